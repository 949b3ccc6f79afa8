"""What a piece of a rank's time may be, and the colour that it has in every picture."""

from __future__ import annotations

from dataclasses import dataclass

from ringmpi.blame import Cause


@dataclass(frozen=True)
class Kind:
    """A kind of time.

    Attributes
    ----------
    name : str
    colour : str
        ``#rrggbb``; on white and on black, and for people who see two of three colours, each differs from
        the others.
    about : str
        What a person should read from it.
    """

    name: str
    colour: str
    about: str


COMPUTE = "compute"
OVERHEAD = "overhead"
UNBLAMED = "unblamed"

#: Compute and overhead first; what follows is stall, by what it is blamed on.
KINDS = (
    Kind(COMPUTE, "#3f66b0", "the device attends"),
    Kind(OVERHEAD, "#bdc2cb", "posting, bookkeeping, checksums"),
    Kind(Cause.LINK.value, "#d55a06", "the sender posted in time; the transfer outlasted the compute"),
    Kind(Cause.LATE_SENDER.value, "#f2b829", "a rank upstream was slower at the same work"),
    Kind(Cause.IMBALANCE.value, "#ab6aa3", "a rank upstream had more pairs to attend"),
    Kind(Cause.PROGRESS.value, "#089d69", "the data could have come, but nobody called MPI"),
    Kind(UNBLAMED, "#8a2335", "too short to mean something, or no cause is known"),
)

#: Where each is in `KINDS`.
INDEX = {kind.name: index for index, kind in enumerate(KINDS)}


def stalled(kind: str) -> bool:
    """Return whether a kind of time is stall. Local."""
    return kind not in (COMPUTE, OVERHEAD)


def shown(kind: str) -> str:
    """Return what a kind is called in a legend. Local.

    >>> shown("compute"), shown("link"), shown("unblamed")
    ('compute', 'stall: link', 'stall: unblamed')
    """
    return f"stall: {kind}" if stalled(kind) else kind
