"""Results to be judged: right ones, computed like a ring in memory, for the tests of verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from dense import pairs_between
from numpy.typing import NDArray

from ringmpi.config import Experiment, experiment_from
from ringmpi.encoding import numpy_dtype
from ringmpi.layout import Layout, Runs
from ringmpi.problem import Generated, Problem, positions_of
from ringmpi.softmax import DTYPES, state_dtype
from ringmpi.verify import Verdict, verify

Array = NDArray[Any]

#: The control experiment: awkward sizes, grouped heads, a layout whose rank order is not the token order.
TOKENS, SIZE = 65, 3
GIVEN: dict[str, Any] = {
    "seq_len": TOKENS,
    "batch": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 12,
    "causal": True,
    "layout": "zigzag",
}
LAYOUT = Layout("zigzag", TOKENS, SIZE)

NARROW = ("float16", "bfloat16")
CONTROL_DTYPES = ("float64", "float32", *NARROW)

#: Dtypes and weights that go together.
WAYS = [*((dtype, "exact") for dtype in DTYPES), *((dtype, "rounded") for dtype in NARROW)]

FORWARD = ("out", "lse")
BACKWARD = ("dq", "dk", "dv")

MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {},
    "window": {"window": 7},
    "own key alone": {"window": 0},
    "documents": {"documents": (0, 1, 30, 30, 65)},
    "one token": {"seq_len": 1},
    "one head": {"heads": 1, "kv_heads": 1, "batch": 1, "head_dim": 1},
    "own scale": {"softmax_scale": 0.9},
    "several row blocks": {"seq_len": 530, "heads": 1, "kv_heads": 1, "batch": 1, "head_dim": 5},
    "last rows": {"query_len": 20},
    "last rows of a window": {"query_len": 20, "window": 7},
    "last row": {"query_len": 1, "causal": False},
}


@dataclass
class Held:
    """A result in memory; tensors of fewer tokens than the sequence has are those of its end."""

    out: Array
    lse: Array
    dq: Array = field(default_factory=lambda: np.empty(0))
    dk: Array = field(default_factory=lambda: np.empty(0))
    dv: Array = field(default_factory=lambda: np.empty(0))
    seq_len: int = TOKENS

    def rows(self, tensor: str, batch: int, head: int, runs: Runs) -> Array:
        array = getattr(self, tensor)
        at = np.concatenate([np.arange(run.start, run.stop, run.step) for run in runs])
        at -= self.seq_len - array.shape[2]
        assert (at >= 0).all()
        return np.asarray(array[batch, head, at])

    def copy(self) -> Held:
        return replace(self, **{name: getattr(self, name).copy() for name in FORWARD + BACKWARD})


@dataclass
class Arrays:
    """A problem in memory."""

    q: Array
    k: Array
    v: Array
    dout: Array | None = None

    def heads_of(self, tensor: str) -> int:
        return int(getattr(self, tensor).shape[1])

    def rows(self, tensor: str, runs: Runs, heads: range, batch: range) -> Array:
        at = np.array([position for run in runs for position in run], np.int64)
        part = getattr(self, tensor)[batch.start : batch.stop, heads.start : heads.stop]
        return np.asarray(part[:, :, at - (self.k.shape[2] - part.shape[2])])


def whole(name: str, experiment: Experiment, problem: Problem | None = None) -> Array:
    """Return a tensor, at all positions that it covers."""
    problem = problem or Generated(experiment)
    positions = (positions_of(name, experiment),)
    heads, batch = range(problem.heads_of(name)), range(experiment.batch)
    return problem.rows(name, positions, heads, batch)


def tensors_of(experiment: Experiment, problem: Problem | None = None) -> tuple[Array, Array, Array]:
    q, k, v = (whole(name, experiment, problem) for name in "qkv")
    return q, k, v


def scale_of(experiment: Experiment) -> float:
    return experiment.softmax_scale or experiment.head_dim**-0.5


def pairs_of(experiment: Experiment) -> NDArray[np.bool_]:
    """Return which pairs are allowed, shape (queries, keys)."""
    keys = np.arange(experiment.seq_len)
    queries = keys[-experiment.num_queries :]
    return pairs_between(queries, keys, experiment.causal, experiment.window, experiment.documents)


def multiplied(weights: Array, experiment: Experiment) -> Array:
    """Return weights as they are multiplied: in the dtype of the inputs, where they are rounded to it."""
    if experiment.weights == "exact":
        return weights
    # Weights and gradients of these sizes are among the numbers of float16 too.
    return weights.astype(numpy_dtype(experiment.dtype)).astype(weights.dtype)


def query_layout(experiment: Experiment, size: int) -> Layout:
    first = experiment.seq_len - experiment.num_queries
    return Layout(experiment.layout, experiment.num_queries, size, first)


def ring_result(
    experiment: Experiment,
    size: int = SIZE,
    problem: Problem | None = None,
    after_block: Callable[[Array], None] = lambda acc: None,
) -> Held:
    """Return what a ring of `size` ranks gives, with every rank computed here."""
    q, k, v = tensors_of(experiment, problem)
    group = experiment.heads // experiment.kv_heads
    dtype: Any = state_dtype(q.dtype).type
    k, v = (np.repeat(tensor, group, axis=1).astype(dtype) for tensor in (k, v))
    layout, pairs = Layout(experiment.layout, experiment.seq_len, size), pairs_of(experiment)
    queries_of = query_layout(experiment, size)
    held = Held(np.zeros_like(q), np.zeros(q.shape[:3], dtype), seq_len=experiment.seq_len)
    for rank in range(size):
        mine = queries_of.positions(rank) - queries_of.first
        acc = np.zeros_like(q[:, :, mine], dtype)
        top, total = np.full(acc.shape[:3], -np.inf, dtype), np.zeros(acc.shape[:3], dtype)
        for step in range(size):
            at = layout.positions((rank - step) % size)
            scores = q[:, :, mine].astype(dtype) @ k[:, :, at].swapaxes(2, 3)
            scores = np.where(pairs[np.ix_(mine, at)], scores * dtype(scale_of(experiment)), -np.inf)
            higher = np.maximum(top, scores.max(axis=-1, initial=-np.inf))
            shift = np.where(np.isneginf(higher), 0, higher)
            weights, fading = np.exp(scores - shift[..., None]), np.exp(top - shift)
            acc = acc * fading[..., None] + multiplied(weights, experiment) @ v[:, :, at]
            top, total = higher, total * fading + weights.sum(axis=-1)
            after_block(acc)
        some = total > 0
        acc[some] /= total[some][:, None]
        held.out[:, :, mine] = acc
        with np.errstate(divide="ignore"):
            held.lse[:, :, mine] = np.log(total) + top
    return held


#: Of a rank and a block: what it takes for (lse, delta), from (lse, delta), the rank's own scores and
#: products of dout and v with the block, and which pairs of them are allowed.
Statistics = Callable[[Array, Array, Array, Array, Array], tuple[Array, Array]]


def global_statistics(
    lse: Array, delta: Array, scores: Array, rise: Array, allowed: Array
) -> tuple[Array, Array]:
    return lse, delta


def with_gradients(
    experiment: Experiment,
    held: Held,
    size: int = SIZE,
    problem: Problem | None = None,
    *,
    allowed: NDArray[np.bool_] | None = None,
    statistics: Statistics = global_statistics,
    after_block: Callable[[Array], None] = lambda acc: None,
) -> Held:
    """Return a result with the gradients that a ring gives, computed in the dtype of the state.

    Every rank sums a block at a time into dq, and into a dk and dv that travel; out and lse are taken from
    the result, out as it was rounded.
    """
    dtype = held.lse.dtype.type
    pairs = pairs_of(experiment) if allowed is None else allowed
    group = experiment.heads // experiment.kv_heads
    q, k, v, dout = (whole(n, experiment, problem).astype(dtype) for n in ("q", "k", "v", "dout"))
    k, v = (np.repeat(tensor, group, axis=1) for tensor in (k, v))
    delta = (dout * held.out.astype(dtype)).sum(axis=-1)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    layout, queries_of = (
        Layout(experiment.layout, experiment.seq_len, size),
        query_layout(experiment, size),
    )
    scale = dtype(scale_of(experiment))
    for rank in range(size):
        mine = queries_of.positions(rank) - queries_of.first
        for step in range(size):
            at = layout.positions((rank - step) % size)
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                scores = q[:, :, mine] @ k[:, :, at].swapaxes(2, 3) * scale
                seen = pairs[np.ix_(mine, at)] & (scores > -np.inf)
                rise = np.where(seen, dout[:, :, mine] @ v[:, :, at].swapaxes(2, 3), 0)
                taken = statistics(held.lse[:, :, mine], delta[:, :, mine], scores, rise, seen)
                weights = np.where(seen, np.exp(scores - taken[0][..., None]), 0)
                slopes = np.where(seen, weights * (rise - taken[1][..., None]), 0) * scale
            slopes, weights = (multiplied(array, experiment) for array in (slopes, weights))
            dq[:, :, mine] += slopes @ np.where(np.isfinite(k[:, :, at]), k[:, :, at], 0)
            dk[:, :, at] += slopes.swapaxes(2, 3) @ q[:, :, mine]
            dv[:, :, at] += weights.swapaxes(2, 3) @ dout[:, :, mine]
            for acc in (dq, dk, dv):
                after_block(acc)
    shape = (experiment.batch, experiment.kv_heads, group, *dk.shape[2:])
    dk, dv = (tensor.reshape(shape).sum(axis=2) for tensor in (dk, dv))
    rounded = (gradient.astype(held.out.dtype) for gradient in (dq, dk, dv))
    return replace(held, **dict(zip(BACKWARD, rounded, strict=True)))


def both_ways(experiment: Experiment, size: int = SIZE, problem: Problem | None = None) -> Held:
    """Return what a ring gives, forward and backward."""
    held = ring_result(experiment, size, problem)
    return with_gradients(experiment, held, size, problem)


def judge(experiment: Experiment, held: Held, problem: Problem | None = None) -> dict[str, Verdict]:
    problem = problem or Generated(experiment)
    layout = Layout(experiment.layout, experiment.seq_len, SIZE)
    verdicts = verify(held, problem, experiment, layout, lambda done, total: None)
    return {verdict.tensor: verdict for verdict in verdicts}


def control(dtype: str, **given: Any) -> Experiment:
    return experiment_from(GIVEN | {"dtype": dtype} | given)
