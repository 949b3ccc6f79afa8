from __future__ import annotations

import numpy as np
import pytest

from ringmpi.devices.numpy import TILE_COLUMNS, TILE_ROWS
from ringmpi.errors import ConfigError
from ringmpi.layout import LAYOUTS, Layout
from ringmpi.mask import Mask, TileKind

MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window 0": Mask(causal=True, window=0),
    "window 10": Mask(causal=True, window=10),
    "window only": Mask(window=3),
    "window over all": Mask(causal=True, window=17),
    "documents": Mask(documents=(0, 5, 6, 17)),
    "empty documents": Mask(causal=True, documents=(0, 0, 7, 7, 7, 17, 17)),
    "all": Mask(causal=True, window=4, documents=(0, 5, 6, 17)),
}

with_every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())


def sees(mask: Mask, query: int, key: int) -> bool:
    """Say by the words of the rules whether a query may see a key."""
    if mask.causal and key > query:
        return False
    if mask.window is not None and query - key > mask.window:
        return False
    if mask.documents is None:
        return True
    starts, ends = mask.documents[:-1], mask.documents[1:]
    return any(
        start <= query < end and start <= key < end for start, end in zip(starts, ends, strict=True)
    )


@with_every_mask
def test_allowed_pairs_follow_the_rules_one_by_one(mask: Mask) -> None:
    queries, keys = np.arange(17), np.array([0, 1, 4, 5, 6, 7, 11, 16])

    allowed = mask.allowed(queries, keys)

    assert allowed.tolist() == [[sees(mask, q, k) for k in keys.tolist()] for q in range(17)]


@with_every_mask
@pytest.mark.parametrize("keys", [[0, 1, 4, 5, 6, 7, 11, 16], [16], []], ids=len)
def test_bounds_are_the_keys_that_a_query_sees(mask: Mask, keys: list[int]) -> None:
    queries = np.arange(17)

    begin, end = mask.bounds(queries, np.array(keys, np.int64))

    for query, low, high in zip(queries.tolist(), begin.tolist(), end.tolist(), strict=True):
        assert keys[low:high] == [key for key in keys if sees(mask, query, key)]
    for edge in (begin, end):  # What devices rely on that get no more than an address.
        assert edge.dtype == np.int64
        assert edge.flags.c_contiguous
        assert (np.diff(edge) >= 0).all()
    assert (begin >= 0).all()
    assert (begin <= end).all()
    assert (end <= len(keys)).all()


@with_every_mask
def test_pairs_are_counted_without_making_them(mask: Mask) -> None:
    queries, keys = np.array([0, 2, 3, 9, 16]), np.array([1, 2, 5, 6, 13])

    count = mask.pairs(queries, keys)

    assert count == sum(sees(mask, q, k) for q in queries.tolist() for k in keys.tolist())


@pytest.mark.parametrize("tile", [(1, 1), (3, 2), (4, 5), (17, 17), (128, 512)], ids=str)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@with_every_mask
def test_tiles_cover_each_allowed_pair_once(mask: Mask, layout: str, tile: tuple[int, int]) -> None:
    shards = [Layout(layout, 17, 3).positions(rank) for rank in range(3)]

    for queries in shards:
        for keys in shards:
            covered = np.zeros((len(queries), len(keys)), np.int64)
            tiling = mask.tiling(queries, keys, *tile)
            for piece in tiling.tiles:
                inside = mask.allowed(queries[piece.rows], keys[piece.columns])
                covered[piece.rows, piece.columns] += 1
                assert piece.pairs == inside.sum() > 0
                assert piece.area == inside.size
                assert (piece.kind is TileKind.FULL) == inside.all()
                assert inside.shape[0] <= tile[0]
                assert inside.shape[1] <= tile[1]
            allowed = mask.allowed(queries, keys)
            assert covered.max(initial=0) <= 1
            assert covered[allowed].all()
            assert sum(piece.pairs for piece in tiling.tiles) == allowed.sum()


@with_every_mask
def test_empty_tiles_of_the_grid_are_counted_and_not_made(mask: Mask) -> None:
    queries, keys = np.arange(17), np.arange(17)

    tiling = mask.tiling(queries, keys, 4, 5)

    allowed = mask.allowed(queries, keys)
    grid = [allowed[i : i + 4, j : j + 5] for i in range(0, 17, 4) for j in range(0, 17, 5)]
    assert tiling.empty == sum(not cell.any() for cell in grid)
    assert len(tiling.tiles) == sum(bool(cell.any()) for cell in grid)


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_a_block_without_queries_or_keys_has_no_tiles(rows: int, keys: int) -> None:
    tiling = Mask(causal=True).tiling(np.arange(rows), np.arange(keys), 4, 4)

    assert tiling.tiles == ()
    assert tiling.empty == 0
    assert Mask(causal=True).pairs(np.arange(rows), np.arange(keys)) == 0


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (Mask(), 32 * 32),
        (Mask(causal=True), 528),
        # Rows see 1, 2, .., 10, then 11 keys each.
        (Mask(causal=True, window=10), sum(range(1, 11)) + 22 * 11),
        (Mask(causal=True, window=31), 528),
        (Mask(causal=True, window=0), 32),
        (Mask(documents=(0, 7, 32)), 7 * 7 + 25 * 25),
        (Mask(causal=True, documents=(0, 7, 7, 32)), 28 + 325),
    ],
    ids=["full", "causal", "window 10", "window 31", "window 0", "documents", "packed causal"],
)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_pairs_over_all_ranks_have_a_closed_form(mask: Mask, pairs: int, layout: str) -> None:
    shards = [Layout(layout, 32, 4).positions(rank) for rank in range(4)]

    total = sum(mask.pairs(queries, keys) for queries in shards for keys in shards)

    assert total == pairs


def test_a_window_over_three_ranks_leaves_nine_of_sixteen_blocks() -> None:
    mask = Mask(causal=True, window=10)
    shards = [Layout("contiguous", 32, 4).positions(rank) for rank in range(4)]

    busy = {(i, j) for i in range(4) for j in range(4) if mask.pairs(shards[i], shards[j])}

    assert busy == {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_causal_run_works_on_little_more_than_half_of_a_full_one(layout: str, size: int) -> None:
    tokens = 8192
    shards = [Layout(layout, tokens, size).positions(rank) for rank in range(size)]

    area = sum(
        tile.area
        for queries in shards
        for keys in shards
        for tile in Mask(causal=True).tiling(queries, keys, TILE_ROWS, TILE_COLUMNS).tiles
    )

    # A staircase costs half a tile's rows a query and block: 64 P / 4096 of half, 12.5 % at P = 8.
    assert 1 <= area / (tokens * (tokens + 1) / 2) <= 1.15


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"window": -1}, ["window=-1", "0 (only the own key) or more"]),
        ({"documents": (0,)}, ["documents=0", "e.g. 0,512,769"]),
        ({"documents": ()}, ["documents=", "start at 0"]),
        ({"documents": (1, 5)}, ["documents=1,5", "start at 0"]),
        ({"documents": (0, 5, 3)}, ["documents=0,5,3", "never fall"]),
    ],
    ids=["negative window", "one offset", "no offset", "late start", "falling"],
)
def test_an_impossible_mask_is_refused_with_what_would_work(
    options: dict[str, object], told: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        Mask(**options)  # type: ignore[arg-type]

    assert all(part in str(refusal.value) for part in told)


def test_positions_beyond_32_bits_are_compared_exactly() -> None:
    far = 2**40 + np.arange(3)

    allowed = Mask(causal=True, window=1).allowed(far, far)

    assert allowed.astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
