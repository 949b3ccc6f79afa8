"""One repeat of one pass, as every picture shows it: pieces of time, and hops between ranks.

Pictures compute nothing of their own. All moments are on rank 0's clock, in seconds from the first start of
the repeat on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.blame import Blame, blame
from ringmpi.config import Experiment
from ringmpi.metrics import compute_time, makespans, stall_time, typical_repeat
from ringmpi.report.culprits import MOST_STEPS
from ringmpi.report.kinds import COMPUTE, INDEX, OVERHEAD, UNBLAMED
from ringmpi.schedule import Pass, Shards
from ringmpi.schedule.hops import Hop
from ringmpi.store import ResultFile
from ringmpi.timeline import Timeline, timeline_of
from ringmpi.trace import MOMENTS

Array = NDArray[Any]

#: Seconds by which two pieces may be apart, or one be long, since moments of hours were subtracted.
ROUNDING = 1e-9

#: A piece of a rank's time; `kind` is an index into `KINDS`, `blame` one into the blames of the view, or -1.
PIECE = np.dtype(
    [
        ("rank", int),
        ("step", int),
        ("kind", int),
        ("blame", int),
        ("begin", np.float64),
        ("end", np.float64),
    ]
)


@dataclass(frozen=True)
class Arrow:
    """A hop, and when it was under way.

    Attributes
    ----------
    hop : Hop
    nbytes : int
    posted : float
        When the sender had posted it; seconds.
    received : float
        When the receiver saw the last part of its step complete, this one or another one; seconds.
    stall : float
        Of the receiver, in the step in which it waits for it; seconds.
    """

    hop: Hop
    nbytes: int
    posted: float
    received: float
    stall: float


@dataclass(frozen=True)
class View:
    """One repeat of one pass.

    Attributes
    ----------
    direction : Pass
    repeat : int
    origin : float
        The first start, on rank 0's clock; seconds.
    makespan : float
        From the first start to the last end; seconds.
    size : int
        Ranks of the run.
    ranks : ndarray of int, shape (shown,)
        Those that are shown.
    records : ndarray of trace.RECORD, shape (shown, steps)
        Moments in seconds from `origin` on.
    blames : list of Blame
        Of the ranks shown, from `origin` on.
    arrows : list of Arrow
        Between ranks shown, those with the longest stall of the receiver first.
    """

    direction: Pass
    repeat: int
    origin: float
    makespan: float
    size: int
    ranks: Array
    records: Array
    blames: list[Blame]
    arrows: list[Arrow]

    @property
    def steps(self) -> int:
        """The number of steps of a rank."""
        return int(self.records.shape[1])

    @property
    def explained(self) -> bool:
        """Whether hops and blame were looked for: not beyond `MOST_STEPS` of all ranks."""
        return self.size * self.steps <= MOST_STEPS

    def pieces(self) -> Array:
        """Return what each rank did when, of `PIECE`, in no order; they fill each step without overlap."""
        records = self.records
        computed = records["launched"] + compute_time(records)
        waited = records["compute_done"] + stall_time(records)
        parts = [
            self._pieces(OVERHEAD, records["started"], records["launched"]),
            self._pieces(COMPUTE, records["launched"], computed),
            self._pieces(OVERHEAD, waited, records["step_end"]),
            *self._stalls(waited),
        ]
        return np.concatenate(parts)

    def _pieces(self, kind: str, begin: Array, end: Array) -> Array:
        """Return one piece a step, where there is any."""
        rows, steps = np.nonzero(end > begin)
        found = np.empty(len(rows), PIECE)
        found["rank"], found["step"] = self.ranks[rows], steps
        found["kind"], found["blame"] = INDEX[kind], -1
        found["begin"], found["end"] = begin[rows, steps], end[rows, steps]
        return found

    def _stalls(self, waited: Array) -> list[Array]:
        """Return the pieces of stall: those that are blamed on something, and what is left between."""
        begin, end = self.records["compute_done"], waited.copy()
        by_step: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, found_out in enumerate(self.blames):
            by_step[found_out.rank, found_out.step].append(number)
        row_of = {int(rank): row for row, rank in enumerate(self.ranks)}
        found = []
        for (rank, step), numbers in by_step.items():
            row = row_of[rank]
            at, last = float(begin[row, step]), float(waited[row, step])
            for number in sorted(numbers, key=lambda number: self.blames[number].begin):
                its = self.blames[number]
                # Pieces of a stall fill it, but for rounding.
                low, high = max(at, its.begin), min(last, its.end)
                if high > low:
                    found.append((rank, step, INDEX[UNBLAMED], -1, at, low))
                    found.append((rank, step, INDEX[its.cause.value], number, low, high))
                    at = high
            found.append((rank, step, INDEX[UNBLAMED], -1, at, last))
            end[row, step] = begin[row, step]  # Taken apart already.
        blamed = np.array(found, PIECE)
        return [self._pieces(UNBLAMED, begin, end), blamed[blamed["end"] > blamed["begin"] + ROUNDING]]


class Views:
    """The views of one pass of a file; what all repeats have in common is read once. Local.

    Beyond `MOST_STEPS` of all ranks they have neither hops nor blames.

    Parameters
    ----------
    result : ResultFile
    direction : Pass
    most_steps, most_ranks : int, optional
        Where there are more steps of all ranks, or ranks, some ranks are shown, evenly spread from the
        first to the last one.

    Attributes
    ----------
    timings : Timings
        Of all ranks.
    """

    def __init__(
        self,
        result: ResultFile,
        direction: Pass,
        most_steps: int | None = None,
        most_ranks: int | None = None,
    ) -> None:
        self._direction = direction
        self._size = result.size
        self.timings = result.timings(direction)
        known, self._steps = result.watched(direction)
        _, rows, steps = self._steps.records.shape
        most = min(rows, most_ranks or rows, max(1, (most_steps or rows * steps) // max(1, steps)))
        shown = np.unique(np.linspace(0, rows - 1, most).round().astype(int))
        self._rows = {known[row]: int(row) for row in shown}
        self._schedules = result.schedules(direction) if explainable(result, direction) else []
        self._nbytes = bytes_of_hops(result.experiment, result.size)

    @property
    def cost(self) -> int:
        """How many steps of all ranks shown a view has."""
        return len(self._rows) * int(self._steps.records.shape[2])

    @property
    def repeats(self) -> int:
        """How many repeats were timed."""
        return len(self.timings.records)

    @property
    def begins(self) -> float:
        """When the first rank begins the first repeat, on rank 0's clock; infinite if there is none."""
        clocks, records = self.timings.clocks, self.timings.records
        return float(clocks.corrected(records["started"]).min(initial=np.inf))

    def by_length(self) -> list[int]:
        """Return the repeats, the one of median makespan first, then the shortest, longest and others."""
        if not self.repeats:
            return []
        order = np.argsort(makespans(self.timings)).tolist()
        return list(dict.fromkeys([typical_repeat(self.timings), order[0], order[-1], *order]))

    def view(self, repeat: int | None = None) -> View:
        """Return a repeat, the one of median makespan by default; there must be one."""
        chosen = typical_repeat(self.timings) if repeat is None else repeat
        timeline = timeline_of(self._steps, chosen, self._schedules)
        blames = blame(timeline) if self._schedules else []
        found = make_view(self._direction, chosen, timeline, self._rows, blames, self._nbytes)
        return replace(found, size=self._size, makespan=float(makespans(self.timings)[chosen]))


def make_view(
    direction: Pass,
    repeat: int,
    timeline: Timeline,
    rows: Mapping[int, int],
    blames: Sequence[Blame],
    nbytes: Callable[[Hop], int],
) -> View:
    """Return a view of a timeline and what was found out about it. Local.

    Parameters
    ----------
    direction : Pass
    repeat : int
    timeline : Timeline
    rows : mapping of int to int
        The ranks to show, rising, and where each is in the timeline.
    blames : sequence of Blame
        Of all ranks, on rank 0's clock.
    nbytes : callable
        Gives the bytes of a hop.
    """
    origin = float(timeline.records["started"].min())
    records = timeline.records[list(rows.values())]
    for moment in MOMENTS:
        records[moment] -= origin
    row_of = {rank: row for row, rank in enumerate(rows)}
    stalls = stall_time(records)
    arrows = []
    for hop in timeline.hops:
        if hop.sender not in row_of or hop.receiver not in row_of:
            continue
        to = row_of[hop.receiver], hop.due
        posted = float(records["posted"][row_of[hop.sender], hop.step])
        received = float(records["received"][to])
        if np.isfinite(posted) and np.isfinite(received):
            arrows.append(Arrow(hop, nbytes(hop), posted, received, float(stalls[to])))
    return View(
        direction=direction,
        repeat=repeat,
        origin=origin,
        makespan=timeline.makespan,
        size=len(timeline.records),
        ranks=np.array(list(rows)),
        records=records,
        blames=[
            replace(b, begin=b.begin - origin, end=b.end - origin) for b in blames if b.rank in row_of
        ],
        arrows=sorted(arrows, key=lambda arrow: -arrow.stall),
    )


def explainable(result: ResultFile, direction: Pass) -> bool:
    """Return whether hops and blame can be told: of every step, and not beyond `MOST_STEPS`. Local."""
    known, timings = result.watched(direction)
    steps = int(timings.records.shape[2])
    return len(known) == result.size and result.size * steps <= MOST_STEPS


def bytes_of_hops(experiment: Experiment, size: int) -> Callable[[Hop], int]:
    """Return what gives the bytes of the hops of an experiment on `size` ranks. Local."""
    shape, layouts = experiment.shape, experiment.layouts(size)
    shards = Shards(layouts["k"], layouts["q"], 0)  # What a part is does not depend on who asks.
    return lambda hop: shape.nbytes(hop.part, shards)
