"""Who calls MPI while the device computes, and what it does for the transfers.

Nonblocking is not asynchronous: with nobody inside MPI large messages do not move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI
from sharded import SOME_WAYS, Check, Problem, Way, both_passes, make, random_tensors

from ringmpi import RingAttention
from ringmpi.attention import execute
from ringmpi.comm.exchange import Exchange
from ringmpi.comm.policy import PROGRESS
from ringmpi.comm.team import Team
from ringmpi.comm.watch import Watch
from ringmpi.errors import ConfigError, Interrupted
from ringmpi.layout import Layout
from ringmpi.schedule import METHODS, Pass, Shards
from ringmpi.schedule.steps import parts_held
from ringmpi.trace import Tally, Trace

pytestmark = pytest.mark.mpi

#: Far above any eager limit, and large beside what a call into MPI takes.
NBYTES = 16 * 2**20

#: Seconds: some ten times what moving them takes on a machine of today.
COMPUTE = 0.1

#: By how many seconds rank 1 begins later: more than it takes to post.
LATER = 0.02

#: Passes, of which the median counts.
REPEATS = 5

PROBLEM = Problem(48, 0, "zigzag", "causal", heads=8, kv_heads=8, head_dim=16, dtype="float32")


class Sleep:
    """Compute that leaves the core to others, in slices after which a rank may poll."""

    def __init__(self, seconds: float) -> None:
        self.tally = Tally()
        self._until = time.perf_counter() + seconds

    def advance(self) -> bool:
        """Sleep a millisecond."""
        time.sleep(1e-3)
        return time.perf_counter() >= self._until


class Sleeping:
    """A workspace in which attending is sleeping."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def do(self, chores: Any) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing."""

    def works(self, attends: Any) -> Iterator[Sleep]:
        """Yield one work a step, where there is something to attend to."""
        yield from [Sleep(self.seconds)] if attends else []


class Ring(NamedTuple):
    """Of a transfer to rank 0: what is left of it after the compute, and what progress took."""

    exposed: float
    polling: float


def ring(team: Team, progress: str) -> Ring:
    """Let a ring of two sleep and transfer at once."""
    comm = team.comm
    layout = Layout("contiguous", comm.size, comm.size)
    steps = METHODS["ring"](Shards(layout, layout, comm.rank), Pass.FORWARD)
    notes = comm.Dup()
    exchange = Exchange(
        comm, lambda part: NBYTES, lambda n: np.zeros(n, np.uint8), team.watch, notes, progress=progress
    )
    passes = []
    for _ in range(REPEATS + 1):
        exchange.begin({held.slot: NBYTES for held in parts_held(steps)})
        trace = Trace(len(steps))
        team.barrier()
        time.sleep(LATER * comm.rank)
        with exchange.moving():
            execute(steps, exchange, Sleeping(COMPUTE), trace)  # type: ignore[arg-type]
        passes.append(trace.records)
    notes.Free()
    records = np.stack(team.allgather(np.stack(passes[1:])))  # The first one touches the memory.
    left = np.maximum(records["received"] - records["compute_done"], 0)[0, :, 0]
    return Ring(float(np.median(left)), float(records["polling"].sum()))


def plain_copy() -> float:
    """Return how fast this machine can move as many bytes at best; seconds."""
    source, target = np.ones(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
    took = []
    for _ in range(10):
        began = time.perf_counter()
        np.copyto(target, source)
        took.append(time.perf_counter() - began)
    return min(took)


@pytest.mark.ranks(least=2, most=2)  # On two cores a third rank would have to wait for one.
def test_only_who_calls_mpi_while_computing_hides_transfers(
    team: Team, collective_assert: Check
) -> None:
    """The demonstration that nonblocking is not asynchronous.

    Without calls a transfer begins when the compute is done, and MPI cannot copy faster than memory allows.
    With calls it ends long before the compute, which takes some ten times as long, and nothing is left. Half
    a plain copy lies between, whatever else the machine does.

    Rank 1 posts a little later, and may find all of its part at hand, and take it while it posts. Rank 0
    cannot, so it is looked at.
    """
    found = {policy: ring(team, policy) for policy in PROGRESS}
    half = min(team.allgather(plain_copy())) / 2
    collective_assert(found["wait"].exposed > half, f"{half} {found}")
    collective_assert(found["wait"].polling == 0, found)
    for policy in ("poll", "thread"):
        collective_assert(found[policy].exposed < half, f"{policy}: {half} {found}")
        # Whoever moves 16 MiB needs time for it; who only waits takes none from the compute.
        collective_assert(found[policy].polling > 0, found)


def helpers() -> list[str]:
    """Return the helper threads that there are in this process."""
    return [thread.name for thread in threading.enumerate() if "ringmpi" in thread.name]


@pytest.mark.parametrize("way", SOME_WAYS, ids=str)
def test_a_thread_changes_no_bit_and_ends_with_the_pass(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """Also where it moves checked parts in chunks, over a link on which they take their time."""
    whole = random_tensors(PROBLEM)
    mine = PROBLEM.shards(comm, whole)
    with make(comm, way, PROBLEM) as attention:
        expected = both_passes(attention, mine)
    options: list[dict[str, Any]] = [
        {},
        {"chunk_limit": 100, "check_transfers": True},
        {"link": "1Gbit/s,1ms", "check_transfers": True},
    ]
    for given in options:
        with make(comm, way, PROBLEM, progress="thread", **given) as attention:
            for _ in range(2):
                found = both_passes(attention, mine)
                same = all(found[name].tobytes() == expected[name].tobytes() for name in expected)
                collective_assert(same, f"{given}")
                collective_assert(helpers() == [], helpers())
            attention.transfers_alone()
        collective_assert(helpers() == [], helpers())


@pytest.mark.ranks(least=2)
def test_what_goes_wrong_in_the_thread_is_raised_by_the_pass(
    comm: MPI.Comm, collective_assert: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = Exchange._test

    def broken(self: Exchange) -> bool:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("a fault of the test")
        return test(self)

    monkeypatch.setattr(Exchange, "_test", broken)
    # Slow enough for the thread to have its turn in the first step of each rank.
    monkeypatch.setattr("ringmpi.workspace.Workspace.works", lambda self, attends: iter([Sleep(0.05)]))
    message, where = "", ""
    mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
    attention = make(comm, Way("ring"), PROBLEM, progress="thread")
    try:
        attention.forward(mine["q"], mine["k"], mine["v"])
    except RuntimeError as error:
        message, where = str(error), "".join(frame.name for frame in _frames(error))
    collective_assert(message == "a fault of the test" and "broken" in where, message + where)
    collective_assert(helpers() == [], helpers())
    # Nobody has finished, so all can: the transfers are still under way.
    monkeypatch.setattr(Exchange, "_test", test)
    assert attention._engine is not None
    attention._engine.exchange.finish()
    attention.close()


def _frames(error: BaseException) -> Any:
    import traceback

    return traceback.extract_tb(error.__traceback__)


@pytest.mark.ranks(least=2)
def test_an_error_of_the_device_ends_the_thread_too(
    comm: MPI.Comm, collective_assert: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is in the middle of a call that takes its time."""
    test = Exchange._test

    def lasting(self: Exchange) -> bool:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)
        return test(self)

    def fails(self: Any, attends: Any) -> Iterator[Sleep]:
        yield Sleep(0.01)
        raise MemoryError("a fault of the test")

    monkeypatch.setattr(Exchange, "_test", lasting)
    monkeypatch.setattr("ringmpi.workspace.Workspace.works", fails)
    mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
    attention = make(comm, Way("ring"), PROBLEM, progress="thread")
    try:
        attention.forward(mine["q"], mine["k"], mine["v"])
        raised = False
    except MemoryError:
        raised = True
    collective_assert(raised)
    collective_assert(helpers() == [], helpers())
    assert attention._engine is not None
    attention._engine.exchange.finish()
    attention.close()


class _Told:
    """Signals that a test sends itself."""

    def __init__(self) -> None:
        self.received: int | None = None


@pytest.mark.ranks(least=2)
def test_a_signal_is_heeded_while_a_thread_moves_data(
    comm: MPI.Comm, collective_assert: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank is signalled in the middle of a compute of 20 s; all give up within seconds."""
    signals = _Told()
    watch = Watch(comm.Dup(), timeout=60, signals=signals)  # type: ignore[arg-type]

    def works(self: Any, attends: Any) -> Iterator[Sleep]:
        if comm.rank == comm.size // 2:
            signals.received = 15
        yield Sleep(20.0)

    monkeypatch.setattr("ringmpi.workspace.Workspace.works", works)
    mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
    attention = make(comm, Way("ring"), PROBLEM, progress="thread", watch=watch)
    started, number = time.monotonic(), None
    try:
        attention.forward(mine["q"], mine["k"], mine["v"])
    except Interrupted as stop:
        number = stop.signal_number
    collective_assert(number == 15, str(number))
    collective_assert(time.monotonic() - started < 10, "half of the compute")
    collective_assert(helpers() == [], helpers())
    assert attention._engine is not None
    attention._engine.exchange.finish()
    attention.close()


@pytest.mark.parametrize("who", ["all", "last"])
def test_a_thread_is_refused_alike_where_mpi_cannot_have_one(
    comm: MPI.Comm, collective_assert: Check, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    if who == "all" or comm.rank == comm.size - 1:
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED)
    message = ""
    try:
        RingAttention(comm, seq_len=16, progress="thread")
    except ConfigError as error:
        message = str(error)
    words = (
        "progress=thread: needs MPI_THREAD_MULTIPLE, and MPI gives thread level 'funneled' here; use "
    )
    collective_assert(message.startswith(words) and "\n" not in message, message)
    collective_assert(len(set(comm.allgather(message))) == 1, message)
    for policy in ("wait", "poll"):
        RingAttention(comm, seq_len=16, progress=policy).close()


@pytest.mark.parametrize("policy", PROGRESS)
def test_what_progress_takes_is_in_the_trace(
    comm: MPI.Comm, collective_assert: Check, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Calls of at least 1 ms each show up where the compute has some; of a thread only its CPU time does."""
    monkeypatch.setattr("ringmpi.workspace.Workspace.works", lambda self, attends: iter([Sleep(0.02)]))
    test = Exchange._test

    def slow(self: Exchange) -> bool:
        time.sleep(1e-3)
        return test(self)

    monkeypatch.setattr(Exchange, "_test", slow)
    mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
    with make(comm, Way("ring"), PROBLEM, progress=policy) as attention:
        attention.forward(mine["q"], mine["k"], mine["v"])
        records = attention.trace.records
    polling, compute = records["polling"], records["compute_done"] - records["launched"]
    collective_assert((polling <= compute + 1e-6).all(), f"{polling} {compute}")
    if policy == "wait":
        collective_assert((polling == 0).all(), f"{polling}")
    elif policy == "poll":
        collective_assert((polling >= 1e-3).all(), f"{polling}")
    else:
        collective_assert((polling > 0).all() and (polling < compute / 2).all(), f"{polling} {compute}")
