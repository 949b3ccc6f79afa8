"""What every contender's process does: obey the driver, one command at a time.

Between two commands a worker sleeps in a read, so that it takes no core from the contender that runs.
"""

from __future__ import annotations

import gc
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import numpy as np
from numpy.typing import NDArray

from case import Array, Case


class Unsupported(Exception):  # noqa: N818  # it is no error
    """Raised for a case that a contender does not offer; the message says why."""


class Job(ABC):
    """A case, made ready to run again and again.

    Attributes
    ----------
    positions : ndarray or None
        Global positions of the tokens of this rank; None for all, in order.
    """

    positions: NDArray[np.int64] | None = None

    @abstractmethod
    def run(self) -> Any:
        """Compute once. This is what is timed."""

    @abstractmethod
    def outputs(self, result: Any) -> dict[str, Array]:
        """Return what `run` returned as float32, [batch, heads, tokens, head_dim], by tensor."""

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Give back what does not come back by itself."""


def serve(
    address: str,
    prepare: Callable[[Case, str], Job],
    facts: dict[str, str],
    rank: int = 0,
    barrier: Callable[[], object] = lambda: None,
) -> None:
    """Obey the driver until it hangs up.

    Parameters
    ----------
    address : str
        Of the driver's socket.
    prepare : callable
        Makes a job of a case and the layout of its shards.
    facts : dict
        What to tell about this contender: versions and settings.
    rank : int
        Of this process among those of the contender.
    barrier : callable
        Lets all ranks of the contender start together.
    """
    driver = Client(address, family="AF_UNIX")
    driver.send((rank, facts))
    jobs: dict[str, Job] = {}
    while True:
        try:
            command, layout, case = driver.recv()
        except EOFError:
            return
        try:
            driver.send(("done", _obey(command, layout, case, jobs, prepare, barrier)))
        except Unsupported as reason:
            driver.send(("unsupported", str(reason)))
        except Exception as error:
            traceback.print_exc()
            driver.send(("failed", f"{type(error).__name__}: {error}".splitlines()[0]))


def _obey(
    command: str,
    layout: str,
    case: Case | None,
    jobs: dict[str, Job],
    prepare: Callable[[Case, str], Job],
    barrier: Callable[[], object],
) -> Any:
    if command == "forget":
        for job in jobs.values():
            job.close()
        jobs.clear()
        gc.collect()
        return None
    if command == "prepare":
        assert case is not None
        jobs[layout] = prepare(case, layout)
        return None
    job = jobs[layout]
    if command == "check":
        barrier()
        return job.positions, job.outputs(job.run())
    assert command == "run"
    gc.disable()
    barrier()
    # One machine, so one clock: the driver takes the first start and the last end over the ranks.
    started = time.perf_counter()
    result = job.run()
    ended = time.perf_counter()
    gc.enable()
    del result  # Giving memory back is not timed.
    return started, ended
