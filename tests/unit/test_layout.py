from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from ringmpi.errors import ConfigError
from ringmpi.layout import LAYOUTS, Layout, piece_of

NAMES = sorted(LAYOUTS)

#: Lengths and sizes: one token, fewer tokens than ranks, sizes that do not divide, and some that do.
SHAPES = [(1, 1), (1, 3), (3, 1), (3, 7), (5, 3), (6, 4), (7, 3), (17, 4), (17, 17), (64, 8), (100, 7)]


def shape_id(shape: tuple[int, int]) -> str:
    return f"{shape[0]} tokens on {shape[1]}"


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("name", NAMES)
class TestShards:
    def test_shards_partition_the_sequence(self, name: str, shape: tuple[int, int]) -> None:
        layout = Layout(name, *shape)

        together = np.concatenate([layout.positions(rank) for rank in range(layout.size)])

        assert sorted(together.tolist()) == list(range(layout.seq_len))

    def test_positions_ascend_as_64_bit_integers(self, name: str, shape: tuple[int, int]) -> None:
        layout = Layout(name, *shape)

        shards = [layout.positions(rank) for rank in range(layout.size)]

        assert all(shard.dtype == np.int64 for shard in shards)
        assert all((np.diff(shard) > 0).all() for shard in shards)

    def test_positions_are_the_runs_one_after_the_other(
        self, name: str, shape: tuple[int, int]
    ) -> None:
        layout = Layout(name, *shape)

        runs = [layout.runs(rank) for rank in range(layout.size)]

        assert all(len(run) > 0 for of_rank in runs for run in of_rank)
        for rank, of_rank in enumerate(runs):
            assert layout.positions(rank).tolist() == [at for run in of_rank for at in run]

    def test_the_owner_is_the_inverse_of_the_positions(self, name: str, shape: tuple[int, int]) -> None:
        layout = Layout(name, *shape)

        places = {
            position: (rank, index)
            for rank in range(layout.size)
            for index, position in enumerate(layout.positions(rank).tolist())
        }

        assert {at: layout.owner(at) for at in range(layout.seq_len)} == places

    def test_shards_differ_by_at_most_one_token(self, name: str, shape: tuple[int, int]) -> None:
        layout = Layout(name, *shape)

        lengths = [layout.shard_len(rank) for rank in range(layout.size)]

        assert lengths == [len(layout.positions(rank)) for rank in range(layout.size)]
        assert max(lengths) - min(lengths) <= 1


def test_a_zigzag_rank_owns_an_early_and_the_matching_late_piece() -> None:
    layout = Layout("zigzag", seq_len=16, size=2)

    order = [layout.positions(rank).tolist() for rank in range(2)]

    assert order == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]


def test_a_striped_rank_owns_every_nth_token() -> None:
    layout = Layout("striped", seq_len=7, size=3)

    order = [layout.positions(rank).tolist() for rank in range(3)]

    assert order == [[0, 3, 6], [1, 4], [2, 5]]


def test_a_contiguous_rank_owns_one_run() -> None:
    layout = Layout("contiguous", seq_len=7, size=3)

    order = [layout.positions(rank).tolist() for rank in range(3)]

    assert order == [[0, 1, 2], [3, 4], [5, 6]]


def causal_work(layout: Layout) -> list[int]:
    """Return the allowed pairs of every rank: query i sees i + 1 keys."""
    return [int((layout.positions(rank) + 1).sum()) for rank in range(layout.size)]


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_zigzag_balances_causal_work_exactly_where_the_pieces_are_equal(size: int) -> None:
    layout = Layout("zigzag", seq_len=2 * size * 17, size=size)

    work = causal_work(layout)

    assert len(set(work)) == 1


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_the_last_contiguous_rank_has_almost_twice_the_mean_causal_work(size: int) -> None:
    tokens = size * 17
    layout = Layout("contiguous", seq_len=tokens, size=size)

    work = causal_work(layout)
    ratio = Fraction(max(work) * size, sum(work))

    # With n = N / P the last rank has n (2 N - n + 1) / 2 pairs of N (N + 1) / 2.
    assert ratio == Fraction(2 * tokens - 17 + 1, tokens + 1)
    assert abs(ratio - (2 - Fraction(1, size))) < Fraction(1, tokens)


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_striped_ranks_differ_by_one_key_a_query_and_rank(size: int) -> None:
    layout = Layout("striped", seq_len=size * 17, size=size)

    work = causal_work(layout)

    # Token r + P i sees one key more than token r - 1 + P i, and a rank owns 17 tokens.
    assert np.diff(work).tolist() == [17] * (size - 1)


@pytest.mark.parametrize(
    ("name", "seq_len", "size", "told"),
    [
        ("zigzack", 16, 2, ["zigzack", "did you mean 'zigzag'", "contiguous, striped, zigzag"]),
        ("", 16, 2, ["layout=''", "contiguous, striped, zigzag"]),
        ("zigzag", 0, 2, ["seq_len=0", "at least 1"]),
        ("striped", -3, 2, ["seq_len=-3", "at least 1"]),
        ("contiguous", 16, 0, ["size=0", "at least 1"]),
    ],
    ids=["misspelt", "nameless", "empty", "negative", "nobody"],
)
def test_an_impossible_layout_is_refused_with_what_would_work(
    name: str, seq_len: int, size: int, told: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        Layout(name, seq_len, size)

    assert all(part in str(refusal.value) for part in told)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("name", NAMES)
def test_queries_at_the_end_lie_as_a_sequence_of_their_own_does_moved_along(
    name: str, shape: tuple[int, int]
) -> None:
    layout, moved = Layout(name, *shape), Layout(name, *shape, first=1000)

    for rank in range(layout.size):
        assert moved.positions(rank).tolist() == (layout.positions(rank) + 1000).tolist()
        assert moved.shard_len(rank) == layout.shard_len(rank)
        assert [(r.start, r.stop, r.step) for r in moved.runs(rank)] == [
            (r.start + 1000, r.stop + 1000, r.step) for r in layout.runs(rank)
        ]
    for position in range(layout.seq_len):
        assert moved.owner(position + 1000) == layout.owner(position)


@pytest.mark.parametrize("position", [-1, 0, 99, 117])
@pytest.mark.parametrize("name", NAMES)
def test_a_position_before_or_behind_the_queries_has_no_owner(name: str, position: int) -> None:
    layout = Layout(name, seq_len=17, size=3, first=100)

    with pytest.raises(ConfigError, match=f"position={position}: tokens lie from 100 to 116"):
        layout.owner(position)


@pytest.mark.parametrize("pieces", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("tokens", [0, 1, 3, 7, 8, 17])
def test_pieces_lie_one_after_the_other_and_the_first_ones_are_longer(tokens: int, pieces: int) -> None:
    parts = [piece_of(tokens, pieces, index) for index in range(pieces)]

    assert [at for part in parts for at in part] == list(range(tokens))
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize("position", [-1, 17, 10**12])
@pytest.mark.parametrize("name", NAMES)
def test_a_position_outside_the_sequence_has_no_owner(name: str, position: int) -> None:
    layout = Layout(name, seq_len=17, size=3)

    with pytest.raises(ConfigError, match=f"position={position}: tokens lie from 0 to 16"):
        layout.owner(position)
