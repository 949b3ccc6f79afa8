"""Stall against block length, with the length from which on compute should hide the transfers."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isnan, log

import numpy as np

from ringmpi.metrics import stall_time
from ringmpi.report.across.chart import Axis, Chart, Guide, Mark, Point, Series
from ringmpi.report.across.expected import Expected, expected
from ringmpi.report.across.settings import Setting, settings
from ringmpi.report.text import milliseconds
from ringmpi.schedule import Pass
from ringmpi.store import ResultFile


def stall_by_length(results: Sequence[ResultFile]) -> list[Chart]:
    """Return a chart of each pass that was timed at several lengths. Local."""
    charts = []
    for direction in Pass:
        swept = settings(
            results,
            direction,
            by_ranks=True,
            telling=lambda members: members[0].size > 1 and len(set(map(block_len, members))) > 1,
        )
        if swept:
            charts.append(_chart(direction, swept))
    return charts


def block_len(result: ResultFile) -> int:
    """Return the tokens of the longest block of keys. Local."""
    return -(-result.experiment.seq_len // result.size)


def threshold(found: Sequence[tuple[float, float]]) -> float | None:
    """Return from which length on all is hidden: where compute over transfer becomes 1, for good. Local.

    Parameters
    ----------
    found : sequence of (float, float)
        Length, and compute over transfer there; lengths rising.

    Returns
    -------
    float or None
        Between two lengths by a power law through both, beyond the longest by one through the last two;
        None where it was reached at the shortest already, or where nothing says that it ever will be.

    Examples
    --------
    >>> round(threshold([(128, 0.5), (512, 2.0)]))
    256
    >>> round(threshold([(128, 0.25), (256, 0.5)]))
    512
    """
    positive = [(length, ratio) for length, ratio in found if ratio > 0]
    below = [at for at, (_, ratio) in enumerate(positive) if ratio < 1]
    if len(positive) < 2 or not below:
        return None
    at = min(below[-1], len(positive) - 2)
    (left, low), (right, high) = positive[at : at + 2]
    slope = log(high / low) / log(right / left)
    if slope <= 0:
        return None
    return exp(log(left) - log(low) / slope)


def _chart(direction: Pass, swept: Sequence[Setting]) -> Chart:
    series, guides, notes = [], [], []
    for group, setting in enumerate(swept):
        ordered = sorted(setting.results, key=block_len)
        expectations = [expected(result, direction) for result in ordered]
        named = setting.name or f"{ordered[0].size} ranks"
        points = tuple(map(_found, ordered, expectations, [direction] * len(ordered)))
        series.append(Series(f"{named}, {setting.mark.value}", setting.mark, group, points))
        known = [
            (block_len(result), found)
            for result, found in zip(ordered, expectations, strict=True)
            if found is not None
        ]
        if not known:
            notes.append(f"{named}: no rate of a link is known, so nothing is predicted.")
            continue
        predicted = tuple(Point(c, f.stall * 1e3, f.stall * 1e3, f.stall * 1e3) for c, f in known)
        series.append(Series(f"{named}, predicted", Mark.PREDICTED, group, predicted))
        length = threshold([(c, found.hidden) for c, found in known])
        if length is None:
            why = "all is hidden" if known[0][1].hidden >= 1 else "longer blocks hide no more"
            if isnan(known[0][1].hidden):
                why = "nothing is computed beside the transfers"
            notes.append(f"{named}: no threshold, as {why} by the prediction.")
            continue
        beyond = ", beyond what was run" if length > known[-1][0] else ""
        guides.append(Guide(length, f"{length:.0f} tokens{beyond}", group))
    if any(point.hollow for found in series for point in found.points):
        notes.append("Hollow: more ranks or threads than cores, so the time says little.")
    notes.append(
        "A bar goes from the rank with least stall to the one with most; a point is their median."
    )
    return Chart(
        title=f"Stall against block length, {direction.value}",
        x=Axis("tokens of a block", logarithmic=True),
        y=Axis("stall of a rank, ms"),
        series=tuple(series),
        guides=tuple(guides),
        notes=tuple(notes),
    )


def _found(result: ResultFile, found: Expected | None, direction: Pass) -> Point:
    """Return the stall of a file: of all steps, medians over repeats."""
    records = result.timings(direction).records
    by_rank = np.median(stall_time(records).sum(axis=2), axis=0) * 1e3
    told = [("file", result.path.name), ("tokens", str(result.experiment.seq_len))]
    if found is not None:
        told += [
            ("compute / transfer", f"{found.hidden:.2f}"),
            ("predicted ms", milliseconds(found.stall)),
            ("GFLOP/s a rank", f"{found.flops / 1e9:.1f}"),
        ]
    return Point(
        block_len(result),
        float(np.median(by_rank)),
        float(by_rank.min()),
        float(by_rank.max()),
        tuple(told),
        result.oversubscribed,
    )
