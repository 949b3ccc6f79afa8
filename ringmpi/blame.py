"""Who or what a stall is to be blamed on.

The stall of a rank in a step goes from the end of its compute to the moment at which the last transfer that
was due is seen complete; that transfer, and so one peer, is to blame. It falls into pieces, on the timeline
of all ranks:

* Until the peer posts its end the stall is its lateness. Since the waiting rank began, that rank has
  computed and waited; what has the peer done instead? One goes back in time from its posting, until as many
  seconds are found as it was late:

  - it computed. Let ``pairs / rate`` be what the allowed pairs of a step take at the median rate of all
    ranks. What the step took beyond that is that of a ``late sender``. The rest counts for nothing, up to as
    much as the waiting rank itself has computed so far: that is nobody's lateness. What goes beyond is
    ``imbalance``;
  - it stalled. Then both suffer from the same cause, that of its stall: lateness is followed upstream, to
    the rank or the link that it began with;
  - it did something else, or had not begun: ``late sender``.

  No delay makes a rank wait twice: what it has waited for before, in whichever step and whomever it came
  through, is left out. A delay that was hidden at first shows later in this way.
* Once both have posted, the transfer takes as long as it takes alone: ``link``. That is measured, with no
  compute beside it. Without a measurement all that is left is ``link``.
* What is left after that is ``progress``: the data could have come, but nobody was inside MPI to fetch it.
  So is all of a stall whose transfer could have come before the compute was done.

The peer is the sender of what is received late, or the receiver of a send that is done late: large sends end
only once their receiver takes them.

Not every stall means something. A stall is blamed only if it is longer than the clocks of its two ranks can
err plus `SMALL` of a mean step; and a shorter piece of a stall goes to the longer one of those beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringmpi.schedule.hops import Hop
from ringmpi.timeline import Timeline

Array = NDArray[Any]

#: The part of a mean step below which a stall means nothing. If every step of a rank had such a stall, the
#: pass would be shorter by less than this without them. A wait is seen to end up to 2 % late
#: (`comm.watch.NAP_PART`), and two of them are in the time of a transfer; the rest is noise.
SMALL = 0.05


class Cause(Enum):
    """Why a rank waited."""

    LINK = "link"
    """The sender posted in time; the transfer outlasted the compute."""
    LATE_SENDER = "late sender"
    """A rank upstream posted late, since it was slower at computing what others compute too."""
    IMBALANCE = "imbalance"
    """A rank upstream posted late, since it had more allowed pairs."""
    PROGRESS = "progress"
    """The data could have come, but nobody was inside MPI to fetch it."""


@dataclass(frozen=True)
class Blame:
    """A piece of a stall that has one cause.

    Attributes
    ----------
    rank, step : int
        Where the stall is.
    begin, end : float
        The piece, on rank 0's clock; seconds.
    cause : Cause
    culprit : tuple of int
        The rank, or the sender and the receiver of the link; of `PROGRESS` the rank that waited.
    """

    rank: int
    step: int
    begin: float
    end: float
    cause: Cause
    culprit: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.begin

    @property
    def _why(self) -> tuple[Cause, tuple[int, ...]]:
        return self.cause, self.culprit


def blame(timeline: Timeline) -> list[Blame]:
    """Return the pieces of every stall of one repeat that means something. Local.

    Parameters
    ----------
    timeline : Timeline

    Returns
    -------
    list of Blame
        Ordered by step, rank and time. Those of one stall lie end to end, from the end of the compute to the
        end of the stall. Empty for files whose traces do not tell what was waited for.
    """
    return list(_Inquiry(timeline).verdicts())


def least_stall(timeline: Timeline, rank: int, peer: int) -> float:
    """Return the seconds from which on a stall of `rank` that waits for `peer` means something. Local."""
    steps = timeline.records.shape[1]
    return float(timeline.between(rank, peer) + SMALL * timeline.makespan / steps)


@dataclass(frozen=True)
class _Root:
    """What a delay began with: in a step of a rank, at one place of it."""

    cause: Cause
    culprit: tuple[int, ...]
    rank: int
    step: int
    place: str


class _Delay(NamedTuple):
    """Some seconds of it."""

    seconds: float
    root: _Root


class _Inquiry:
    """Goes through the stalls step by step.

    What a peer did before it posted is in earlier steps than the one in which it is waited for, so that
    those of its stalls that matter are explained already.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._records = timeline.records
        self._ends = np.fmax(timeline.records["compute_done"], timeline.ends)
        self._nominal = _nominal_compute(timeline.records)
        ranks, _ = timeline.records.shape
        self._explained: list[list[list[_Delay]]] = [[] for _ in range(ranks)]
        self._waited = [0.0] * ranks
        self._suffered: list[dict[_Root, float]] = [defaultdict(float) for _ in range(ranks)]

    def verdicts(self) -> Iterator[Blame]:
        """Yield the pieces of every stall that means something."""
        ranks, steps = self._records.shape
        for step in range(steps):
            for rank in range(ranks):
                delays = self._explain(rank, step)
                self._remember(rank, delays)
                if delays:
                    peer = int(self._records["waited_for"][rank, step])
                    pieces = self._pieces(rank, step, delays)
                    yield from _meaningful(pieces, least_stall(self._timeline, rank, peer))

    def _remember(self, rank: int, delays: list[_Delay]) -> None:
        self._explained[rank].append(delays)
        for seconds, root in delays:
            self._waited[rank] += seconds
            self._suffered[rank][root] += seconds

    def _pieces(self, rank: int, step: int, delays: Iterable[_Delay]) -> list[Blame]:
        """Lay delays end to end, from the end of the compute on."""
        at = float(self._records["compute_done"][rank, step])
        pieces = []
        for seconds, root in delays:
            pieces.append(Blame(rank, step, at, at + seconds, root.cause, root.culprit))
            at += seconds
        end = float(self._ends[rank, step])
        return _tidy([*pieces[:-1], replace(pieces[-1], end=end)])  # Sums of seconds are rounded.

    def _explain(self, rank: int, step: int) -> list[_Delay]:
        """Return what a stall is made of; nothing without a stall."""
        begin, end = float(self._records["compute_done"][rank, step]), float(self._ends[rank, step])
        hop = self._timeline.awaited(rank, step)
        if hop is None or not end > begin:
            return []
        peer_posted = self._timeline.peer_posted(rank, step, hop)
        both_posted = max(peer_posted, float(self._records["posted"][rank, hop.step]))
        late_until = min(max(begin, peer_posted), end)
        come = min(max(late_until, both_posted + self._time_alone(hop, rank)), end)
        link = _Root(Cause.LINK, (hop.sender, hop.receiver), rank, step, "transfer")
        progress = _Root(Cause.PROGRESS, (rank,), rank, step, "transfer")
        delays = [
            *self._lateness(rank, step, hop, peer_posted, late_until - begin),
            _Delay(come - late_until, link),
            _Delay(end - come, progress),
        ]
        return [delay for delay in delays if delay.seconds > 0]

    def _time_alone(self, hop: Hop, rank: int) -> float:
        """Return what a hop takes at one of its ends with no compute beside it; infinite if unknown."""
        return self._alone.get(_like(hop, rank), np.inf)

    @cached_property
    def _alone(self) -> dict[Hashable, float]:
        """What hops take alone, from the later posting on; of those that are alike the longest median.

        Behind a slow link the receiver posts late in all steps but the first, when most of the way is over.
        """
        alone = self._timeline.alone
        found: dict[Hashable, float] = {}
        for hop in self._timeline.hops:
            posted = np.maximum(
                *(alone["posted"][:, end, hop.step] for end in (hop.sender, hop.receiver))
            )
            for rank, moment in ((hop.receiver, "received"), (hop.sender, "sent")):
                took = alone[moment][:, rank, hop.due] - posted
                if np.isfinite(took).any():
                    median = max(0.0, float(np.nanmedian(took)))
                    found[_like(hop, rank)] = max(median, found.get(_like(hop, rank), 0.0))
        return found

    def _lateness(
        self, rank: int, step: int, hop: Hop, until: float, seconds: float
    ) -> Iterable[_Delay]:
        """Return what a peer did instead of posting earlier than at `until`, by so many seconds."""
        if not seconds > 0:
            return []
        peer = hop.sender if hop.receiver == rank else hop.receiver
        posting = hop.step
        since = float(self._records["started"][rank, 0])
        own = float(self._records["compute_done"][rank, step]) - since - self._waited[rank]
        before: dict[_Root, float] = {}
        found: list[_Delay] = []
        for (length, root), nominal in self._history(peer, posting, since, until):
            if root.culprit == (rank,) and root.cause is not Cause.PROGRESS:
                own -= length  # The peer waited for this rank's compute, which is its own time.
                continue
            shared = min(length, max(0.0, own)) if nominal else 0.0
            own -= shared
            known = before.setdefault(root, self._suffered[rank].get(root, 0.0))
            again = min(length - shared, known)
            before[root] -= again
            counts = min(length - shared - again, seconds)
            found.append(_Delay(counts, root))
            seconds -= counts
            if not seconds > 0:
                break
        found.append(_Delay(seconds, _Root(Cause.LATE_SENDER, (peer,), peer, posting, "unknown")))
        return found[::-1]

    def _history(
        self, peer: int, posting: int, since: float, until: float
    ) -> Iterator[tuple[_Delay, bool]]:
        """Yield what a peer did between two moments and before its step `posting`, last things first.

        Each with whether it is compute at the median rate, to be blamed as imbalance if on anything.
        """
        records = self._records[peer]

        def did(step: int, begin: float, end: float, cause: Cause, place: str) -> _Delay:
            return _Delay(max(0.0, end - max(begin, since)), _Root(cause, (peer,), peer, step, place))

        for step in range(posting - 1, -1, -1):
            if until <= since:
                return
            launched, done = (float(records[name][step]) for name in ("launched", "compute_done"))
            slow_from = min(done, launched + float(self._nominal[peer, step]))
            stalled_until = float(self._ends[peer, step])
            yield did(step, stalled_until, until, Cause.LATE_SENDER, "after"), False
            if stalled_until > since:
                yield from ((delay, False) for delay in reversed(self._explained[peer][step]))
            yield did(step, slow_from, done, Cause.LATE_SENDER, "slow"), False
            yield did(step, launched, slow_from, Cause.IMBALANCE, "nominal"), True
            until = launched
        yield did(0, since, until, Cause.LATE_SENDER, "before"), False


def _like(hop: Hop, rank: int) -> Hashable:
    """Return what hops have in common that take equally long at one of their ends."""
    return hop.sender, hop.receiver, rank, hop.part.payload, hop.due - hop.step


def _nominal_compute(records: Array) -> Array:
    """Return what each step's pairs take at the median rate of all ranks, shape (ranks, steps)."""
    compute = records["compute_done"] - records["launched"]
    pairs = np.nan_to_num(records["pairs"])
    busy = (pairs.sum(axis=1) > 0) & (compute.sum(axis=1) > 0)
    if not busy.any():
        return np.asarray(compute)
    rate = np.median(pairs[busy].sum(axis=1) / compute[busy].sum(axis=1))
    return np.asarray(pairs / rate)


def _tidy(pieces: Iterable[Blame]) -> list[Blame]:
    """Join neighbours that have one cause and one culprit."""
    joined = []
    for _, alike in groupby(pieces, key=lambda piece: piece._why):
        first, *rest = alike
        joined.append(replace(first, end=(rest or [first])[-1].end))
    return joined


def _meaningful(pieces: list[Blame], least: float) -> list[Blame]:
    """Return the pieces of a stall without those that are shorter than `least`, nothing of one that is."""
    if pieces[-1].end - pieces[0].begin < least:
        return []
    while len(pieces) > 1:
        number = min(range(len(pieces)), key=lambda index: pieces[index].seconds)
        small = pieces[number]
        if small.seconds >= least:
            break
        beside = [index for index in (number - 1, number + 1) if 0 <= index < len(pieces)]
        heir = max(beside, key=lambda index: pieces[index].seconds)
        grown = replace(
            pieces[heir],
            begin=min(small.begin, pieces[heir].begin),
            end=max(small.end, pieces[heir].end),
        )
        pieces = _tidy(
            grown if index == heir else p for index, p in enumerate(pieces) if index != number
        )
    return pieces
