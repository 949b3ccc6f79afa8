"""One repeat of a pass with all ranks on one clock, and what travelled between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.metrics import Timings
from ringmpi.schedule.hops import Hop, hops
from ringmpi.schedule.steps import Step

Array = NDArray[Any]


@dataclass(frozen=True)
class Contradiction:
    """A receive that lies before its send by more than clocks can err.

    Attributes
    ----------
    hop : Hop
    seconds : float
        By how much more.
    """

    hop: Hop
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """All moments on rank 0's clock.

    Attributes
    ----------
    records : ndarray of trace.RECORD, shape (ranks, steps)
        Of one repeat.
    alone : ndarray of trace.RECORD, shape (passes, ranks, steps)
        The same transfers with no compute beside them.
    hops : sequence of Hop
        Everything that travelled.
    error : ndarray of float64, shape (ranks,)
        Seconds to within which a rank's moments are right; NaN where unknown.
    """

    records: Array
    alone: Array
    hops: Sequence[Hop]
    error: Array

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return float(self.records["step_end"].max() - self.records["started"].min())

    @property
    def ends(self) -> Array:
        """When each step's transfers are done; NaN in steps without, shape (ranks, steps)."""
        return np.asarray(np.fmax(self.records["received"], self.records["sent"]))

    def between(self, rank: int, other: int) -> float:
        """Return the seconds to within which moments of two ranks can be compared; 0 if unknown."""
        return float(np.nan_to_num(self.error[rank] + self.error[other]))

    def received_last(self, rank: int, step: int) -> bool:
        """Return whether the transfer that a rank waited for longest in a step brought it something."""
        received, sent = (float(self.records[name][rank, step]) for name in ("received", "sent"))
        return received >= sent or np.isnan(sent)

    def awaited(self, rank: int, step: int) -> Hop | None:
        """Return the hop that a rank waited for longest in a step, being seen complete last there.

        Of several between the same ranks that were due together the one that the note of its posting
        belongs to, or of sends the last one posted. None where the trace does not tell, or tells of a hop
        that the schedules do not have: those of another version of ringmpi may differ.
        """
        peer, posted = float(self.records["waited_for"][rank, step]), self._noted(rank, step)
        ends = (peer, rank) if self.received_last(rank, step) else (rank, peer)
        found = self._due.get((*ends, step), [])
        # Both moments are of one clock, so that they can be compared without an allowance.
        begun = [
            hop
            for hop in found
            if np.isnan(posted) or self.records["started"][hop.sender, hop.step] <= posted
        ]
        return max(begun or found, key=lambda hop: hop.step, default=None)

    def peer_posted(self, rank: int, step: int, hop: Hop) -> float:
        """Return when the other end of a hop posted it that a rank waited for longest in a step."""
        noted, peer = self._noted(rank, step), hop.sender if hop.receiver == rank else hop.receiver
        return float(self.records["posted"][peer, hop.step]) if np.isnan(noted) else noted

    def contradictions(self) -> Iterator[Contradiction]:
        """Yield every hop that seems to be received before it was sent, by more than the stated error.

        A hop is sent once its sender's step has started; of those that a note tells more about, once they
        were posted.
        """
        for hop in self.hops:
            sender, receiver = hop.sender, hop.receiver
            sent = self.records["started"][sender, hop.step]
            noted = self._noted(receiver, hop.due)
            if not np.isnan(noted) and self.awaited(receiver, hop.due) is hop:
                sent = noted
            early = sent - self.records["received"][receiver, hop.due]
            beyond = early - (self.error[sender] + self.error[receiver])
            if beyond > 0:
                yield Contradiction(hop, float(beyond))

    def _noted(self, rank: int, step: int) -> float:
        return float(self.records["peer_posted"][rank, step])

    @cached_property
    def _due(self) -> dict[tuple[float, float, int], list[Hop]]:
        """Hops by sender, receiver and the step in which they are due."""
        found: dict[tuple[float, float, int], list[Hop]] = {}
        for hop in self.hops:
            found.setdefault((hop.sender, hop.receiver, hop.due), []).append(hop)
        return found


def timeline_of(timings: Timings, repeat: int, schedules: Sequence[Sequence[Step]]) -> Timeline:
    """Return one repeat on one clock. Local.

    Parameters
    ----------
    timings : Timings
    repeat : int
    schedules : sequence of sequence of Step
        Of all ranks, as they were executed.
    """
    clocks = timings.clocks
    return Timeline(
        records=clocks.merged(timings.records[repeat]),
        alone=clocks.merged(timings.alone),
        hops=tuple(hops(schedules)),
        error=clocks.corrected_error,
    )
