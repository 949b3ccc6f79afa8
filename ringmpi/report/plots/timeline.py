"""When each rank computed, when it stalled and why, and what travelled meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import Patch

from ringmpi.report.kinds import INDEX, KINDS, shown
from ringmpi.report.view import View, Views
from ringmpi.schedule import Pass
from ringmpi.store import ResultFile

#: More arrows than this hide what is below them; those are drawn that were waited for longest.
MOST_ARROWS = 80

#: More rows than this are too thin to see.
MOST_RANKS = 64

#: More rectangles than this are drawn as pixels in an SVG too, which no program could show else.
MOST_SHAPES = 20_000

#: More lines between steps than this for each rank would be all that can be seen.
MOST_STEPS_MARKED = 100

INK = "#20242a"


def timelines(results: Sequence[ResultFile], path: Path) -> None:
    """Draw passes of files, one below the other on one time axis. Local.

    Parameters
    ----------
    results : sequence of ResultFile
        Each with at least one timed repeat of its passes; the one of median length is drawn.
    path : Path
        PNG, SVG or PDF by its ending.
    """
    passes = [
        (result, Views(result, direction, most_ranks=MOST_RANKS).view())
        for result in results
        for direction in result.directions
    ]
    # Many ranks get thinner rows, so that the picture still fits a page.
    heights = [max(0.8, len(view.ranks) * min(0.4, 0.14 + 2.0 / len(view.ranks))) for _, view in passes]
    figure, axes = plt.subplots(
        len(passes),
        figsize=(9, 1.1 + 0.5 * len(passes) + sum(heights)),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    kinds: set[int] = set()
    for axis, (result, view) in zip(axes[:, 0], passes, strict=True):
        kinds |= _draw(axis, view)
        axis.set_title(_title(result, view))
    axes[-1, 0].set_xlabel("time, ms")
    axes[-1, 0].set_xlim(0, max(view.makespan for _, view in passes) * 1e3 or 1.0)
    legend = [Patch(color=KINDS[kind].colour, label=shown(KINDS[kind].name)) for kind in sorted(kinds)]
    figure.legend(handles=legend, loc="outside lower center", ncols=min(4, len(legend)), frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _title(result: ResultFile, view: View) -> str:
    words = [result.path.stem]
    if view.direction is Pass.BACKWARD:
        words.append("backward")
    if result.kind != "measured":
        words.append(result.kind)
    told = f"{', '.join(words)}: {view.makespan * 1e3:.1f} ms"
    hidden = []
    if len(view.ranks) < view.size:
        hidden.append(f"{len(view.ranks)} of {view.size} ranks shown")
    if not view.explained:
        hidden.append("neither transfers nor blame")
    if len(view.arrows) > MOST_ARROWS:
        hidden.append(f"{MOST_ARROWS} of {len(view.arrows)} transfers, those with the longest stalls")
    return told + (f"   ({'; '.join(hidden)})" if hidden else "")


def _draw(axis: Axes, view: View) -> set[int]:
    """Draw a view, and return the kinds of time in it, as indices into `KINDS`."""
    rows = {int(rank): row for row, rank in enumerate(view.ranks)}
    pieces = view.pieces()
    half = 0.4
    at = np.searchsorted(view.ranks, pieces["rank"])
    begin, end = pieces["begin"] * 1e3, pieces["end"] * 1e3
    corners = np.stack(
        [
            np.stack([begin, at - half], -1),
            np.stack([begin, at + half], -1),
            np.stack([end, at + half], -1),
            np.stack([end, at - half], -1),
        ],
        axis=1,
    )
    colours = np.array([kind.colour for kind in KINDS])[pieces["kind"]]
    bars = PolyCollection(
        list(corners), facecolors=colours, linewidths=0, antialiased=view.steps > MOST_STEPS_MARKED
    )
    bars.set_rasterized(len(pieces) > MOST_SHAPES)
    axis.add_collection(bars)
    if view.steps <= MOST_STEPS_MARKED:
        starts = view.records["started"] * 1e3
        lines = [[(x, row - half), (x, row + half)] for row, found in enumerate(starts) for x in found]
        axis.add_collection(LineCollection(lines, colors="white", linewidths=0.8))
    for arrow in view.arrows[:MOST_ARROWS]:
        sender, receiver = rows[arrow.hop.sender], rows[arrow.hop.receiver]
        side = half if receiver > sender else -half
        axis.annotate(
            "",
            xy=(arrow.received * 1e3, receiver - side),
            xytext=(arrow.posted * 1e3, sender + side),
            arrowprops={
                "arrowstyle": "-|>,head_length=0.35,head_width=0.14",
                "color": INK,
                "alpha": 0.75,
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
    every = -(-len(view.ranks) // 16)
    axis.set(
        ylabel="rank",
        yticks=range(0, len(view.ranks), every),
        yticklabels=[str(rank) for rank in view.ranks[::every]],
        ylim=(len(view.ranks) - 0.4, -0.6),
    )
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    return {int(kind) for kind in np.unique(pieces["kind"])} | {INDEX["compute"]}
