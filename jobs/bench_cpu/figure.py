"""The picture of a table: ratios with their aims above, rates with the peak of the processor below.

Usage: figure.py TABLE PICTURE
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # Files only: a batch job has no screen.

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from case import BOTH, FORWARD
from table import Row, read

#: One for each contender and layout, whatever else is in the table.
COLOURS = {
    "native": "#1a1a1a",
    "ring zigzag": "#1a1a1a",
    "ring contiguous": "#7a7a7a",
    "native-unsliced": "#b0b0b0",
    "native-exact": "#3aa6a6",
    "numpy": "#c9a227",
    "torch-sdpa": "#d1495b",
    "torch-ring zigzag": "#d1495b",
    "torch-ring contiguous": "#eda2ab",
    "torch-ring-allgather zigzag": "#8e4b9e",
    "torch-ring-allgather contiguous": "#cbaad3",
    "jax-ring contiguous": "#4878a8",
    "ring-attention-pytorch contiguous": "#5a9e6f",
    "one-rank zigzag": "#e08e45",
    "one-rank contiguous": "#e08e45",
}

PARTS = {"single": "one process, {threads} threads", "ring": "{ranks} ranks of one thread"}
PANELS = [(dtype, direction) for dtype in ("float32", "bfloat16") for direction in (FORWARD, BOTH)]


def draw(table: Path, picture: Path) -> None:
    """Draw a table.

    Parameters
    ----------
    table : Path
        As bench_cpu writes it; nothing else is needed.
    picture : Path
        PNG or SVG by its ending.
    """
    header, rows = read(table)
    parts = [part for part in PARTS if any(row["part"] == part for row in rows)]
    panels = [panel for panel in PANELS if any((row["dtype"], row["pass"]) == panel for row in rows)]
    figure, axes = plt.subplots(
        2 * len(parts), len(panels), figsize=(24, 9 * len(parts)), squeeze=False, layout="constrained"
    )
    for index, part in enumerate(parts):
        for column, (dtype, direction) in enumerate(panels):
            wanted = {"part": part, "dtype": dtype, "pass": direction}
            found = [row for row in rows if wanted.items() <= row.items()]
            above, below = axes[2 * index, column], axes[2 * index + 1, column]
            above.set_title(f"{title(part, rows)}\n{dtype}, {direction}", fontsize=11, pad=18)
            draw_ratios(above, found)
            draw_rates(below, found)
            if column == 0:
                above.set_ylabel("time of the other / time of ringmpi\n(above 1: ringmpi is faster)")
                below.set_ylabel("GFLOP/s of allowed pairs")
        legend(axes[2 * index, -1], [row for row in rows if row["part"] == part])
    figure.suptitle(
        f"ringmpi {header.get('ringmpi', '')} on {header.get('machine', '')}\n{header.get('settings', '')}"
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=100)
    plt.close(figure)


def title(part: str, rows: Sequence[Row]) -> str:
    """Return what a part is, in words."""
    of_part = [row for row in rows if row["part"] == part]
    most = {name: max(int(row[name]) for row in of_part) for name in ("ranks", "threads")}
    return PARTS[part].format(**most)


def draw_ratios(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw how much longer each contender takes than ours, and the least that is aimed at."""

    def limits(row: Row) -> tuple[float, float, float]:
        return float(row["ratio_min"]), float(row["ratio_median"]), float(row["ratio_max"])

    shown = [row for row in rows if row["ratio_median"] and not is_peak(row)]
    draw_points(axis, rows, shown, limits)
    axis.axhline(1, color="black", linewidth=0.8)
    for name in sorted({label(row) for row in shown}):
        aims = {float(row["aim"]) for row in shown if label(row) == name and row["aim"]}
        for aim in aims:
            axis.axhline(aim, color=COLOURS.get(name, "black"), linewidth=0.9, linestyle=(0, (5, 4)))
    if shown:
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def draw_rates(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw how fast each contender is, and the processor's peak at all threads."""

    def limits(row: Row) -> tuple[float, float, float]:
        rate, median = float(row["gflops"]), float(row["median_s"])
        slowest, fastest = (rate * median / float(row[name]) for name in ("max_s", "min_s"))
        return slowest, rate, fastest

    shown = [row for row in rows if row["gflops"] and not is_peak(row)]
    order = draw_points(axis, rows, shown, limits)
    peaks = sorted(
        (row for row in rows if is_peak(row) and row["against"]), key=lambda row: place(problem(row))
    )
    if peaks:
        at = [order.index(problem(row)) for row in peaks]
        height = [float(row["gflops"]) for row in peaks]
        axis.scatter(at, height, marker="_", s=250, color="black", linewidth=1.2, zorder=1)
        axis.annotate(
            f"measured peak, {peaks[0]['contender'].removeprefix('peak-')}",
            (-0.45, height[0]),
            xytext=(0, 5),
            textcoords="offset points",
            fontsize=8,
        )
    if shown:
        axis.set_yscale("log")


def draw_points(
    axis: Axes,
    rows: Sequence[Row],
    shown: Sequence[Row],
    limits: Callable[[Row], tuple[float, float, float]],
) -> list[tuple[str, ...]]:
    """Draw least, median and most of each row above its problem; return the problems in their order."""
    order = sorted({problem(row) for row in rows}, key=place)
    names = [name for name in COLOURS if any(label(row) == name for row in shown)]
    for index, name in enumerate(names):
        mine = [row for row in shown if label(row) == name]
        beside = 0.6 * (index - (len(names) - 1) / 2) / max(1, len(names))
        at = [order.index(problem(row)) + beside for row in mine]
        low, middle, high = zip(*map(limits, mine), strict=True)
        axis.vlines(at, low, high, color=COLOURS[name], linewidth=1.5, alpha=0.7)
        axis.plot(at, middle, "o", color=COLOURS[name], markersize=4.5)
    axis.set_xticks(
        range(len(order)), [f"{seq_len}\nd {width}" for _, seq_len, width in order], fontsize=7
    )
    for mask in dict.fromkeys(mask for mask, *_ in order):
        at = [index for index, each in enumerate(order) if each[0] == mask]
        middle = ((at[0] + at[-1] + 1) / 2 / len(order), 1.01)
        axis.text(
            *middle,
            mask,
            transform=axis.transAxes,
            ha="center",
            va="bottom",
            fontsize=10,
            weight="bold",
        )
    axis.set_xlim(-0.5, len(order) - 0.5)
    for edge in range(1, len(order)):
        other = order[edge][0] != order[edge - 1][0]
        axis.axvline(
            edge - 0.5, color="#555555" if other else "#cccccc", linewidth=1.2 if other else 0.5
        )
    axis.grid(axis="y", which="both", linewidth=0.3)
    return order


def legend(axis: Axes, rows: Sequence[Row]) -> None:
    """Name the colours beside the last panel of a part."""
    names = [name for name in COLOURS if any(label(row) == name for row in rows)]
    handles = [Line2D([], [], color=COLOURS[name], marker="o", label=name) for name in names]
    handles.append(Line2D([], [], color="black", linestyle=(0, (5, 4)), label="aim, in that colour"))
    axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)


def problem(row: Row) -> tuple[str, ...]:
    """Return what tells the problems of a panel apart."""
    return row["mask"], row["seq_len"], row["head_dim"]


def place(of: tuple[str, ...]) -> tuple[bool, int, int]:
    """Return what problems are sorted by: full before causal, then the lengths."""
    mask, seq_len, head_dim = of
    return mask != "full", int(seq_len), int(head_dim)


def label(row: Row) -> str:
    """Return a contender with its layout."""
    return f"{row['contender']} {row['layout']}".strip()


def is_peak(row: Row) -> bool:
    """Return whether a row is the processor's own."""
    return row["contender"].startswith("peak-")


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
