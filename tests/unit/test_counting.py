"""Tiles of a kernel, counted at once and one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ringmpi.devices.counting import TileCounts, tile_counts
from ringmpi.mask import Mask

MASKS = {
    "none": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=9),
    "documents": Mask(documents=(0, 3, 3, 40, 97)),
    "all": Mask(causal=True, window=20, documents=(0, 50, 97)),
}

POSITIONS = {
    "whole": (np.arange(97), np.arange(97)),
    "striped": (np.arange(1, 97, 3), np.arange(0, 97, 3)),
    "later": (np.arange(60, 97), np.arange(0, 33)),
    "earlier": (np.arange(0, 33), np.arange(60, 97)),
    "zigzag": (np.r_[0:10, 87:97], np.r_[10:20, 77:87]),
    "no keys": (np.arange(5), np.arange(0)),
    "no queries": (np.arange(0), np.arange(5)),
}


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (16, 4), (4, 16), (64, 64), (1, 1)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_counts_are_those_of_a_look_at_every_tile(
    positions: tuple[np.ndarray, np.ndarray], mask: Mask, rows: int, columns: int
) -> None:
    queries, keys = positions
    allowed = mask.allowed(queries, keys)
    tiles = full = empty = pairs = 0
    for top, left in product(range(0, len(queries), rows), range(0, len(keys), columns)):
        tile = allowed[top : top + rows, left : left + columns]
        tiles += tile.any()
        empty += not tile.any()
        full += tile.all() and tile.shape[1] == columns
        pairs += tile.size * tile.any()

    found = tile_counts(*mask.bounds(queries, keys), len(keys), rows, columns)

    assert found == TileCounts(tiles, full, empty, pairs)
