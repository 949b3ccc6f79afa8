"""What happened when: one record a step, on the rank's own clock.

Measured runs fill a trace from the clock, simulated ones from a model; everything that reads traces
(metrics, file, report) cannot tell which.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def now() -> float:
    """Return seconds on this rank's own clock, on which all its moments are taken. Local."""
    return time.perf_counter()


@dataclass(frozen=True)
class Quantity:
    """One column of a trace: its unit, and what it is."""

    unit: str
    description: str


#: Moments, in the order in which they pass. `received` and `sent` are NaN in a step without transfers.
MOMENTS = {
    "started": Quantity("s", "the step begins"),
    "posted": Quantity("s", "its sends and receives are posted"),
    "launched": Quantity("s", "its compute begins"),
    "compute_done": Quantity("s", "its compute is done"),
    "received": Quantity("s", "the last receive is seen complete"),
    "sent": Quantity("s", "the last send is seen complete"),
    "step_end": Quantity("s", "the step ends"),
}

#: What the step waited for longest; NaN in a step without transfers, and in files of an older ringmpi.
AWAITED = {
    "waited_for": Quantity("1", "the rank from or to which the transfer seen complete last went"),
    "peer_posted": Quantity("s", "that rank posts it, on its own clock; NaN where it received"),
}

#: What progress costs the compute. Under `poll` calls delay it; a thread takes CPU time beside it.
COSTS = {
    "polling": Quantity("s", "in MPI calls while computing, or the CPU time of the helper thread"),
}

#: Counts. `computed_pairs` is what the device worked on; the surplus over `pairs` was masked.
COUNTS = {
    "bytes_sent": Quantity("B", "bytes passed to MPI for sending"),
    "messages": Quantity("1", "messages passed to MPI for sending"),
    "hops": Quantity("1", "blocks and other parts that they were"),
    "pairs": Quantity("1", "allowed query-key pairs, over batch and heads"),
    "computed_pairs": Quantity("1", "pairs worked on, over batch and heads"),
    "flops": Quantity("1", "4 * head_dim for every allowed pair, 10 * head_dim in the backward pass"),
    "tiles": Quantity("1", "tiles computed, over batch and KV heads"),
    "tiles_unmasked": Quantity("1", "tiles computed without a mask, being allowed as a whole"),
    "tiles_skipped": Quantity("1", "tiles left out because no pair in them is allowed"),
}

#: What a device with a clock of its own says of the same compute as `launched` and `compute_done` do.
DEVICE_TIMES = {
    "device_time": Quantity("s", "attending, between events of the GPU; 0 on devices without"),
}

QUANTITIES = MOMENTS | AWAITED | COSTS | DEVICE_TIMES | COUNTS

#: A record a step. Counts are float64 too: exact up to 2**53, and NaN where nothing was recorded.
RECORD = np.dtype([(name, np.float64) for name in QUANTITIES])


@dataclass
class Tally:
    """What a device did in one attend."""

    pairs: int = 0
    computed_pairs: int = 0
    flops: int = 0
    tiles: int = 0
    tiles_unmasked: int = 0
    tiles_skipped: int = 0
    device_time: float = 0.0

    def counts(self) -> dict[str, float]:
        """Return what adds up over the attends of a step, by the name of its column."""
        return vars(self).copy()


class Trace:
    """The records of one pass over a schedule.

    Parameters
    ----------
    steps : int
        Steps of the schedule.
    clock : callable, optional
        Returns seconds; never falls.

    Attributes
    ----------
    records : ndarray of RECORD, shape (steps,)
    """

    def __init__(self, steps: int, clock: Callable[[], float] = now) -> None:
        self.records: NDArray[Any] = np.zeros(steps, RECORD)
        for name in (*MOMENTS, *AWAITED):
            self.records[name] = np.nan
        self._clock = clock
        self._step = 0

    def begin(self, step: int) -> None:
        """Make `step` the one that is recorded, starting now."""
        self._step = step
        self.mark("started")

    def mark(self, moment: str) -> None:
        """Record that a moment has come."""
        self.records[moment][self._step] = self._clock()

    def note(self, **values: float) -> None:
        """Record what others have found out about the step."""
        for name, value in values.items():
            self.records[name][self._step] = value

    def count(self, **counts: float) -> None:
        """Add to the counts of the step."""
        for name, number in counts.items():
            self.records[name][self._step] += number
