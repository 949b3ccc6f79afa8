"""What travels in a schedule, seen from above all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringmpi.schedule.steps import Direction, Part, Step


@dataclass(frozen=True)
class Hop:
    """One part on its way from one rank to another.

    Both post it in the same step and wait for it in the same one, as `check_schedule` proves.

    Attributes
    ----------
    step : int
        In which both post it.
    due : int
        In which both wait for it.
    sender, receiver : int
    part : Part
    """

    step: int
    due: int
    sender: int
    receiver: int
    part: Part


def hops(schedules: Sequence[Sequence[Step]]) -> Iterator[Hop]:
    """Yield every hop of the schedules of all ranks, rank by rank, as they are posted. Local."""
    for sender, steps in enumerate(schedules):
        for number, step in enumerate(steps):
            for transfer in step.transfers:
                if transfer.direction is Direction.SEND:
                    due = number + transfer.steps - 1
                    yield Hop(number, due, sender, transfer.peer, transfer.part)
