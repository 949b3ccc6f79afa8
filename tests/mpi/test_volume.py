"""What each rank sends, in how many messages and hops, and what it holds, equals closed forms.

Names are those of facts.md, sections 2.3 and 1.9 (backward): e bytes an element, c tokens a rank,
h = heads * head_dim, r = KV heads / heads; and s bytes an element of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from dense import DTYPES
from mpi4py import MPI
from sharded import ALL_WAYS, SOME_WAYS, Check, Problem, Way, gradients_of, make, random_tensors, spread

from ringmpi.schedule import Pass

pytestmark = pytest.mark.mpi

FORWARD, BACKWARD = Pass.FORWARD, Pass.BACKWARD


def shared(items: int, among: int, index: int) -> int:
    """Return how many items the ``index``-th of some sharers has: the first ones have one more."""
    return items // among + (index < items % among)


@dataclass(frozen=True)
class Costs:
    """The bytes of what travels, for the tokens of a rank and a number of heads."""

    problem: Problem
    size: int

    def _rows(self, tokens: int, heads: int) -> int:
        return self.problem.batch * heads * tokens

    @property
    def _item(self) -> int:
        return int(np.dtype(DTYPES[self.problem.dtype]).itemsize)

    @property
    def _state(self) -> int:
        return int(np.dtype(self.problem.state).itemsize)

    def kv(self, tokens: int, heads: int) -> int:
        return self._rows(tokens, heads) * 2 * self.problem.head_dim * self._item

    def dkv(self, tokens: int, heads: int) -> int:
        return self._rows(tokens, heads) * 2 * self.problem.head_dim * self._state

    def q(self, tokens: int, heads: int) -> int:
        return self._rows(tokens, heads) * self.problem.head_dim * self._item

    def running(self, tokens: int, heads: int) -> int:
        """acc, row_max and row_sum."""
        return self._rows(tokens, heads) * (self.problem.head_dim + 2) * self._state

    def out(self, tokens: int, heads: int) -> int:
        """Out and lse."""
        return self._rows(tokens, heads) * (self.problem.head_dim * self._item + self._state)

    def asking(self, tokens: int, heads: int) -> int:
        """q, dout, lse and delta."""
        return self._rows(tokens, heads) * 2 * (self.problem.head_dim * self._item + self._state)

    def dq(self, tokens: int, heads: int) -> int:
        return self._rows(tokens, heads) * self.problem.head_dim * self._state

    def keys_of(self, rank: int) -> int:
        """Keys that a rank owns: where they do not divide, zigzag gives one more to other ranks."""
        n, pieces = self.problem.seq_len, 2 * self.size
        if self.problem.layout == "zigzag":
            return shared(n, pieces, rank) + shared(n, pieces, pieces - 1 - rank)
        return shared(n, self.size, rank)

    def queries_of(self, rank: int) -> int:
        n, pieces = self.problem.num_queries, 2 * self.size
        if self.problem.layout == "zigzag":
            return shared(n, pieces, rank) + shared(n, pieces, pieces - 1 - rank)
        return shared(n, self.size, rank)

    def heads_of(self, index: int, among: int) -> int:
        return shared(self.problem.heads, among, index)

    def kv_heads_of(self, index: int, among: int) -> int:
        """KV heads that a share of the query heads reads: one that several shares read counts in each."""
        before = sum(self.heads_of(other, among) for other in range(index))
        group = self.problem.heads // self.problem.kv_heads
        return len({head // group for head in range(before, before + self.heads_of(index, among))})


Parts = Iterator[int]


def ring_parts(costs: Costs, rank: int, direction: Pass) -> Parts:
    """P - 1 hops of k and v, all but those of the next rank; P hops of dk and dv."""
    kv_heads, size = costs.problem.kv_heads, costs.size
    for owner in range(size):
        if owner != (rank + 1) % size:
            yield costs.kv(costs.keys_of(owner), kv_heads)
        if direction is BACKWARD and size > 1:
            yield costs.dkv(costs.keys_of(owner), kv_heads)


def bidirectional_parts(costs: Costs, rank: int, direction: Pass) -> Parts:
    """As the ring, with the first half of the tokens one way round and the second half the other."""
    kv_heads, size = costs.problem.kv_heads, costs.size
    for way, last in ((0, rank + 1), (1, rank - 1)):
        for owner in range(size):
            tokens = shared(costs.keys_of(owner), 2, way)
            if owner != last % size:
                yield costs.kv(tokens, kv_heads)
            if direction is BACKWARD and size > 1:
                yield costs.dkv(tokens, kv_heads)


def allgather_parts(costs: Costs, rank: int, direction: Pass) -> Parts:
    """P - 1 hops of k and v, and P - 1 of the sums of dk and dv, which are those of the others."""
    kv_heads, size = costs.problem.kv_heads, costs.size
    for owner in range(size):
        if owner != (rank + 1) % size:
            yield costs.kv(costs.keys_of(owner), kv_heads)
        if direction is BACKWARD and owner != rank:
            yield costs.dkv(costs.keys_of(owner), kv_heads)


def passq_parts(costs: Costs, rank: int, direction: Pass) -> Parts:
    """P - 1 hops of what a query needs, P hops of what it has been answered."""
    heads, size = costs.problem.heads, costs.size
    asking, answer = (costs.q, costs.running) if direction is FORWARD else (costs.asking, costs.dq)
    for owner in range(size):
        if owner != (rank + 1) % size:
            yield asking(costs.queries_of(owner), heads)
        if size > 1:
            yield answer(costs.queries_of(owner), heads)


def hybrid_parts(costs: Costs, rank: int, direction: Pass, degree: int) -> Parts:
    """Two all-to-alls in the group, and a ring of the ranks with the same share of heads, over all groups."""
    place, group = rank % degree, rank // degree
    if degree == 1:
        yield from ring_parts(costs, rank, direction)
        return
    asking, answer = (costs.q, costs.out) if direction is FORWARD else (costs.asking, costs.dq)
    heads, kv_heads = costs.heads_of(place, degree), costs.kv_heads_of(place, degree)
    for other in range(degree):
        if other != place:
            member = group * degree + other
            yield asking(costs.queries_of(rank), costs.heads_of(other, degree))
            yield costs.kv(costs.keys_of(rank), costs.kv_heads_of(other, degree))
            yield answer(costs.queries_of(member), heads)
            if direction is BACKWARD:
                yield costs.dkv(costs.keys_of(member), kv_heads)
    groups = costs.size // degree
    for number in range(groups):
        for owner in range(number * degree, number * degree + degree):
            if number != (group + 1) % groups:
                yield costs.kv(costs.keys_of(owner), kv_heads)
            if direction is BACKWARD and groups > 1:
                yield costs.dkv(costs.keys_of(owner), kv_heads)


def double_ring_parts(costs: Costs, rank: int, direction: Pass, inner: int) -> Parts:
    """In each of P / W groups W - 1 inner hops of k and v, and one outer hop between two groups.

    dk and dv make W inner hops in each group, and one outer hop from each group to the next, the last of
    which brings them home.
    """
    outer, kv_heads = costs.size // inner, costs.problem.kv_heads
    if 1 in (inner, outer):
        yield from ring_parts(costs, rank, direction)
        return
    group, place = divmod(rank, inner)
    for number in range(outer):
        for other in range(inner):
            tokens = costs.keys_of(number * inner + other)
            if other != (place + 1) % inner:
                yield costs.kv(tokens, kv_heads)
            if other == place and number != (group + 1) % outer:
                yield costs.kv(tokens, kv_heads)
            if direction is BACKWARD:
                yield costs.dkv(tokens, kv_heads)
                if other == place:
                    yield costs.dkv(tokens, kv_heads)


def parts_sent(way: Way, costs: Costs, rank: int, direction: Pass) -> list[int]:
    """Return the bytes of everything that a rank sends in a pass; what has no tokens does not travel."""
    simple: dict[str, Callable[[Costs, int, Pass], Parts]] = {
        "ring": ring_parts,
        "bidirectional": bidirectional_parts,
        "allgather": allgather_parts,
        "passq": passq_parts,
    }
    if way.method in simple:
        parts = simple[way.method](costs, rank, direction)
    elif way.method == "double-ring":
        parts = double_ring_parts(costs, rank, direction, way.inner or 1)
    else:
        parts = hybrid_parts(costs, rank, direction, way.inner or costs.size)
    return [nbytes for nbytes in parts if nbytes]


def bytes_held(way: Way, costs: Costs, direction: Pass, keys: int, queries: int) -> int:
    """Return the bytes of all slots, for so many keys and queries on each rank and heads that divide.

    A part that travels is in one of two slots, in turn; a sum that follows it needs three: two to compute
    into in turn and one to arrive in.
    """
    size, heads, kv_heads = costs.size, costs.problem.heads, costs.problem.kv_heads
    backward = direction is BACKWARD
    if size == 1:
        return 0
    kv, dkv = costs.kv(keys, kv_heads), costs.dkv(keys, kv_heads)
    asking, answer = (costs.asking, costs.dq) if backward else (costs.q, costs.running)
    ring = 2 * kv + backward * 3 * dkv
    if way.method == "passq":
        return 2 * asking(queries, heads) + 3 * answer(queries, heads)
    if way.method == "allgather":
        return size * kv + backward * size * dkv  # One dkv arrives, P - 1 are summed up for others.
    if way.method in ("ring", "bidirectional"):
        return ring
    if way.method == "double-ring":
        inner = way.inner or 1
        # A turn begins with one of two blocks, and walks on in two; five sums.
        return ring if inner in (1, size) else (2 + min(2, inner - 1)) * kv + backward * 5 * dkv
    degree = way.inner or size
    if degree == 1:
        return ring
    heads, kv_heads = costs.heads_of(0, degree), costs.kv_heads_of(0, degree)
    kv, dkv = costs.kv(keys, kv_heads), costs.dkv(keys, kv_heads)
    rings = degree * (kv + backward * 3 * dkv) if degree < size else 0
    # What leaves for the others, in whose place what they send back arrives; what lies here of all members.
    if backward:
        away = max(asking(queries, heads), answer(queries, heads)) + max(kv, dkv)
        here = asking(queries, heads) + kv + answer(queries, heads) + dkv
    else:
        away = costs.out(queries, heads) + kv
        here = costs.out(queries, heads) + kv + costs.running(queries, heads)
    return (degree - 1) * away + degree * here + rings


CHUNK_LIMIT = 500


def counts(records: Any) -> dict[str, float]:
    names = ("bytes_sent", "messages", "hops", "pairs", "flops")
    return {name: float(records[name].sum()) for name in names}


def measured(
    comm: MPI.Comm, way: Way, problem: Problem, alone: bool = False
) -> dict[Pass, dict[str, float]]:
    """Return what this rank counted in each pass, and perhaps in its transfers alone."""
    found = {}
    with make(comm, way, problem, chunk_limit=CHUNK_LIMIT) as attention:
        mine = problem.shards(comm, random_tensors(problem))
        out, lse = attention.forward(mine["q"], mine["k"], mine["v"])
        for direction in Pass:
            if direction is BACKWARD:
                gradients_of(attention, mine, out, lse)
            found[direction] = counts(attention.trace.records)
            if alone:
                moved = counts(attention.transfers_alone().records)
                found[direction] |= {f"{name} alone": number for name, number in moved.items()}
            found[direction]["held"] = attention.held_nbytes(direction)
    return found


def unexpected(
    comm: MPI.Comm, way: Way, problem: Problem, found: dict[Pass, dict[str, float]]
) -> Iterator[str]:
    """Yield what differs from the forms that hold for any shards and heads."""
    costs = Costs(problem, comm.size)
    for direction, counted in found.items():
        parts = parts_sent(way, costs, comm.rank, direction)
        moved = {
            "bytes_sent": sum(parts),
            "messages": sum(-(-nbytes // CHUNK_LIMIT) for nbytes in parts),
            "hops": len(parts),
        }
        expected = moved | {f"{name} alone": number for name, number in moved.items()}
        expected |= {"pairs alone": 0, "flops alone": 0}
        for name, number in expected.items():
            if counted.get(name, number) != number:
                yield f"{problem}, {direction.value}: {name} {counted[name]} and not {number}"
        pairs = problem.batch * problem.heads * problem.allowed().sum()
        flops = {FORWARD: 4, BACKWARD: 10}[direction] * problem.head_dim * pairs
        total = comm.allreduce(counted["pairs"]), comm.allreduce(counted["flops"])
        if total != (pairs, flops):
            yield f"{problem}, {direction.value}: pairs and FLOPs {total} and not {pairs, flops}"


#: Shards and heads that do not divide by the ranks, and shards without tokens.
UNEVEN = [
    Problem(31, 0, "contiguous", "full", batch=2, heads=9, kv_heads=3, dtype="bfloat16"),
    Problem(5, 3, "striped", "causal", heads=8, kv_heads=1, dtype="float32"),
    Problem(43, 7, "zigzag", "window", heads=10, kv_heads=5, dtype="float16"),
]


@pytest.mark.parametrize("way", ALL_WAYS, ids=str)
def test_bytes_messages_and_hops_are_those_of_the_layout(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    wrong: list[str] = []
    for problem in spread(UNEVEN, way, {3: 3, 5: 2, 8: 1}):
        wrong += unexpected(comm, way, problem, measured(comm, way, problem))
    collective_assert(not wrong, wrong)


@pytest.mark.parametrize("way", ALL_WAYS, ids=str)
def test_bytes_sent_and_held_are_those_of_the_table(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """Even shards, heads that divide: facts.md 2.3 as it stands there, and 1.9 for the backward pass."""
    size, c, dim, heads, kv_heads, batch = comm.size, 6, 4, 2 * comm.size, comm.size, 2
    for dtype in spread(["float16", "float64"], way, {3: 2, 8: 1}):
        problem = Problem(c * size, 0, "zigzag", "full", batch, heads, kv_heads, dim, dtype)
        found = measured(comm, way, problem, alone=True)
        collective_assert("bytes_sent alone" in found[BACKWARD])
        e, s = np.dtype(DTYPES[dtype]).itemsize, np.dtype(problem.state).itemsize
        expected = table(way, size, e, s, c, heads, kv_heads / heads, dim)
        sent = tuple(found[direction]["bytes_sent"] / batch for direction in Pass)
        collective_assert(sent == expected, f"{dtype}: {sent} and not {expected}")
        collective_assert(size > 1 or not any(found[direction]["hops"] for direction in Pass))
        held = tuple(found[direction]["held"] for direction in Pass)
        costs = Costs(problem, size)
        expected_held = tuple(bytes_held(way, costs, direction, c, c) for direction in Pass)
        collective_assert(held == expected_held, f"{dtype}: {held} and not {expected_held}")
        wrong = list(unexpected(comm, way, problem, found))
        collective_assert(not wrong, wrong)


def table(
    way: Way, size: int, e: int, s: int, c: int, heads: int, r: float, dim: int
) -> tuple[float, float]:
    """Return the bytes that each rank sends in the forward and in the backward pass, for one batch."""
    h = heads * dim
    whole_ring = 2 * e * r * c * h * (size - 1)
    sums = 2 * s * r * c * h  # dk and dv of a rank's tokens.
    inner = way.inner or size
    groups = size // inner
    ulysses = e * (2 + 2 * r) * c * h * (inner - 1) / inner
    lse = s * c * heads * (inner - 1) / inner  # One number a row and head, which the table leaves out.
    outcome = 2 * s * c * heads  # lse and delta of a rank's queries.
    state = s * c * (h + 2 * heads)  # Running numerator, maximum and sum.
    ring_of_groups = 2 * e * r * c * h * (groups - 1)
    sums_of_groups = sums * groups * (groups > 1)
    double = way.method == "double-ring" and 1 < inner < size
    homecoming = sums * (size + groups * double) * (size > 1)
    back = (e * (2 + 2 * r) * c * h + outcome + s * (1 + 2 * r) * c * h) * (inner - 1) / inner
    forms = {
        "ring": (whole_ring, whole_ring + homecoming),
        "bidirectional": (whole_ring, whole_ring + homecoming),
        "double-ring": (whole_ring, whole_ring + homecoming),
        "allgather": (whole_ring, whole_ring + sums * (size - 1)),
        "passq": (
            e * c * h * (size - 1) + state * size * (size > 1),
            (2 * e * c * h + outcome) * (size - 1) + s * c * h * size * (size > 1),
        ),
        "ulysses": (ulysses + lse, back),
        # Both stages; a rank in the ring has 1 / inner of the heads, for the tokens of its whole group.
        "hybrid": (ulysses + lse + ring_of_groups, back + ring_of_groups + sums_of_groups),
    }
    return forms[way.method]


@pytest.mark.parametrize("way", SOME_WAYS, ids=str)
def test_uneven_shards_need_no_more_than_the_longest_on_every_rank(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    heads = 2 * comm.size
    problem = Problem(
        4 * comm.size + 3, 2 * comm.size + 1, "striped", "full", 1, heads, heads, 3, "float16"
    )
    costs = Costs(problem, comm.size)
    keys = [costs.keys_of(rank) for rank in range(comm.size)]
    queries = [costs.queries_of(rank) for rank in range(comm.size)]
    with make(comm, way, problem) as attention:
        mine = problem.shards(comm, random_tensors(problem))
        attention.forward(mine["q"], mine["k"], mine["v"])
        held = {direction: attention.held_nbytes(direction) for direction in Pass}
    for direction in Pass:
        least, most = (
            bytes_held(way, costs, direction, extreme(keys), extreme(queries)) for extreme in (min, max)
        )
        collective_assert(least <= held[direction] <= most, f"{held[direction]} of {least}, {most}")


@pytest.mark.ranks(least=4, most=4)
def test_a_window_leaves_blocks_without_work(comm: MPI.Comm, collective_assert: Check) -> None:
    """Ten keys back with eight tokens a rank: 9 of 16 pairs of shards have something to do."""
    problem = Problem(32, 0, "contiguous", "causal-window-10")
    with make(comm, Way("ring"), problem) as attention:
        mine = problem.shards(comm, random_tensors(problem))
        attention.forward(mine["q"], mine["k"], mine["v"])
        busy = attention.trace.records["pairs"] > 0
    expected = {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [0, 1, 2]}[comm.rank]
    collective_assert(np.flatnonzero(busy).tolist() == expected, busy)
    collective_assert(comm.allreduce(int(busy.sum())) == 9)


@pytest.mark.parametrize("chunk_limit", [1, 7] if MPI.COMM_WORLD.size < 5 else [7])
def test_a_chunk_limit_changes_messages_only(
    comm: MPI.Comm, collective_assert: Check, chunk_limit: int
) -> None:
    """Of three ways, each of which sends another mix of parts."""
    problem = Problem(5, 0, "contiguous", "causal", kv_heads=1, head_dim=1, dtype="float16")
    whole = problem.shards(comm, random_tensors(problem))
    for way in (Way("ring"), Way("ulysses"), Way("passq")):
        found = {}
        for limit in (chunk_limit, 2**27):
            with make(comm, way, problem, chunk_limit=limit) as attention:
                out, lse = attention.forward(whole["q"], whole["k"], whole["v"])
                dq, dk, dv = gradients_of(attention, whole, out, lse).values()
                records = attention.trace.records
                bits = [tensor.tobytes() for tensor in (out, lse, dq, dk, dv)]
                found[limit] = bits, records["bytes_sent"].tolist(), records["hops"].tolist()
                messages = records["messages"].sum()
                if limit == 1:
                    collective_assert(messages == records["bytes_sent"].sum(), way)
                if limit >= 2**27:
                    collective_assert(messages == records["hops"].sum(), way)
        collective_assert(found[chunk_limit] == found[2**27], way)
