"""One pass of all ranks, by the quicker of two ways that give the same moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.errors import ConfigError
from ringmpi.model.machine import Machine
from ringmpi.simulator.disturbance import Disturbance
from ringmpi.simulator.events import events
from ringmpi.simulator.network import shared_capacities
from ringmpi.simulator.record import Recorder, watched_ranks
from ringmpi.simulator.recurrence import OutOfOrderError, recurrence
from ringmpi.simulator.work import Work

Array = NDArray[Any]
Ranks = NDArray[np.intp]

#: Steps of all ranks that are gone through event after event where every rank has moments of its own, with
#: noise: some ten minutes.
MOST_EVENTS = 2**20


#: Told how much is done, of how much.
Progress = Callable[[int, int], None]


def _silent(done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Simulated:
    """A pass that was simulated.

    Attributes
    ----------
    records : ndarray of RECORD, shape (ranks, steps)
        Or condensed, shape (ranks, 1), see `record`.
    watched : ndarray of intp
        Ranks whose steps are kept in full.
    steps : ndarray of RECORD, shape (watched, steps)
    """

    records: Array
    watched: Ranks
    steps: Array

    @property
    def condensed(self) -> bool:
        """Whether each rank has one record, all its steps laid end to end."""
        return len(self.watched) < len(self.records)


class Simulation:
    """Passes of one direction on a machine. Local.

    Parameters
    ----------
    work : Work
    machine : Machine
    progress : str
        ``wait``: a flow above the eager limit moves only while both its ends wait. Otherwise all move.
    disturbance : Disturbance
    """

    def __init__(self, work: Work, machine: Machine, progress: str, disturbance: Disturbance) -> None:
        self._work = work
        self._waits = progress == "wait"
        self._disturbance = disturbance
        self._shared = shared_capacities(machine, work.size, work.connections())
        self._watched = watched_ranks(work.size, work.steps, disturbance.slow)
        self.by_recurrence = not self._shared.any

    @property
    def way(self) -> str:
        """How passes are gone through."""
        return "recurrence" if self.by_recurrence else "events"

    @property
    def held_nbytes(self) -> Array:
        """Bytes of buffers, shape (ranks,)."""
        return self._work.held_nbytes

    def run(self, repeat: int = 0, computing: bool = True, progress: Progress = _silent) -> Simulated:
        """Simulate a pass; without compute its transfers alone.

        Parameters
        ----------
        repeat : int
            Each has noise of its own.
        computing : bool
        progress : callable
            Told how many steps of all ranks are done, of how many.

        Raises
        ------
        ConfigError
            If it would take hours.
        """
        if self.by_recurrence:
            try:
                return self._run(repeat, computing, progress)
            except OutOfOrderError:
                self.by_recurrence = False
        work = self._work
        if self._disturbance.noise and work.size * work.steps > MOST_EVENTS:
            raise ConfigError(
                f"ranks={work.size}: with noise the {work.size * work.steps} steps of all ranks, "
                f"whose transfers "
                f"hold each other up, would be gone through one by one; use --noise 0, fewer ranks, "
                f"or method ring "
                f"on links of which no rank shares one"
            )
        return self._run(repeat, computing, progress)

    def _run(self, repeat: int, computing: bool, progress: Progress) -> Simulated:
        work = self._work
        recorder = Recorder(work.size, work.steps, work.flops_per_pair, self._watched, progress)
        if self.by_recurrence:
            recurrence(
                work, self._disturbance, repeat, recorder, waits=self._waits, computing=computing
            )
        else:
            events(
                work,
                self._shared,
                self._disturbance,
                repeat,
                recorder,
                waits=self._waits,
                computing=computing,
            )
        recorder.finish()
        return Simulated(recorder.condensed(), self._watched, recorder.records)
