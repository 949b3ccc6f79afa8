"""Charts of several files, side by side in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from ringmpi.report.across.chart import GROUP_COLOURS, Chart, Mark, Series

#: How the points of a series are drawn and joined.
LOOKS: dict[Mark, dict[str, Any]] = {
    Mark.MEASURED: {"marker": "o", "linestyle": "-"},
    Mark.SIMULATED: {"marker": "s", "linestyle": "--"},
    Mark.PREDICTED: {"marker": "", "linestyle": ":"},
    Mark.IDEAL: {"marker": "", "linestyle": "-", "color": "#8a9099", "linewidth": 0.9},
}

#: Of two bars that stand side by side, of 1 for the distance between two categories.
BARS_WIDTH = 0.8


def draw_charts(charts: Sequence[Chart], path: Path) -> None:
    """Draw charts into one picture. Local.

    Parameters
    ----------
    charts : sequence of Chart
    path : Path
        PNG, SVG or PDF by its ending.
    """
    columns = min(2, len(charts))
    rows = -(-len(charts) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(4.8 * columns + 0.6, 3.9 * rows),
        squeeze=False,
        layout="constrained",
    )
    for axis, chart in zip(axes.flat, charts, strict=False):
        _draw(axis, chart)
    for axis in axes.flat[len(charts) :]:
        axis.set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def _draw(axis: Axes, chart: Chart) -> None:
    for at, series in enumerate(chart.series):
        if chart.categories:
            _bars(axis, series, at, len(chart.series))
        else:
            _line(axis, series)
    for at, guide in enumerate(chart.guides):
        colour = _colour(guide.group)
        axis.axvline(guide.x, color=colour, linewidth=1, linestyle=(0, (4, 3)))
        axis.annotate(
            guide.label,
            (guide.x, 0.98 - 0.07 * at),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            color=colour,
            fontsize=8,
            va="top",
        )
    axis.set_title(chart.title)
    axis.set_xlabel(chart.x.label)
    axis.set_ylabel(chart.y.label)
    if chart.categories:
        axis.set_xticks(range(len(chart.categories)), chart.categories, rotation=20, ha="right")
    for way, scaled in (("x", chart.x), ("y", chart.y)):
        if scaled.logarithmic:
            _octaves(axis, way, chart)
        elif way == "y":
            axis.set_ylim(bottom=0)
    axis.grid(axis="y", color="#e2e5ea", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    axis.annotate(
        "\n".join(chart.notes),
        (0, 0),
        xycoords="axes fraction",
        xytext=(0, -66 if chart.categories else -42),  # Below the names of ticks and axis.
        textcoords="offset points",
        fontsize=7,
        color="#5a616b",
        va="top",
    )


def _octaves(axis: Axes, way: str, chart: Chart) -> None:
    """Scale an axis to the base of 2, with a tick at each value of x there is."""
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    if way == "x":
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({p.x for series in chart.series for p in series.points}))
        axis.xaxis.set_major_formatter(plain)
        axis.xaxis.set_minor_locator(NullLocator())
    else:
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(plain)


def _line(axis: Axes, series: Series) -> None:
    plain: dict[str, Any] = {"color": _colour(series.group), "linewidth": 1.4, "markersize": 5}
    look = plain | LOOKS[series.mark]
    x, y = [p.x for p in series.points], [p.y for p in series.points]
    axis.plot(x, y, label=series.name, **look)
    varying = [p for p in series.points if p.high > p.low]
    if varying:
        axis.vlines(
            [p.x for p in varying],
            [p.low for p in varying],
            [p.high for p in varying],
            color=look["color"],
            linewidth=1,
        )
    doubtful = [p for p in series.points if p.hollow]
    if doubtful:
        axis.plot(
            [p.x for p in doubtful],
            [p.y for p in doubtful],
            **{**look, "linestyle": "", "markerfacecolor": "white"},
        )


def _bars(axis: Axes, series: Series, at: int, of: int) -> None:
    width = BARS_WIDTH / of
    for number, point in enumerate(series.points):
        x = point.x + (at - (of - 1) / 2) * width
        colour = _colour(series.group)
        axis.bar(
            x,
            point.y,
            width * 0.92,
            color="white" if point.hollow else colour,
            edgecolor=colour,
            linewidth=1.2,
            label=series.name if number == 0 else None,
        )
        if point.high > point.low:
            axis.vlines(x, point.low, point.high, color="#20242a", linewidth=1)


def _colour(group: int) -> str:
    return GROUP_COLOURS[group % len(GROUP_COLOURS)]
