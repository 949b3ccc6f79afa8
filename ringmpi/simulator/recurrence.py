"""The pass of ranks whose flows never hold each other up, all ranks at once.

Where no capacity is shared, a flow waits for its two ends and for those that went before it on the same
connection, and for nothing else. So the moments of a step follow from those of the step before by maxima and
sums over all ranks, and nobody needs to ask what happens next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.simulator.disturbance import Disturbance
from ringmpi.simulator.flows import Flows
from ringmpi.simulator.record import Recorder, later
from ringmpi.simulator.work import Work

Array = NDArray[Any]


class OutOfOrderError(Exception):
    """A flow is not ready in the order of its connection, or moves in pieces: events must be told apart."""


def recurrence(
    work: Work,
    disturbance: Disturbance,
    repeat: int,
    recorder: Recorder,
    *,
    waits: bool,
    computing: bool,
) -> None:
    """Go through a pass in which no capacity is shared. Local.

    Parameters
    ----------
    work : Work
    disturbance : Disturbance
    repeat : int
    recorder : Recorder
        Takes the steps.
    waits : bool
        Nothing above the eager limit moves but while both its ends wait.
    computing : bool
        With compute, else the transfers alone.

    Raises
    ------
    OutOfOrderError
        If this is not a pass that can be gone through so.
    """
    size, none = work.size, np.full(work.size, -np.inf)
    started = np.zeros(size)
    free: dict[int, Array] = {}
    ready_before: dict[int, Array] = {}
    loose: set[int] = set()  # Ways of which a flow may be on its way when the next one is posted.
    under_way: dict[int, list[_Sent]] = defaultdict(list)
    for number in range(work.steps):
        load = work.load(number, computing)
        done = started
        if computing:
            done = started + disturbance.of(load.compute, repeat, number)
        for flows, due in load.flows:
            at, way = flows.sending, flows.way
            ready = _ready(flows, started, done if waits else started)
            if waits and due > number and not flows.eager.all():
                raise OutOfOrderError
            if flows.any_eager or due > number:
                loose.add(way)
            if way not in loose:
                arrival = ready + flows.lasting
            else:
                if (ready < ready_before.get(way, none)[at]).any():
                    raise OutOfOrderError
                ended = np.maximum(ready, free.get(way, none)[at]) + flows.moving
                _note(ready_before, flows, ready, size)
                _note(free, flows, ended, size)
                arrival = ended + flows.latency
            under_way[due].append(_Sent(flows, arrival, started))
        arrived = under_way.pop(number, [])
        received, sent = (
            _last([a.received() for a in arrived], none),
            _last([a.sent() for a in arrived], none),
        )
        end = np.maximum(np.maximum(received, sent), done)
        moments = {
            "started": started,
            "compute_done": done,
            "received": received,
            "sent": sent,
            "step_end": end,
        }
        recorder.step(number, None, moments, load, partial(_awaited, arrived))
        started = end


@dataclass(frozen=True)
class _Sent:
    """Flows that were sent, when they arrive, and when each rank posted its own."""

    flows: Flows
    arrival: Array
    posted: Array

    @cached_property
    def seen(self) -> Array:
        """When its receiver sees each arrive, which it cannot before it has posted the receive."""
        if not self.flows.any_eager:
            return self.arrival
        return np.maximum(self.arrival, self.flows.of_receivers(self.posted))

    def received(self) -> Array:
        """Return when each rank sees them arrive."""
        return self.flows.by_receiver(self.seen, len(self.posted))

    def sent(self) -> Array:
        """Return when each rank is done with sending, which it is at once with eager ones."""
        arrival = self.arrival
        if self.flows.any_eager:
            arrival = np.where(self.flows.eager, self.posted[self.flows.sending], arrival)
        return self.flows.by_sender(arrival, len(self.posted))


def _last(moments: Sequence[Array], none: Array) -> Array:
    return reduce(np.maximum, moments) if moments else none


def _awaited(arrived: Sequence[_Sent], ranks: NDArray[np.intp]) -> tuple[Array, Array]:
    """Return the peer of the transfer that some ranks saw complete last, and when it posted what it sent.

    Of those that end at once it is a receive, and from the highest rank. Nobody waits for an eager send.
    """
    peer, posted, latest = (np.full(len(ranks), fill) for fill in (np.nan, np.nan, -np.inf))
    for what in arrived:
        flows = what.flows
        mine = flows.sent_by(ranks, len(what.posted))
        seen = np.where((mine < 0) | flows.eager[mine], -np.inf, what.arrival[mine])
        whose = flows.receivers[mine]
        last = later(seen, latest) | (_at_once(seen, latest) & (whose > peer))
        peer, latest = np.where(last, whose, peer), np.maximum(seen, latest)
    received = np.zeros(len(ranks), bool)
    for what in arrived:
        flows = what.flows
        mine = flows.received_by(ranks, len(what.posted))
        seen, whose = np.where(mine < 0, -np.inf, what.seen[mine]), flows.senders[mine]
        last = later(seen, latest) | (_at_once(seen, latest) & (~received | (whose > peer)))
        peer, posted = np.where(last, whose, peer), np.where(last, what.posted[whose], posted)
        latest, received = np.maximum(seen, latest), received | last
    return peer, posted


def _at_once(moments: Array, others: Array) -> Array:
    """Return which moments are there, and the same as others."""
    return np.asarray(np.isfinite(moments) & ~later(moments, others) & ~later(others, moments))


def _note(known: dict[int, Array], flows: Flows, values: Array, size: int) -> None:
    """Keep what is known of connections, by way."""
    if flows.turn is not None:
        known[flows.way] = values
    else:
        before = known.get(flows.way, np.full(size, -np.inf)).copy()
        before[flows.senders] = values
        known[flows.way] = before


def _ready(flows: Flows, started: Array, able: Array) -> Array:
    """Return when flows may begin: both ends can move them, or an eager one has been posted."""
    sending, receiving = able[flows.sending], flows.of_receivers(able)
    ready = np.maximum(sending, receiving)
    if flows.any_eager:
        ready = np.where(flows.eager, started[flows.sending], ready)
    return np.asarray(ready)
