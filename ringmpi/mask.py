"""Which query may see which key, decided on global positions alone.

Every mask that ringmpi knows lets a query see one interval of keys, ``first <= key < last``:

* causal: ``last = query + 1``;
* window W: ``first = query - W``, so W previous keys beside the own one;
* documents: the interval is cut to the query's own document.

Both ends never fall as the query grows. That is what makes exact counting and the cutting into
EMPTY, FULL and PARTIAL tiles cheap, for any ascending positions that a layout hands out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ringmpi.errors import ConfigError

Positions = NDArray[np.int64]


class TileKind(Enum):
    """How much of a tile is allowed: all of it, or some of it. EMPTY tiles are never made."""

    FULL = "full"
    PARTIAL = "partial"


@dataclass(frozen=True)
class Tile:
    """A rectangle of local (query, key) indices in which at least one pair is allowed.

    Attributes
    ----------
    rows, columns : slice
        Queries of the shard and keys of the block.
    kind : TileKind
        FULL needs no mask.
    pairs : int
        Allowed pairs inside.
    """

    rows: slice
    columns: slice
    kind: TileKind
    pairs: int

    @property
    def area(self) -> int:
        """Pairs that a kernel computes for this tile, allowed or not."""
        height: int = self.rows.stop - self.rows.start
        width: int = self.columns.stop - self.columns.start
        return height * width


@dataclass(frozen=True)
class Tiling:
    """The tiles of one block, and what the grid they were cut from held.

    Attributes
    ----------
    tiles : tuple of Tile
        Those with work, row by row.
    empty : int
        Tiles of the grid without an allowed pair, which nobody computes.
    """

    tiles: tuple[Tile, ...]
    empty: int


@dataclass(frozen=True)
class Mask:
    """A rule over global positions; the default allows every pair.

    Parameters
    ----------
    causal : bool
        A query sees no key after itself.
    window : int, optional
        How many previous keys are visible beside the own one. Later keys are left to `causal`.
    documents : tuple of int, optional
        Cumulative offsets, from 0 to the length of the sequence; a query sees its own document.

    Raises
    ------
    ConfigError
        If the window is negative, or the offsets do not start at 0 and rise.

    Examples
    --------
    >>> Mask(causal=True, window=1).allowed(np.arange(3), np.arange(3)).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not 0 <= self.window < 2**62:
            raise ConfigError(
                f"window={self.window}: must be 0 (only the own key) or more, and fit into 62 bits"
            )
        if self.documents is not None:
            rising = all(low <= high for low, high in pairwise(self.documents))
            if len(self.documents) < 2 or self.documents[0] != 0 or not rising:
                raise ConfigError(
                    f"documents={','.join(map(str, self.documents))}: cumulative offsets start at 0, "
                    f"never fall and end at the length of the sequence, e.g. 0,512,769"
                )

    def interval(self, queries: Positions) -> tuple[Positions, Positions]:
        """Return the first visible key of each query, and the one after its last.

        Parameters
        ----------
        queries : ndarray of int64, shape (rows,)

        Returns
        -------
        first, last : ndarray of int64, shape (rows,)
            Neither falls where `queries` rises. An end that no rule sets is the smallest or
            largest integer.
        """
        first = np.full_like(queries, np.iinfo(np.int64).min)
        last = np.full_like(queries, np.iinfo(np.int64).max)
        if self.causal:
            last = queries + 1
        if self.window is not None:
            first = queries - self.window
        if self.documents is not None:
            offsets = np.asarray(self.documents, np.int64)
            document = np.searchsorted(offsets, queries, side="right")
            first = np.maximum(first, offsets[document - 1])
            last = np.minimum(last, offsets[document])
        return first, last

    def allowed(self, queries: Positions, keys: Positions) -> NDArray[np.bool_]:
        """Return which pairs are allowed, shape (queries, keys)."""
        first, last = self.interval(queries)
        result: NDArray[np.bool_] = (first[:, None] <= keys) & (keys < last[:, None])
        return result

    def pairs(self, queries: Positions, keys: Positions) -> int:
        """Count the allowed pairs exactly, without making them.

        Parameters
        ----------
        queries, keys : ndarray of int64
            Ascending global positions.
        """
        begin, end = self.bounds(queries, keys)
        return int(np.maximum(end - begin, 0).sum())

    def bounds(self, queries: Positions, keys: Positions) -> tuple[Positions, Positions]:
        """Return the visible keys of each query, as indices ``begin <= index < end`` into `keys`.

        Parameters
        ----------
        queries, keys : ndarray of int64
            Ascending global positions.

        Returns
        -------
        begin, end : ndarray of int64, shape (queries,)
            Contiguous. Neither falls from one query to the next.
        """
        first, last = self.interval(queries)
        begin, end = (np.searchsorted(keys, edge) for edge in (first, last))
        return begin.astype(np.int64, copy=False), end.astype(np.int64, copy=False)

    def tiling(self, queries: Positions, keys: Positions, rows: int, columns: int) -> Tiling:
        """Cut a block into tiles of at most `rows` by `columns`, without the EMPTY ones.

        A tile is narrowed to the keys that any of its queries sees, so a staircase such as the
        causal diagonal costs at most ``rows / 2`` surplus keys a query, whatever the layout.

        Parameters
        ----------
        queries, keys : ndarray of int64
            Ascending global positions of the shard and of the block.
        rows, columns : int
            The largest tile.
        """
        begin, end = self.bounds(queries, keys)
        tiles = tuple(self._tiles(begin, end, rows, columns))
        grid = -(-len(queries) // rows) * -(-len(keys) // columns)
        return Tiling(tiles, empty=grid - len(tiles))

    @staticmethod
    def _tiles(begin: Positions, end: Positions, rows: int, columns: int) -> Iterator[Tile]:
        for top in range(0, len(begin), rows):
            lower, upper = begin[top : top + rows], end[top : top + rows]
            # Both ends rise with the query: the first row reaches furthest left, the last one right.
            leftmost, rightmost = int(lower[0]), int(upper[-1])
            for left in range(leftmost // columns * columns, rightmost, columns):
                low, high = max(left, leftmost), min(left + columns, rightmost)
                pairs = int(np.maximum(np.minimum(upper, high) - np.maximum(lower, low), 0).sum())
                if pairs:
                    full = pairs == len(lower) * (high - low)
                    kind = TileKind.FULL if full else TileKind.PARTIAL
                    yield Tile(slice(top, top + len(lower)), slice(low, high), kind, pairs)
