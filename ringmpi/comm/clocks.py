"""How far the clocks of the ranks are apart, by ping-pong with rank 0.

Rank 0 notes ``sent`` and ``returned`` on its clock, the other rank ``there`` on its own. Half the round
trip bounds the error of ``there - (sent + returned) / 2``, so the exchange with the smallest round trip
gives the best estimate (Cristian 1989).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ringmpi.comm.team import Team
from ringmpi.comm.watch import LONGEST_NAP
from ringmpi.trace import now

#: Exchanges a rank; the smallest of them is within microseconds of the best on a quiet node.
ROUNDS = 50

CLOCK_TAG = 2

#: Seconds from a barrier to a start by the clock: in twice the longest nap of a waiting rank all hear of it.
START_AHEAD = 2 * LONGEST_NAP

#: Seconds before the start in which a rank no longer sleeps, as it may wake later by so much.
AWAKE_BEFORE = 2e-4

#: Seconds between two calls into MPI before that.
NAP = 1e-3


def clock_offsets(team: Team, clock: Callable[[], float] = now) -> NDArray[np.float64]:
    """Return each rank's clock minus rank 0's, and the error bound. Collective.

    Parameters
    ----------
    team : Team
    clock : callable
        Returns seconds; that of traces by default.

    Returns
    -------
    ndarray of float64, shape (size, 3), on every rank
        When it was measured on rank 0's clock, the offset, and the bound of its error; seconds.
    """
    table = np.zeros((team.size, 3))
    if team.rank == 0:
        table[0, 0] = clock()
    for other in range(1, team.size):
        if team.rank == 0:
            table[other] = _measure(team, other, clock)
        elif team.rank == other:
            _answer(team, clock)
    return np.asarray(team.share(table))


def start_together(team: Team, offsets: NDArray[np.float64], clock: Callable[[], float] = now) -> None:
    """Return on all ranks at the same moment. Collective.

    Ranks leave a barrier one after the other, and milliseconds apart where they share cores, since each has
    to be given one first. So they agree on a moment, and sleep until then.

    Parameters
    ----------
    team : Team
    offsets : ndarray of float64, shape (size,)
        Each rank's clock minus rank 0's, seconds.
    clock : callable
        Returns seconds; that of traces by default.
    """
    team.barrier()  # Protects the moment from ranks that come late.
    start = team.share(clock() + START_AHEAD) + float(offsets[team.rank])
    while (left := start - AWAKE_BEFORE - clock()) > 0:
        team.comm.Iprobe()  # Or others may hear of the moment only with this rank's next call, in the pass.
        time.sleep(min(left, NAP))
    while clock() < start:
        pass


def _measure(team: Team, other: int, clock: Callable[[], float]) -> tuple[float, float, float]:
    best = (0.0, 0.0, np.inf)
    there = np.empty(1)
    for _ in range(ROUNDS):
        request = team.comm.Irecv(there, source=other, tag=CLOCK_TAG)
        sent = clock()
        team.comm.Send(np.empty(1), dest=other, tag=CLOCK_TAG)
        team.watch.wait([request], f"compares clocks with rank {other}")
        returned = clock()
        error = (returned - sent) / 2
        if error < best[2]:
            middle = (sent + returned) / 2
            best = (middle, float(there[0]) - middle, error)
    return best


def _answer(team: Team, clock: Callable[[], float]) -> None:
    ping = np.empty(1)
    for _ in range(ROUNDS):
        request = team.comm.Irecv(ping, source=0, tag=CLOCK_TAG)
        team.watch.wait([request], "compares clocks with rank 0")
        team.comm.Send(np.array([clock()]), dest=0, tag=CLOCK_TAG)
