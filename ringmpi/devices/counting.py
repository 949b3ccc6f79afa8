"""How many tiles a kernel meets, without going over them one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringmpi.mask import Positions


@dataclass(frozen=True)
class TileCounts:
    """Tiles of one head.

    Attributes
    ----------
    tiles : int
        Computed, since some pair in them is allowed.
    full : int
        Of these, the ones that need no mask: all pairs are allowed, and no column is missing.
    empty : int
        Left out.
    pairs : int
        In the computed ones, allowed or not.
    """

    tiles: int
    full: int
    empty: int
    pairs: int


def tile_counts(begin: Positions, end: Positions, keys: int, rows: int, columns: int) -> TileCounts:
    """Count the tiles of a grid of `rows` by `columns` over queries and keys. Local.

    Parameters
    ----------
    begin, end : ndarray of int64, shape (queries,)
        The keys that each query sees, as `Mask.bounds` gives them: neither falls.
    keys : int
    rows, columns : int
        Of a tile.
    """
    queries = len(begin)
    grid = -(-queries // rows) * -(-keys // columns)
    if not grid:
        return TileCounts(0, 0, 0, 0)
    # Columns of tiles that a query sees; none for one that sees nothing, and for those behind the last one.
    shape = (-(-queries // rows), rows)
    low, high = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    seeing = begin < end
    low.flat[:queries] = begin // columns
    high.flat[:queries] = np.where(seeing, -(-end // columns), 0)
    # A query adds the tiles behind those that one before it has reached.
    reached = np.maximum.accumulate(high, axis=1)
    low[:, 1:] = np.maximum(low[:, 1:], reached[:, :-1])
    met = np.maximum(high - low, 0).sum(axis=1)
    first = np.arange(0, queries, rows)
    heights = np.minimum(first + rows, queries) - first
    all_from, all_to = begin[first + heights - 1], end[first]
    full = np.maximum(all_to // columns - -(-all_from // columns), 0)
    # The last column of tiles may be narrower.
    last = -(-keys // columns)
    missing = np.where(reached[:, -1] == last, last * columns - keys, 0)
    tiles = int(met.sum())
    return TileCounts(
        tiles, int(full.sum()), grid - tiles, int((heights * (met * columns - missing)).sum())
    )
