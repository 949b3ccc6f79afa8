"""Waiting, and the one place where it is given up.

No wait blocks inside MPI. Each is a loop of tests with a rest in between, during which the rank heeds
signals, answers ranks that ask what it does, and after the time limit asks them itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from mpi4py import MPI

from ringmpi.comm.signals import Signals
from ringmpi.comm.word import Status, Word
from ringmpi.errors import Interrupted, StalledRingError
from ringmpi.trace import now

#: Seconds between looks for word: rare enough to cost nothing, often enough to stop within a second.
LOOK_INTERVAL = 0.02

#: Seconds that a rank which has asked waits for answers. A rank answers between tiles and while it waits.
GRACE = 2.0

#: A rank that waits spins this many seconds, yielding its core, and then sleeps between tests, for a part of
#: the time that it has waited. Short stalls are measured sharply, long ones to within that part, and
#: ranks that wait for minutes leave the cores to others.
SPIN = 0.005
NAP_PART = 0.02
LONGEST_NAP = 0.01


class Watch:
    """What a rank keeps an eye on while it waits. Its methods are local unless they say otherwise.

    Parameters
    ----------
    comm : MPI.Comm
        Of the ranks that watch together; nobody else may communicate on it.
    timeout : float
        Seconds without progress after which a waiting rank asks the others what they do.
    signals : Signals, optional
        Where signals are remembered; without it none is heeded.
    """

    def __init__(self, comm: MPI.Comm, timeout: float, signals: Signals | None = None) -> None:
        self.timeout = timeout
        self._comm = comm
        self._word = Word(comm)
        self._signals = signals or Signals()
        self._next_look = 0.0
        self._abandoned: list[MPI.Request] = []
        self._armed = True
        self._held = False

    def close(self) -> None:
        """Give the communicator back to MPI. Collective."""
        self._comm.Free()

    def disarm(self) -> None:
        """Wait without limit and heed no signal from now on: the work is done, only its end is left."""
        self._armed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Heed no signal within the block, but pass it on; it is heeded at the first look after it."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def look(self, doing: Callable[[], str], idle: float = 0.0) -> None:
        """Give up if a signal came, here or at another rank; answer ranks that ask.

        Parameters
        ----------
        doing : callable
            Says what this rank does.
        idle : float
            Seconds for which nothing has moved for it; 0 while it works.

        Raises
        ------
        Interrupted
            Soon after any rank received a signal. Only once: what follows is the orderly end.
        """
        if not self._armed:
            return
        if self._signals.received is not None and self._word.stop is None:
            self._word.tell_stop(self._signals.received)
        at = time.monotonic()
        if at >= self._next_look:
            self._next_look = at + LOOK_INTERVAL
            self._word.listen(lambda: Status(doing(), idle))
        if self._word.stop is not None and not self._held:
            self.disarm()
            raise Interrupted(self._word.stop)

    def begin_wait(self, doing: Callable[[], str]) -> Wait:
        """Return the patience for one wait."""
        return Wait(self, doing)

    def wait(self, requests: Iterable[MPI.Request], doing: str) -> None:
        """Wait until all requests are done, such as those of a collective.

        Raises
        ------
        Interrupted, StalledRingError
            As `Wait.rest` does.
        """
        pending = list(requests)
        wait = self.begin_wait(lambda: doing)
        try:
            while not MPI.Request.Testall(pending):
                wait.rest()
        except (Interrupted, StalledRingError):
            # MPI may still write to their buffers, which live as long as the requests do.
            self._abandoned += pending
            raise

    def ask_around(self, doing: Callable[[], str], idle: float) -> None:
        """Find out, after a wait beyond the time limit, whether the others are slow or stuck.

        It is all right to wait on if every rank answers and one of them has not waited for long: that
        one works, and the others follow it.

        Raises
        ------
        StalledRingError
            Otherwise, with what each rank does.
        """
        if not self._armed:
            return
        word = self._word
        word.ask(Status(doing(), idle))
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and len(word.answers) < self._comm.size:
            self.look(doing, idle)
            time.sleep(LONGEST_NAP)
        everyone = len(word.answers) == self._comm.size
        if everyone and min(status.idle for status in word.answers.values()) < self.timeout / 2:
            return
        if min(word.asking) < self._comm.rank:
            # One picture is enough: the lowest rank that asked draws it and ends the job meanwhile.
            time.sleep(GRACE)
        raise StalledRingError(
            f"no transfer made progress for {self.timeout:g} s on rank {self._comm.rank} of "
            f"{self._comm.size}; the ring:\n" + "\n".join(self._picture())
        )

    def _picture(self) -> Iterable[str]:
        for rank in range(self._comm.size):
            status = self._word.answers.get(rank)
            yield f"  rank {rank}: {status.doing if status else 'no answer: stopped, busy or gone'}"


class Wait:
    """One wait: rests between tests, and knows for how long nothing has moved. Local."""

    def __init__(self, watch: Watch, doing: Callable[[], str]) -> None:
        self._watch = watch
        self._doing = doing
        self.progressed()

    def progressed(self) -> None:
        """Note that something moved: the time limit begins anew."""
        self._since = time.monotonic()
        self._ask_after = self._watch.timeout

    def rest(self) -> None:
        """Let others run for a moment: yield the core first, later sleep.

        Raises
        ------
        Interrupted
            If some rank received a signal.
        StalledRingError
            If nothing moves for the time limit and the ring is stuck.
        """
        idle = time.monotonic() - self._since
        self._watch.look(self._doing, idle)
        if idle > self._ask_after:
            self._watch.ask_around(self._doing, idle)
            self._ask_after = idle + self._watch.timeout / 2
        if idle < SPIN:
            os.sched_yield()
        else:
            time.sleep(min(idle * NAP_PART, LONGEST_NAP))

    def pass_time(self, until: float) -> None:
        """Let time pass until a moment of `trace.now`, or until it is time to look again.

        For what comes at a time that is known beforehand, so it counts as progress.

        Raises
        ------
        Interrupted
            If some rank received a signal.
        """
        self._watch.look(self._doing)
        self.progressed()
        left = until - now()
        if left > 0:
            time.sleep(min(left, LOOK_INTERVAL))
