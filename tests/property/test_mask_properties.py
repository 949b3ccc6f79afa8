from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmpi.layout import LAYOUTS, Layout
from ringmpi.mask import Mask, TileKind


@st.composite
def problems(draw: st.DrawFn) -> tuple[Mask, Layout, int, int]:
    tokens = draw(st.integers(1, 40))
    window = draw(st.none() | st.integers(0, 45))
    # Any offsets between the ends, repeated ones being empty documents.
    inner = draw(st.none() | st.lists(st.integers(0, tokens), max_size=6))
    documents = None if inner is None else (0, *sorted(inner), tokens)
    mask = Mask(draw(st.booleans()), window, documents)
    layout = Layout(draw(st.sampled_from(sorted(LAYOUTS))), tokens, draw(st.integers(1, 9)))
    ranks = st.integers(0, layout.size - 1)
    return mask, layout, draw(ranks), draw(ranks)


def sees(mask: Mask, query: int, key: int) -> bool:
    in_order = not mask.causal or key <= query
    near = mask.window is None or key >= query - mask.window
    if mask.documents is None:
        return in_order and near
    # Two tokens share a document unless some document begins after one of them and not after the other.
    begun = [(offset <= query, offset <= key) for offset in mask.documents]
    return in_order and near and all(of_query == of_key for of_query, of_key in begun)


@settings(deadline=None, max_examples=200)
@given(problems(), st.integers(1, 45), st.integers(1, 45))
def test_tiles_hold_each_allowed_pair_once_and_their_count_is_exact(
    problem: tuple[Mask, Layout, int, int], rows: int, columns: int
) -> None:
    mask, layout, rank, owner = problem
    queries, keys = layout.positions(rank), layout.positions(owner)
    expected = np.array([[sees(mask, q, k) for k in keys.tolist()] for q in queries.tolist()], np.bool_)
    expected = expected.reshape(len(queries), len(keys))

    tiling = mask.tiling(queries, keys, rows, columns)

    covered = np.zeros(expected.shape, np.int64)
    for tile in tiling.tiles:
        inside = expected[tile.rows, tile.columns]
        covered[tile.rows, tile.columns] += 1
        assert tile.pairs == inside.sum() > 0
        assert (tile.kind is TileKind.FULL) == inside.all()
        assert inside.shape[0] <= rows
        assert inside.shape[1] <= columns
    assert covered.max(initial=0) <= 1
    assert covered[expected].all()
    assert mask.pairs(queries, keys) == expected.sum()
    assert np.array_equal(mask.allowed(queries, keys), expected)
    cells = -(-len(queries) // rows) * -(-len(keys) // columns)
    assert tiling.empty == cells - len(tiling.tiles)


@settings(deadline=None, max_examples=100)
@given(problems())
def test_visible_intervals_never_fall(problem: tuple[Mask, Layout, int, int]) -> None:
    mask, layout, rank, _ = problem

    first, last = mask.interval(layout.positions(rank))

    assert (np.diff(first.astype(object)) >= 0).all()
    assert (np.diff(last.astype(object)) >= 0).all()
