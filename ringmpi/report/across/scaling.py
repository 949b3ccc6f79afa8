"""Speed-up and parallel efficiency over the number of ranks.

Speed is FLOPs of all ranks over the time of the whole, which is fair to strong scaling (one problem) and to
weak scaling alike: with as many tokens a rank, each rank has more keys to attend to the more ranks there are,
so that equal times would be too much to ask. For one problem it is the ratio of times.

Results with more ranks or threads than cores are left out: how they share cores says nothing of scaling.

``speed-up = speed / speed of the fewest ranks * the fewest ranks``; ``efficiency = speed-up / ranks``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ringmpi.metrics import makespans
from ringmpi.report.across.chart import Axis, Chart, Mark, Point, Series
from ringmpi.report.across.settings import Setting, settings
from ringmpi.report.text import milliseconds
from ringmpi.schedule import Pass
from ringmpi.store import ResultFile

#: Names of files that a sentence has room for.
MOST_NAMES = 3


def scaling(results: Sequence[ResultFile]) -> list[Chart]:
    """Return speed-up and efficiency of each pass that was timed on several numbers of ranks. Local."""
    charts = []
    fit = [result for result in results if not result.oversubscribed]
    for direction in Pass:
        several = settings(
            fit,
            direction,
            by_ranks=False,
            telling=partial(_families, direction),
        )
        families = [
            (name, setting, members)
            for setting in several
            for name, members in _families(direction, setting.results)
        ]
        if families:
            charts += _charts(direction, families)
    left_out = crowded(results)
    return [replace(chart, notes=(*chart.notes, left_out)) for chart in charts] if left_out else charts


def crowded(results: Sequence[ResultFile]) -> str:
    """Return which results are left out, as a sentence; empty if none is. Local."""
    names = [result.path.name for result in results if result.oversubscribed]
    if not names:
        return ""
    shown = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
    return f"Left out, having more ranks or threads than cores: {len(names)} ({shown})."


def _families(direction: Pass, results: Sequence[ResultFile]) -> list[tuple[str, list[ResultFile]]]:
    """Return the results of one problem, and those of as many tokens a rank, on several numbers of ranks."""
    found: dict[str, dict[int, ResultFile]] = defaultdict(dict)
    for result in results:
        if not result.timings(direction).records["flops"][-1].sum() > 0:
            continue  # Nothing was allowed to be seen, so there is no speed.
        tokens, size = result.experiment.seq_len, result.size
        found[f"strong, {tokens} tokens"][size] = result
        if tokens % size == 0:
            found[f"weak, {tokens // size} tokens a rank"][size] = result
    return [
        (name, [members[size] for size in sorted(members)])
        for name, members in sorted(found.items())
        if len(members) > 1
    ]


def _charts(
    direction: Pass, families: Sequence[tuple[str, Setting, Sequence[ResultFile]]]
) -> list[Chart]:
    speedups, efficiencies = [], []
    notes = []
    sizes = sorted({result.size for _, _, members in families for result in members})
    for group, (name, setting, members) in enumerate(families):
        named = ", ".join(filter(None, (name, setting.name)))
        points = _points(members, direction)
        speedups.append(Series(named, setting.mark, group, points))
        efficiencies.append(Series(named, setting.mark, group, tuple(map(_efficiency, points))))
        if members[0].size > 1:
            notes.append(f"{named}: against {members[0].size} ranks.")
    lines = [tuple(Point(p, y, y, y) for p, y in ((p, float(p)) for p in sizes))]
    lines.append(tuple(Point(p, 1.0, 1.0, 1.0) for p in sizes))
    ideal = [Series("ideal", Mark.IDEAL, len(families), line) for line in lines]
    x = Axis("ranks", logarithmic=True)
    notes.append("Speed is FLOPs of all ranks over the time of the whole.")
    return [
        Chart(
            f"Speed-up, {direction.value}",
            x,
            Axis("speed-up", logarithmic=True),
            (*speedups, ideal[0]),
            notes=tuple(notes),
        ),
        Chart(
            f"Parallel efficiency, {direction.value}",
            x,
            Axis("efficiency"),
            (*efficiencies, ideal[1]),
            notes=tuple(notes),
        ),
    ]


def _points(members: Sequence[ResultFile], direction: Pass) -> tuple[Point, ...]:
    """Return the speed-up of each result; from its slowest repeat to its fastest."""
    measured = [result.timings(direction) for result in members]
    flops = [float(timings.records["flops"][-1].sum()) for timings in measured]
    spans = [makespans(timings) for timings in measured]
    unit = members[0].size / (flops[0] / float(np.median(spans[0])))
    return tuple(
        Point(
            result.size,
            unit * work / float(np.median(times)),
            unit * work / float(times.max()),
            unit * work / float(times.min()),
            (
                ("file", result.path.name),
                ("time ms", milliseconds(float(np.median(times)))),
                ("GFLOP/s in all", f"{work / float(np.median(times)) / 1e9:.1f}"),
            ),
        )
        for result, work, times in zip(members, flops, spans, strict=True)
    )


def _efficiency(point: Point) -> Point:
    ranks = point.x
    return Point(ranks, point.y / ranks, point.low / ranks, point.high / ranks, point.told)
