"""Which global positions a rank owns.

A layout is a table of positions and nothing else: no loop and no kernel asks for its name. The
positions of a rank are a few *runs* (Python ranges), ascending, so that a file can be read and
written in slices and a table of a whole sequence is never held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ringmpi.errors import ConfigError, check_choice

Runs = tuple[range, ...]


def piece_of(seq_len: int, pieces: int, index: int) -> range:
    """Piece `index` of `pieces` nearly equal ones; the first ``seq_len % pieces`` are one longer."""
    length, longer = divmod(seq_len, pieces)
    start = index * length + min(index, longer)
    return range(start, start + length + (index < longer))


def _contiguous(seq_len: int, size: int, rank: int) -> Runs:
    return (piece_of(seq_len, size, rank),)


def _striped(seq_len: int, size: int, rank: int) -> Runs:
    return (range(rank, seq_len, size),)


def _zigzag(seq_len: int, size: int, rank: int) -> Runs:
    """Pieces `rank` and ``2 * size - 1 - rank`` of ``2 * size``: as much early as late work."""
    return (
        piece_of(seq_len, 2 * size, rank),
        piece_of(seq_len, 2 * size, 2 * size - 1 - rank),
    )


LAYOUTS: dict[str, Callable[[int, int, int], Runs]] = {
    "contiguous": _contiguous,
    "striped": _striped,
    "zigzag": _zigzag,
}


@lru_cache(maxsize=2**16)
def _shard_len(name: str, seq_len: int, size: int, rank: int) -> int:
    """Return how many tokens a rank owns: a schedule asks for it again in every step."""
    return sum(map(len, LAYOUTS[name](seq_len, size, rank)))


@dataclass(frozen=True)
class Layout:
    """A sequence of `seq_len` tokens shared by `size` ranks.

    Any length and any size work; where they do not divide, shards differ by at most one token, and
    where there are fewer tokens than ranks some shards are empty.

    Parameters
    ----------
    name : str
        ``contiguous``, ``striped`` or ``zigzag``.
    seq_len : int
        Tokens of the whole sequence.
    size : int
        Number of ranks.
    first : int
        Global position of the first token; above 0 for queries at the end of a longer sequence.

    Raises
    ------
    ConfigError
        If the name is unknown, or `seq_len` or `size` is below 1.

    Examples
    --------
    >>> Layout("zigzag", seq_len=16, size=2).positions(0).tolist()
    [0, 1, 2, 3, 12, 13, 14, 15]
    >>> Layout("striped", seq_len=5, size=2).positions(1).tolist()
    [1, 3]
    """

    name: str
    seq_len: int
    size: int
    first: int = 0

    def __post_init__(self) -> None:
        check_choice("layout", self.name, LAYOUTS)
        if self.seq_len < 1:
            raise ConfigError(f"seq_len={self.seq_len}: a sequence has at least 1 token")
        if self.size < 1:
            raise ConfigError(f"size={self.size}: a ring has at least 1 rank")

    def runs(self, rank: int) -> Runs:
        """Return the non-empty runs of positions that `rank` owns, ascending. Local."""
        runs = LAYOUTS[self.name](self.seq_len, self.size, rank)
        return tuple(
            range(run.start + self.first, run.stop + self.first, run.step) for run in runs if run
        )

    def shard_len(self, rank: int) -> int:
        """Return the number of tokens that `rank` owns. Local."""
        return _shard_len(self.name, self.seq_len, self.size, rank)

    def positions(self, rank: int) -> NDArray[np.int64]:
        """Return the global positions of the tokens of `rank`, ascending. Local.

        Returns
        -------
        ndarray of int64, shape (shard_len,)
        """
        runs = [np.arange(run.start, run.stop, run.step, dtype=np.int64) for run in self.runs(rank)]
        return np.concatenate(runs) if runs else np.empty(0, np.int64)

    def owner(self, position: int) -> tuple[int, int]:
        """Return the rank that owns a global position, and the index in its shard. Local.

        Raises
        ------
        ConfigError
            If the position lies outside the sequence.
        """
        for rank in range(self.size):
            before = 0
            for run in self.runs(rank):
                if position in run:
                    return rank, before + run.index(position)
                before += len(run)
        last = self.first + self.seq_len - 1
        raise ConfigError(f"position={position}: tokens lie from {self.first} to {last}")
