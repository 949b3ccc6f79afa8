"""Pictures of result files. The only room that imports matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # Files only: a batch job has no screen.

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

from ringmpi.metrics import makespans, stall_time
from ringmpi.store import ResultFile

COLOURS = {"compute": "#4878a8", "stall": "#d1495b", "overhead": "#c9c9c9"}


def timeline(result: ResultFile, path: Path) -> None:
    """Draw when each rank computed and when it stalled, in the repeat of median length. Local.

    Parameters
    ----------
    result : ResultFile
    path : Path
        PNG or SVG by its ending.
    """
    timings = result.timings()
    spans = makespans(timings)
    repeat = int(np.argsort(spans)[len(spans) // 2])
    records = timings.records[repeat]
    origin = (records["started"][:, 0] - timings.offsets).min()
    size = result.size

    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.42 * size), layout="constrained")
    for rank in range(size):
        steps = records[rank]
        shift = timings.offsets[rank] + origin
        begin, launched = steps["started"] - shift, steps["launched"] - shift
        done, end = steps["compute_done"] - shift, steps["step_end"] - shift
        stall = stall_time(steps)
        bars = {
            "overhead": (begin, end - begin),
            "compute": (launched, done - launched),
            "stall": (done, stall),
        }
        for name, (left, width) in bars.items():
            pairs = list(zip(left * 1e3, width * 1e3, strict=True))
            axes.broken_barh(pairs, (rank - 0.4, 0.8), color=COLOURS[name], linewidth=0)
        for number in range(len(steps)):
            axes.plot([begin[number] * 1e3] * 2, [rank - 0.4, rank + 0.4], color="black", linewidth=0.6)
    axes.set(
        xlabel="time, ms",
        ylabel="rank",
        yticks=range(size),
        title=f"{result.path.stem}: {spans[repeat] * 1e3:.1f} ms, a black line begins each step",
    )
    axes.invert_yaxis()
    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.22 - 0.1 / size),
        ncols=3,
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
