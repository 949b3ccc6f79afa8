from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dense import DTYPES

from ringmpi.errors import ShapeError
from ringmpi.softmax import State, finish, merge, state_dtype

Array = np.ndarray[Any, np.dtype[Any]]


def state_over(scores: Array, values: Array) -> State:
    """Return the state of one row over some keys, by its definition."""
    top = scores.max(initial=-np.inf)
    weights = np.exp(scores - top) if len(scores) else scores
    dtype = scores.dtype
    return State(
        acc=(weights @ values).reshape(1, 1, 1, -1).astype(dtype),
        row_max=np.full((1, 1, 1), top, dtype),
        row_sum=np.full((1, 1, 1), weights.sum(), dtype),
    )


def merged(state: State, other: State) -> State:
    """Return the two merged, into a copy."""
    both = State(state.acc.copy(), state.row_max.copy(), state.row_sum.copy())
    merge(both, other)
    return both


def row(acc: list[float], row_max: float, row_sum: float, dtype: Any = np.float64) -> State:
    return State(
        np.array(acc, dtype).reshape(1, 1, 1, -1),
        np.full((1, 1, 1), row_max, dtype),
        np.full((1, 1, 1), row_sum, dtype),
    )


def assert_same_bits(a: State, b: State) -> None:
    for name in ("acc", "row_max", "row_sum"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name


@pytest.mark.parametrize(
    ("name", "wide"),
    [("float64", "float64"), ("float32", "float32"), ("float16", "float32"), ("bfloat16", "float32")],
)
def test_the_state_is_never_narrower_than_32_bits(name: str, wide: str) -> None:
    assert state_dtype(np.dtype(DTYPES[name])) == np.dtype(wide)


def test_the_identity_has_seen_no_key() -> None:
    state = State.identity((2, 3, 5, 7), np.dtype(np.float32))

    assert state.acc.shape == (2, 3, 5, 7)
    assert state.row_max.shape == state.row_sum.shape == (2, 3, 5)
    assert {state.acc.dtype, state.row_max.dtype, state.row_sum.dtype} == {np.dtype(np.float32)}
    assert np.isneginf(state.row_max).all()
    assert not state.acc.any()
    assert not state.row_sum.any()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "state",
    [
        row([1.5, -2.25, 1e-300], 3.0, 24.0),
        row([1e300, 5e-324, 0.1], -7e5, 1.0),
        row([0.1, 0.2, 0.3], 1e30, 1.7, np.float32),
        row([0.0, 0.0, 0.0], -math.inf, 0.0),
    ],
    ids=["plain", "extreme", "large scores", "no key"],
)
def test_merging_with_the_identity_gives_the_same_bits(state: State, side: str) -> None:
    nothing = State.identity((1, 1, 1, 3), state.acc.dtype)

    both = merged(nothing, state) if side == "left" else merged(state, nothing)

    assert_same_bits(both, state)


def test_merging_with_the_identity_keeps_the_value_of_a_negative_zero() -> None:
    state = row([-0.0, 1.0], 0.5, 1.0)

    both = merged(State.identity((1, 1, 1, 2), np.dtype(np.float64)), state)

    assert np.array_equal(both.acc, state.acc)


def test_merge_weights_are_those_of_base_e() -> None:
    # Normalisers 3 and 24: the outputs 1 and 10 are mixed by 1/9 and 8/9, in base 2 by 0.19 and 0.81.
    a = row([1.0], math.log(3.0), 1.0)
    b = row([10.0], math.log(24.0), 1.0)

    out, lse = finish(merged(a, b))

    # Two exponentials of rounded logarithms and three more operations: a few epsilons of each value.
    assert abs(out.item() - (1 / 9 + 80 / 9)) <= 16 * np.finfo(np.float64).eps * 9
    assert abs(lse.item() - math.log(27.0)) <= 8 * np.finfo(np.float64).eps * math.log(27.0)


def test_merge_works_in_the_memory_of_the_first_and_leaves_the_other_alone() -> None:
    a, b = row([1.0, 2.0], 0.0, 1.0), row([3.0, 4.0], 5.0, 2.0)
    arrays = a.acc, a.row_max, a.row_sum
    both = merged(a, b)

    merge(a, b)

    assert a.acc is arrays[0]
    assert a.row_max is arrays[1]
    assert a.row_sum is arrays[2]
    assert_same_bits(a, both)
    assert a.row_max.item() == 5
    assert_same_bits(b, row([3.0, 4.0], 5.0, 2.0))


def test_merge_works_in_views_of_larger_tensors() -> None:
    whole = State.identity((2, 4, 6, 3), np.dtype(np.float32))
    at = np.s_[:, 1:3, 2:5]
    other = State(
        np.full((2, 2, 3, 3), 6, np.float32),
        np.ones((2, 2, 3), np.float32),
        np.full((2, 2, 3), 2, np.float32),
    )

    merge(State(whole.acc[at], whole.row_max[at], whole.row_sum[at]), other)

    assert (whole.acc[at] == 6).all()
    assert (whole.row_max[at] == 1).all()
    assert (whole.row_sum[at] == 2).all()
    assert np.isfinite(whole.row_max).sum() == 12
    assert (whole.acc != 0).sum() == 36


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_far_below_another_is_forgotten_and_never_nan(dtype: Any) -> None:
    most = np.finfo(dtype).max
    low, high = row([1.0], -most, 1.0, dtype), row([2.0], most, 1.0, dtype)

    for both in (merged(low, high), merged(high, low)):
        assert_same_bits(both, high)


def test_a_row_without_a_key_ends_as_zero_and_minus_infinity() -> None:
    state = State.identity((1, 2, 3, 5), np.dtype(np.float32))

    out, lse = finish(state)

    assert np.array_equal(out, np.zeros((1, 2, 3, 5)))
    assert np.array_equal(lse, np.full((1, 2, 3), -np.inf))


def test_rows_with_and_without_keys_do_not_mix() -> None:
    state = merged(
        State.identity((1, 1, 2, 1), np.dtype(np.float64)),
        State(
            np.array([6.0, 0.0]).reshape(1, 1, 2, 1),
            np.array([2.0, -np.inf]).reshape(1, 1, 2),
            np.array([3.0, 0.0]).reshape(1, 1, 2),
        ),
    )

    out, lse = finish(state)

    assert out.ravel().tolist() == [2.0, 0.0]
    # One logarithm and one addition.
    assert abs(lse[0, 0, 0] - (2 + math.log(3))) <= 4 * np.finfo(np.float64).eps * 4
    assert lse[0, 0, 1] == -np.inf


def test_finish_works_in_the_memory_of_the_state() -> None:
    state = row([2.0, 4.0], 0.0, 2.0)

    out, _ = finish(state)

    assert np.shares_memory(out, state.acc)


@pytest.mark.parametrize("size", [1e30, -1e30, 3e38, -3e38])
def test_huge_equal_scores_average_their_values(size: float) -> None:
    a = row([2.0], size, 1.0, np.float32)
    b = row([4.0], size, 1.0, np.float32)

    out, lse = finish(merged(a, b))

    assert out.item() == 3.0
    assert lse.item() == np.float32(size)


@pytest.mark.parametrize("gap", [1e30, 1e38, 3e38])
def test_a_score_far_below_another_has_no_weight(gap: float) -> None:
    low = row([100.0], -gap, 1.0, np.float32)
    high = row([4.0], gap, 1.0, np.float32)

    out, lse = finish(merged(low, high))

    assert out.item() == 4.0
    assert lse.item() == np.float32(gap)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 1, 2, 4), np.float32), ((1, 1, 3, 4), np.float64), ((2, 1, 3, 4), np.float32)],
    ids=["rows", "dtype", "batch"],
)
def test_states_that_do_not_belong_together_are_refused(shape: Any, dtype: Any) -> None:
    one = State.identity((1, 1, 3, 4), np.dtype(np.float32))
    other = State.identity(shape, np.dtype(dtype))

    with pytest.raises(ShapeError, match="only states of one shape and dtype") as refusal:
        merge(one, other)

    assert str(shape) in str(refusal.value)


@pytest.mark.parametrize("cuts", [[1], [3], [1, 2, 3], [5, 5], [0, 16]], ids=str)
def test_any_split_of_the_keys_gives_the_same_result(cuts: list[int]) -> None:
    rng = np.random.default_rng(7)
    scores, values = rng.normal(size=17) * 5, rng.normal(size=(17, 3))
    parts = zip(np.split(scores, cuts), np.split(values, cuts), strict=True)
    state = State.identity((1, 1, 1, 3), np.dtype(np.float64))

    for part in parts:
        merge(state, state_over(*part))
    out, lse = finish(state)

    whole, whole_lse = finish(state_over(scores, values))
    # Each merge rounds two products and a sum of positive weights: 4 epsilons of at most max |v|, and
    # both sides sum 17 weights whose exponentials each err by |score - max| < 50 epsilons at most.
    budget = (4 * (len(cuts) + 1) + 2 * 17 + 2 * 50) * np.finfo(np.float64).eps
    assert np.abs(out - whole).max() <= budget * np.abs(values).max()
    assert np.abs(lse - whole_lse).max() <= budget * max(1.0, float(np.abs(whole_lse).max()))
