"""What the words of a schedule cost: bytes of a part, allowed pairs and seconds of an attend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from ringmpi.layout import Layout
from ringmpi.mask import Mask
from ringmpi.model.costs import attention_flops
from ringmpi.model.machine import Curve
from ringmpi.model.pairs import causal_pairs, runs_of
from ringmpi.schedule import Pass, Shards, Step
from ringmpi.schedule.steps import OF_KEYS, Attend, Part, parts_held
from ringmpi.tensors import Shape


@dataclass(frozen=True)
class Task:
    """What is to be computed.

    Attributes
    ----------
    shape : Shape
    keys, queries : Layout
    causal : bool
    window : int, optional
    documents : tuple of int, optional
        As in `Mask`. With one of these two, pairs are counted from positions, not by formula.
    """

    shape: Shape
    keys: Layout
    queries: Layout
    causal: bool
    window: int | None = None
    documents: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.keys.size

    @property
    def by_formula(self) -> bool:
        """Whether pairs are counted by formula."""
        return self.window is None and self.documents is None

    @cached_property
    def mask(self) -> Mask:
        """Who sees whom."""
        return Mask(self.causal, self.window, self.documents)

    @property
    def pairs(self) -> int:
        """Allowed pairs of the whole sequence."""
        keys, queries = self.keys.seq_len, self.queries.seq_len
        asking = range(self.queries.first, self.queries.first + queries)
        if not self.by_formula:
            return self.mask.pairs(np.asarray(asking, np.int64), np.arange(keys))
        return causal_pairs([asking], [range(keys)]) if self.causal else keys * queries


class Prices:
    """Prices parts and attends; what a part is does not depend on the rank that asks, and is found once.

    Local.

    Parameters
    ----------
    task : Task
    rates : Curve
        FLOP/s of a rank in this pass, by tokens of a block.
    direction : Pass
    """

    def __init__(self, task: Task, rates: Curve, direction: Pass) -> None:
        self.task = task
        self.direction = direction
        self._rates = rates
        self._shards = Shards(task.keys, task.queries, 0)
        self._seconds: dict[tuple[Part, Part], float] = {}
        self._nbytes: dict[Part, int] = {}
        self._runs: dict[Part, tuple[range, ...]] = {}
        self._positions: dict[Part, NDArray[np.int64]] = {}

    def nbytes(self, part: Part) -> int:
        """Return the bytes of a part in flight."""
        if part not in self._nbytes:
            self._nbytes[part] = self.task.shape.nbytes(part, self._shards)
        return self._nbytes[part]

    def tokens(self, part: Part) -> int:
        """Return how many tokens a part has."""
        return len(self._shards.tokens(part))

    def seconds(self, attend: Attend) -> float:
        """Return how long an attend takes: its FLOPs at the rate of the geometric mean of its tokens."""
        known = attend.queries.part, attend.keys.part
        if known not in self._seconds:
            self._seconds[known] = self.attended(*known)[1]
        return self._seconds[known]

    def attended(self, queries: Part, keys: Part) -> tuple[int, float]:
        """Return the allowed pairs of an attend in one head of one sequence, and its seconds in all."""
        rows, columns = self.tokens(queries), self.tokens(keys)
        if not (rows and columns):
            return 0, 0.0
        shape, pairs = self.task.shape, self._counted(queries, keys)
        flops = attention_flops(shape, pairs, self.direction) * len(shape.heads(queries))
        return pairs, flops / shape.num_heads / self._rates.at(sqrt(rows * columns))

    def _counted(self, queries: Part, keys: Part) -> int:
        if not self.task.by_formula:
            return self.task.mask.pairs(self._places(queries), self._places(keys))
        if not self.task.causal:
            return self.tokens(queries) * self.tokens(keys)
        return causal_pairs(self._in_runs(queries), self._in_runs(keys))

    def _in_runs(self, part: Part) -> tuple[range, ...]:
        if part not in self._runs:
            self._runs[part] = runs_of(self._layout(part), part.owner, self._shards.tokens(part))
        return self._runs[part]

    def _places(self, part: Part) -> NDArray[np.int64]:
        if part not in self._positions:
            tokens = self._shards.tokens(part)
            self._positions[part] = self._layout(part).positions(part.owner)[tokens.start : tokens.stop]
        return self._positions[part]

    def _layout(self, part: Part) -> Layout:
        return self.task.keys if part.payload in OF_KEYS else self.task.queries


def held_nbytes(steps: Iterable[Step], prices: Prices) -> int:
    """Return the bytes of all slots of a schedule, each as large as the largest part in it. Local."""
    slots: dict[int, int] = {}
    for held in parts_held(steps):
        slots[held.slot] = max(slots.get(held.slot, 0), prices.nbytes(held.part))
    return sum(slots.values())
