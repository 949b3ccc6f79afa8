"""How far the clocks of the ranks are apart, by ping-pong with rank 0.

Rank 0 notes ``sent`` and ``returned`` on its clock, the other rank ``there`` on its own. Half the round
trip bounds the error of ``there - (sent + returned) / 2``, so the exchange with the smallest round trip
gives the best estimate (Cristian 1989).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ringmpi.comm.team import Team
from ringmpi.trace import now

#: Exchanges a rank; the smallest of them is within microseconds of the best on a quiet node.
ROUNDS = 50

CLOCK_TAG = 2


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
