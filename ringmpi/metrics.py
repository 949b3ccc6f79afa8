r"""From a trace to what the ranks did with their time. The definitions live here.

For every repeat, rank and step, in seconds on the rank's own clock:

* ``step = step_end - started``;
* ``compute = compute_done - launched``, which under ``poll`` includes the calls into MPI between tiles;
* ``stall = max(0, max(received, sent) - compute_done)``: what the transfers took longer than the compute;
* ``overhead = step - compute - stall``: posting, bookkeeping, checksums.

``overlap = 1 - stall / alone``, clipped to [0, 1], where ``alone`` is what the same transfers took with no
compute beside them; NaN where nothing moved. The ``makespan`` of a repeat is the latest end minus the
earliest start over all ranks, on clocks corrected by their offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.trace import COUNTS

Array = NDArray[Any]


@dataclass(frozen=True)
class Clocks:
    """How the clocks of the ranks compare with rank 0's.

    Attributes
    ----------
    measured_at : ndarray of float64, shape (ranks,)
        When, on rank 0's clock; seconds.
    offset : ndarray of float64, shape (ranks,)
        The rank's clock minus rank 0's then; seconds.
    drift : ndarray of float64, shape (ranks,)
        Seconds by which the offset grows a second; NaN where it was measured only once.
    """

    measured_at: Array
    offset: Array
    drift: Array

    def corrected(self, moments: Array) -> Array:
        """Return moments of shape (..., ranks, steps) on rank 0's clock."""
        offset = self.offset[:, None]
        elapsed = moments - offset - self.measured_at[:, None]
        return np.asarray(moments - offset - np.nan_to_num(self.drift)[:, None] * elapsed)


@dataclass(frozen=True)
class Timings:
    """What a run recorded.

    Attributes
    ----------
    records : ndarray of trace.RECORD, shape (repeats, ranks, steps)
    alone : ndarray of trace.RECORD, shape (passes, ranks, steps)
        The transfers with no compute beside them.
    clocks : Clocks
    """

    records: Array
    alone: Array
    clocks: Clocks


def step_time(records: Array) -> Array:
    """Return the length of each step, seconds."""
    return np.asarray(records["step_end"] - records["started"])


def compute_time(records: Array) -> Array:
    """Return the compute of each step, seconds."""
    return np.asarray(records["compute_done"] - records["launched"])


def stall_time(records: Array) -> Array:
    """Return the stall of each step, seconds; 0 where nothing was transferred."""
    # fmax ignores the NaN of a direction in which nothing moved.
    arrived = np.fmax(records["received"], records["sent"])
    return np.asarray(np.fmax(0, arrived - records["compute_done"]))


def overhead_time(records: Array) -> Array:
    """Return what is neither compute nor stall, seconds."""
    return step_time(records) - compute_time(records) - stall_time(records)


def overlap(timings: Timings) -> Array:
    """Return the hidden part of each rank's transfers, medians over repeats; shape (ranks,).

    NaN where nothing moved, or was not moved alone.
    """
    if not len(timings.alone):
        return np.full(timings.records.shape[1], np.nan)
    stall = np.median(stall_time(timings.records).sum(axis=2), axis=0)
    alone = np.median(stall_time(timings.alone).sum(axis=2), axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        hidden = np.where(alone > 0, 1 - stall / alone, np.nan)
    return np.asarray(np.clip(hidden, 0, 1))


def rates(timings: Timings) -> tuple[float, float]:
    """Return what a rank computes and sends, FLOP/s and bytes a second; medians over ranks.

    The bandwidth is that of the transfers with no compute beside them; NaN where nothing was moved so.
    """
    compute = compute_time(timings.records).sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        flops = timings.records["flops"].sum(axis=2) / compute
        alone = stall_time(timings.alone).sum(axis=2)
        bandwidth = timings.alone["bytes_sent"].sum(axis=2) / alone
    known = [values[np.isfinite(values)] for values in (flops, bandwidth)]
    found = [float(np.median(values)) if values.size else float("nan") for values in known]
    return found[0], found[1]


def makespans(timings: Timings) -> Array:
    """Return the time from the first start to the last end of each repeat, seconds; shape (repeats,)."""
    start = timings.clocks.corrected(timings.records["started"])
    end = timings.clocks.corrected(timings.records["step_end"])
    return np.asarray(end.max(axis=(1, 2)) - start.min(axis=(1, 2)))


@dataclass(frozen=True)
class RankSummary:
    """One rank's share of a repeat: sums over steps, medians over repeats.

    Attributes
    ----------
    rank : int
    compute, stall, overhead, total : float
        Seconds.
    overlap : float
        Hidden part of the transfers, 0 to 1; NaN where nothing moved.
    counts : dict of str to int
        By the names of `trace.COUNTS`; those that were not recorded are absent.
    """

    rank: int
    compute: float
    stall: float
    overhead: float
    total: float
    overlap: float
    counts: dict[str, int]


def by_rank(timings: Timings) -> list[RankSummary]:
    """Return the summary of every rank; empty if there is no repeat."""
    records = timings.records
    if not len(records):
        return []

    def median(times: Array) -> Array:
        return np.asarray(np.median(times.sum(axis=2), axis=0))

    hidden = overlap(timings)
    compute, stall = median(compute_time(records)), median(stall_time(records))
    overhead, total = median(overhead_time(records)), median(step_time(records))
    # Counts are the same in every repeat.
    counts = {name: records[name][-1].sum(axis=-1) for name in COUNTS}
    return [
        RankSummary(
            rank=rank,
            compute=float(compute[rank]),
            stall=float(stall[rank]),
            overhead=float(overhead[rank]),
            total=float(total[rank]),
            overlap=float(hidden[rank]),
            counts={
                name: int(number[rank]) for name, number in counts.items() if np.isfinite(number[rank])
            },
        )
        for rank in range(records.shape[1])
    ]
