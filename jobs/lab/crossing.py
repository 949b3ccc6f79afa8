"""Where a curve of overlaps comes up to a level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

#: Overlap from which on a stall counts as vanished: what polling must reach beyond 1.25 times the threshold.
HIDDEN = 0.95


def vanishes_at(
    lengths: Sequence[int], overlaps: Sequence[float], level: float = HIDDEN
) -> float | None:
    """Return the block length from which on the overlap stays at a level or above it.

    Linear between the measured lengths, which rise. None if the longest does not reach the level, or all do.

    >>> vanishes_at([100, 200, 300], [0.5, 0.9, 1.0])
    250.0
    >>> vanishes_at([100, 200], [0.5, 0.9]), vanishes_at([100, 200], [1.0, 1.0])
    (None, None)
    """
    points = list(zip(lengths, overlaps, strict=True))
    for (left, low), (right, high) in reversed(list(pairwise(points))):
        if high < level:
            return None
        if low < level:
            return left + (right - left) * (level - low) / (high - low)
    return None
