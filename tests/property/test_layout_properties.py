from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmpi.layout import LAYOUTS, Layout

layouts = st.builds(
    Layout,
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 500),
    st.integers(1, 40),
    st.integers(0, 10**6),
)


@settings(deadline=None, max_examples=150)
@given(layouts)
def test_shards_partition_the_sequence_evenly(layout: Layout) -> None:
    shards = [layout.positions(rank) for rank in range(layout.size)]

    assert np.array_equal(np.sort(np.concatenate(shards)), layout.first + np.arange(layout.seq_len))
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1


@settings(deadline=None, max_examples=150)
@given(layouts, st.data())
def test_the_owner_finds_every_position_again(layout: Layout, data: st.DataObject) -> None:
    position = layout.first + data.draw(st.integers(0, layout.seq_len - 1))

    rank, index = layout.owner(position)

    assert layout.positions(rank)[index] == position


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.integers(1, 30))
def test_zigzag_work_is_equal_wherever_twice_the_size_divides_the_length(
    size: int, tokens: int
) -> None:
    layout = Layout("zigzag", 2 * size * tokens, size)

    work = {int((layout.positions(rank) + 1).sum()) for rank in range(size)}

    assert len(work) == 1
