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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.trace import COUNTS, MOMENTS

Array = NDArray[Any]


@dataclass(frozen=True)
class Clocks:
    """How the clocks of the ranks compare with rank 0's, as found before and after the passes.

    A clock is taken to run evenly from the first measurement to the last one, so that its offset in between
    lies on the straight line through the two, and errs by no more than the larger of their two errors.

    Attributes
    ----------
    measured_at : ndarray of float64, shape (measurements, ranks)
        When, on rank 0's clock; seconds.
    offset : ndarray of float64, shape (measurements, ranks)
        The rank's clock minus rank 0's then; seconds.
    error_bound : ndarray of float64, shape (measurements, ranks)
        The offset is right to within this; seconds.
    of : sequence of int, optional
        The ranks that moments are of; all of them by default.
    """

    measured_at: Array
    offset: Array
    error_bound: Array
    of: Sequence[int] | None = None

    @property
    def drift(self) -> Array:
        """Seconds by which each offset grows a second; NaN where it was measured only once."""
        return self._a_second(self.offset[-1] - self.offset[0])

    @property
    def drift_error(self) -> Array:
        """The drift is right to within this."""
        return self._a_second(self.error_bound[-1] + self.error_bound[0])

    @property
    def corrected_error(self) -> Array:
        """Seconds to within which a corrected moment between the two measurements is right, of each rank.

        After one measurement alone it holds for that moment, as nothing is known of the drift.
        """
        return np.asarray(self.error_bound[[0, -1]].max(axis=0)[self._of])

    def corrected(self, moments: Array) -> Array:
        """Return moments of shape (..., ranks, steps) on rank 0's clock."""
        return self._on_rank_0(moments, self._of[:, None])

    def merged(self, records: Array) -> Array:
        """Return records of shape (..., ranks, steps) with all moments on rank 0's clock."""
        merged = records.copy()
        for name in MOMENTS:
            merged[name] = self.corrected(records[name])
        peers = np.nan_to_num(records["waited_for"]).astype(np.int64)
        merged["peer_posted"] = self._on_rank_0(records["peer_posted"], peers)
        return merged

    @property
    def _of(self) -> Array:
        return np.arange(self.offset.shape[1]) if self.of is None else np.asarray(self.of)

    def _on_rank_0(self, moments: Array, ranks: Array) -> Array:
        """Return moments on rank 0's clock, each from the clock of a rank."""
        began = self.measured_at[0]
        # While rank 0's clock goes on by a second, another one goes on by a second and its drift.
        pace = 1 / (1 + np.nan_to_num(self.drift))
        elapsed = moments - (began + self.offset[0])[ranks]
        return np.asarray(began[ranks] + elapsed * pace[ranks])

    def _a_second(self, growth: Array) -> Array:
        elapsed = self.measured_at[-1] - self.measured_at[0]
        return np.asarray(growth / np.where(elapsed > 0, elapsed, np.nan))


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


def typical_repeat(timings: Timings) -> int:
    """Return which repeat is of median length, the longer one of two."""
    spans = makespans(timings)
    return int(np.argsort(spans)[len(spans) // 2])


@dataclass(frozen=True)
class RankSummary:
    """One rank's share of a repeat: sums over steps, medians over repeats.

    Attributes
    ----------
    rank : int
    compute, stall, overhead, total : float
        Seconds.
    polling : float
        Seconds that progress took of the compute, or a helper thread beside it; NaN if not recorded.
    device_time : float
        Seconds between events of the GPU, of the same compute; 0 without a GPU, NaN if not recorded.
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
    polling: float
    device_time: float
    overlap: float
    counts: dict[str, int]

    @property
    def flops(self) -> float:
        """FLOPs of allowed pairs; NaN if not recorded."""
        return self.counts.get("flops", float("nan"))


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
    polling, device_time = median(records["polling"]), median(records["device_time"])
    # Counts are the same in every repeat.
    counts = {name: records[name][-1].sum(axis=-1) for name in COUNTS}
    return [
        RankSummary(
            rank=rank,
            compute=float(compute[rank]),
            stall=float(stall[rank]),
            overhead=float(overhead[rank]),
            total=float(total[rank]),
            polling=float(polling[rank]),
            device_time=float(device_time[rank]),
            overlap=float(hidden[rank]),
            counts={
                name: int(number[rank]) for name, number in counts.items() if np.isfinite(number[rank])
            },
        )
        for rank in range(records.shape[1])
    ]
