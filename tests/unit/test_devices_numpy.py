"""The tiles of the NumPy device; what it computes is in test_devices_attend.py."""

from __future__ import annotations

import numpy as np
import pytest

from ringmpi.devices import Block, NumpyDevice, Queries
from ringmpi.devices.numpy import TILE_COLUMNS, TILE_ROWS

from .attending import TALLIES, Case, attend, cut, state_of


def numpy_device(case: Case) -> NumpyDevice:
    return NumpyDevice(case.mask, case.scale)


@pytest.mark.parametrize("case", TALLIES.values(), ids=TALLIES.keys())
def test_every_tile_of_the_grid_is_computed_or_skipped(case: Case) -> None:
    blocks = cut(case.tokens, case.tokens // 2)

    *_, tallies = attend(numpy_device(case), case, case.tensors(), blocks)

    rows = TILE_ROWS // (case.heads // case.kv_heads)
    for tally, block in zip(tallies, blocks, strict=True):
        cells = -(-len(case.positions) // rows) * -(-len(block) // TILE_COLUMNS)
        assert tally.tiles + tally.tiles_skipped == cells * case.batch * case.kv_heads


def test_a_full_mask_masks_no_tile() -> None:
    case = Case(tokens=700, queries=300)

    *_, (tally,) = attend(numpy_device(case), case, case.tensors(), cut(700))

    assert tally.tiles_unmasked == tally.tiles == 2 * 3 * 2
    assert tally.tiles_skipped == 0
    assert tally.computed_pairs == tally.pairs


def test_causal_tiles_off_the_diagonal_need_no_mask() -> None:
    case = Case(tokens=512, queries=128, heads=1, kv_heads=1, causal=True)

    *_, tallies = attend(numpy_device(case), case, case.tensors(), cut(512, 384))

    assert [tally.tiles_unmasked for tally in tallies] == [1, 0]
    assert [tally.tiles for tally in tallies] == [1, 1]


def test_an_advance_computes_one_tile() -> None:
    case = Case(tokens=700, queries=300, causal=True)
    device = numpy_device(case)
    q, k, v = case.tensors()
    queries = Queries(q, case.positions)
    work = device.attend(queries, Block(k, v, np.arange(700)), state_of(q))

    counts = []
    while not work.advance():
        counts.append(work.tally.tiles)

    assert counts == list(range(1, work.tally.tiles + 1))
