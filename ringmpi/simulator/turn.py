"""Schedules that are one schedule, turned round: all ranks in it counted on.

A rank is a place in a group of `inner` neighbouring ranks, and both are counted on, each round its own
circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.errors import ScheduleError
from ringmpi.schedule import Step
from ringmpi.schedule.steps import Part, Share

Ranks = NDArray[np.intp]


class Turn:
    """Counts ranks on: groups round one circle, places in them round another."""

    def __init__(self, size: int, inner: int) -> None:
        self.size, self.inner = size, inner
        self.ranks: Ranks = np.arange(size, dtype=np.intp)
        self.plain = inner in (1, size)  # One circle.
        self._twice = np.concatenate([self.ranks, self.ranks])

    def on(self, rank: int, by: int) -> int:
        """Return a rank, counted on by another one."""
        inner, outer = self.inner, self.size // self.inner
        group = (rank // inner + by // inner) % outer
        return group * inner + (rank % inner + by % inner) % inner

    def all_on(self, by: int) -> Ranks:
        """Return all ranks, counted on."""
        if self.plain:
            return self._twice[by : by + self.size]
        inner, outer = self.inner, self.size // self.inner
        groups = (np.arange(outer) + by // inner) % outer * inner
        places = (np.arange(inner) + by % inner) % inner
        return np.asarray((groups[:, None] + places).ravel(), np.intp)

    def cuts(self, *by: int) -> list[int]:
        """Return where a circle that is counted on begins anew, from 0 to the end; empty if there are two."""
        if not self.plain:
            return []
        return sorted({0, self.size, *((self.size - places) % self.size for places in by)})

    def share(self, share: Share, by: int) -> Share:
        """Return a share of the heads: those of a group are handed out by place."""
        if share.pieces != self.inner:
            return share
        return Share((share.index + by) % self.inner, share.pieces)


def check_turned(own: Iterable[Step], other: Iterable[Step], turn: Turn, rank: int) -> None:
    """Raise unless a rank's schedule is rank 0's, with all ranks in it counted on.

    The order of transfers and of attends in a step does not matter here. Local.

    Raises
    ------
    ScheduleError
        Naming the rank and the step.
    """
    for number, (mine, its) in enumerate(zip(own, other, strict=True)):
        if sorted(_told(mine, turn, rank)) != sorted(_told(its, turn, 0)):
            raise ScheduleError(
                f"step {number}: rank {rank} does not do what rank 0 does, turned round"
            )


def _told(step: Step, turn: Turn, by: int) -> Iterator[tuple[Any, ...]]:
    """Yield what a step sends, receives and attends to, with all ranks counted on."""

    def plain(part: Part) -> tuple[Any, ...]:
        heads = turn.share(part.heads, by)
        tokens = part.tokens
        owner = turn.on(part.owner, by)
        return part.payload.value, owner, tokens.index, tokens.pieces, heads.index, heads.pieces

    for transfer in step.transfers:
        peer = turn.on(transfer.peer, by)
        yield transfer.direction.value, peer, transfer.steps, *plain(transfer.part)
    for attend in step.attends:
        yield "attend", 0, 0, *plain(attend.queries.part), *plain(attend.keys.part)
