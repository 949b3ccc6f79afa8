"""Clocks that run apart are found out to within the stated error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from ringmpi.comm.clocks import START_AHEAD, clock_offsets, start_together
from ringmpi.comm.team import Team

pytestmark = pytest.mark.mpi

OFFSETS = (0.0, 0.25, -0.1, 1e3)


def test_offsets_are_found_within_their_bound(
    team: Team, collective_assert: Callable[..., None]
) -> None:
    """All ranks are on one machine, whose monotonic clock they share, so the injected offset is the truth."""
    true = OFFSETS[team.rank % len(OFFSETS)]
    table = clock_offsets(team, lambda: time.perf_counter() + true)
    collective_assert(table.shape == (team.size, 3))
    for rank in range(team.size):
        _, offset, bound = table[rank]
        collective_assert(
            abs(offset - OFFSETS[rank % len(OFFSETS)]) <= bound + 1e-9, f"rank {rank}: {table}"
        )
    collective_assert(table[0].tolist()[1:] == [0.0, 0.0], "rank 0 is the measure of all")


def test_nobody_starts_before_the_moment_that_follows_the_last_ones_coming(
    team: Team, comm: MPI.Comm, collective_assert: Callable[..., None]
) -> None:
    """A rank that took its clock for rank 0's would start at once, or 0.1 s late, or never."""
    mine = OFFSETS[team.rank % len(OFFSETS)]
    time.sleep(0.03 * team.rank)
    came = time.perf_counter()
    offsets = np.array([OFFSETS[rank % len(OFFSETS)] for rank in range(team.size)])
    start_together(team, offsets, lambda: time.perf_counter() + mine)
    started = time.perf_counter()
    # Clocks with injected offsets are added up in float64, as the largest of them is 1000 s.
    start = max(comm.allgather(came)) + START_AHEAD - 1e-9
    collective_assert(started >= start, f"{start - started} s too early")


class Ticking:
    """A team of one whose clock goes on by what is slept and by each look; tells when MPI was called."""

    rank = 0

    def __init__(self) -> None:
        self.comm = self
        self.time = 0.0
        self.called: list[float] = []

    def clock(self) -> float:
        self.time += 1e-6
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def barrier(self) -> None:
        pass

    def share(self, moment: float) -> float:
        return moment

    def Iprobe(self) -> bool:  # noqa: N802  # mpi4py's name
        self.called.append(self.time)
        return False


@pytest.mark.mpi(min_size=1)
def test_mpi_goes_on_while_a_rank_waits_for_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the message that tells others of it may stay here until the pass."""
    team: Any = Ticking()
    monkeypatch.setattr(time, "sleep", team.sleep)

    start_together(team, np.zeros(1), team.clock)

    assert len(team.called) > 5
    assert np.diff([0.0, *team.called, team.time]).max() < START_AHEAD / 5


def test_drift_shows_between_two_measurements(
    team: Team, collective_assert: Callable[..., None]
) -> None:
    """A clock that runs 1000 ppm fast gains 50 us in 50 ms; the two offsets differ by that."""
    rate = 1e-3 if team.rank else 0.0
    origin = MPI.COMM_WORLD.bcast(time.perf_counter())

    def clock() -> float:
        now = time.perf_counter()
        return now + rate * (now - origin)

    before = clock_offsets(team, clock)
    time.sleep(0.05)
    after = clock_offsets(team, clock)
    for rank in range(1, team.size):
        gained = after[rank, 1] - before[rank, 1]
        expected = 1e-3 * (after[rank, 0] - before[rank, 0])
        bound = before[rank, 2] + after[rank, 2]
        collective_assert(
            abs(gained - expected) <= bound + 1e-6, f"rank {rank}: {gained} of {expected}"
        )
