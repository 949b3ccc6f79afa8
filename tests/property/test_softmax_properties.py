from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ringmpi.softmax import State, finish, merge

Array = np.ndarray[Any, np.dtype[Any]]

EPS = float(np.finfo(np.float64).eps)

#: One row of scores and values. Scores reach from where all weights but one vanish to where all count.
scores = st.floats(-700, 700, allow_subnormal=False)
values = st.floats(-10, 10, allow_subnormal=False)


@st.composite
def keys(draw: st.DrawFn, most: int = 12) -> tuple[Array, Array]:
    count = draw(st.integers(0, most))
    return draw(arrays(np.float64, count, elements=scores)), draw(
        arrays(np.float64, (count, 2), elements=values)
    )


def state_over(part: tuple[Array, Array]) -> State:
    row_scores, row_values = part
    top = row_scores.max(initial=-np.inf)
    weights = np.exp(row_scores - (top if np.isfinite(top) else 0))
    return State(
        (weights @ row_values).reshape(1, 1, 1, 2),
        np.full((1, 1, 1), top),
        np.full((1, 1, 1), weights.sum()),
    )


def merged(state: State, other: State) -> State:
    """Return the two merged, into a copy."""
    both = State(state.acc.copy(), state.row_max.copy(), state.row_sum.copy())
    merge(both, other)
    return both


def assert_close(a: State, b: State, budget: float) -> None:
    """Compare the results of two states; `budget` counts epsilons of a relative error in the weights.

    A score error of epsilon * |score - max| <= 1400 epsilon is one of 1400 epsilon in the weight, where
    the shifts of two merges are rounded differently. Values are at most 10.
    """
    (out_a, lse_a), (out_b, lse_b) = finish(a), finish(b)
    assert np.array_equal(np.isneginf(lse_a), np.isneginf(lse_b))
    assert np.abs(out_a - out_b).max() <= 10 * budget * EPS
    if np.isfinite(lse_a).all():
        assert np.abs(lse_a - lse_b).max() <= budget * EPS


@settings(deadline=None, max_examples=150)
@given(keys())
def test_the_identity_is_neutral_to_the_bit(part: tuple[Array, Array]) -> None:
    state = state_over(part)
    state.acc += 0.0  # No negative zeros: they have a test of their own.
    nothing = State.identity((1, 1, 1, 2), np.dtype(np.float64))

    both = merged(nothing, state), merged(state, nothing)

    for name in ("acc", "row_max", "row_sum"):
        assert all(getattr(m, name).tobytes() == getattr(state, name).tobytes() for m in both)


@settings(deadline=None, max_examples=150)
@given(keys(), keys())
def test_merge_is_commutative_to_the_bit(a: tuple[Array, Array], b: tuple[Array, Array]) -> None:
    one, other = merged(state_over(a), state_over(b)), merged(state_over(b), state_over(a))

    assert np.array_equal(one.acc, other.acc)
    assert np.array_equal(one.row_max, other.row_max)
    assert np.array_equal(one.row_sum, other.row_sum)


@settings(deadline=None, max_examples=150)
@given(keys(), keys(), keys())
def test_merge_is_associative_within_rounding(
    a: tuple[Array, Array], b: tuple[Array, Array], c: tuple[Array, Array]
) -> None:
    x, y, z = state_over(a), state_over(b), state_over(c)

    # Two merges a side, of 6 roundings each, and the rounded shifts.
    assert_close(merged(merged(x, y), z), merged(x, merged(y, z)), 2 * 12 + 4 * 1400)


@settings(deadline=None, max_examples=150)
@given(keys(most=20), st.lists(st.integers(0, 20), max_size=5))
def test_any_split_of_the_keys_gives_the_same_state(part: tuple[Array, Array], cuts: list[int]) -> None:
    cuts = sorted(min(cut, len(part[0])) for cut in cuts)
    pieces = zip(np.split(part[0], cuts), np.split(part[1], cuts), strict=True)

    state = State.identity((1, 1, 1, 2), np.dtype(np.float64))
    for piece in pieces:
        merge(state, state_over(piece))

    # At most 6 merges of 6 roundings, sums over 20 keys, and the rounded shifts of each merge.
    assert_close(state, state_over(part), 6 * 6 + 2 * 20 + 7 * 1400)


@settings(deadline=None, max_examples=100)
@given(keys(), keys(), st.floats(-1000, 1000))
def test_a_constant_added_to_all_scores_leaves_the_output(
    a: tuple[Array, Array], b: tuple[Array, Array], constant: float
) -> None:
    moved = [(row_scores + constant, row_values) for row_scores, row_values in (a, b)]

    out, _ = finish(merged(state_over(a), state_over(b)))
    out_moved, _ = finish(merged(*map(state_over, moved)))

    # The sums are rounded: half an epsilon of 1700 in each of two scores of a difference.
    assert np.abs(out - out_moved).max() <= 10 * (2 * 6 + 2 * 24 + 4 * 1700) * EPS
