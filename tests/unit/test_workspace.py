from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from dense import (
    DTYPES,
    assert_exact_up_to_rounding,
    attend_dense,
    pairs_between,
)
from numpy.typing import NDArray

from ringmpi.devices import NumpyDevice
from ringmpi.layout import Layout
from ringmpi.mask import Mask
from ringmpi.schedule import GROUP_OPTIONS, METHODS, Pass, Shards
from ringmpi.schedule.steps import (
    HOME,
    Clear,
    Copy,
    Direction,
    Finish,
    Held,
    Merge,
    Part,
    Payload,
    Share,
    Step,
    Transfer,
    parts_held,
)
from ringmpi.softmax import state_dtype
from ringmpi.tensors import Shape
from ringmpi.workspace import Workspace

from .gradients import assert_gradients_exact

Array = NDArray[Any]

#: In every dtype, a float with all bits set is NaN.
POISON = 0xFF


def part(payload: Payload, owner: int = 1, **shares: Share) -> Part:
    return Part(payload, owner, **shares)


class Room:
    """The workspace of rank 1 of two, which owns tokens 4 to 6 and all queries are there too."""

    def __init__(self, dtype: str = "float32", heads: int = 4, kv_heads: int = 2, **own: Array) -> None:
        self.shape = Shape(2, heads, kv_heads, 3, np.dtype(DTYPES[dtype]))
        whole = Layout("contiguous", 7, 2)
        self.shards = Shards(whole, whole, 1)
        self.slots = {slot: np.full(4096, POISON, np.uint8) for slot in range(6)}
        device = NumpyDevice(Mask(), 0.5)
        self.workspace = Workspace(self.shape, self.shards, device, self.bytes_of, own)

    def bytes_of(self, held: Part, slot: int) -> NDArray[np.uint8]:
        return self.slots[slot][: self.shape.nbytes(held, self.shards)]

    def view(self, held: Part, slot: int) -> dict[str, Array]:
        return self.shape.views(held, self.shards, self.bytes_of(held, slot))

    def do(self, *chores: Any) -> None:
        self.workspace.do(chores)


def numbers(*shape: int, dtype: Any = np.float32) -> Array:
    """Return whole numbers, which every dtype adds exactly."""
    return (np.arange(np.prod(shape)).reshape(shape) % 97).astype(dtype)


@pytest.mark.parametrize("payload", [Payload.DQ, Payload.DKV])
def test_a_sum_in_a_slot_is_cleared_to_zeros(payload: Payload) -> None:
    room = Room()

    room.do(Clear(Held(part(payload), 2)))

    assert all((array == 0).all() for array in room.view(part(payload), 2).values())


def test_a_state_in_a_slot_is_cleared_to_the_identity() -> None:
    room = Room()

    room.do(Clear(Held(part(Payload.STATE), 2)))

    views = room.view(part(Payload.STATE), 2)
    assert (views["acc"] == 0).all()
    assert (views["row_sum"] == 0).all()
    assert np.isneginf(views["row_max"]).all()


def test_a_clear_writes_to_no_other_byte() -> None:
    room = Room()
    nbytes = len(room.bytes_of(part(Payload.DKV), 2))

    room.do(Clear(Held(part(Payload.DKV), 2)))

    assert (room.slots[2][nbytes:] == POISON).all()
    assert all((room.slots[slot] == POISON).all() for slot in (0, 1, 3, 4, 5))


def test_inputs_are_packed_in_the_order_of_their_tensors() -> None:
    k, v = numbers(2, 2, 3, 3), numbers(2, 2, 3, 3) + 100
    room = Room(k=k, v=v)

    room.do(Copy(Held(part(Payload.KV)), Held(part(Payload.KV), 0)))

    assert room.bytes_of(part(Payload.KV), 0).tobytes() == k.tobytes() + v.tobytes()


@pytest.mark.parametrize("index", [0, 1])
def test_a_piece_of_the_tokens_at_home_is_that_of_its_share(index: int) -> None:
    k, v = numbers(2, 2, 3, 3), numbers(2, 2, 3, 3) + 100
    room = Room(k=k, v=v)
    half = part(Payload.KV, tokens=Share(index, 2))

    room.do(Copy(Held(half), Held(half, 0)))

    # Three tokens: two and one.
    tokens = [slice(0, 2), slice(2, 3)][index]
    assert np.array_equal(room.view(half, 0)["k"], k[:, :, tokens])
    assert np.array_equal(room.view(half, 0)["v"], v[:, :, tokens])


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_share_of_the_heads_at_home_has_the_kv_heads_that_they_read(index: int) -> None:
    q, k = numbers(2, 4, 3, 3), numbers(2, 2, 3, 3)
    room = Room(q=q, k=k, v=k + 100)
    heads = Share(index, 3)
    of_queries, of_keys = part(Payload.Q, heads=heads), part(Payload.KV, heads=heads)

    room.do(Copy(Held(of_queries), Held(of_queries, 0)), Copy(Held(of_keys), Held(of_keys, 1)))

    # Heads 0 and 1, 2, and 3; of which the first two read KV head 0.
    queries, keys = [(slice(0, 2), 0), (slice(2, 3), 1), (slice(3, 4), 1)][index]
    assert np.array_equal(room.view(of_queries, 0)["q"], q[:, queries])
    assert np.array_equal(room.view(of_keys, 1)["k"], k[:, [keys]])


def test_what_is_copied_home_leaves_the_other_shares_alone() -> None:
    room = Room()
    second = part(Payload.DQ, heads=Share(1, 2))
    room.view(second, 0)["dq"][...] = 7

    room.do(Copy(Held(second, 0), Held(second)))

    dq = room.workspace.own("dq")
    assert (dq[:, :2] == 0).all()
    assert (dq[:, 2:] == 7).all()


def test_sums_are_merged_by_adding_them() -> None:
    room = Room()
    whole = part(Payload.DKV)
    for slot, value in ((0, 5), (1, 7)):
        for array in room.view(whole, slot).values():
            array[...] = value

    room.do(Merge(Held(whole, 0), Held(whole, 1)), Merge(Held(whole, 1), Held(whole)))

    assert (room.view(whole, 0)["dk"] == 5).all()
    assert (room.view(whole, 1)["dv"] == 12).all()
    assert (room.workspace.own("dk") == 12).all()
    assert (room.workspace.own("dv") == 12).all()


def test_shares_that_read_one_kv_head_are_added_up_at_home() -> None:
    room = Room(heads=4, kv_heads=1)
    for index in range(4):
        share = part(Payload.DKV, heads=Share(index, 4))
        room.view(share, index)["dk"][...] = 10**index
        room.view(share, index)["dv"][...] = 2 * 10**index

        room.do(Merge(Held(share, index), Held(share)))

    assert (room.workspace.own("dk") == 1111).all()
    assert (room.workspace.own("dv") == 2222).all()


def test_states_are_merged_as_states() -> None:
    room = Room()
    whole = part(Payload.STATE)
    for slot, (acc, top, total) in {0: (6.0, 2.0, 1.0), 1: (4.0, 2.0, 3.0)}.items():
        views = room.view(whole, slot)
        views["acc"][...], views["row_max"][...], views["row_sum"][...] = acc, top, total

    room.do(Merge(Held(whole, 0), Held(whole, 1)), Copy(Held(whole, 1), Held(whole)))

    assert (room.workspace.own("acc") == 10).all()
    assert (room.workspace.own("row_max") == 2).all()
    assert (room.workspace.own("row_sum") == 4).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot", [HOME, 3], ids=["home", "slot"])
def test_a_state_is_finished_in_the_dtype_of_the_inputs(dtype: str, slot: int) -> None:
    room = Room(dtype)
    state, out = part(Payload.STATE), part(Payload.OUT)
    views = room.view(state, 0)
    views["acc"][...], views["row_max"][...], views["row_sum"][...] = 6, 2, 1

    room.do(Finish(Held(state, 0), Held(out, slot)))

    if slot == HOME:
        found = {name: room.workspace.own(name) for name in ("out", "lse")}
    else:
        found = room.view(out, slot)
    assert found["out"].dtype == np.dtype(DTYPES[dtype])
    assert found["lse"].dtype == state_dtype(np.dtype(DTYPES[dtype]))
    assert (found["out"].astype(np.float64) == 6).all()
    assert (found["lse"] == 2).all()


def test_a_state_at_home_begins_as_the_identity_and_ends_as_zero_and_minus_infinity() -> None:
    room = Room()

    room.do(Finish(Held(part(Payload.STATE)), Held(part(Payload.OUT))))

    assert (room.workspace.own("out") == 0).all()
    assert np.isneginf(room.workspace.own("lse")).all()
    assert room.workspace.own("out").shape == (2, 4, 3, 3)


def test_gradients_that_nothing_was_added_to_are_zero_in_the_dtype_of_the_state() -> None:
    room = Room("bfloat16")

    for name, shape in {"dq": (2, 4, 3, 3), "dk": (2, 2, 3, 3), "dv": (2, 2, 3, 3)}.items():
        found = room.workspace.own(name)
        assert found.shape == shape
        assert found.dtype == np.float32
        assert not found.any()


def test_work_begins_when_it_is_asked_for() -> None:
    q = numbers(2, 4, 3, 3)
    room = Room(q=q, k=numbers(2, 2, 3, 3), v=numbers(2, 2, 3, 3))
    steps = METHODS["ring"](room.shards, Pass.FORWARD)

    room.do(*steps[0].before)
    works = room.workspace.works(steps[0].attends)
    before = room.workspace.own("row_sum").copy()
    for work in works:
        while not work.advance():
            pass

    assert not before.any()
    assert (room.workspace.own("row_sum") >= 1).all()


# Whole schedules, without MPI: every rank in turn, step by step.


@dataclass(frozen=True)
class Flight:
    """A message under way, read and written as late as it may be."""

    last: int
    source: tuple[int, Transfer]
    target: tuple[int, Transfer]


class Loopback:
    """All ranks of a schedule in one process, with slots that hold NaN until something is there."""

    def __init__(self, shape: Shape, shards: Sequence[Shards], schedules: Sequence[list[Step]]) -> None:
        self._shape = shape
        self._shards = shards
        self._schedules = schedules
        self.bytes_sent = [0] * len(shards)
        self._slots: list[dict[int, NDArray[np.uint8]]] = []
        for mine, steps in zip(shards, schedules, strict=True):
            sizes: dict[int, int] = defaultdict(int)
            for held in parts_held(steps):
                sizes[held.slot] = max(sizes[held.slot], shape.nbytes(held.part, mine))
            device = NumpyDevice(Mask(), 1.0)
            self._slots.append({slot: device.allocate(n) for slot, n in sizes.items()})
            for buffer in self._slots[-1].values():
                buffer[:] = POISON

    def slot(self, rank: int, held: Part, slot: int) -> NDArray[np.uint8]:
        return self._slots[rank][slot][: self._shape.nbytes(held, self._shards[rank])]

    def run(self, workspaces: Sequence[Workspace]) -> None:
        under_way: list[Flight] = []
        for number, steps in enumerate(zip(*self._schedules, strict=True)):
            for workspace, step in zip(workspaces, steps, strict=True):
                workspace.do(step.before)
            under_way += self._post(number, steps)
            for workspace, step in zip(workspaces, steps, strict=True):
                for work in workspace.works(step.attends):
                    while not work.advance():
                        pass
            for flight in [flight for flight in under_way if flight.last == number]:
                under_way.remove(flight)
                self._deliver(flight)
            for workspace, step in zip(workspaces, steps, strict=True):
                workspace.do(step.after)
        assert not under_way

    def _post(self, number: int, steps: Sequence[Step]) -> list[Flight]:
        sent, received = defaultdict(list), defaultdict(list)
        for rank, step in enumerate(steps):
            for transfer in step.transfers:
                if transfer.direction is Direction.SEND:
                    sent[rank, transfer.peer].append((rank, transfer))
                else:
                    received[transfer.peer, rank].append((rank, transfer))
                    self.slot(rank, transfer.part, transfer.slot)[:] = POISON
        assert sent.keys() == received.keys()
        return [
            Flight(number + source[1].steps - 1, source, target)
            for pair in sent
            for source, target in zip(sent[pair], received[pair], strict=True)
        ]

    def _deliver(self, flight: Flight) -> None:
        (rank, send), (peer, receive) = flight.source, flight.target
        data = self.slot(rank, send.part, send.slot)
        self.slot(peer, receive.part, receive.slot)[:] = data
        self.bytes_sent[rank] += data.nbytes


@dataclass(frozen=True)
class Problem:
    """Inputs on some ranks, and how they are shared."""

    method: str
    size: int
    inner: int = 1
    layout: str = "contiguous"
    tokens: int = 19
    queries: int = 19
    heads: int = 4
    kv_heads: int = 2
    dtype: str = "float32"
    causal: bool = True
    window: int | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.size}/{self.inner} {self.layout} {self.queries}:{self.tokens}"

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        first = self.tokens - self.queries
        return (
            Layout(self.layout, self.tokens, self.size),
            Layout(self.layout, self.queries, self.size, first),
        )

    @property
    def allowed(self) -> NDArray[np.bool_]:
        keys = np.arange(self.tokens)
        return pairs_between(keys[self.tokens - self.queries :], keys, self.causal, self.window)

    def tensors(self) -> tuple[Array, Array, Array, Array]:
        """Return q, k, v and dout."""
        rng = np.random.default_rng(5)
        of_queries, of_keys = (2, self.heads, self.queries, 5), (2, self.kv_heads, self.tokens, 5)
        shapes = of_queries, of_keys, of_keys, of_queries
        q, k, v, dout = (rng.normal(size=shape).astype(DTYPES[self.dtype]) for shape in shapes)
        return q, k, v, dout


def computed(problem: Problem, direction: Pass, names: Sequence[str], inputs: dict[str, Array]) -> Any:
    """Return whole results of a pass over shards, by name, and the bytes that each rank sent."""
    keys, queries = problem.layouts
    shape = Shape(2, problem.heads, problem.kv_heads, 5, np.dtype(DTYPES[problem.dtype]))
    shards = [Shards(keys, queries, rank, problem.inner) for rank in range(problem.size)]
    loopback = Loopback(shape, shards, [METHODS[problem.method](mine, direction) for mine in shards])

    def at(name: str, rank: int) -> NDArray[np.int64]:
        layout = keys if name in ("k", "v", "dk", "dv") else queries
        return layout.positions(rank) - layout.first

    def workspace(rank: int) -> Workspace:
        own = {name: np.ascontiguousarray(a[:, :, at(name, rank)]) for name, a in inputs.items()}
        device = NumpyDevice(Mask(problem.causal, problem.window), 0.5)
        return Workspace(shape, shards[rank], device, partial(loopback.slot, rank), own)

    workspaces = [workspace(rank) for rank in range(problem.size)]
    loopback.run(workspaces)
    found = []
    for name in names:
        pieces = [room.own(name) for room in workspaces]
        length = problem.tokens if name in ("dk", "dv") else problem.queries
        whole = np.full((*pieces[0].shape[:2], length, *pieces[0].shape[3:]), np.nan, pieces[0].dtype)
        for rank, piece in enumerate(pieces):
            whole[:, :, at(name, rank)] = piece
        found.append(whole)
    return found, loopback.bytes_sent


def problems() -> list[Problem]:
    """Return all methods on all kinds of rings and meshes, and every kind of length with each of them."""
    lengths = [("contiguous", 19, 19), ("zigzag", 19, 3), ("striped", 3, 2)]
    found = []
    for method in sorted(METHODS):
        for size in (1, 2, 3, 4, 6):
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            groups = divisors[1:] or [1] if method in GROUP_OPTIONS else [1]
            for inner in [size] if method == "ulysses" else groups:
                heads, kv_heads = (9, 3) if method in ("ulysses", "hybrid") else (4, 2)
                found += [
                    Problem(method, size, inner, *shape, heads=heads, kv_heads=kv_heads)
                    for shape in lengths
                ]
    return found


@pytest.mark.parametrize("problem", problems(), ids=str)
class TestSchedulesOnData:
    def test_forward_is_dense_attention(self, problem: Problem) -> None:
        q, k, v, _ = problem.tensors()

        found, _ = computed(problem, Pass.FORWARD, ("out", "lse"), {"q": q, "k": k, "v": v})

        assert_exact_up_to_rounding(tuple(found), (q, k, v), problem.allowed, 0.5)

    def test_backward_is_that_of_dense_attention(self, problem: Problem) -> None:
        q, k, v, dout = tensors = problem.tensors()
        out, lse = attend_dense(q, k, v, problem.allowed, 0.5, np.float64)
        handed = out.astype(q.dtype), lse.astype(np.float32)
        delta = (dout.astype(np.float64) * handed[0]).sum(axis=-1).astype(np.float32)
        inputs = {"q": q, "k": k, "v": v, "dout": dout, "lse": handed[1], "delta": delta}

        found, _ = computed(problem, Pass.BACKWARD, ("dq", "dk", "dv"), inputs)

        assert_gradients_exact(found, tensors, problem.allowed, 0.5, handed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_schedules_take_every_dtype(method: str, dtype: str) -> None:
    inner = {"ulysses": 4, "hybrid": 2, "double-ring": 2}.get(method, 1)
    problem = Problem(method, 4, inner, "zigzag", 19, 11, 8, 4, dtype, window=6)
    q, k, v, dout = tensors = problem.tensors()

    (out, lse), _ = computed(problem, Pass.FORWARD, ("out", "lse"), {"q": q, "k": k, "v": v})
    delta = NumpyDevice(Mask(), 1.0).delta(dout, out)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta}
    gradients, _ = computed(problem, Pass.BACKWARD, ("dq", "dk", "dv"), inputs)

    assert_exact_up_to_rounding((out, lse), (q, k, v), problem.allowed, 0.5)
    assert_gradients_exact(gradients, tensors, problem.allowed, 0.5, (out, lse))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_schedule_gives_the_same_bits_twice(method: str) -> None:
    problem = Problem(method, 4, {"ulysses": 4, "hybrid": 2, "double-ring": 2}.get(method, 1))
    q, k, v, _ = problem.tensors()

    runs = [computed(problem, Pass.FORWARD, ("out", "lse"), {"q": q, "k": k, "v": v}) for _ in range(2)]

    assert runs[0][0][0].tobytes() == runs[1][0][0].tobytes()
    assert runs[0][0][1].tobytes() == runs[1][0][1].tobytes()
    assert runs[0][1] == runs[1][1]
