"""What a waiting rank keeps an eye on: the clock, signals, and word from ranks in trouble.

Word travels as small messages on a communicator of its own, so no transfer can be taken for one. They are
short enough to be sent eagerly, so a rank in trouble never waits for them to be read.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from mpi4py import MPI

from ringmpi.errors import Interrupted, StalledRingError

#: Longest word, in characters; with its quotes well below the smallest eager limit known, 1 KiB.
WORD_LENGTH = 400

#: Seconds between looks for word: rare enough to cost nothing, often enough to stop within a second.
LOOK_INTERVAL = 0.02

#: Seconds that a rank at its time limit listens for the others' states before it draws the ring.
GRACE = 2.0

#: A rank that waits spins this many seconds, yielding its core, and then sleeps between tests, for a part of
#: the time that it has waited. Short stalls are measured sharply, long ones to within that part, and
#: ranks that wait for minutes leave the cores to others.
SPIN = 0.005
NAP_PART = 0.02
LONGEST_NAP = 0.01

#: What schedulers send before they kill: SIGTERM, and SIGUSR1 by `--signal`.
HEEDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Signals:
    """Remembers a signal instead of dying of it. Local."""

    def __init__(self) -> None:
        self.received: int | None = None

    def heed(self) -> None:
        """Take over the signals that ask a job to end."""
        for number in HEEDED_SIGNALS:
            signal.signal(number, self._remember)

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.received = number


class Watch:
    """The one place where waiting is given up.

    Parameters
    ----------
    comm : MPI.Comm
        Of the ranks that watch together; nobody else may communicate on it.
    timeout : float
        Seconds without progress after which a transfer is given up.
    signals : Signals, optional
        Where signals are remembered; without it none is heeded.
    """

    def __init__(self, comm: MPI.Comm, timeout: float, signals: Signals | None = None) -> None:
        self.timeout = timeout
        self._comm = comm
        self._signals = signals or Signals()
        self._told: dict[int, str] = {}
        self._asking: set[int] = set()
        self._stop: int | None = None
        self._next_look = 0.0
        self._sends: list[tuple[MPI.Request, bytes]] = []
        self._abandoned: list[MPI.Request] = []
        self._armed = True

    def close(self) -> None:
        """Give the communicator back to MPI. Collective."""
        self._comm.Free()

    def disarm(self) -> None:
        """Heed no signal from now on: the work is done and only its end is left. Local."""
        self._armed = False

    def look(self, doing: Callable[[], str]) -> None:
        """Give up if a signal came, here or at another rank; answer ranks that ask. Local.

        Parameters
        ----------
        doing : callable
            Says what this rank does, for others' pictures of the ring.

        Raises
        ------
        Interrupted
            Soon after any rank received a signal. Only once: what follows is the orderly end.
        """
        if not self._armed:
            return
        if self._signals.received is not None and self._stop is None:
            self._stop = self._signals.received
            self._tell({"stop": self._stop})
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_INTERVAL
            self._listen(doing)
        if self._stop is not None:
            self._armed = False
            raise Interrupted(self._stop)

    def give_up(self, doing: Callable[[], str]) -> None:
        """End a wait that lasted too long, with a picture of the ring. Local.

        Raises
        ------
        StalledRingError
            Always, after a short time in which the others say what they do.
        """
        self._ask(doing)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and len(self._told) < self._comm.size:
            self._listen(doing)
            time.sleep(LONGEST_NAP)
        if min(self._asking) < self._comm.rank:
            # One picture is enough: the lowest rank that asked draws it and ends the job meanwhile.
            time.sleep(GRACE)
        lines = [
            f"  rank {rank}: {self._told.get(rank, 'no answer: computing, stopped or gone')}"
            for rank in range(self._comm.size)
        ]
        raise StalledRingError(
            f"no transfer made progress for {self.timeout:g} s on rank {self._comm.rank} of "
            f"{self._comm.size}; the ring:\n" + "\n".join(lines)
        )

    def wait(self, requests: Iterable[MPI.Request], doing: str) -> None:
        """Wait for requests that may take as long as they like, such as those of a collective.

        Raises
        ------
        Interrupted
            As `look` does.
        """
        pending = list(requests)
        patience = Patience()
        try:
            while not MPI.Request.Testall(pending):
                self.look(lambda: doing)
                patience.rest()
        except Interrupted:
            # MPI may still write to their buffers, which live as long as the requests do.
            self._abandoned += pending
            raise

    def _ask(self, doing: Callable[[], str]) -> None:
        self._asking.add(self._comm.rank)
        self._told[self._comm.rank] = doing()[:WORD_LENGTH]
        self._tell({"asks": self._told[self._comm.rank]})

    def _tell(self, word: dict[str, Any], to: Iterable[int] | None = None) -> None:
        message = json.dumps(word).encode()
        for rank in range(self._comm.size) if to is None else to:
            if rank != self._comm.rank:
                request = self._comm.Isend([message, MPI.BYTE], dest=rank)
                self._sends.append((request, message))

    def _listen(self, doing: Callable[[], str]) -> None:
        status = MPI.Status()
        while self._comm.Iprobe(source=MPI.ANY_SOURCE, status=status):
            buffer = bytearray(status.Get_count(MPI.BYTE))
            self._comm.Recv([buffer, MPI.BYTE], source=status.source, tag=status.tag)
            word = json.loads(buffer)
            if "stop" in word and self._stop is None:
                self._stop = int(word["stop"])
            if "asks" in word:
                self._asking.add(status.source)
                self._tell({"does": doing()[:WORD_LENGTH]}, to=[status.source])
            if "asks" in word or "does" in word:
                self._told[status.source] = str(word.get("asks", word.get("does")))


class Patience:
    """Rests between two tests of a request: first yields the core, later sleeps. Local."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def rest(self) -> None:
        """Let others run for a moment."""
        waited = time.monotonic() - self._since
        if waited < SPIN:
            os.sched_yield()
        else:
            time.sleep(min(waited * NAP_PART, LONGEST_NAP))
