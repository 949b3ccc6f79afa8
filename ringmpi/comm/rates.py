"""What the links between two ranks take, measured with the exchange that attention uses.

So the times are those that a step of a ring has: Python's part of it, notes, chunks and an emulated network
are in them. Of many times the least counts: what the link takes where nobody is in the way. Every function is
collective: ranks that measure nothing wait for those that do, and all learn what these found.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ringmpi.comm.clocks import clock_offsets
from ringmpi.comm.exchange import Exchange
from ringmpi.comm.link import Network
from ringmpi.comm.policy import CHUNK_LIMIT
from ringmpi.comm.team import Team, duplicate
from ringmpi.schedule.steps import Direction, Part, Payload, Transfer

#: Computes for so many seconds, calling what it is given now and then; returns the seconds of compute alone.
Compute = Callable[[float, Callable[[], None]], float]

#: Bytes of the smallest message: its time is the latency.
LEAST = 8

#: Bytes of messages, each four times the one before. A block of the largest is beyond all caches.
SIZES = tuple(4**power for power in range(6, 14))

#: Times that a message is sent at least and at most; the first time sets up connections and is not counted.
COUNTS = (5, 200)

#: Seconds in which a send that needs no help is surely done, as is a receive whose message is already here;
#: and seconds for which a receiver stays away at least.
ALONE = 2e-3
AWAY = 10e-3

#: Times that a message may come late, by what else the machine does, before it counts as not eager.
TRIES = 3

#: A receiver that takes at most this part of what the link takes, had the message come meanwhile.
HARDLY = 0.5

#: Largest eager message that is looked for, in bytes.
LARGEST_EAGER = 2**24

EAGER_TAG = 3


def _nothing() -> None:
    """Do nothing meanwhile."""


class Links:
    """The ways between the ranks of a team. Collective.

    Parameters
    ----------
    team : Team
    network : Network or None
        Emulated.
    progress : str
    chunk_limit : int
    """

    def __init__(
        self, team: Team, network: Network | None, progress: str, chunk_limit: int = CHUNK_LIMIT
    ) -> None:
        self.team = team
        self._nbytes = LEAST
        self._exchange = Exchange(
            duplicate(team.comm, team.watch),
            lambda part: LEAST if part.payload is Payload.Q else self._nbytes,
            lambda nbytes: np.ones(
                nbytes, np.uint8
            ),  # Written to, so that it is memory and not a promise.
            team.watch,
            duplicate(team.comm, team.watch),
            progress=progress,
            chunk_limit=chunk_limit,
            network=network,
            offsets=() if network is None else clock_offsets(team)[:, 1].tolist(),
        )

    def latency(self, first: int, second: int, seconds: float) -> float:
        """Return half the round trip of a small message; as many as the seconds allow."""

        def round_trip() -> float:
            if self.team.rank == first:
                began = time.perf_counter()
                self._move([self._send(second)])
                self._move([self._receive(second)])
                return time.perf_counter() - began
            self._move([self._receive(first)])
            self._move([self._send(first)])
            return 0.0

        self._size(LEAST, slots=2)
        return self._repeated((first, second), round_trip, seconds) / 2

    def swap(self, first: int, second: int, nbytes: int, seconds: float) -> float:
        """Return how long two ranks take to send each other a message at the same time."""
        self._size(nbytes, slots=2)
        return self._repeated((first, second), self._swap(first, second), seconds)

    def spread(self, first: int, others: Sequence[int], nbytes: int, seconds: float) -> float:
        """Return how long a rank takes to send a message to each of others at once, and to hear of it."""

        def there_and_back() -> float:
            if self.team.rank == first:
                began = time.perf_counter()
                self._move([self._send(other) for other in others])
                self._move([self._receive(o, Payload.Q, slot) for slot, o in enumerate(others, 1)])
                return time.perf_counter() - began
            self._move([self._receive(first)])
            self._move([self._send(first, Payload.Q)])
            return 0.0

        self._size(nbytes, slots=1 + len(others))
        return self._repeated((first, *others), there_and_back, seconds)

    def overlap(self, first: int, second: int, nbytes: int, seconds: float, compute: Compute) -> float:
        """Return which part of a swap is hidden behind as much compute, 0 to 1: the OSU benchmarks' measure.

        ``1 - (total - compute) / alone``, where `alone` is the time of the swap and `total` that of both
        together; the mean over the two ranks (osu_iallgather and kin, OSU Micro-Benchmarks).
        """
        ranks = first, second
        self._size(nbytes, slots=2)
        swap = self._swap(first, second)
        alone = self._repeated(ranks, swap, seconds, median)
        busy = 0.0

        def compute_beside() -> None:
            nonlocal busy
            busy = compute(alone, self._exchange.poll)

        def exposed() -> float:
            return swap(compute_beside) - busy

        with self._exchange.moving():
            return max(0.0, 1 - self._repeated(ranks, exposed, 2 * seconds, median) / alone)

    def _size(self, nbytes: int, slots: int) -> None:
        self._nbytes = nbytes
        self._exchange.begin(dict.fromkeys(range(slots), nbytes))

    def _send(self, peer: int, payload: Payload = Payload.KV) -> Transfer:
        return Transfer(Direction.SEND, peer, Part(payload, self.team.rank), slot=0)

    def _receive(self, peer: int, payload: Payload = Payload.KV, slot: int = 1) -> Transfer:
        return Transfer(Direction.RECEIVE, peer, Part(payload, peer), slot)

    def _move(self, transfers: Sequence[Transfer], meanwhile: Callable[[], None] = _nothing) -> None:
        self._exchange.start(tuple(transfers))
        meanwhile()
        self._exchange.finish()

    def _swap(self, first: int, second: int) -> Callable[..., float]:
        """Return what swaps messages once, with something done meanwhile, and returns the seconds."""
        other = second if self.team.rank == first else first

        def swap(meanwhile: Callable[[], None] = _nothing) -> float:
            began = time.perf_counter()
            self._move([self._send(other), self._receive(other)], meanwhile)
            return time.perf_counter() - began

        return swap

    def _repeated(
        self,
        ranks: Sequence[int],
        once: Callable[[], float],
        seconds: float,
        of_times: Callable[[Sequence[float]], float] = min,
    ) -> float:
        """Do something on some ranks as often as the seconds allow, and return what it takes.

        A rank that comes late waits less, and its peer longer by as much: so each time is the mean of the
        ranks, which is never less than that of the link. Ranks that only answer return 0 and do not count.
        """
        takes_part = self.team.rank in ranks
        if takes_part:
            once()
        began = time.perf_counter()
        if takes_part:
            once()
        least, most = COUNTS
        estimate = max(self.team.allgather(time.perf_counter() - began))
        count = min(max(int(seconds / estimate), least), most)
        found = self.team.allgather([once() for _ in range(count)] if takes_part else [])
        counted = [found[rank] for rank in ranks if any(found[rank])]
        return of_times([fmean(times) for times in zip(*counted, strict=True)])


def eager_limit(team: Team, first: int, second: int, lasting: Callable[[int], float]) -> int:
    """Return the bytes of the largest message that comes while neither its sender nor its receiver calls MPI.

    That such a send is done says little: it may have been copied, by the library or, over TCP, into the
    buffers of sockets, of which a slow link needs long to empty the first. So the receiver has to find the
    message there, too, when it comes back. Collective.

    Parameters
    ----------
    team : Team
    first, second : int
        Sender and receiver; they have talked before, so that they are connected.
    lasting : callable
        Returns the seconds that a message of so many bytes takes.

    Returns
    -------
    int
        0 if none does, at most `LARGEST_EAGER`.
    """
    low, high = 0, LARGEST_EAGER + 1
    size = LEAST
    while low < high - 1:
        if any(_comes_alone(team, first, second, size, lasting(size)) for _ in range(TRIES)):
            low = size
        else:
            high = size
        # Doubling until one does not come, then halving what is left.
        size = min(2 * low, high - 1) if high > LARGEST_EAGER else (low + high) // 2
    return low


def _comes_alone(team: Team, first: int, second: int, nbytes: int, seconds: float) -> bool:
    message: NDArray[np.uint8] = np.ones(nbytes, np.uint8)
    alone = True
    team.barrier()
    if team.rank == first:
        limit = time.perf_counter() + ALONE
        request = team.comm.Isend([message, MPI.BYTE], dest=second, tag=EAGER_TAG)
        while not (alone := bool(request.Test())) and time.perf_counter() < limit:
            os.sched_yield()
        team.watch.wait([request], f"waits for rank {second} to take a message")
    elif team.rank == second:
        request = team.comm.Irecv([message, MPI.BYTE], source=first, tag=EAGER_TAG)
        time.sleep(AWAY + 2 * seconds)
        back = time.perf_counter()
        team.watch.wait([request], f"waits for a message of rank {first}")
        alone = time.perf_counter() - back < max(ALONE, HARDLY * seconds)
    return all(team.allgather(alone))
