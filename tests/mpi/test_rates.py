"""What is measured of a link is what an emulated one was given, and no less."""

from __future__ import annotations

import time
from typing import Any

import pytest
from mpi4py import MPI
from sharded import Check

from ringmpi.comm.link import parse_link_map
from ringmpi.comm.rates import ALONE, LARGEST_EAGER, LEAST, Links, eager_limit
from ringmpi.comm.team import Team

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(least=2, most=4)]

#: From rank 0 to rank 1 and back in a node of two; from there on between nodes, over one card a rank.
INNER, OUTER = (8e6, 5e-3), (4e6, 8e-3)
MAP = "2:64Mbit/s,5ms:32Mbit/s,8ms,shared"

#: Clocks are compared to within this on one machine, or messages arrive early by as much.
CLOCKS = 2e-4

#: Seconds by which a busy machine may see even the best of some messages late.
LATE = 4e-3


@pytest.fixture
def links(team: Team) -> Links:
    return Links(team, parse_link_map(MAP), "poll")


@pytest.mark.parametrize("peer", [1, 2])
def test_latency_and_bandwidth_are_those_of_the_link(
    links: Links, collective_assert: Check, peer: int
) -> None:
    if peer >= links.team.size:
        peer = 1
    bandwidth, latency = INNER if peer == 1 else OUTER
    nbytes = 2**17
    for found, least in (
        (links.latency(0, peer, 0.3), latency + LEAST / bandwidth),
        (links.swap(0, peer, nbytes, 0.3), latency + nbytes / bandwidth),
    ):
        collective_assert(least - CLOCKS <= found <= least + LATE, f"{found} of {least}")


@pytest.mark.ranks(least=3, most=4)
def test_a_shared_card_sends_to_all_others_one_after_the_other(
    team: Team, collective_assert: Check
) -> None:
    others, nbytes = range(1, team.size), 2**16
    links = Links(team, parse_link_map("1:64Mbit/s,5ms:32Mbit/s,8ms,shared"), "poll")
    found = links.spread(0, others, nbytes, 0.3)
    least = len(others) * nbytes / OUTER[0] + 2 * OUTER[1]
    collective_assert(least - CLOCKS <= found <= least + 2 * LATE, f"{found} of {least}")


@pytest.mark.parametrize("progress", ["poll", "wait"])
def test_overlap_is_all_with_polling_and_nothing_without(
    team: Team, collective_assert: Check, progress: str
) -> None:
    """Compute sleeps, so that ranks may share cores."""

    def compute(seconds: float, poll: object) -> float:
        assert callable(poll)
        began, busy = time.perf_counter(), 0.0
        while busy < seconds:
            time.sleep(1e-3)
            poll()
            busy = time.perf_counter() - began
        return busy

    links = Links(team, parse_link_map(MAP), progress)
    found = links.overlap(0, 1, 2**18, 0.2, compute)
    collective_assert(found >= 0.85 if progress == "poll" else found <= 0.15, str(found))


def test_the_eager_limit_is_where_sends_begin_to_need_their_receiver(
    team: Team, comm: MPI.Comm, collective_assert: Check
) -> None:
    Links(team, None, "poll").latency(0, 1, 0.01)  # Ranks are connected when they talk first.
    found = eager_limit(team, 0, 1, lambda nbytes: nbytes / 1e9)
    # No library sends 16 MiB to a receiver that is not there, and all have some room for what is small.
    collective_assert(64 <= found < LARGEST_EAGER, str(found))
    collective_assert(len(set(comm.allgather(found))) == 1)


class Buffered:
    """A team whose library swallows what is sent, and delivers what is larger only once it is asked for.

    The first messages are late, whatever their size.
    """

    LARGEST = 300

    def __init__(self, team: Team, late: int) -> None:
        self._team, self._late = team, late
        self.comm, self.watch = self, self
        self.rank, self.barrier, self.allgather = team.rank, team.barrier, team.allgather
        self._nbytes = 0

    def Isend(self, message: list[Any], dest: int, tag: int) -> Done:  # noqa: N802 - as MPI has it
        del message, dest, tag
        return Done()

    def Irecv(self, message: list[Any], source: int, tag: int) -> Done:  # noqa: N802 - as MPI has it
        del source, tag
        self._nbytes = message[0].nbytes
        return Done()

    def wait(self, requests: list[Done], doing: str) -> None:
        del requests, doing
        if self._team.rank == 1 and (self._nbytes > self.LARGEST or self._late):
            self._late = max(0, self._late - 1)
            time.sleep(2 * ALONE)


class Done:
    def Test(self) -> bool:  # noqa: N802 - as MPI has it
        return True


@pytest.mark.parametrize("late", [0, 2])
def test_what_was_only_swallowed_is_not_eager(late: int, team: Team, collective_assert: Check) -> None:
    buffered: Any = Buffered(team, late)
    found = eager_limit(buffered, 0, 1, lambda nbytes: nbytes / 1e12)
    collective_assert(found == Buffered.LARGEST, str(found))
