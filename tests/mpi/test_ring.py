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
from ringmpi.errors import ConfigError, Interrupted, ShapeError, StalledRingError, TransportError
from ringmpi.layout import LAYOUTS, Layout
from ringmpi.schedule import ring

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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seq_len", [3, 64, 101])
def test_bytes_and_messages_are_the_closed_form(
    comm: MPI.Comm, collective_assert: Check, layout: str, seq_len: int
) -> None:
    """P - 1 hops, each of 2 * batch * num_kv_heads * tokens * head_dim * itemsize bytes; none at P = 1."""
    with RingAttention(comm, seq_len=seq_len, layout=layout) as attention:
        attention.forward(*shard(comm, seq_len, layout=layout))
        records = attention.trace.records
    sizes = [Layout(layout, seq_len, comm.size).shard_len(rank) for rank in range(comm.size)]
    passed_on = [sizes[(comm.rank - step) % comm.size] for step in range(comm.size - 1)]
    expected = [2 * 1 * 2 * tokens * 8 * 4 for tokens in passed_on] + [0]
    collective_assert(records["bytes_sent"].tolist() == expected, records["bytes_sent"])
    collective_assert(records["messages"].tolist() == [float(nbytes > 0) for nbytes in expected])
    collective_assert(comm.allreduce(records["flops"].sum()) == 4 * 8 * 2 * seq_len**2)


@pytest.mark.parametrize("chunk_limit", [1, 7, 1000, 2**28])
def test_chunks_give_the_same_result_and_the_same_bytes(
    comm: MPI.Comm, collective_assert: Check, chunk_limit: int
) -> None:
    mine = shard(comm, 31)
    expected, _ = ring_attention(*mine, comm)
    with RingAttention(comm, seq_len=31, chunk_limit=chunk_limit) as attention:
        out, _ = attention.forward(*mine)
        records = attention.trace.records
    collective_assert(out.tobytes() == expected.tobytes())
    chunks = -(-records["bytes_sent"] // chunk_limit)
    collective_assert(records["messages"].tolist() == chunks.tolist())


@pytest.mark.parametrize("tokens", [64, 16384])
@pytest.mark.parametrize("progress", ["wait", "poll"])
def test_transfers_complete_below_and_above_the_eager_limit(
    comm: MPI.Comm, collective_assert: Check, tokens: int, progress: str
) -> None:
    """A rank without work must still pass blocks on: with documents, most blocks are EMPTY."""
    seq_len = tokens * comm.size
    documents = (0, 1, seq_len)
    mine = shard(comm, seq_len, heads=1, head_dim=64)  # 32 KiB and 8 MiB a block.
    mask = {"documents": documents, "window": 2, "causal": True}
    with RingAttention(comm, seq_len=seq_len, progress=progress, **mask) as attention:
        out, _ = attention.forward(*mine)
        moved = attention.trace.records["bytes_sent"].sum()
    collective_assert(moved == (comm.size - 1) * 2 * tokens * 64 * 4 and np.isfinite(out).all())


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_causal_work_is_skipped_and_not_masked(
    comm: MPI.Comm, collective_assert: Check, layout: str
) -> None:
    """At 8192 tokens a causal run computes at most 15 % more than half of all pairs."""
    with RingAttention(comm, seq_len=8192, layout=layout, causal=True) as attention:
        attention.forward(*shard(comm, 8192, heads=1, layout=layout))
        computed = comm.allreduce(attention.trace.records["computed_pairs"].sum())
    collective_assert(8192 * 8193 / 2 <= computed <= 1.15 * 8192**2 / 2, computed / 8192**2)


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
        exchange = attention._exchange
        exchange._comm = _NotesTags(exchange._comm, tags)  # type: ignore[assignment]
        start = exchange.start

        def far_along(transfers: Any) -> None:
            exchange._step += 32767  # As in the middle of a ring of 40 000 ranks.
            start(transfers)
            exchange._step -= 32767

        exchange.start = far_along  # type: ignore[method-assign]
        out, _ = attention.forward(*mine)
    collective_assert(out.tobytes() == expected.tobytes())
    passed_on = comm.allgather(tags)
    collective_assert(
        any(passed_on) and all(tag <= 32767 for own in passed_on for tag in own), passed_on
    )


def test_ranks_that_disagree_all_raise_alike(comm: MPI.Comm, collective_assert: Check) -> None:
    q, k, v = shard(comm, 16)
    last = comm.rank == comm.size - 1
    odd: dict[str, Callable[[], Any]] = {
        "dtype": lambda: ring_attention(*((a.astype("f8") if last else a) for a in (q, k, v)), comm),
        "heads": lambda: ring_attention(*((a[:, :1] if last else a) for a in (q, k, v)), comm),
        "causal": lambda: ring_attention(q, k, v, comm, causal=last),
        "rank of array": lambda: RingAttention(comm, seq_len=16).forward(q[0] if last else q, k, v),
        "tokens": lambda: RingAttention(comm, seq_len=16).forward(q[:, :, 1:] if last else q, k, v),
        "integers": lambda: ring_attention(*((a.astype(int) if last else a) for a in (q, k, v)), comm),
    }
    for what, call in odd.items():
        if comm.size == 1 and what in ("dtype", "heads", "causal"):
            continue  # One rank cannot disagree with itself.
        try:
            call()
            raised = None
        except ShapeError as error:
            raised = str(error)
        collective_assert(raised is not None, f"{what}: nothing raised")
        collective_assert(len(set(comm.allgather(raised))) == 1, f"{what}: {raised}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "zagzig"}, "zigzag"),
        ({"method": "rings"}, "did you mean 'ring'"),
        ({"device": "gpu"}, "numpy"),
        ({"progress": "never"}, "poll, wait"),
        ({"window": -1}, "must be 0"),
        ({"documents": [0, 5]}, "append 16"),
        ({"chunk_limit": 0}, "at least 1 byte"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_parameters_are_refused_on_every_rank(
    comm: MPI.Comm, collective_assert: Check, options: dict[str, Any], words: str
) -> None:
    try:
        ring_attention(*shard(comm, 16), comm, **options)
        message = ""
    except ConfigError as error:
        message = str(error)
    collective_assert(words in message, message)


@pytest.mark.ranks(least=2)
def test_a_damaged_block_is_noticed(
    comm: MPI.Comm, collective_assert: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = Exchange._compare_checksums

    def damage(self: Exchange) -> None:
        if comm.rank == 0 and self._step == 1:
            self._slots[1][17] ^= 1
        compare(self)

    monkeypatch.setattr(Exchange, "_compare_checksums", damage)
    try:
        with RingAttention(comm, seq_len=64, check_transfers=True, timeout=2.0) as attention:
            attention.forward(*shard(comm, 64))
        message = ""
    except (TransportError, StalledRingError) as error:
        message = str(error)
    told = f"block {comm.size - 1} came damaged from rank {comm.size - 1} in step 0"
    collective_assert(comm.rank != 0 or told in message, message)


@pytest.mark.ranks(least=2)
def test_a_silent_rank_ends_the_wait_with_a_picture(comm: MPI.Comm, collective_assert: Check) -> None:
    """The last rank never enters the ring. The others say what they wait for, and it gives no answer."""
    silent = comm.size - 1
    layout = Layout("contiguous", 1024 * comm.size, comm.size)
    watch = Watch(comm.Dup(), timeout=0.5)
    exchange = Exchange(comm, [2**20] * comm.size, lambda n: np.zeros(n, np.uint8), watch)
    message = ""
    if comm.rank != silent:
        try:
            for step in ring(layout, comm.rank):
                exchange.start(step.transfers)
                exchange.finish()
        except StalledRingError as error:
            message = str(error)
    # Every rank but the silent one waits for something that comes through it.
    collective_assert(comm.rank == silent or "no transfer made progress for 0.5 s" in message, message)
    collective_assert(comm.rank == silent or f"rank {silent}: no answer" in message, message)
    waits = f"rank 0: step 0: waits for block {silent} from rank {silent}"
    collective_assert(comm.rank != 0 or waits in message, message)
    _drain(comm, exchange)


def _drain(comm: MPI.Comm, exchange: Exchange) -> None:
    """Take back requests that nobody will complete, so that the communicator can be freed."""
    for message in exchange._pending:
        message.request.Cancel()
        message.request.Free()
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


@pytest.mark.ranks(least=2, most=2)  # One count is enough, and two ranks need 9 GB.
def test_a_block_above_2_gib_arrives_whole(comm: MPI.Comm, collective_assert: Check) -> None:
    """2**31 + 12345 bytes between two ranks: more than a C int counts, on both MPI libraries."""
    nbytes = 2**31 + 12345
    needed = 2 * 2 * nbytes
    if min(comm.allgather(psutil.virtual_memory().available)) < 1.2 * needed:
        pytest.skip(f"needs {1.2 * needed / 1e9:.0f} GB of memory")
    layout = Layout("contiguous", 2, 2)
    exchange = Exchange(comm, [nbytes, nbytes], lambda n: np.empty(n, np.uint8), Watch(comm.Dup(), 60))
    pattern = np.arange(251, dtype=np.uint8)  # A prime length, so that no chunk looks like another.
    exchange.slot(0, comm.rank)[:] = np.resize(pattern + comm.rank, nbytes)
    sent = 0
    for step in ring(layout, comm.rank):
        exchange.start(step.transfers)
        exchange.finish()
        sent += exchange.bytes_sent
    other = 1 - comm.rank
    arrived = exchange.slot(1, other)
    same = all(
        np.array_equal(arrived[at : at + 251], (pattern + other)[: nbytes - at])
        for at in range(0, nbytes, 251 * 4001)
    )
    tail = arrived[-(nbytes % 251) :]
    collective_assert(same and np.array_equal(tail, (pattern + other)[: len(tail)]) and sent == nbytes)
