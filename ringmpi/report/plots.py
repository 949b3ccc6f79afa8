"""Pictures of result files. The only room that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # Files only: a batch job has no screen.

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ringmpi.metrics import compute_time, makespans, stall_time
from ringmpi.schedule import Pass
from ringmpi.store import ResultFile

COLOURS = {"compute": "#4878a8", "stall": "#d1495b", "overhead": "#c9c9c9"}


def timelines(results: Sequence[ResultFile], path: Path) -> None:
    """Draw when each rank computed and when it stalled, one pass below the other on one time axis. Local.

    Parameters
    ----------
    results : sequence of ResultFile
        Each with at least one timed repeat of its passes; the one of median length is drawn.
    path : Path
        PNG or SVG by its ending.
    """
    passes = [(result, direction) for result in results for direction in result.directions]
    heights = [0.42 * result.size for result, _ in passes]
    figure, axes = plt.subplots(
        len(passes),
        figsize=(9, 1.0 + 0.7 * len(passes) + sum(heights)),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (result, direction) in zip(axes[:, 0], passes, strict=True):
        _draw(axis, result, direction)
    axes[-1, 0].set_xlabel("time, ms")
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()],
        loc="outside lower center",
        ncols=len(COLOURS),
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw(axis: Axes, result: ResultFile, direction: Pass) -> None:
    """Draw the ranks in one pass of a file, on rank 0's clock, from the first start on."""
    timings = result.timings(direction)
    spans = makespans(timings)
    repeat = int(np.argsort(spans)[len(spans) // 2])
    records = timings.records[repeat]
    begins = timings.clocks.corrected(records["started"])
    begins -= begins.min()
    for rank, steps in enumerate(records):
        # Within a step the rank's own clock is right; only where the step begins is corrected.
        shift = steps["started"] - begins[rank]
        bars = {
            "overhead": (steps["started"], steps["step_end"] - steps["started"]),
            "compute": (steps["launched"], compute_time(steps)),
            "stall": (steps["compute_done"], stall_time(steps)),
        }
        for name, (begin, length) in bars.items():
            pairs = list(zip((begin - shift) * 1e3, length * 1e3, strict=True))
            axis.broken_barh(pairs, (rank - 0.4, 0.8), color=COLOURS[name], linewidth=0)
        axis.vlines(begins[rank] * 1e3, rank - 0.4, rank + 0.4, color="black", linewidth=0.6)
    back = ", backward" if direction is Pass.BACKWARD else ""
    axis.set(
        ylabel="rank",
        yticks=range(result.size),
        title=f"{result.path.stem}{back}: {spans[repeat] * 1e3:.1f} ms; a black line begins each step",
    )
    axis.invert_yaxis()
