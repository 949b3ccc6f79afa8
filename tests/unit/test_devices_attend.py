"""What every device in host memory does alike: attending, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dense import (
    DTYPES,
    assert_exact_up_to_rounding,
    attend_dense,
    attend_dense_backward,
    differences,
)
from numpy.typing import NDArray

from ringmpi.devices import Block, Outcome, Queries
from ringmpi.mask import Mask
from ringmpi.softmax import state_dtype
from ringmpi.trace import Tally

from .attending import KINDS, TALLIES, Backward, Case, Maker, attend, cut, state_of, striped


@pytest.fixture(params=KINDS)
def maker(request: pytest.FixtureRequest) -> Maker:
    """Makes devices of each kind that this machine offers."""
    return Maker(request.param)


GRID = {
    "one token": (Case(tokens=1), [np.arange(1)]),
    "blocks of 0, 1, 3 and 13": (Case(), cut(17, 0, 1, 3)),
    "one block of 17": (Case(causal=True), [np.arange(17)]),
    "causal": (Case(causal=True), cut(17, 0, 1, 3)),
    "causal striped": (Case(causal=True), striped(17, 3)),
    "causal, queries at the end": (Case(queries=3, causal=True), cut(17, 6, 6)),
    "window 0": (Case(causal=True, window=0), cut(17, 6, 6)),
    "window over blocks": (Case(causal=True, window=7), cut(17, 3, 3, 3, 3)),
    "window without causal": (Case(window=2), striped(17, 4)),
    "documents": (Case(documents=(0, 5, 5, 6, 17)), cut(17, 3, 8)),
    "packed causal": (Case(causal=True, documents=(0, 1, 9, 17)), striped(17, 3)),
    "all masks": (Case(causal=True, window=3, documents=(0, 0, 8, 17)), cut(17, 9)),
    "batch, grouped heads": (Case(batch=3, heads=6, kv_heads=2, causal=True), cut(17, 9)),
    "one KV head": (Case(batch=2, heads=7, kv_heads=1), cut(17, 5, 5)),
    "more heads than rows of a tile": (Case(tokens=7, heads=200, kv_heads=1, causal=True), cut(7, 3)),
    "head_dim 1": (Case(head_dim=1, causal=True), cut(17, 9)),
    "head_dim 12": (Case(head_dim=12, causal=True), cut(17, 9)),
    "head_dim 64": (Case(head_dim=64), cut(17, 9)),
    "head_dim 80": (Case(head_dim=80), cut(17, 9)),
    "head_dim 256": (Case(head_dim=256, causal=True), cut(17, 9)),
    "block of 600": (Case(tokens=601, queries=19, heads=1, kv_heads=1), cut(601, 600)),
    "block of 1100": (
        Case(tokens=1101, queries=300, heads=1, kv_heads=1, causal=True),
        cut(1101, 1100),
    ),
    "long window": (
        Case(tokens=1100, queries=300, heads=1, kv_heads=1, causal=True, window=555),
        striped(1100, 2),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "blocks"), GRID.values(), ids=GRID.keys())
def test_blocks_give_dense_attention(
    maker: Maker, case: Case, blocks: list[NDArray[np.int64]], dtype: str
) -> None:
    case = Case(**(vars(case) | {"dtype": dtype}))
    tensors = case.tensors()

    out, lse, _ = attend(maker.of(case), case, tensors, blocks)

    assert_exact_up_to_rounding((out, lse), tensors, case.allowed, case.scale)


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_blocks_may_come_in_any_order(maker: Maker, dtype: str, order: list[int]) -> None:
    case = Case(tokens=64, dtype=dtype, causal=True, window=40)
    tensors = case.tensors()
    blocks = cut(64, 3, 30, 1)

    out, lse, _ = attend(maker.of(case), case, tensors, [blocks[at] for at in order])

    assert_exact_up_to_rounding((out, lse), tensors, case.allowed, case.scale)


def test_inputs_are_not_written_to(maker: Maker) -> None:
    case = Case(dtype="float32", causal=True)
    tensors = case.tensors()
    before = [tensor.copy() for tensor in tensors]

    attend(maker.of(case), case, tensors, cut(17, 9))

    assert all(np.array_equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_the_same_schedule_gives_the_same_bits(maker: Maker) -> None:
    case = Case(tokens=700, queries=300, causal=True, heads=4)
    tensors = case.tensors()
    device = maker.of(case)

    first = attend(device, case, tensors, cut(700, 333))
    again = attend(device, case, tensors, cut(700, 333))
    elsewhere = attend(maker.of(case), case, tensors, cut(700, 333))

    for other in (again, elsewhere):
        assert first[0].tobytes() == other[0].tobytes()
        assert first[1].tobytes() == other[1].tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("where", ["k", "v", "k and v"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 24], ids=["all rows at once", "rows of one document at once"])
def test_a_wild_key_behind_the_mask_reaches_nobody(
    maker: Maker, heads: int, dtype: str, where: str, bad: float
) -> None:
    case = Case(dtype=dtype, causal=True, documents=(0, 6, 17), heads=heads)
    q, k, v = case.tensors()
    clean = attend(maker.of(case), case, (q, k, v), cut(17, 9))
    wild_k, wild_v = k.copy(), v.copy()
    if "k" in where:
        wild_k[:, :, 11] = bad
    if "v" in where:
        wild_v[:, :, 11] = bad

    out, lse, _ = attend(maker.of(case), case, (q, wild_k, wild_v), cut(17, 9))

    hidden = ~case.allowed[:, 11]
    assert hidden.sum() == 11
    assert_exact_up_to_rounding(
        (out[:, :, hidden], lse[:, :, hidden]),
        (q[:, :, hidden], k, v),
        case.allowed[hidden],
        case.scale,
    )
    assert np.isfinite(clean[0].astype(np.float64)).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_nan_value_reaches_exactly_the_rows_that_see_it(maker: Maker, dtype: str) -> None:
    case = Case(dtype=dtype, causal=True, window=3)
    q, k, v = case.tensors()
    v[:, :, 5] = np.nan

    out, lse, _ = attend(maker.of(case), case, (q, k, v), cut(17, 4, 4))

    touched = np.isnan(out.astype(np.float64)).all(axis=(0, 1, 3))
    assert touched.tolist() == case.allowed[:, 5].tolist()
    assert np.isnan(out.astype(np.float64)).any(axis=(0, 1, 3)).tolist() == touched.tolist()
    assert np.isfinite(lse).all()


def test_a_block_of_nothing_but_hidden_nan_leaves_the_result(maker: Maker) -> None:
    case = Case(causal=True, queries=17)
    q, k, v = case.tensors()
    hidden = Case(causal=True, documents=(0, 9, 17))
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[:, :, 9:], bad_v[:, :, 9:] = np.nan, np.nan

    out, lse, _ = attend(maker.of(hidden), hidden, (q, bad_k, bad_v), cut(17, 7))

    early = slice(0, 9)
    assert_exact_up_to_rounding(
        (out[:, :, early], lse[:, :, early]), (q[:, :, early], k, v), hidden.allowed[early], case.scale
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_key_are_zero_with_minus_infinity(maker: Maker, dtype: str) -> None:
    # Only later keys are offered, so causal rows before them see nothing.
    case = Case(dtype=dtype, causal=True)
    tensors = case.tensors()

    out, lse, _ = attend(maker.of(case), case, tensors, [np.arange(9, 17)])

    assert np.array_equal(out[:, :, :9].astype(np.float64), np.zeros((1, 2, 9, 5)))
    assert np.isneginf(lse[:, :, :9]).all()
    assert np.isfinite(lse[:, :, 9:]).all()


@pytest.mark.parametrize("blocks", [cut(16), cut(16, 4, 4, 4)], ids=["one block", "four blocks"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_scores_far_below_zero_win_over_any_made_up_minimum(
    maker: Maker, dtype: str, blocks: list[NDArray[np.int64]]
) -> None:
    case = Case(tokens=16, heads=1, kv_heads=1, head_dim=4, dtype=dtype, causal=True)
    q, k, v = (np.zeros((1, 1, 16, 4), DTYPES[dtype]) for _ in range(3))
    q[..., 0] = 1000
    k[0, 0, :, 0] = -(1000 + np.arange(16))
    v[0, 0] = 1 + np.arange(16)[:, None]

    out, lse, _ = attend(maker.of(case), case, (q, k, v), blocks)

    # Scores fall by 500 a key, so the first key has all the weight: exp(-500) < 1e-217.
    assert (out == 1).all()
    assert (lse == -5e5).all()


@pytest.mark.parametrize("size", [1e30, -1e30], ids=["high", "low"])
def test_scores_of_size_1e30_average_their_values(maker: Maker, size: float) -> None:
    case = Case(tokens=16, heads=1, kv_heads=1, head_dim=4, causal=True)
    q, k = (np.zeros((1, 1, 16, 4), np.float32) for _ in range(2))
    q[..., 0], k[..., 0] = 2e15, size / 1e15
    v = np.repeat(np.arange(16, dtype=np.float32), 4).reshape(1, 1, 16, 4)

    out, lse, _ = attend(maker.of(case), case, (q, k, v), cut(16, 5, 5))

    # All scores of a row are equal: the mean of 0 .. i, whose sums are whole numbers below 2**24; the
    # weighted mean is one rounded division of them.
    assert np.array_equal(out[0, 0, :, 0], (np.arange(16) / 2).astype(np.float32))
    # One product and the scale of 1/2, which is exact; ln(i + 1) vanishes beside 1e30.
    assert (np.abs(lse / np.float64(size) - 1) <= 4 * np.finfo(np.float32).eps).all()


@pytest.mark.parametrize("head_dim", [1, 5, 12, 80])
def test_the_scale_is_that_of_the_device_and_not_of_a_padded_head(maker: Maker, head_dim: int) -> None:
    case = Case(tokens=1, heads=1, kv_heads=1, head_dim=head_dim, dtype="float64")
    ones = np.ones((1, 1, 1, head_dim))

    _, lse, _ = attend(maker.of(case), case, (ones, ones, ones), cut(1))

    # head_dim products of the rounded scale, summed: head_dim roundings of at most sqrt(head_dim).
    budget = (head_dim + 2) * np.finfo(np.float64).eps * head_dim**0.5
    assert abs(lse.item() - head_dim**0.5) <= budget


class TestClosedForm:
    """q = 0 and v[b, h, j] = j + 100 h + 10000 b: every allowed key weighs the same."""

    @pytest.mark.parametrize(
        ("options", "mean"),
        [
            ({}, lambda i: np.full(12, 11 / 2)),
            ({"causal": True}, lambda i: i / 2),
            ({"causal": True, "window": 3}, lambda i: (np.maximum(0, i - 3) + i) / 2),
            ({"causal": True, "documents": (0, 5, 12)}, lambda i: (np.where(i < 5, 0, 5) + i) / 2),
            ({"documents": (0, 5, 12)}, lambda i: np.where(i < 5, 2, 8)),
        ],
        ids=["full", "causal", "window", "packed causal", "packed"],
    )
    def test_out_is_the_mean_and_lse_the_log_of_the_count(
        self, maker: Maker, options: Any, mean: Any
    ) -> None:
        case = Case(tokens=12, batch=2, heads=6, kv_heads=3, dtype="float64", **options)
        b, h, j = np.arange(2)[:, None, None], np.arange(3)[:, None], np.arange(12)
        values = (j + 100 * h + 10000 * b)[..., None] + np.zeros(5)
        tensors = (np.zeros((2, 6, 12, 5)), np.full(values.shape, 7.0), values)

        out, lse, _ = attend(maker.of(case), case, tensors, striped(12, 5))

        head = np.repeat(h, 2, axis=0)
        expected = mean(j) + 100 * head + 10000 * b
        # Weights are exactly 1, sums whole numbers: one rounded division and one logarithm.
        eps = np.finfo(np.float64).eps
        assert (np.abs(out - expected[..., None]) <= eps * expected.max()).all()
        assert (np.abs(lse - np.log(case.allowed.sum(axis=1))) <= 2 * eps * np.log(12)).all()


class TestTally:
    @pytest.mark.parametrize("case", TALLIES.values(), ids=TALLIES.keys())
    def test_pairs_and_flops_are_those_of_the_mask(self, maker: Maker, case: Case) -> None:
        *_, tallies = attend(maker.of(case), case, case.tensors(), striped(case.tokens, 3))

        pairs = int(case.allowed.sum()) * case.batch * case.heads
        assert sum(tally.pairs for tally in tallies) == pairs
        assert sum(tally.flops for tally in tallies) == 4 * case.head_dim * pairs
        assert all(tally.computed_pairs >= tally.pairs for tally in tallies)

    def test_a_full_mask_masks_no_tile(self, maker: Maker) -> None:
        case = Case(tokens=700, queries=300)

        *_, (tally,) = attend(maker.of(case), case, case.tensors(), cut(700))

        assert tally.tiles_unmasked == tally.tiles > 0
        assert tally.tiles_skipped == 0
        assert tally.computed_pairs == tally.pairs

    def test_a_block_in_the_future_is_skipped_as_a_whole(self, maker: Maker) -> None:
        case = Case(tokens=17, causal=True)
        device = maker.of(case)
        q, k, v = case.tensors()
        queries = Queries(q[:, :, :5], np.arange(5))
        state = state_of(queries.q)

        work = device.attend(queries, Block(k[:, :, 9:], v[:, :, 9:], np.arange(9, 17)), state)

        assert work.advance()
        assert work.tally == Tally(tiles_skipped=work.tally.tiles_skipped)
        assert work.tally.tiles_skipped >= 2
        assert np.isneginf(state.row_max).all()


def test_the_state_is_wide_for_narrow_inputs_and_rounded_once(maker: Maker) -> None:
    case = Case(dtype="bfloat16", causal=True)
    tensors = case.tensors()
    device = maker.of(case)
    queries = Queries(tensors[0], case.positions)

    state = state_of(tensors[0])
    device.attend(queries, Block(tensors[1], tensors[2], np.arange(17)), state).advance()
    out, lse, _ = attend(maker.of(case), case, tensors, cut(17, 9))

    exact, _ = attend_dense(*tensors, case.allowed, case.scale, np.float64)
    rounded = exact.astype(DTYPES["bfloat16"]).astype(np.float64)
    assert state.acc.dtype == lse.dtype == np.float32
    # float32 errors move a value over a rounding boundary of bfloat16 in about one of 2**16 / 100
    # cases; a state of 16 bits would change most of the 170 values.
    assert (out.astype(np.float64) != rounded).sum() <= 2


# The backward pass.


BACKWARD_GRID = {
    name: (case, blocks)
    for name, (case, blocks) in GRID.items()
    if name not in ("block of 1100", "long window")
} | {
    "tiles of both kinds": (
        Case(tokens=1100, queries=150, heads=1, kv_heads=1, causal=True, window=555),
        striped(1100, 2),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "blocks"), BACKWARD_GRID.values(), ids=BACKWARD_GRID.keys())
def test_blocks_add_up_to_the_gradients_of_dense_attention(
    maker: Maker, case: Case, blocks: list[NDArray[np.int64]], dtype: str
) -> None:
    backward = Backward.of(replace(case, dtype=dtype))

    found, _ = backward.run(maker.of(backward.case), blocks)

    backward.assert_exact(found)


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=7, head_dim=3, dtype="float64", batch=2),
        Case(tokens=7, head_dim=3, dtype="float64", heads=4, causal=True, window=3),
        Case(tokens=9, queries=3, head_dim=2, heads=6, dtype="float64", documents=(0, 4, 9)),
    ],
    ids=["full", "causal window, grouped", "documents, grouped"],
)
def test_gradients_are_what_the_loss_does(maker: Maker, case: Case) -> None:
    backward = Backward.of(case)

    found, _ = backward.run(maker.of(backward.case), cut(case.tokens, 2, 3))

    tensors = backward.q, backward.k, backward.v, backward.dout
    step = 2.0**-17
    expected = differences(tensors, case.allowed, case.scale, step)
    # The loss sums at most 100 terms below 10 with an error of some epsilons each, and a difference of two
    # is divided by twice the step; third derivatives below 1000 make step ** 2 / 6 of that.
    budget = 2 * 1000 * np.finfo(np.float64).eps / step + 1000 * step**2
    assert max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True)) <= budget < 1e-6
    assert all(np.abs(gradient).max() > 0.01 for gradient in found)


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1, 3, 0, 2]], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gradients_of_blocks_may_be_added_in_any_order(
    maker: Maker, dtype: str, order: list[int]
) -> None:
    backward = Backward.of(Case(tokens=64, dtype=dtype, causal=True, window=40))
    blocks = cut(64, 3, 30, 1)

    found, _ = backward.run(maker.of(backward.case), [blocks[at] for at in order])

    backward.assert_exact(found)


def test_gradients_are_added_to_what_is_there(maker: Maker) -> None:
    backward = Backward.of(Case(causal=True, dtype="float64"))
    (alone, _), total = backward.run(maker.of(backward.case), [np.arange(17)]), backward.gradients()
    for array in (total.dq, total.dk, total.dv):
        array[...] = 64

    device = maker.of(backward.case)
    work = device.attend_backward(
        Queries(backward.q, np.arange(17)),
        Outcome(backward.dout, backward.lse, backward.delta),
        Block(backward.k, backward.v, np.arange(17)),
        total,
    )
    while not work.advance():
        pass

    # One rounded addition to 64, and one subtraction that rounds nothing more.
    for array, expected in zip((total.dq, total.dk, total.dv), alone, strict=True):
        assert np.abs(array - 64 - expected).max() <= 128 * np.finfo(np.float64).eps
        assert np.abs(expected).max() > 0.1


def test_the_backward_pass_writes_to_no_input(maker: Maker) -> None:
    backward = Backward.of(Case(causal=True, heads=4))
    before = {name: array.copy() for name, array in backward.inputs().items()}

    backward.run(maker.of(backward.case), cut(17, 9))

    assert all(np.array_equal(before[name], array) for name, array in backward.inputs().items())


def test_the_backward_pass_gives_the_same_bits_twice(maker: Maker) -> None:
    backward = Backward.of(Case(tokens=700, queries=300, causal=True, heads=4, dtype="bfloat16"))
    device = maker.of(backward.case)

    first, again = (backward.run(device, cut(700, 333))[0] for _ in range(2))
    elsewhere, _ = backward.run(maker.of(backward.case), cut(700, 333))

    for one, other, third in zip(first, again, elsewhere, strict=True):
        assert one.tobytes() == other.tobytes() == third.tobytes()


#: Of a wild value in one token of an input: whether it reaches dq, dk and dv of that token's pairs, and of
#: which tokens: of "all" that see it or are seen by it, or of the token "itself".
REACH = {
    "q": ("itself", "all", "all"),
    "dout": ("itself", "all", "all"),
    "lse": ("itself", "all", "all"),
    "delta": ("itself", "all", "none"),
    "k": ("all", "itself", "itself"),
    "v": ("all", "itself", "none"),
}

#: A problem, and a token of it that is wild: of the second document, or of the first one.
WILD = {
    "causal": (Case(causal=True), 8),
    "window": (Case(causal=True, window=3), 8),
    "documents": (Case(documents=(0, 6, 17)), 8),
    "packed, grouped": (Case(causal=True, documents=(0, 6, 17), heads=4, batch=2), 8),
    "rows of one document at once": (Case(documents=(0, 6, 17), heads=24), 8),
    "rows of the other document": (Case(documents=(0, 6, 17), heads=24), 3),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REACH)
@pytest.mark.parametrize(("case", "token"), WILD.values(), ids=WILD.keys())
def test_a_nan_reaches_the_gradients_of_its_pairs_and_no_others(
    maker: Maker, case: Case, token: int, name: str, dtype: str
) -> None:
    clean = Backward.of(replace(case, dtype=dtype))
    tensor = clean.inputs()[name].copy()
    tensor[:, :, token] = np.nan
    allowed = case.allowed

    found, _ = replace(clean, **{name: tensor}).run(maker.of(case), cut(17, 4, 7))

    itself = np.arange(17) == token
    seen = allowed[:, token] if name in ("k", "v") else allowed[token]
    expected = {"itself": itself, "all": seen, "none": np.zeros(17, np.bool_)}
    single = attend_dense_backward(
        (clean.q, clean.k, clean.v, clean.dout),
        allowed,
        case.scale,
        np.float64,
        (clean.out, clean.lse),
    )
    for gradient, reach, right in zip(found, REACH[name], single, strict=True):
        touched = np.isnan(gradient)
        assert touched.any(axis=(0, 1, 3)).tolist() == expected[reach].tolist()
        assert touched.all(axis=(0, 1, 3)).tolist() == expected[reach].tolist()
        # Rows beyond its reach are right: 17 sums of terms of which the largest is below 100, in float32.
        assert np.abs(gradient - right)[~touched].max() <= 17 * 100 * np.finfo(np.float32).eps


@pytest.mark.parametrize("bad", [np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("name", REACH)
def test_an_infinity_stays_among_its_pairs(maker: Maker, name: str, bad: float) -> None:
    case = Case(causal=True, documents=(0, 6, 17), dtype="float64")
    clean, token = Backward.of(case), 8
    tensor = clean.inputs()[name].copy()
    tensor[:, :, token] = bad
    exact, _ = clean.run(maker.of(case), cut(17, 4, 7))

    found, _ = replace(clean, **{name: tensor}).run(maker.of(case), cut(17, 4, 7))

    first = np.s_[:, :, :6]
    for gradient, right in zip(found, exact, strict=True):
        # The same document's own sums, in products of another shape at most.
        assert np.abs(gradient[first] - right[first]).max() <= 17 * 100 * np.finfo(np.float64).eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_key_give_and_get_nothing(maker: Maker, dtype: str) -> None:
    # Only later keys are offered, so causal rows before them see nothing, and have an lse of -inf.
    case = Case(dtype=dtype, causal=True)
    backward = Backward.of(case)
    backward.lse[:, :, :9] = -np.inf
    backward.dout[:, :, :9] = np.nan

    (dq, dk, dv), _ = backward.run(maker.of(backward.case), [np.arange(9, 17)])

    assert not dq[:, :, :9].any()
    assert np.isfinite(dq).all()
    assert np.isfinite(dk).all()
    assert np.isfinite(dv).all()
    assert np.abs(dv[:, :, 9:]).max() > 0.1


@pytest.mark.parametrize("case", TALLIES.values(), ids=TALLIES.keys())
def test_backward_flops_are_five_products_of_each_allowed_pair(maker: Maker, case: Case) -> None:
    backward = Backward.of(case)
    *_, forward_tallies = attend(maker.of(case), case, case.tensors(), striped(case.tokens, 3))

    _, tallies = backward.run(maker.of(backward.case), striped(case.tokens, 3))

    pairs = int(case.allowed.sum()) * case.batch * case.heads
    assert sum(tally.pairs for tally in tallies) == pairs
    assert sum(tally.flops for tally in tallies) == 10 * case.head_dim * pairs
    # All else is counted as in the forward pass.
    assert [replace(tally, flops=0) for tally in tallies] == [
        replace(tally, flops=0) for tally in forward_tallies
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_delta_is_summed_in_the_dtype_of_the_state(maker: Maker, dtype: str) -> None:
    rng = np.random.default_rng(3)
    dout, out = (rng.normal(size=(2, 3, 7, 64)).astype(DTYPES[dtype]) for _ in range(2))

    delta = maker.device(Mask()).delta(dout, out)

    state = state_dtype(out.dtype)
    exact = (dout.astype(np.longdouble) * out.astype(np.longdouble)).sum(axis=-1)
    size = np.abs(dout.astype(np.float64) * out.astype(np.float64)).sum(axis=-1)
    assert delta.dtype == state
    assert delta.shape == (2, 3, 7)
    # 64 products and 64 sums, each rounded once: 65 epsilons / 2 of the sum of sizes at most.
    assert (np.abs(delta - exact) <= 33 * np.finfo(state).eps * size).all()


def test_the_weights_are_those_of_all_keys_and_not_of_the_block(maker: Maker) -> None:
    # One block of two, from the lse over both: half of the weight, so half of dv.
    case = Case(tokens=2, heads=1, kv_heads=1, head_dim=4, dtype="float64")
    zeros, ones = np.zeros((1, 1, 2, 4)), np.ones((1, 1, 2, 4))
    backward = Backward.of(case, (zeros, zeros, ones))
    backward.dout[...] = 1

    (_, _, dv), _ = backward.run(maker.of(backward.case), [np.arange(1)])

    # Two rows give exp(-ln 2) each, whose exponent is rounded.
    assert np.abs(dv[:, :, 0] - 1).max() <= 4 * np.finfo(np.float64).eps
    assert not dv[:, :, 1].any()


def test_delta_is_not_finite_where_a_result_is_not(maker: Maker) -> None:
    out = np.ones((1, 1, 3, 2), np.float32)
    out[0, 0, 1] = np.inf, -np.inf

    delta = maker.of(Case(tokens=3, heads=1, head_dim=2)).delta(np.ones_like(out), out)

    assert np.isfinite(delta[0, 0]).tolist() == [True, False, True]
