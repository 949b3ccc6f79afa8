"""The words that every schedule is written in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    """Which way a block moves, seen from the rank whose schedule it is."""

    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True)
class Transfer:
    """One hop of one block, in flight while the step's attends run.

    Attributes
    ----------
    direction : Direction
    peer : int
        The other rank.
    block : int
        The rank whose shard the block is; its positions follow from the layout.
    slot : int
        The buffer that it leaves from or arrives in.
    """

    direction: Direction
    peer: int
    block: int
    slot: int


@dataclass(frozen=True)
class Attend:
    """Attend the rank's queries to the block in a slot.

    Attributes
    ----------
    block : int
        The rank whose shard the block is.
    slot : int
        The buffer that holds it.
    """

    block: int
    slot: int


@dataclass(frozen=True)
class Step:
    """Transfers that overlap with attends; the step ends when both are done."""

    transfers: tuple[Transfer, ...]
    attends: tuple[Attend, ...]
