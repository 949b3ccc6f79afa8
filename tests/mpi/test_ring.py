"""How the ring moves its blocks: what is sent, when MPI is called, what is refused, what is noticed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
from mpi4py import MPI

from ringmpi import RingAttention, ring_attention
from ringmpi.comm.exchange import Exchange
from ringmpi.comm.team import Team
from ringmpi.comm.watch import Watch
from ringmpi.devices.numpy import TileWork
from ringmpi.errors import ConfigError, Interrupted, StalledRingError
from ringmpi.layout import LAYOUTS, Layout
from ringmpi.schedule import METHODS, Pass, Shards, Step
from ringmpi.schedule.steps import Direction, parts_held

pytestmark = pytest.mark.mpi

Check = Callable[..., None]


def shard(
    comm: MPI.Comm, seq_len: int, heads: int = 2, head_dim: int = 8, layout: str = "contiguous"
) -> Any:
    """Return q, k and v of this rank: random, the same whatever the number of ranks."""
    positions = Layout(layout, seq_len, comm.size).positions(comm.rank)
    rng = np.random.default_rng(1)
    return [
        rng.standard_normal((1, heads, seq_len, head_dim), np.float32)[:, :, positions] for _ in "qkv"
    ]


def test_moments_follow_each_other(comm: MPI.Comm, collective_assert: Check) -> None:
    with RingAttention(comm, seq_len=300, causal=True) as attention:
        attention.forward(*shard(comm, 300))
        records = attention.trace.records
        alone = attention.transfers_alone().records
    for trace in (records, alone):
        order = [trace[name] for name in ("started", "posted", "launched", "compute_done", "step_end")]
        collective_assert((np.diff(order, axis=0) >= 0).all(), "within a step")
        collective_assert((trace["step_end"][:-1] <= trace["started"][1:]).all(), "between steps")
        moved = np.fmax(trace["received"], trace["sent"])
        collective_assert(np.isnan(moved[-1]) and not np.isnan(moved[:-1]).any(), "transfers")
        collective_assert((moved[:-1] <= trace["step_end"][:-1]).all())
    collective_assert(
        alone["pairs"].sum() == 0 and alone["bytes_sent"].sum() == records["bytes_sent"].sum()
    )


@pytest.mark.every_device
@pytest.mark.parametrize("layout", LAYOUTS)
def test_causal_work_is_skipped_and_not_masked(
    comm: MPI.Comm, collective_assert: Check, layout: str
) -> None:
    """At 8192 tokens a causal run computes at most 15 % more than half of all pairs."""
    with RingAttention(comm, seq_len=8192, layout=layout, causal=True) as attention:
        attention.forward(*shard(comm, 8192, heads=1, layout=layout))
        computed = comm.allreduce(attention.trace.records["computed_pairs"].sum())
    collective_assert(8192 * 8193 / 2 <= computed <= 1.15 * 8192**2 / 2, computed / 8192**2)


@pytest.mark.every_device
def test_skipped_tiles_show_in_the_trace(comm: MPI.Comm, collective_assert: Check) -> None:
    seq_len = 2048
    for layout in LAYOUTS:
        work = {}
        for causal in (False, True):
            with RingAttention(comm, seq_len=seq_len, layout=layout, causal=causal) as attention:
                attention.forward(*shard(comm, seq_len, heads=1, layout=layout))
                total = {
                    name: comm.allreduce(attention.trace.records[name].sum())
                    for name in ("pairs", "computed_pairs", "tiles_skipped")
                }
            work[causal] = total
        collective_assert(
            work[False] == {"pairs": seq_len**2, "computed_pairs": seq_len**2, "tiles_skipped": 0}
        )
        collective_assert(work[True]["pairs"] == seq_len * (seq_len + 1) // 2)
        collective_assert(work[True]["tiles_skipped"] > 0 or layout == "striped", layout)


@pytest.mark.parametrize(("progress", "expected"), [("wait", False), ("poll", True)])
def test_only_polling_calls_mpi_while_computing(
    comm: MPI.Comm,
    collective_assert: Check,
    monkeypatch: pytest.MonkeyPatch,
    progress: str,
    expected: bool,
) -> None:
    calls: list[bool] = []
    computing = [False]
    advance, test = TileWork.advance, Exchange._test

    def marked_test(self: Exchange) -> bool:
        calls.append(computing[0])
        return test(self)

    def marked_advance(self: TileWork) -> bool:
        done = advance(self)
        computing[0] = not done
        return done

    monkeypatch.setattr(Exchange, "_test", marked_test)
    monkeypatch.setattr(TileWork, "advance", marked_advance)
    ring_attention(*shard(comm, 600), comm, progress=progress)
    if comm.size > 1:
        collective_assert(any(calls) == expected)


def test_a_ring_of_one_sends_nothing_to_itself(
    collective_assert: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a message to oneself")

    monkeypatch.setattr(Exchange, "_post", refuse)
    out, _ = ring_attention(*shard(MPI.COMM_SELF, 20), MPI.COMM_SELF)
    collective_assert(np.isfinite(out).all())


def test_blocks_are_not_pickled(
    comm: MPI.Comm, collective_assert: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    dumps = pickle.dumps

    def small_only(item: Any, *args: Any, **options: Any) -> bytes:
        packed = dumps(item, *args, **options)
        if len(packed) > 4096:
            raise AssertionError(f"{len(packed)} bytes pickled")
        return packed

    monkeypatch.setattr(pickle, "dumps", small_only)
    out, _ = ring_attention(*shard(comm, 4096), comm, window=1, causal=True)
    collective_assert(np.isfinite(out).all())


class _NotesTags:
    """A communicator that notes the tags of what is posted on it."""

    def __init__(self, comm: MPI.Comm, tags: list[int]) -> None:
        self._comm = comm
        self._tags = tags

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Isend(self, *args: Any, tag: int, **options: Any) -> MPI.Request:  # noqa: N802 - MPI's name
        self._tags.append(tag)
        return self._comm.Isend(*args, tag=tag, **options)


@pytest.mark.ranks(least=2)
def test_tags_stay_below_what_every_library_allows(comm: MPI.Comm, collective_assert: Check) -> None:
    """MPI promises tags up to 32767 only, and a ring may have more steps than that."""
    tags: list[int] = []
    with RingAttention(comm, seq_len=16) as attention:
        mine = shard(comm, 16)
        expected, _ = attention.forward(*mine)
        assert attention._engine is not None
        exchange = attention._engine.exchange
        exchange._comm = _NotesTags(exchange._comm, tags)  # type: ignore[assignment]
        begin = exchange.begin

        def far_along(slots: Any) -> None:
            begin(slots)
            exchange._step = 32767  # As in the middle of a ring of 40 000 ranks.

        exchange.begin = far_along  # type: ignore[method-assign]
        out, _ = attention.forward(*mine)
    collective_assert(out.tobytes() == expected.tobytes())
    passed_on = comm.allgather(tags)
    collective_assert(
        any(passed_on) and all(tag <= 32767 for own in passed_on for tag in own), passed_on
    )


@pytest.mark.ranks(least=2)
def test_a_silent_rank_ends_the_wait_with_a_picture(
    comm: MPI.Comm, collective_assert: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank never enters the ring. The others say what they wait for, and it gives no answer."""
    monkeypatch.setattr(
        "ringmpi.comm.watch.GRACE", 1.0
    )  # The others wait for it at the same time, and answer.
    silent = comm.size - 1
    watch = Watch(comm.Dup(), timeout=0.5)
    steps, slots = ring_of(comm, 1024 * comm.size, 2**20)
    exchange = Exchange(comm, lambda part: 2**20, lambda n: np.zeros(n, np.uint8), watch, comm.Dup())
    exchange.begin(slots)
    message = ""
    if comm.rank != silent:
        try:
            for step in steps:
                exchange.start(step.transfers)
                exchange.finish()
        except StalledRingError as error:
            message = str(error)
    # Every rank but the silent one waits for something that comes through it.
    collective_assert(comm.rank == silent or "no transfer made progress for 0.5 s" in message, message)
    collective_assert(comm.rank == silent or f"rank {silent}: no answer" in message, message)
    waits = f"rank 0: step 0: waits for kv of {silent} from rank {silent}"
    collective_assert(comm.rank != 0 or waits in message, message)
    _drain(comm, exchange)


class _Noting:
    """A communicator that notes in which order its ranks post."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm, self.rank, self.posted = comm, comm.rank, ""

    def Isend(self, *args: Any, **more: Any) -> MPI.Request:  # noqa: N802 - MPI's name
        self.posted += "s"
        return self._comm.Isend(*args, **more)

    def Irecv(self, *args: Any, **more: Any) -> MPI.Request:  # noqa: N802 - MPI's name
        self.posted += "r"
        return self._comm.Irecv(*args, **more)


@pytest.mark.ranks(least=2)
def test_sends_are_posted_before_receives(comm: MPI.Comm, collective_assert: Check) -> None:
    """Else two ranks that swap large parts over TCP do so one after the other, as jobs/netlab.sh shows."""
    steps, slots = ring_of(comm, 4 * comm.size, 64)
    noting, watch = _Noting(comm), Watch(comm.Dup(), timeout=20.0)
    exchange = Exchange(noting, lambda part: 64, lambda n: np.zeros(n, np.uint8), watch, comm.Dup())  # type: ignore[arg-type]
    exchange.begin(slots)
    for step in steps:
        exchange.start(step.transfers)
        exchange.finish()
    watch.close()
    collective_assert(noting.posted == "sr" * (comm.size - 1), noting.posted)


def ring_of(comm: MPI.Comm, seq_len: int, nbytes: int) -> tuple[list[Step], dict[int, int]]:
    """Return this rank's steps of the ring, and slots of so many bytes."""
    layout = Layout("contiguous", seq_len, comm.size)
    steps = METHODS["ring"](Shards(layout, layout, comm.rank), Pass.FORWARD)
    return steps, {held.slot: nbytes for held in parts_held(steps)}


def _drain(comm: MPI.Comm, exchange: Exchange) -> None:
    """Take back requests that nobody will complete, so that the communicator can be freed."""
    for request, *_ in exchange._pending:
        request.Cancel()
        request.Free()
    comm.Barrier()


class _Told:
    """Signals that a test sends itself."""

    def __init__(self, received: int | None) -> None:
        self.received = received


def test_a_signal_at_one_rank_reaches_all(comm: MPI.Comm, collective_assert: Check) -> None:
    """Ranks wait in a collective that the signalled rank never enters; all give up within a second."""
    signalled = comm.size // 2
    watch = Watch(comm.Dup(), timeout=60, signals=_Told(15 if comm.rank == signalled else None))  # type: ignore[arg-type]
    team = Team(comm.Dup(), watch)
    started = time.monotonic()
    try:
        if comm.rank == signalled:
            watch.look(lambda: "is signalled")
        else:
            team.barrier()
        number = None
    except Interrupted as stop:
        number = stop.signal_number
    collective_assert(number == 15)
    collective_assert(time.monotonic() - started < 5, "5 s is the limit")
    watch.look(lambda: "ends in order")  # Not a second time.


@pytest.mark.parametrize("item", [None, 3, "text", {"a": [1, 2]}], ids=str)
def test_a_team_shares_and_gathers(team: Team, collective_assert: Check, item: Any) -> None:
    collective_assert(team.allgather((team.rank, item)) == [(rank, item) for rank in range(team.size)])
    collective_assert(team.share(item if team.rank == 0 else "of another rank") == item)


def test_a_team_agrees_on_the_lowest_ranks_error(team: Team, collective_assert: Check) -> None:
    team.agree(None)
    try:
        team.agree(ConfigError(f"rank {team.rank} says no") if team.rank else None)
        message, everywhere = "", True
    except ConfigError as error:
        message, everywhere = str(error), error.everywhere
    collective_assert(everywhere)
    collective_assert(("rank 1 says no" in message) == (team.size > 1), message)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seq_len", [3, 200])
def test_shards_come_to_rank_0_in_pieces_that_know_their_place(
    team: Team,
    collective_assert: Check,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    seq_len: int,
) -> None:
    monkeypatch.setattr("ringmpi.comm.team.PIECE_NBYTES", 1000)
    whole = np.arange(2 * 3 * seq_len * 5, dtype=np.float64).reshape(2, 3, seq_len, 5)
    table = Layout(layout, seq_len, team.size)
    gathered, largest = np.full_like(whole, np.nan), 0
    for positions, piece in team.shards_by_piece(table, whole[:, :, table.positions(team.rank)]):
        gathered[:, :, positions.start : positions.stop : positions.step] = piece
        largest = max(largest, piece.nbytes)
    collective_assert(team.rank != 0 or (np.array_equal(gathered, whole) and largest <= 1000))


@pytest.mark.timeout(300)  # A busy machine may take minutes to touch 9 GB.
@pytest.mark.ranks(least=2, most=2)  # One count is enough, and two ranks need 9 GB.
def test_a_block_above_2_gib_arrives_whole(comm: MPI.Comm, collective_assert: Check) -> None:
    """2**31 + 12345 bytes between two ranks: more than a C int counts, on both MPI libraries."""
    nbytes = 2**31 + 12345
    needed = 2 * 2 * nbytes
    if min(comm.allgather(psutil.virtual_memory().available)) < 1.2 * needed:
        pytest.skip(f"needs {1.2 * needed / 1e9:.0f} GB of memory")
    steps, slots = ring_of(comm, 2, nbytes)
    exchange = Exchange(
        comm, lambda part: nbytes, lambda n: np.empty(n, np.uint8), Watch(comm.Dup(), 60), comm.Dup()
    )
    exchange.begin(slots)
    pattern = np.arange(251, dtype=np.uint8)  # A prime length, so that no chunk looks like another.
    (leaving,) = (t for t in steps[0].transfers if t.direction is Direction.SEND)
    (coming,) = (t for t in steps[0].transfers if t.direction is Direction.RECEIVE)
    exchange.slot(leaving.part, leaving.slot)[:] = np.resize(pattern + comm.rank, nbytes)
    sent = 0
    for step in steps:
        exchange.start(step.transfers)
        exchange.finish()
        sent += exchange.bytes_sent
    other = 1 - comm.rank
    arrived = exchange.slot(coming.part, coming.slot)
    same = all(
        np.array_equal(arrived[at : at + 251], (pattern + other)[: nbytes - at])
        for at in range(0, nbytes, 251 * 4001)
    )
    tail = arrived[-(nbytes % 251) :]
    collective_assert(same and np.array_equal(tail, (pattern + other)[: len(tail)]) and sent == nbytes)
