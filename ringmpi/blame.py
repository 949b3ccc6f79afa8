"""Who or what a stall is to be blamed on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
        The rank, or the sender and the receiver of the link.
    """

    rank: int
    step: int
    begin: float
    end: float
    cause: Cause
    culprit: tuple[int, ...]
