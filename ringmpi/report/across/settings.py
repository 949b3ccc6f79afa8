"""Which files belong together: those that are alike but for what a chart varies."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringmpi.report.across.chart import Mark
from ringmpi.schedule import Pass
from ringmpi.store import ResultFile

#: Options that change neither problem nor time, and the length, which charts vary.
VARIED = ("seq_len", "query_len", "output", "ranks", "verify", "timeout", "seed", "repeats", "warmup")

#: What tells settings apart and is no option.
KIND, RANKS = "kind", "size"


@dataclass(frozen=True)
class Setting:
    """Results of one pass that are alike but for their length, and perhaps the number of ranks.

    Attributes
    ----------
    name : str
        What tells it from the others, in a few words; empty if there are no others.
    mark : Mark
        Measured or simulated.
    direction : Pass
    results : tuple of ResultFile
    """

    name: str
    mark: Mark
    direction: Pass
    results: tuple[ResultFile, ...]


def settings(
    results: Sequence[ResultFile],
    direction: Pass,
    by_ranks: bool,
    telling: Callable[[Sequence[ResultFile]], object],
) -> list[Setting]:
    """Return the settings in which a pass was timed. Local.

    Parameters
    ----------
    results : sequence of ResultFile
    direction : Pass
    by_ranks : bool
        Whether results on another number of ranks are of another setting.
    telling : callable
        Given the results of a setting, what is true if they are enough; others are left out.
    """
    alike: dict[str, list[ResultFile]] = defaultdict(list)
    for result in results:
        if direction in result.directions and result.repeats(direction):
            alike[json.dumps(_options(result, by_ranks))].append(result)
    found = [members for members in alike.values() if telling(members)]
    options = [_options(members[0], by_ranks) for members in found]
    differing = [
        name
        for name in (options[0] if options else ())
        if name != KIND and len({json.dumps(given[name]) for given in options}) > 1
    ]
    return [
        Setting(
            name=", ".join(_worded(name, given[name]) for name in differing),
            mark=Mark(given[KIND]),
            direction=direction,
            results=tuple(members),
        )
        for members, given in zip(found, options, strict=True)
    ]


def _options(result: ResultFile, by_ranks: bool) -> dict[str, Any]:
    """Return what must be alike in a setting."""
    record = result.experiment.record()
    found = {name: value for name, value in record.items() if name not in VARIED}
    return found | {KIND: result.kind} | ({RANKS: result.size} if by_ranks else {})


def _worded(name: str, value: Any) -> str:
    if name == RANKS:
        return f"{value} rank(s)"
    if value is None or value is False:
        return f"no {name}"
    if value is True:
        return name
    return f"{name} {value:g}" if isinstance(value, int | float) else str(value)
