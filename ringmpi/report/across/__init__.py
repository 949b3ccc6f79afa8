"""What several files say together, as numbers that any picture can be drawn of."""

from collections.abc import Callable, Sequence

from ringmpi.report.across.chart import Chart
from ringmpi.report.across.methods import compared_methods
from ringmpi.report.across.scaling import crowded, scaling
from ringmpi.report.across.stall import stall_by_length
from ringmpi.store import ResultFile

#: By the name that a person asks for it with. Each gives no chart where the files do not allow one.
FIGURES: dict[str, Callable[[Sequence[ResultFile]], list[Chart]]] = {
    "stall": stall_by_length,
    "scaling": scaling,
    "methods": compared_methods,
}

#: What those that leave results out say of them; empty if there are none.
LEFT_OUT: dict[str, Callable[[Sequence[ResultFile]], str]] = {"scaling": crowded}

#: What each needs, for those who gave files that do not allow it.
NEEDS = {
    "stall": "results that differ in --seq-len alone, on the same ranks",
    "scaling": "results that differ in the number of ranks, and at most in --seq-len",
    "methods": "results of one problem by several methods",
}
