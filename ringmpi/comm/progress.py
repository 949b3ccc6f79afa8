"""Progress beside the compute: a thread that calls MPI while the device is busy.

Nonblocking is not asynchronous: an MPI library moves large messages while somebody calls it, and hardly
otherwise. The helper thread is that somebody, where the library lets two threads call it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from types import TracebackType

from mpi4py import MPI

from ringmpi.comm.probe import thread_level
from ringmpi.errors import ConfigError

#: Seconds between two calls: ten times as often as what moved 64 MiB in the shadow of 300 ms of compute with
#: the MPICH and Open MPI wheels, and some per cent of a core.
INTERVAL = 1e-4


def thread_refusal(progress: str) -> ConfigError | None:
    """Return why there can be no helper thread, if one is asked for; or None. Local."""
    level = thread_level(MPI)
    if progress != "thread" or level == "multiple":
        return None
    return ConfigError(
        f"progress=thread: needs MPI_THREAD_MULTIPLE, and MPI gives thread level {level!r} here; use "
        f"progress=poll, or an MPI library that is built and initialised for threads"
    )


class Helper:
    """The thread, for the length of its ``with`` block. Local.

    It is idle but between `resume` and `pause`, and there too once all that was to be moved is.

    It ends with the block, however that ends, so nothing of it is left when MPI is finalised.

    Parameters
    ----------
    move : callable
        Lets MPI make progress, and returns whether there is more to be moved.
    lock : Lock
        Held during `move`.
    """

    def __init__(self, move: Callable[[], bool], lock: Lock) -> None:
        self._move = move
        self._lock = lock
        self._going = Event()
        self._ending = False
        self._error: Exception | None = None
        self._cpu = self._cpu_before = 0.0
        self._thread = Thread(target=self._run, name="ringmpi progress", daemon=True)

    def __enter__(self) -> Helper:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:  # Or it could go to rest, having moved all, just after it is woken up to end.
            self._ending = True
            self._going.set()
        self._thread.join()

    def resume(self) -> None:
        """Let it go on: the device computes."""
        self._cpu_before = self._cpu
        self._going.set()

    def pause(self) -> float:
        """Stop it until `resume`, and return the CPU seconds that it took since the last one.

        Raises
        ------
        Exception
            What went wrong in it.
        """
        self._going.clear()
        with self._lock:  # It may be inside MPI; once this is had, it is not and will not be.
            spent = self._cpu - self._cpu_before
        self.check()
        return spent

    def check(self) -> None:
        """Raise what went wrong in the thread, which has ended by that."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            self._going.wait()
            with self._lock:
                if self._ending:
                    return
                if self._going.is_set():
                    try:
                        if not self._move():
                            self._going.clear()
                    except Exception as error:  # Whatever it is, the main thread raises it.
                        self._error = error
                        return
                self._cpu = time.thread_time()
            time.sleep(INTERVAL)
