"""What the scripts of a page are given: numbers, as JSON.

Times are whole nanoseconds, which numbers in JavaScript hold exactly for as long as a run may take. Columns
of a view are lists by rank and step, those of one rank after those of another; moments but the first are
told from the beginning of their step on, in fewer digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from numpy.typing import NDArray

from ringmpi.metrics import stall_time
from ringmpi.report.across import FIGURES
from ringmpi.report.across.chart import GROUP_COLOURS, Chart
from ringmpi.report.culprits import culprit_name
from ringmpi.report.kinds import INDEX, KINDS, shown
from ringmpi.report.view import View, Views
from ringmpi.store import ResultFile

Array = NDArray[Any]

#: Steps of all ranks that a view, and a page, may have: about 60 bytes each, so that a page has at most
#: 10 MB, which a browser opens in a second or two.
STEPS_OF_VIEW = 60_000
STEPS_OF_PAGE = 150_000

#: Rows that a person can tell apart on a screen.
MOST_RANKS = 128

#: Hops that a view tells, those with the longest stalls: as many bytes as its steps.
MOST_HOPS = 20_000


def page_data(results: Sequence[ResultFile]) -> dict[str, Any]:
    """Return all that is drawn. Local."""
    return {
        "kinds": [{"name": shown(kind.name), "colour": kind.colour} for kind in KINDS],
        "groups": GROUP_COLOURS,
        "files": _files(results),
        "charts": [
            _chart(name, chart) for name, charts in FIGURES.items() for chart in charts(results)
        ],
    }


def _files(results: Sequence[ResultFile]) -> list[dict[str, Any]]:
    """Return the passes of every file; of each the median repeat, and others while there is room."""
    room = STEPS_OF_PAGE
    passes: list[tuple[Views, dict[str, Any]]] = []
    files = []
    for result in results:
        told = []
        for direction in result.directions:
            views = Views(result, direction, STEPS_OF_VIEW, MOST_RANKS)
            found: dict[str, Any] = {
                "direction": direction.value,
                "repeats": views.repeats,
                "views": [],
            }
            told.append(found)
            passes.append((views, found))
        files.append({"name": result.path.name, "passes": told})
    orders = [views.by_length() for views, _ in passes]
    for place in range(max(map(len, orders), default=0)):
        for (views, found), order in zip(passes, orders, strict=True):
            if place < len(order) and views.cost <= room:
                room -= views.cost
                found["views"].append(_view(views.view(order[place])))
    return files


def _view(view: View) -> dict[str, Any]:
    records, rows = view.records, {int(rank): row for row, rank in enumerate(view.ranks)}
    started = records["started"]
    moments = {
        name: records[name] for name in ("posted", "launched", "compute_done", "received", "step_end")
    }
    moments["waited"] = records["compute_done"] + stall_time(records)
    return {
        "repeat": view.repeat + 1,
        "makespan": round(view.makespan * 1e9),
        "size": view.size,
        "ranks": view.ranks.tolist(),
        "steps": view.steps,
        "explained": view.explained,
        "started": _nanoseconds(started),
        **{name: _nanoseconds(moment - started) for name, moment in moments.items()},
        "polling": _nanoseconds(records["polling"]),
        **{name: _whole(records[name]) for name in ("bytes_sent", "pairs", "flops")},
        # Row, step, kind, beginning, end, and who.
        "blames": [
            [
                rows[b.rank],
                b.step,
                INDEX[b.cause.value],
                *(round(float(at) * 1e9) for at in (b.begin, b.end)),
                culprit_name(b.cause, b.culprit),
            ]
            for b in sorted(view.blames, key=lambda b: b.begin)
        ],
        # Rows and steps of sender and receiver, bytes, and what.
        "hops": [
            [
                rows[arrow.hop.sender],
                arrow.hop.step,
                rows[arrow.hop.receiver],
                arrow.hop.due,
                arrow.nbytes,
                str(arrow.hop.part),
            ]
            for arrow in view.arrows[:MOST_HOPS]
        ],
    }


def _chart(figure: str, chart: Chart) -> dict[str, Any]:
    told = asdict(chart) | {"figure": figure}
    for series, found in zip(told["series"], chart.series, strict=True):
        series["mark"] = found.mark.value
    return told


def _nanoseconds(seconds: Array) -> list[int | None]:
    return _whole(seconds * 1e9)


def _whole(values: Array) -> list[int | None]:
    """Return the nearest whole numbers in one list; None where nothing was recorded."""
    return [round(value) if isfinite(value) else None for value in values.ravel().tolist()]
