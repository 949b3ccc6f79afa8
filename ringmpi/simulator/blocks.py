"""Allowed pairs and seconds of an attend, of all ranks at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.errors import ConfigError
from ringmpi.layout import Layout
from ringmpi.model.prices import Prices, Task
from ringmpi.schedule.steps import Attend, Part

Array = NDArray[Any]
Ranks = NDArray[np.intp]

#: Pairs of shards whose pairs are counted one by one, where there is no rule for many; some ten seconds.
MOST_COUNTED = 2**18

#: Query tokens that a mask is asked about, over all pairs of shards; as long.
MOST_ASKED = 2**30


class Owners:
    """Ranks by what their shards look like: with ``P`` ranks, shards differ by a token at most.

    Attributes
    ----------
    kind : ndarray of intp, shape (ranks,)
        Ranks of one kind have runs of the same lengths.
    examples : list of (int, int)
        The first and the last rank of each kind.
    shortest : int
        Tokens of the shortest shard.
    """

    def __init__(self, layout: Layout) -> None:
        runs = [tuple(map(len, layout.runs(rank))) for rank in range(layout.size)]
        known = {lens: number for number, lens in enumerate(dict.fromkeys(runs))}
        self.kind: Ranks = np.array([known[lens] for lens in runs], np.intp)
        found = (np.flatnonzero(self.kind == number) for number in range(len(known)))
        self.examples = [(int(ranks[0]), int(ranks[-1])) for ranks in found]
        self.shortest = min(map(sum, known))

    def __len__(self) -> int:
        return len(self.examples)


class Blocks:
    """Prices one attend of every rank. Local.

    Where keys and queries have one layout, what is allowed depends on the kinds of the two shards and on
    which of them comes first; so does everything where nothing is masked. Then there are a few blocks, each
    of which is priced once.

    Parameters
    ----------
    task : Task
    prices : Prices
    keys, queries : Owners
    """

    def __init__(self, task: Task, prices: Prices, keys: Owners, queries: Owners) -> None:
        self._task = task
        self._prices = prices
        self._keys, self._queries = keys, queries
        self._tables: dict[tuple[Any, ...], tuple[Array, Array]] = {}
        alike = task.keys == task.queries
        self._few = task.by_formula and (alike or not task.causal)
        if not self._few:
            self._check_effort()

    def of(
        self, attend: Attend, asking: Ranks, asked: Ranks, cuts: Sequence[int] = ()
    ) -> tuple[Array, Array]:
        """Return allowed pairs over batch and heads, and seconds. Local.

        Parameters
        ----------
        attend : Attend
            Of any rank; the owners in it do not matter.
        asking, asked : ndarray of intp, shape (ranks,)
            Whose queries attend to whose keys.
        cuts : sequence of int, optional
            From the first rank to the end; between two cuts, the same one of each two comes first.
        """
        if not self._few:
            return self._one_by_one(attend, asking, asked)
        pairs, seconds = self._table(attend)
        if len(pairs) == 3 and cuts:  # Shards are of one kind.
            met, taken = np.empty(len(asking)), np.empty(len(asking))
            for low, high in pairwise(cuts):
                code = int(np.sign(asked[low] - asking[low])) + 1
                met[low:high], taken[low:high] = pairs[code], seconds[code]
            return met, taken
        code = np.sign(asked - asking) + 1
        code += 3 * (self._queries.kind.take(asking) * len(self._keys) + self._keys.kind.take(asked))
        return pairs.take(code), seconds.take(code)

    def _table(self, attend: Attend) -> tuple[Array, Array]:
        queries, keys = attend.queries.part, attend.keys.part
        known = queries.tokens, queries.heads, keys.tokens, keys.heads
        if known not in self._tables:
            pairs = np.zeros(len(self._queries) * len(self._keys) * 3)
            seconds = np.zeros_like(pairs)
            for code, asking, asked in self._examples():
                pairs[code], seconds[code] = self._priced(attend, asking, asked)
            self._tables[known] = pairs, seconds
        return self._tables[known]

    def _examples(self) -> Iterator[tuple[int, int, int]]:
        """Yield the code of each block that there is, and an example of it."""
        for asking, asked in product(range(len(self._queries)), range(len(self._keys))):
            (first, last), (low, high) = self._queries.examples[asking], self._keys.examples[asked]
            code = (asking * len(self._keys) + asked) * 3
            if not self._task.causal:
                yield from ((code + place, first, low) for place in range(3))
                continue
            if low < last:
                yield code, last, low
            for same in sorted({first, last} & {low, high}):
                yield code + 1, same, same
            if first < high:
                yield code + 2, first, high

    def _one_by_one(self, attend: Attend, asking: Ranks, asked: Ranks) -> tuple[Array, Array]:
        owners = zip(asking.tolist(), asked.tolist(), strict=True)
        priced = [self._priced(attend, *both) for both in owners]
        pairs, seconds = zip(*priced, strict=True)
        return np.array(pairs, np.float64), np.array(seconds)

    def _priced(self, attend: Attend, asking: int, asked: int) -> tuple[int, float]:
        """Return pairs and seconds of the attend of the same shares of other ranks' shards."""
        queries, keys = (held.part for held in (attend.queries, attend.keys))
        mine = Part(queries.payload, asking, queries.tokens, queries.heads)
        theirs = Part(keys.payload, asked, keys.tokens, keys.heads)
        return priced(self._prices, mine, theirs)

    def _check_effort(self) -> None:
        """Refuse what would take hours."""
        task = self._task
        if task.size**2 > MOST_COUNTED:
            raise ConfigError(
                f"ranks={task.size}: with a window, documents or a causal --query-len pairs of shards are "
                f"counted one by one; use at most {int(MOST_COUNTED**0.5)} ranks"
            )
        asked = task.queries.seq_len * task.size
        if not task.by_formula and asked > MOST_ASKED:
            raise ConfigError(
                f"seq_len={task.keys.seq_len} on {task.size} ranks: a window or documents are counted token "
                f"by token; use fewer ranks or at most {MOST_ASKED // task.size} query tokens"
            )


def priced(prices: Prices, queries: Part, keys: Part) -> tuple[int, float]:
    """Return the allowed pairs of an attend over batch and heads, and its seconds. Local."""
    shape = prices.task.shape
    pairs, seconds = prices.attended(queries, keys)
    return pairs * len(shape.heads(queries)) * shape.batch, seconds
