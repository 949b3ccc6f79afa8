from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ringmpi.reference import Rule, attend

Array = NDArray[Any]

EPS = float(np.finfo(np.float64).eps)


def run(
    q: Array, k: Array, v: Array, rule: Rule, dtype: Any = np.float64, piece: int = 5
) -> tuple[Array, Array]:
    """Attend all rows, the keys being cut into pieces."""
    tokens = len(k)
    cuts = [np.arange(start, min(start + piece, tokens)) for start in range(0, tokens, piece)]
    return attend(q, np.arange(len(q)), lambda: [(at, k[at], v[at]) for at in cuts], rule, dtype)


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


def test_the_judge_loads_no_other_room() -> None:
    program = (
        "import sys, ringmpi.reference;"
        "print(*sorted(name for name in sys.modules if name.startswith('ringmpi.')))"
    )

    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert set(answer.stdout.split()) <= {"ringmpi.reference", "ringmpi.errors"}
