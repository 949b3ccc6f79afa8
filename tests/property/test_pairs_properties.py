"""Pairs counted by formula are those counted from positions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringmpi.layout import LAYOUTS, Layout, piece_of
from ringmpi.mask import Mask
from ringmpi.model.pairs import causal_pairs, runs_of

layouts = st.sampled_from(sorted(LAYOUTS))


@given(layouts, st.integers(1, 60), st.integers(1, 9), st.data())
def test_pairs_by_formula_are_those_of_the_mask(
    name: str, seq_len: int, size: int, data: st.DataObject
) -> None:
    num_queries = data.draw(st.integers(1, seq_len))
    keys = Layout(name, seq_len, size)
    queries = Layout(name, num_queries, size, seq_len - num_queries)
    asking, asked = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    pieces = data.draw(st.integers(1, 3))
    index = data.draw(st.integers(0, pieces - 1))
    rows, columns = (
        piece_of(layout.shard_len(rank), pieces, index)
        for layout, rank in ((queries, asking), (keys, asked))
    )

    by_formula = causal_pairs(runs_of(queries, asking, rows), runs_of(keys, asked, columns))

    positions = queries.positions(asking)[rows.start : rows.stop]
    among = keys.positions(asked)[columns.start : columns.stop]
    assert by_formula == Mask(causal=True).pairs(positions, among)


@given(layouts, st.integers(1, 60), st.integers(1, 9), st.data())
def test_runs_of_a_piece_are_its_positions(
    name: str, seq_len: int, size: int, data: st.DataObject
) -> None:
    layout = Layout(name, seq_len, size)
    rank = data.draw(st.integers(0, size - 1))
    low, high = sorted(data.draw(st.integers(0, layout.shard_len(rank))) for _ in range(2))

    runs = runs_of(layout, rank, range(low, high))

    flat = [position for run in runs for position in run]
    np.testing.assert_array_equal(flat, layout.positions(rank)[low:high])
