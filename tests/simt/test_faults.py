"""The executor sees faults: each is put into a copy of the sources, and must be found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from dense import assert_exact_up_to_rounding
from unit.attending import Case, attend, cut

from ringmpi.devices.launch import TENSOR_CAPABILITY, Variant

from .device import SimtDevice
from .library import LaunchError, Library, compiled
from .test_kernels import assert_right

PLAIN = Case(tokens=130, heads=1, kv_heads=1, head_dim=33, dtype="float32", causal=True)
TENSOR = Case(tokens=130, heads=1, kv_heads=1, head_dim=40, dtype="bfloat16", causal=True)


@dataclass(frozen=True)
class Fault:
    """A text of a source that is replaced, and a case that shows it.

    Attributes
    ----------
    told : str
        What the executor must say; empty where only the result is wrong.
    """

    source: str
    right: str
    wrong: str
    case: Case
    told: str = ""


BARRIER = "__syncthreads(); // "

FAULTS = {
    "barrier before a chunk is read": Fault(
        "plain.cuh",
        BARRIER + "the chunk is there for all\n            const Raw *of_rows",
        "const Raw *of_rows",
        PLAIN,
    ),
    "barrier before a chunk is replaced": Fault(
        "plain.cuh",
        BARRIER + "nobody reads the buffer that is filled next\n        }\n    }",
        "}\n    }",
        PLAIN,
    ),
    "barrier before weights are read": Fault(
        "plain.cuh", BARRIER + "the chunk and the weights are there for all", "", PLAIN
    ),
    "barrier before columns are read": Fault(
        "tensor.cuh", BARRIER + "rows and columns are there for all", "", TENSOR
    ),
    "barrier before columns are replaced": Fault(
        "tensor.cuh", BARRIER + "nobody reads the columns that are replaced", "", TENSOR
    ),
    "barrier before the last columns are read": Fault(
        "tensor.cuh", BARRIER + "the last columns are there for all", "", TENSOR
    ),
    "barrier before the last columns are replaced": Fault(
        "tensor.cuh", BARRIER + "nobody reads the last columns any more", "", TENSOR
    ),
    "wait for columns": Fault(
        "tensor.cuh",
        "await_copies<1>();\n        __syncthreads(); // rows",
        "__syncthreads(); // rows",
        TENSOR,
    ),
    "wait for the last columns": Fault(
        "tensor.cuh",
        "await_copies<1>();\n        __syncthreads(); // the last",
        "__syncthreads(); // the last",
        TENSOR,
    ),
    "wait that lets one group too many go": Fault(
        "tensor.cuh",
        "await_copies<1>();\n        __syncthreads(); // the last",
        "await_copies<2>();\n        __syncthreads(); // the last",
        TENSOR,
    ),
    "wait for a chunk": Fault(
        "plain.cuh",
        "await_copies<1>();\n            __syncthreads(); // the chunk is there for all\n            const",
        "__syncthreads(); // the chunk\n            const",
        Case(tokens=130, heads=1, kv_heads=1, head_dim=36, causal=True),
    ),
    "bound of tokens": Fault(
        "load.cuh", "inside = first + row < from.count", "inside = true", PLAIN, "memory fault"
    ),
    "bound of head_dim": Fault("load.cuh", "least(LENGTH, from.width - d)", "LENGTH", PLAIN),
    "bound of rows that are written": Fault(
        "forward.cuh", "if (row >= q.count) continue;", "", PLAIN, "memory fault"
    ),
    "bound of queries": Fault(
        "attention.cu", "if (query >= queries) return;", "", PLAIN, "memory fault"
    ),
    "look at alignment": Fault(
        "load.cuh",
        "from.aligned() && count == LENGTH",
        "count == LENGTH",
        PLAIN,
        "not at multiples of 16",
    ),
    "mask of scores": Fault("forward.cuh", "if (tile.full) return;", "return;", PLAIN),
    "mask of gradients": Fault("backward.cuh", "if (!tile.full) hide(", "if (false) hide(", TENSOR),
    "first key of the mask": Fault(
        "sight.cuh",
        "return begin_[i] <= column && column < end_[i];",
        "return column < end_[i];",
        Case(tokens=130, heads=1, kv_heads=1, head_dim=33, causal=True, window=7),
    ),
    "kind of tile": Fault(
        "sight.cuh", "all_from_ <= first && first + Unit::COLUMNS <= all_to_", "true", PLAIN
    ),
    "barrier that not all reach": Fault(
        "softmax.cuh",
        "const T shift = finite_shift(top);",
        "const T shift = finite_shift(top); if (threadIdx.x % 2) __syncthreads();",
        PLAIN,
        "diverged",
    ),
    "shuffle that not all reach": Fault(
        "softmax.cuh",
        "const T shift = finite_shift(top);",
        "T shift = finite_shift(top); if (threadIdx.x % 2) shift = __shfl_sync(WHOLE_WARP, shift, 0);",
        PLAIN,
        "diverged",
    ),
    "vote of some lanes": Fault(
        "sight.cuh",
        "__ballot_sync(WHOLE_WARP, sees)",
        "__ballot_sync(0xffffu, sees)",
        PLAIN,
        "not all lanes",
    ),
    "rescaling": Fault("softmax.cuh", "row_sum_[i] * factor[i] + sum", "row_sum_[i] + sum", PLAIN),
    "third part of a weight": Fault("parts.cuh", "? 1 : 3", "? 1 : 2", TENSOR),
    "second part of a weight": Fault(
        "parts.cuh",
        "? 1 : 2",
        "? 1 : 1",
        Case(tokens=130, heads=1, kv_heads=1, head_dim=40, dtype="float16"),
    ),
    "write to an input": Fault(
        "forward.cuh",
        "unit.close();",
        "unit.close(); const_cast<typename Unit::Raw *>(q.data)[0] = {};",
        PLAIN,
        "memory fault",
    ),
    "memory of another launch": Fault(
        "plain.cuh", "constexpr int BUFFER = (", "constexpr int BUFFER = 64 + (", PLAIN, "memory fault"
    ),
}


def with_fault(fault: Fault) -> SimtDevice:
    def faulty(variant: Variant) -> Library:
        return compiled(variant, {fault.source: (fault.right, fault.wrong)})

    return SimtDevice(fault.case.mask, fault.case.scale, TENSOR_CAPABILITY, library=faulty)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_found(fault: Fault) -> None:
    with pytest.raises(
        LaunchError if fault.told else (AssertionError, LaunchError), match=fault.told or None
    ):
        assert_right(fault.case, cut(130, 63), with_fault(fault))


def test_the_sources_have_no_such_fault() -> None:
    for case in {fault.case for fault in FAULTS.values()}:
        assert_right(case, cut(130, 63), SimtDevice(case.mask, case.scale))


NAN_FAULTS = {
    "plain": Fault("plain.cuh", "if (counts) sum[i][c] +=", "sum[i][c] +=", PLAIN),
    "tensor": Fault("tensor.cuh", "__syncthreads_or(any_wild())", "false", TENSOR),
    "tensor, pairs": Fault("tensor.cuh", "if (!allows(i, key)) continue;", "", TENSOR),
}


@pytest.mark.parametrize("fault", NAN_FAULTS.values(), ids=NAN_FAULTS.keys())
def test_a_hidden_nan_that_is_multiplied_by_zero_is_found(fault: Fault) -> None:
    q, k, v = fault.case.tensors()
    v[:, :, 100] = np.nan

    right, *_ = attend(SimtDevice(fault.case.mask, fault.case.scale), fault.case, (q, k, v), cut(130))
    wrong, *_ = attend(with_fault(fault), fault.case, (q, k, v), cut(130))

    assert np.isfinite(right[:, :, :100].astype(float)).all()
    assert np.isnan(wrong[:, :, 64:100].astype(float)).any()


#: Ends a launch.
TRAP = "*static_cast<volatile int *>(nullptr) = 0;"

UNITS = pytest.mark.parametrize("case", [PLAIN, TENSOR], ids=["plain", "tensor"])


@UNITS
def test_a_trap_ends_a_launch(case: Case) -> None:
    trap = "return begin_[i] <= column && column < end_[i];", f"{TRAP} return true;"

    with pytest.raises(LaunchError, match="memory fault at"):
        attend(with_fault(Fault("sight.cuh", *trap, case)), case, case.tensors(), cut(130))


@UNITS
def test_empty_tiles_are_not_read(case: Case) -> None:
    # No query sees the first 64 of 192 keys; whoever reads such a tile ends the launch.
    place = "const bool inside = first + row < from.count;"
    empty = Case(
        **(vars(case) | {"tokens": 192, "queries": 128, "documents": (0, 64, 192), "causal": True})
    )
    trap = f"if (from.count == 192 && first < 64) {TRAP} {place}"

    assert_right(empty, cut(192), with_fault(Fault("load.cuh", place, trap, empty)))


@UNITS
def test_full_tiles_are_not_masked(case: Case) -> None:
    # Whoever asks about a pair ends the launch; with whole tiles and no mask nobody does.
    trap = "return begin_[i] <= column && column < end_[i];", f"{TRAP} return true;"
    whole = Case(**(vars(case) | {"tokens": 128, "causal": False}))
    fault = Fault("sight.cuh", *trap, whole)
    tensors = whole.tensors()

    out, lse, _ = attend(with_fault(fault), whole, tensors, cut(128))

    assert_exact_up_to_rounding((out, lse), tensors, whole.allowed, whole.scale)
