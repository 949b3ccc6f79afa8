"""What moves in a step of all ranks, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Ranks = NDArray[np.intp]


@dataclass(frozen=True)
class Flows:
    """What ranks send in a step, at most one flow from each rank and one to each.

    Attributes
    ----------
    way : int
        Flows of one way go over the same connections in all steps.
    senders, receivers : ndarray of intp, shape (flows,)
    nbytes : ndarray of float64, shape (flows,)
    moving : ndarray of float64, shape (flows,)
        Seconds for which they occupy links, alone.
    latency : ndarray of float64, shape (flows,)
        Seconds that they are on their way after that.
    eager : ndarray of bool, shape (flows,)
        Whether they leave before their receivers have posted.
    parts, messages : ndarray of float64, shape (flows,)
        Of which each consists.
    any_eager : bool
        Whether any of them leaves early.
    turn : int or None
        None where not all ranks send. Where all do, they are in order, and this is by how many each receiver
        is further on, or 0 if they are not all as far.
    """

    way: int
    senders: Ranks
    receivers: Ranks
    nbytes: Array
    moving: Array
    latency: Array
    eager: Array
    parts: Array
    messages: Array
    any_eager: bool
    turn: int | None = None
    _sent: dict[str, Array] = field(default_factory=dict)

    @cached_property
    def lasting(self) -> Array:
        """Seconds from the first byte to the arrival, alone."""
        return self.moving + self.latency

    @property
    def sending(self) -> Ranks | slice:
        """The senders, as an index into what there is of every rank."""
        return self.senders if self.turn is None else slice(None)

    def of_receivers(self, values: Array) -> Array:
        """Return values of ranks, at the receivers of the flows."""
        return values.take(self.receivers) if not self.turn else _turned(values, self.turn)

    def by_sender(self, values: Array, size: int) -> Array:
        """Return values of flows at their senders, shape (ranks,); minus infinity at the others."""
        return values if self.turn is not None else _spread(values, self.senders, size, -np.inf)

    def by_receiver(self, values: Array, size: int) -> Array:
        """Return values of flows at their receivers, shape (ranks,); minus infinity at the others."""
        return (
            _turned(values, -self.turn) if self.turn else _spread(values, self.receivers, size, -np.inf)
        )

    def sent_by(self, ranks: Ranks, size: int) -> Ranks:
        """Return the flow that each of some ranks sends, or -1."""
        if self.turn is not None:
            return ranks
        return _spread(np.arange(len(self.senders)), self.senders, size, -1)[ranks]

    def received_by(self, ranks: Ranks, size: int) -> Ranks:
        """Return the flow that each of some ranks receives, or -1."""
        if self.turn:
            return np.asarray((ranks - self.turn) % size)
        return _spread(np.arange(len(self.receivers)), self.receivers, size, -1)[ranks]

    def sent(self, size: int) -> dict[str, Array]:
        """Return what every rank sends, by the names of `Load.SENT`; always the same object."""
        if not self._sent:
            counts = self.nbytes, self.messages, self.parts
            for name, number in zip(Load.SENT, counts, strict=True):
                self._sent[name] = _spread(number, self.senders, size, 0.0)
        return self._sent


@dataclass(frozen=True)
class Load:
    """A step of all ranks.

    Attributes
    ----------
    compute : ndarray of float64, shape (ranks,)
        Seconds, undisturbed.
    pairs : ndarray of float64, shape (ranks,)
        Allowed pairs, over batch and heads.
    flows : list of (Flows, int)
        And the step in which both ends wait for them.
    sent : dict of str to ndarray of float64, shape (ranks,)
        By the names of `SENT`.
    """

    SENT: ClassVar = ("bytes_sent", "messages", "hops")

    compute: Array
    pairs: Array
    flows: list[tuple[Flows, int]]
    sent: dict[str, Array]


def _turned(values: Array, by: int) -> Array:
    return np.concatenate((values[by:], values[:by]))


def _spread(values: Array, ranks: Ranks, size: int, none: float) -> Array:
    spread = np.full(size, none, values.dtype)
    spread[ranks] = values
    return spread
