"""Problems that all ranks of a test share, the ways to compute them, and the dense answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from dense import DTYPES, attend_dense, attend_dense_backward, pairs_between
from mpi4py import MPI
from numpy.typing import NDArray

from ringmpi import RingAttention
from ringmpi.layout import LAYOUTS, Layout
from ringmpi.schedule import GROUP_OPTIONS, METHODS
from ringmpi.softmax import state_dtype

Array = NDArray[Any]
Tensors = dict[str, Array]
Check = Callable[..., None]
T = TypeVar("T")

#: Tensors whose tokens are keys; those of the others are queries.
OF_KEYS = ("k", "v", "dk", "dv")
GRADIENTS = ("dq", "dk", "dv")

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 5},
    "causal-window-0": {"causal": True, "window": 0},
    "causal-window-10": {"causal": True, "window": 10},
    "causal-window-longer-than-all": {"causal": True, "window": 1000},
    "documents": {"documents": (0.0, 0.3, 0.3, 0.9, 1.0)},
    "causal-documents": {"causal": True, "documents": (0.0, 0.1, 0.8, 1.0)},
    "causal-window-documents": {"causal": True, "window": 3, "documents": (0.0, 0.5, 1.0)},
}


class Way(NamedTuple):
    """A method, with the size of its inner groups where it has any."""

    method: str
    inner: int | None = None

    def __str__(self) -> str:
        return self.method if self.inner is None else f"{self.method}-{self.inner}"


def ways(size: int) -> list[Way]:
    """Return every method on so many ranks, with every size of inner groups that is not another method."""
    divisors = [inner for inner in range(2, size) if size % inner == 0]
    return [
        Way(method, inner)
        for method in METHODS
        for inner in (divisors if method in GROUP_OPTIONS else (None,))
    ]


#: At this rank count. Groups of one rank, or one group of all ranks, make a method another, simpler one.
WAYS = ways(MPI.COMM_WORLD.size)
SAME_WAYS = {
    Way(method, inner): Way("ulysses") if method == "hybrid" and inner > 1 else Way("ring")
    for method in GROUP_OPTIONS
    for inner in sorted({1, MPI.COMM_WORLD.size})
}
ALL_WAYS = [*WAYS, *SAME_WAYS] if MPI.COMM_WORLD.size < 6 else WAYS

#: Eight ranks on two cores are slow: of what does not depend on the rank count, each half takes another part.
SOME_WAYS, OTHER_WAYS = (WAYS[0::2], WAYS[1::2]) if MPI.COMM_WORLD.size > 5 else (WAYS, WAYS)


def spread(items: Sequence[T], way: Way, number: dict[int, int]) -> list[T]:
    """Return some of the items, other ones for each way, so that all are used by some way.

    Parameters
    ----------
    items : sequence
    way : Way
    number : dict
        How many, by the rank count up to which this holds: many ranks on two cores are slow.
    """
    count = next((n for size, n in number.items() if size >= MPI.COMM_WORLD.size), len(items))
    first = ALL_WAYS.index(way) * count
    return [items[(first + index) % len(items)] for index in range(min(count, len(items)))]


@dataclass(frozen=True)
class Problem:
    """Attention over a whole sequence, and how it is sharded."""

    seq_len: int = 61
    query_len: int = 0  # All of them.
    layout: str = "contiguous"
    mask: str = "full"
    batch: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 5
    dtype: str = "float64"

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def num_queries(self) -> int:
        """How many positions attend: the last ones."""
        return self.query_len or self.seq_len

    @property
    def first_query(self) -> int:
        """The first position that attends."""
        return self.seq_len - self.num_queries

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return float(self.head_dim**-0.5)

    @property
    def state(self) -> Any:
        """The dtype of lse, and of what gradients are summed in."""
        return state_dtype(np.dtype(DTYPES[self.dtype])).type

    @property
    def mask_options(self) -> dict[str, Any]:
        """The mask, its documents as offsets into the sequence."""
        options = dict(MASKS[self.mask])
        if "documents" in options:
            options["documents"] = tuple(int(part * self.seq_len) for part in options["documents"])
        return options

    @property
    def options(self) -> dict[str, Any]:
        """What `RingAttention` is told."""
        lengths = {"seq_len": self.seq_len, "query_len": self.num_queries}
        return {**lengths, "layout": self.layout, **self.mask_options}

    def allowed(self) -> NDArray[np.bool_]:
        """Return which pairs are allowed, shape (queries, keys)."""
        queries = np.arange(self.first_query, self.seq_len)
        return pairs_between(queries, np.arange(self.seq_len), **self.mask_options)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        heads = self.kv_heads if name in OF_KEYS else self.heads
        tokens = self.seq_len if name in OF_KEYS else self.num_queries
        return (self.batch, heads, tokens, self.head_dim)

    def mine(self, comm: MPI.Comm, name: str) -> NDArray[np.int64]:
        """Return which tokens of a whole tensor this rank owns."""
        if name in OF_KEYS:
            return Layout(self.layout, self.seq_len, comm.size).positions(comm.rank)
        layout = Layout(self.layout, self.num_queries, comm.size, self.first_query)
        return layout.positions(comm.rank) - self.first_query

    def shards(self, comm: MPI.Comm, whole: Tensors) -> Tensors:
        """Return this rank's part of whole tensors."""
        return {name: tensor[:, :, self.mine(comm, name)] for name, tensor in whole.items()}


#: Query heads and KV heads: KV heads fewer than ranks, and heads that do not divide by the ranks.
HEADS = ((8, 8), (8, 2), (8, 1), (9, 3), (10, 5))
LENGTHS = ((61, 0), (40, 7), (7, 0), (33, 1), (6, 0), (40, 0), (3, 2), (61, 30), (1, 0))

#: Every layout with every mask; heads and lengths go on in cycles of other lengths, so that all of them meet.
PROBLEMS = [
    Problem(
        *LENGTHS[index % len(LENGTHS)],
        layout=layout,
        mask=mask,
        batch=1 + (index % 4 == 0),
        heads=HEADS[index % len(HEADS)][0],
        kv_heads=HEADS[index % len(HEADS)][1],
    )
    for index, (mask, layout) in enumerate((m, name) for name in LAYOUTS for m in MASKS)
]


@lru_cache(maxsize=64)
def random_tensors(problem: Problem) -> Tensors:
    """Return whole q, k, v and dout, the same on every rank."""
    rng = np.random.default_rng(problem.seq_len * 1000 + problem.head_dim)
    names = ("q", "k", "v", "dout")
    return {n: rng.standard_normal(problem.shape(n)).astype(DTYPES[problem.dtype]) for n in names}


@lru_cache(maxsize=64)
def dense_answers(problem: Problem) -> Tensors:
    """Return what dense attention in float64 gives for `random_tensors`: out, lse, dq, dk and dv."""
    return answers_for(problem, random_tensors(problem), np.float64)


def answers_for(problem: Problem, tensors: Tensors, dtype: Any) -> Tensors:
    """Return out, lse, dq, dk and dv, all computed in `dtype`."""
    inputs = (tensors["q"], tensors["k"], tensors["v"])
    settings = (problem.allowed(), problem.scale, dtype)
    found = dict(zip(("out", "lse"), attend_dense(*inputs, *settings), strict=True))
    gradients = attend_dense_backward((*inputs, tensors["dout"]), *settings)
    return found | dict(zip(GRADIENTS, gradients, strict=True))


def both_passes(attention: RingAttention, mine: Tensors) -> Tensors:
    """Return out, lse, dq, dk and dv of this rank. Collective."""
    out, lse = attention.forward(mine["q"], mine["k"], mine["v"])
    return {"out": out, "lse": lse} | gradients_of(attention, mine, out, lse)


def gradients_of(attention: RingAttention, mine: Tensors, out: Array, lse: Array) -> Tensors:
    """Return dq, dk and dv of this rank. Collective."""
    inputs = (mine[name] for name in ("dout", "q", "k", "v"))
    return dict(zip(GRADIENTS, attention.backward(*inputs, out, lse), strict=True))


def attend(comm: MPI.Comm, way: Way, problem: Problem, whole: Tensors, **options: Any) -> Tensors:
    """Return out, lse, dq, dk and dv of this rank, by a way, for whole tensors. Collective."""
    with make(comm, way, problem, **options) as attention:
        return both_passes(attention, problem.shards(comm, whole))


def make(comm: MPI.Comm, way: Way, problem: Problem, **options: Any) -> RingAttention:
    """Return the attention of a problem by a way; it gives up waiting after 20 s. Collective."""
    options = {"timeout": 20.0, **problem.options, **options}
    return RingAttention(comm, method=way.method, inner=way.inner, **options)


def error_of(found: Any, exact: Any) -> float:
    """Return the largest error; infinite for NaN, 0 where both are the same infinity."""
    found = found.astype(np.float64)
    if found.shape != exact.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        error = np.where(found == exact, 0, np.abs(found - exact))
    return float(np.nan_to_num(error, nan=np.inf).max(initial=0))


def too_far(found: Tensors, exact: Tensors, tolerance: float) -> Iterable[str]:
    """Yield the tensors of a rank that err by more than the tolerance, with their errors."""
    for name, expected in exact.items():
        error = error_of(found[name], expected)
        if not error <= tolerance:
            yield f"{name}: {error:.1e}"
