from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from dense import attend_dense_backward, differences, pairs_between
from numpy.typing import NDArray

from ringmpi.reference import Rows, Rule, attend, delta_of, key_gradients, query_gradient

Array = NDArray[Any]

EPS = float(np.finfo(np.float64).eps)


def run(
    q: Array, k: Array, v: Array, rule: Rule, dtype: Any = np.float64, piece: int = 5
) -> tuple[Array, Array]:
    """Attend all rows, the keys being cut into pieces."""
    tokens = len(k)
    cuts = [np.arange(start, min(start + piece, tokens)) for start in range(0, tokens, piece)]
    return attend(q, np.arange(len(q)), lambda: [(at, k[at], v[at]) for at in cuts], rule, dtype)


def gradients(
    tensors: tuple[Array, Array, Array, Array],
    rule: Rule,
    dtype: Any = np.float64,
    piece: int = 5,
    block: int = 4,
) -> tuple[Array, Array, Array]:
    """Return dq, dk and dv of one head, for q, k, v and dout; rows are the last positions, in blocks."""
    q, k, v, dout = tensors
    cuts = [np.arange(start, min(start + piece, len(k))) for start in range(0, len(k), piece)]
    pieces = [(at, k[at], v[at]) for at in cuts]
    blocks = []
    for start in range(0, len(q), block):
        at = np.arange(start, min(start + block, len(q)))
        positions = at + len(k) - len(q)
        out, lse = attend(q[at], positions, lambda: pieces, rule, dtype)
        delta = delta_of(dout[at], out, dtype)
        blocks.append(Rows(positions, q[at], dout[at], lse, delta))
    dq = [query_gradient(rows, lambda: pieces, rule, dtype) for rows in blocks]
    dk, dv = zip(*(key_gradients(piece, blocks, rule, dtype) for piece in pieces), strict=True)
    return np.concatenate(dq), np.concatenate(dk), np.concatenate(dv)


CLOSED_FORMS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    # Options of the rule, first visible key of row i, and the one after its last.
    "full": ({}, lambda i: 0, lambda i: 17),
    "causal": ({"causal": True}, lambda i: 0, lambda i: i + 1),
    "window 0": ({"causal": True, "window": 0}, lambda i: i, lambda i: i + 1),
    "window 7": ({"causal": True, "window": 7}, lambda i: max(0, i - 7), lambda i: i + 1),
    "window 16": ({"causal": True, "window": 16}, lambda i: 0, lambda i: i + 1),
    "packed causal": (
        {"causal": True, "documents": (0, 5, 5, 17)},
        lambda i: 0 if i < 5 else 5,
        lambda i: i + 1,
    ),
    "packed": (
        {"documents": (0, 5, 17)},
        lambda i: 0 if i < 5 else 5,
        lambda i: 5 if i < 5 else 17,
    ),
}


@pytest.mark.parametrize("piece", [1, 3, 17, 64])
@pytest.mark.parametrize(("options", "first", "last"), CLOSED_FORMS.values(), ids=CLOSED_FORMS.keys())
def test_equal_weights_give_means_and_logs_of_counts(
    options: dict[str, Any], first: Any, last: Any, piece: int
) -> None:
    rule = Rule(**({"causal": False, "window": None, "documents": None} | options), softmax_scale=0.3)
    values = np.arange(17.0)[:, None] + np.array([0, 100, 10000])

    out, lse = run(np.zeros((17, 3)), np.full((17, 3), 7.0), values, rule, piece=piece)

    means = np.array([(first(i) + last(i) - 1) / 2 for i in range(17)])
    counts = np.array([last(i) - first(i) for i in range(17)])
    # Weights are 1 and sums whole numbers: one rounded division, one logarithm.
    expected = means[:, None] + np.array([0, 100, 10000])
    assert (np.abs(out - expected) <= EPS * expected.max()).all()
    assert (np.abs(lse - np.log(counts)) <= EPS * np.log(17)).all()


@pytest.mark.parametrize("head_dim", [1, 5, 12])
@pytest.mark.parametrize(("options", "first", "last"), CLOSED_FORMS.values(), ids=CLOSED_FORMS.keys())
def test_random_rows_agree_with_a_plain_loop(
    options: dict[str, Any], first: Any, last: Any, head_dim: int
) -> None:
    rule = Rule(**({"causal": False, "window": None, "documents": None} | options), softmax_scale=0.7)
    rng = np.random.default_rng(head_dim)
    q, k, v = (rng.normal(size=(17, head_dim)) for _ in range(3))

    out, lse = run(q, k, v, rule)

    largest_score = 0.0
    for i in range(17):
        keys = range(first(i), last(i))
        scores = [0.7 * math.fsum(a * b for a, b in zip(q[i], k[j], strict=True)) for j in keys]
        total = math.fsum(map(math.exp, scores))
        largest_score = max(largest_score, *map(abs, scores), 1.0)
        # Scores err by (head_dim + 2) eps times the sum of |q k|, at most 4 head_dim; exponentials and
        # the sum over 17 keys add 20 more, on either side.
        budget = 2 * ((head_dim + 2) * 4 * head_dim + 20 + 2 * largest_score) * EPS
        assert abs(lse[i] - math.log(total)) <= budget * max(1.0, abs(math.log(total)))
        for d in range(head_dim):
            mean = math.fsum(math.exp(s) * v[j, d] for s, j in zip(scores, keys, strict=True)) / total
            assert abs(out[i, d] - mean) <= budget * np.abs(v).max()


def test_rows_may_be_any_positions_in_any_number() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(17, 5)) for _ in range(3))
    rule = Rule(causal=True, window=6, documents=(0, 9, 17), softmax_scale=0.5)
    at = np.array([0, 3, 8, 9, 16])

    whole = run(q, k, v, rule)
    some = attend(q[at], at, lambda: [(np.arange(17), k, v)], rule, np.float64)

    # The pieces differ, so sums are in another order: 17 positive weights, rounded once each.
    assert (np.abs(some[0] - whole[0][at]) <= 2 * 17 * EPS * np.abs(v).max()).all()
    assert (np.abs(some[1] - whole[1][at]) <= 2 * 17 * EPS * 4).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("piece", [1, 5, 17])
def test_a_wild_key_behind_the_mask_reaches_nobody(bad: float, piece: int) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(17, 5)) for _ in range(3))
    rule = Rule(causal=True, window=3, documents=None, softmax_scale=0.5)
    clean = run(q, k, v, rule, piece=piece)
    k[8], v[8] = bad, bad

    out, lse = run(q, k, v, rule, piece=piece)

    hidden = [i for i in range(17) if not 8 <= i <= 11]
    # A row with a wild key beside it is summed key by key, in another order than a product of matrices.
    assert (np.abs(out[hidden] - clean[0][hidden]) <= 2 * 17 * EPS * 4).all()
    assert np.array_equal(lse[hidden], clean[1][hidden])
    assert not np.isfinite(out[8:12]).all(axis=1).any()


def test_a_row_without_a_key_is_zero_with_minus_infinity() -> None:
    rule = Rule(causal=True, window=None, documents=None, softmax_scale=1.0)
    q, k, v = (np.ones((3, 2)) for _ in range(3))

    out, lse = attend(q, np.arange(3), lambda: [(np.array([2, 3, 4]), k, v)], rule, np.float64)

    assert out.tolist() == [[0, 0], [0, 0], [1, 1]]
    assert lse[:2].tolist() == [-np.inf, -np.inf]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_very_negative_scores_keep_their_largest(dtype: Any) -> None:
    q, k, v = (np.zeros((16, 4)) for _ in range(3))
    q[:, 0], k[:, 0], v[:] = 1000, -(1000 + np.arange(16)), 1 + np.arange(16)[:, None]
    rule = Rule(causal=True, window=None, documents=None, softmax_scale=0.5)

    out, lse = run(q, k, v, rule, dtype)

    assert out.dtype == lse.dtype == dtype
    assert (out == 1).all()
    assert (lse == -5e5).all()


@pytest.mark.parametrize("size", [1e30, -1e30])
def test_huge_equal_scores_average(size: float) -> None:
    q, k = np.full((3, 1), 1e15, np.float32), np.full((3, 1), size / 1e15, np.float32)
    rule = Rule(causal=False, window=None, documents=None, softmax_scale=1.0)

    out, _ = run(q, k, np.array([[1], [2], [6]], np.float32), rule, np.float32)

    assert out.ravel().tolist() == [3, 3, 3]


def random_tensors(seed: int, rows: int = 17, keys: int = 17, head_dim: int = 5) -> Any:
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(n, head_dim)) for n in (rows, keys, keys, rows))


def as_heads(tensors: tuple[Array, ...]) -> Any:
    return tuple(tensor[None, None] for tensor in tensors)


#: Sums of up to 17 products of numbers of size 1, and of rounded ones, on either side.
SUMS = 2 * 17 * 8 * EPS

RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window 0": {"causal": True, "window": 0},
    "window 7": {"causal": True, "window": 7},
    "open window": {"window": 3},
    "packed causal": {"causal": True, "documents": (0, 5, 5, 17)},
    "packed": {"documents": (0, 5, 17)},
}


def rule_of(options: dict[str, Any], scale: float = 0.7) -> Rule:
    return Rule(**({"causal": False, "window": None, "documents": None} | options), softmax_scale=scale)


def pairs_of(options: dict[str, Any], rows: int) -> NDArray[np.bool_]:
    return pairs_between(np.arange(17 - rows, 17), np.arange(17), **options)


@pytest.mark.parametrize("rows", [17, 6, 1])
@pytest.mark.parametrize("piece", [1, 5, 64])
@pytest.mark.parametrize("options", RULES.values(), ids=RULES.keys())
def test_gradients_agree_with_the_derivative_of_a_softmax(
    options: dict[str, Any], piece: int, rows: int
) -> None:
    tensors = random_tensors(rows, rows)

    found = gradients(tensors, rule_of(options), piece=piece)

    expected = attend_dense_backward(as_heads(tensors), pairs_of(options, rows), 0.7, np.float64)
    for one, other in zip(found, expected, strict=True):
        assert (np.abs(one - other[0, 0]) <= SUMS * max(1, np.abs(other).max())).all()


@pytest.mark.parametrize("rows", [17, 6])
@pytest.mark.parametrize("options", RULES.values(), ids=RULES.keys())
def test_gradients_agree_with_central_differences(options: dict[str, Any], rows: int) -> None:
    tensors = random_tensors(rows, rows, head_dim=2)
    step = 1e-4

    found = gradients(tensors, rule_of(options))

    expected = differences(as_heads(tensors), pairs_of(options, rows), 0.7, step)
    for one, other in zip(found, expected, strict=True):
        # The loss is of size 30 and rounded to its last place, and third derivatives are of size 10.
        assert (np.abs(one - other[0, 0]) <= 100 * EPS / step + 10 * step**2).all()
    assert np.abs(found[0]).max() > 0.1 or options.get("window") == 0


def test_the_oracle_agrees_with_central_differences_in_grouped_heads() -> None:
    rng = np.random.default_rng(5)
    shapes = ((2, 4, 3, 2), (2, 2, 6, 2), (2, 2, 6, 2), (2, 4, 3, 2))
    tensors = tuple(rng.normal(size=shape) for shape in shapes)
    allowed = pairs_between(np.arange(3, 6), np.arange(6), causal=True, window=3)

    found = attend_dense_backward(tensors, allowed, 0.7, np.float64)

    for one, other in zip(found, differences(tensors, allowed, 0.7, 1e-4), strict=True):
        assert one.shape == other.shape
        assert (np.abs(one - other) <= 100 * EPS / 1e-4 + 1e-7).all()


@pytest.mark.parametrize("piece", [1, 3, 64])
@pytest.mark.parametrize(("options", "first", "last"), CLOSED_FORMS.values(), ids=CLOSED_FORMS.keys())
def test_equal_weights_give_gradients_in_closed_form(
    options: dict[str, Any], first: Any, last: Any, piece: int
) -> None:
    """With q = 0 every key that a row sees weighs 1 / count, so every sum is one of whole numbers."""
    scale, tokens = 0.5, np.arange(17.0)
    q, k = np.zeros((17, 2)), np.stack([tokens, 3 - tokens], axis=1)
    v, dout = np.stack([tokens**2, 5 * tokens], axis=1), np.stack([tokens, 7 + 0 * tokens], axis=1)

    dq, dk, dv = gradients((q, k, v, dout), rule_of(options, scale), piece=piece)

    for i in range(17):
        seen = np.arange(first(i), last(i))
        rise = v[seen] @ dout[i]
        expected = scale * ((rise - rise.mean()) @ k[seen]) / len(seen)
        assert np.abs(dq[i] - expected).max() <= 17 * EPS * np.abs(rise).max() * 17
    for j in range(17):
        rows = [i for i in range(17) if first(i) <= j < last(i)]
        expected = sum(dout[i] / (last(i) - first(i)) for i in rows)
        assert np.abs(dv[j] - expected).max() <= 17 * EPS * 17 * 17
    assert not dk.any()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_everything_is_computed_in_the_dtype_asked_for(dtype: Any) -> None:
    tensors = random_tensors(3)
    exact = gradients(tensors, rule_of({"causal": True}))

    found = gradients(tensors, rule_of({"causal": True}), dtype)

    eps = float(np.finfo(dtype).eps)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        assert np.abs(one - other).max() <= SUMS / EPS * eps
        assert dtype == np.float64 or np.abs(one - other).max() > eps / 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("piece", [1, 5, 17])
@pytest.mark.parametrize("name", ["k", "v", "q", "dout"])
def test_a_wild_value_behind_the_mask_reaches_no_gradient(name: str, piece: int, bad: float) -> None:
    """Token 8 is seen by rows 8 to 11 and sees keys 5 to 8."""
    tensors = random_tensors(2)
    rule = rule_of({"causal": True, "window": 3})
    clean = gradients(tensors, rule, piece=piece)
    tensors["qkv".find(name) if name != "dout" else 3][8] = bad

    found = dict(zip(("dq", "dk", "dv"), gradients(tensors, rule, piece=piece), strict=True))

    # A wild key or value is in the softmax of rows 8 to 11, and so in all that those see.
    rows = range(8, 12) if name in ("k", "v") else range(8, 9)
    keys = range(5, 12) if name in ("k", "v") else range(5, 9)
    for (tensor, one), other in zip(found.items(), clean, strict=True):
        hidden = [i for i in range(17) if i not in (rows if tensor == "dq" else keys)]
        assert (np.abs(one - other)[hidden] <= SUMS).all(), tensor
    assert not all(np.isfinite(one).all() for one in found.values())


def test_rows_and_keys_that_see_nothing_have_no_gradient() -> None:
    q, k, v, dout = random_tensors(4, rows=3, keys=3)
    rule = rule_of({"causal": True})
    piece = (np.array([2, 3, 4]), k, v)
    out, lse = attend(q, np.arange(3), lambda: [piece], rule, np.float64)
    dout[0] = np.nan
    rows = Rows(np.arange(3), q, dout, lse, delta_of(dout, out, np.float64))

    dq = query_gradient(rows, lambda: [piece], rule, np.float64)
    dk, dv = key_gradients(piece, [rows], rule, np.float64)

    # Row 2 sees key 2 alone, so its weight is 1 whatever the score.
    assert not dq[:2].any()
    assert not dk[1:].any()
    assert not dv[1:].any()
    assert (np.abs(dv[0] - dout[2]) <= 4 * EPS * np.abs(dout[2])).all()


def test_keys_of_minus_infinity_weigh_nothing_and_have_no_gradient() -> None:
    q, k, v, dout = random_tensors(6, head_dim=1)
    q[:] = np.abs(q)
    clean = gradients((q[2:], k[2:], v[2:], dout[2:]), rule_of({"causal": True}))
    k[:2] = -np.inf

    dq, dk, dv = gradients((q, k, v, dout), rule_of({"causal": True}))

    for found, expected in zip((dq, dk, dv), clean, strict=True):
        assert not found[:2].any()
        assert np.abs(found[2:] - expected).max() <= SUMS


def test_no_rows_and_no_keys_give_no_gradient() -> None:
    q, k, v, dout = random_tensors(7)
    none = np.arange(0)
    rows = Rows(none, q[:0], dout[:0], np.empty(0), np.empty(0))
    rule = rule_of({})

    assert query_gradient(rows, lambda: [(np.arange(17), k, v)], rule, np.float64).shape == (0, 5)
    dk, dv = key_gradients((np.arange(17), k, v), [rows], rule, np.float64)
    assert not dk.any()
    assert not dv.any()
    assert key_gradients((none, k[:0], v[:0]), [rows], rule, np.float64)[0].shape == (0, 5)


def test_very_negative_scores_keep_their_gradient() -> None:
    """Scores of -5e5 weigh as their differences do; exp of any of them alone is 0."""
    q, k, v, dout = random_tensors(8, head_dim=2)
    q[:, 0], k[:, 0] = 1000, -1000
    q[:, 1], k[:, 1] = 1, np.arange(17) / 8

    found = gradients((q, k, v, dout), rule_of({}, 0.5))

    small = (q[:, 1:], k[:, 1:])
    expected = attend_dense_backward(
        as_heads((*small, v, dout)), np.ones((17, 17), bool), 0.5, np.float64
    )
    # Scores and lse are rounded to their last place, 6e-11, in a sum over keys of 1000.
    assert np.abs(found[0][:, 1:] - expected[0][0, 0]).max() <= 17 * 6e-11
    assert np.abs(found[1][:, 1:] - expected[1][0, 0]).max() <= 17 * 6e-11
    assert np.abs(found[2] - expected[2][0, 0]).max() <= 17 * 6e-11


def test_the_judge_loads_no_other_room() -> None:
    program = (
        "import sys, ringmpi.reference;"
        "print(*sorted(name for name in sys.modules if name.startswith('ringmpi.')))"
    )

    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert set(answer.stdout.split()) <= {"ringmpi.reference", "ringmpi.errors"}
