"""Methods compared: what each took for the same problem, forward and backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ringmpi.report.across.chart import Axis, Chart, Mark, Point, Series
from ringmpi.report.cases import Row, cases_of
from ringmpi.schedule import Pass
from ringmpi.store import ResultFile


def compared_methods(results: Sequence[ResultFile]) -> list[Chart]:
    """Return a chart of each case that several methods were timed on. Local."""
    cases = cases_of(results)
    timed: dict[str, list[Row]] = defaultdict(list)
    for row in cases.rows:
        if row["time ms"] != "-" and row["verdict"] != "FAILED":
            timed[cases.words(row)].append(row)
    several = [rows for rows in timed.values() if len({row["method"] for row in rows}) > 1]
    differing = [
        name for name in cases.differing if len({row[name] for rows in several for row in rows}) > 1
    ]
    return [_chart(rows, differing) for rows in several]


def _chart(rows: Sequence[Row], differing: Sequence[str]) -> Chart:
    methods = tuple(dict.fromkeys(row["method"] for row in rows))
    by_pass = {direction: [row for row in rows if row["pass"] == direction.value] for direction in Pass}
    series = tuple(
        Series(
            direction.value,
            Mark(rows[0].get("kind", Mark.MEASURED.value)),
            group,
            tuple(_point(row, methods.index(row["method"])) for row in found),
        )
        for group, (direction, found) in enumerate(by_pass.items())
        if found
    )
    notes = [
        f"Fastest {row['pass']}: {row['method']}, {row['time ms']} ms."
        for row in rows
        if row["fastest"]
    ]
    if any(row["oversubscribed"] for row in rows):
        notes.append("Hollow: more ranks or threads than cores, so the time says little.")
    if any(row["verdict"] == "not verified" for row in rows):
        notes.append("Not all results were verified.")
    told = [f"{rows[0]['ranks']} ranks", *(f"{name} {rows[0][name]}" for name in differing)]
    return Chart(
        title=f"Methods compared, {', '.join(told)}",
        x=Axis("method"),
        y=Axis("time of the whole, ms"),
        series=series,
        categories=methods,
        notes=tuple(notes),
    )


def _point(row: Row, at: int) -> Point:
    told = tuple((name, row[name]) for name in ("stall ms", "compute ms", "sent MB", "verdict"))
    low, high = float(row["min ms"]), float(row["max ms"])
    return Point(at, float(row["time ms"]), low, high, told, bool(row["oversubscribed"]))
