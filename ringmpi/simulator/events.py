"""The pass of ranks whose flows may hold each other up, event after event.

What happens at one moment is done for all ranks and connections that it happens to, as arrays: where ranks
are alike, a step has a few moments, however many ranks there are.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.errors import ScheduleError
from ringmpi.simulator.disturbance import Disturbance
from ringmpi.simulator.flows import Flows, Load
from ringmpi.simulator.network import Shared, max_min_rates
from ringmpi.simulator.record import Recorder, later
from ringmpi.simulator.work import Work

Array = NDArray[Any]
Ranks = NDArray[np.intp]

#: What is known of a flow on its way, by the connection that carries it.
_FLOW = np.dtype(
    [
        ("receiver", np.intp),
        ("nbytes", np.float64),
        ("left", np.float64),  # Seconds that it moves yet, alone.
        ("moving", np.float64),  # Seconds that it moves in all, alone.
        ("latency", np.float64),
        ("eager", np.bool_),
        ("step", np.intp),
        ("due", np.intp),
        ("posted", np.float64),  # When its sender posted it.
    ]
)


#: The transfer that a rank saw complete last: when, whether it received it, the peer, when that posted it.
_AWAITED = np.dtype(
    [("at", np.float64), ("received", np.bool_), ("peer", np.float64), ("posted", np.float64)]
)
NOTHING = np.array((-np.inf, False, np.nan, np.nan), _AWAITED)


def events(
    work: Work,
    shared: Shared,
    disturbance: Disturbance,
    repeat: int,
    recorder: Recorder,
    *,
    waits: bool,
    computing: bool,
) -> None:
    """Go through a pass in which connections share capacities. Local.

    Parameters
    ----------
    work : Work
    shared : Shared
        What they share.
    disturbance : Disturbance
    repeat : int
    recorder : Recorder
        Takes the steps.
    waits : bool
        Nothing above the eager limit moves but while both its ends wait.
    computing : bool
        With compute, else the transfers alone.
    """
    loads = _Loads(work, disturbance, repeat, computing)
    _Pass(work, shared, loads, recorder, waits).run()


class _Loads:
    """The loads of steps that some ranks are in, and the disturbed compute of each."""

    def __init__(self, work: Work, disturbance: Disturbance, repeat: int, computing: bool) -> None:
        self._work, self._disturbance = work, disturbance
        self._repeat, self._computing = repeat, computing
        self._known: dict[int, tuple[Load, Array]] = {}

    def of(self, step: int) -> tuple[Load, Array]:
        if step not in self._known:
            load = self._work.load(step, self._computing)
            taken = load.compute
            if self._computing:
                taken = self._disturbance.of(taken, self._repeat, step)
            self._known[step] = load, taken
        return self._known[step]

    def forget_before(self, step: int) -> None:
        for old in [known for known in self._known if known < step]:
            del self._known[old]


@dataclass(frozen=True)
class _Arrival:
    """Flows that arrive at one moment."""

    senders: Ranks
    flows: Array


class _Pass:
    """A pass under way: where every rank and every connection is."""

    def __init__(
        self, work: Work, shared: Shared, loads: _Loads, recorder: Recorder, waits: bool
    ) -> None:
        size, connections = work.size, len(shared.uses)
        self._work, self._shared, self._loads = work, shared, loads
        self._recorder, self._waits = recorder, waits
        self._now = 0.0
        self._step = np.full(size, -1, np.intp)
        self._started = np.zeros(size)
        self._done_at = np.full(size, np.inf)  # When the compute under way is done.
        self._done = np.zeros(size)  # When that of the step was.
        self._waiting = np.zeros(size, bool)
        # Of transfers by the step in which they are due, modulo the most steps that one has.
        self._open = np.zeros((size, work.span), np.intp)
        self._seen = {name: np.full((size, work.span), -np.inf) for name in ("received", "sent")}
        self._awaited = np.full((size, work.span), NOTHING, _AWAITED)
        # Eager flows that arrived before their receivers posted, by step.
        self._early: dict[int, list[_Arrival]] = defaultdict(list)
        self._flow = np.zeros(connections, _FLOW)  # At the head of each connection.
        self._busy = np.zeros(connections, bool)
        self._speed = np.zeros(connections)  # As a share of that alone.
        self._since = np.zeros(connections)
        self._ends = np.full(connections, np.inf)
        self._queue: dict[int, deque[Any]] = defaultdict(deque)
        self._arrivals: list[tuple[float, int, _Arrival]] = []
        self._number = count()
        self._shares = (shared.uses != len(shared.capacity) - 1).any(axis=1)

    def run(self) -> None:
        everyone = np.arange(self._work.size)
        self._enter(everyone, 0)
        self._set_speeds()
        running = self._work.size
        while running:
            self._now = self._next_moment()
            changed = self._end_flows()
            self._arrive()
            changed |= self._end_compute()
            ended = self._ended()
            running -= self._end_steps(ended)
            if changed or len(ended):
                self._set_speeds()

    def _next_moment(self) -> float:
        moment = min(
            float(self._done_at.min()),
            float(self._ends.min(initial=np.inf)),
            self._arrivals[0][0] if self._arrivals else np.inf,
        )
        if moment == np.inf:
            raise ScheduleError("simulate: all ranks wait, and nothing is on its way")
        return moment

    def _end_flows(self) -> bool:
        """Let flows whose last byte has left go on their way, and those behind them begin."""
        over = np.flatnonzero(self._ends <= self._now)
        if not len(over):
            return False
        flows = self._flow[over].copy()
        self._busy[over], self._ends[over] = False, np.inf
        senders = over % self._work.size
        for latency in np.unique(flows["latency"]):
            these = flows["latency"] == latency
            arrival = _Arrival(senders[these], flows[these])
            heapq.heappush(self._arrivals, (self._now + latency, next(self._number), arrival))
        for connection in over.tolist() if self._queue else ():
            waiting = self._queue.pop(connection, None)
            if waiting:
                self._begin(np.array([connection]), waiting.popleft())
                if waiting:
                    self._queue[connection] = waiting
        return True

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now:
            arrival = heapq.heappop(self._arrivals)[2]
            posted = self._step[arrival.flows["receiver"]] >= arrival.flows["step"]
            if posted.all():
                self._deliver(arrival)
                continue
            self._deliver(_Arrival(arrival.senders[posted], arrival.flows[posted]))
            for step in np.unique(arrival.flows["step"][~posted]).tolist():
                early = ~posted & (arrival.flows["step"] == step)
                self._early[step].append(_Arrival(arrival.senders[early], arrival.flows[early]))

    def _deliver(self, arrival: _Arrival) -> None:
        """Let both ends be done with flows: the sender of an eager one has been before."""
        flows, span = arrival.flows, self._work.span
        both = ~flows["eager"]
        self._see(
            "sent", arrival.senders[both], flows["due"][both] % span, flows["receiver"][both], np.nan
        )
        self._see("received", flows["receiver"], flows["due"] % span, arrival.senders, flows["posted"])

    def _see(self, what: str, ranks: Ranks, due: Ranks, peers: Ranks, posted: Array | float) -> None:
        np.subtract.at(self._open, (ranks, due), 1)
        self._seen[what][ranks, due] = self._now
        new = np.zeros(len(ranks), _AWAITED)
        new["at"], new["received"], new["peer"], new["posted"] = (
            self._now,
            what == "received",
            peers,
            posted,
        )
        old = self._awaited[ranks, due]
        # Of those that end at once it is a receive, and from the highest rank.
        last = later(new["at"], old["at"]) | (new["received"] > old["received"])
        last |= (new["received"] == old["received"]) & (new["peer"] > old["peer"])
        ordered = np.argsort(peers, kind="stable")
        ordered = ordered[last[ordered]]
        self._awaited[ranks[ordered], due[ordered]] = new[ordered]

    def _end_compute(self) -> bool:
        over = self._done_at <= self._now
        self._done[over] = self._now
        self._done_at[over] = np.inf
        self._waiting |= over
        return bool(over.any())

    def _ended(self) -> Ranks:
        """Return the ranks that wait for nothing any more."""
        waiting = np.flatnonzero(self._waiting)
        open_transfers = self._open[waiting, self._step[waiting] % self._work.span]
        return np.asarray(waiting[open_transfers == 0], np.intp)

    def _end_steps(self, ranks: Ranks) -> int:
        """End the step of some ranks and begin the next; return how many have ended the last."""
        finished, steps = 0, self._step[ranks]
        for step in np.unique(steps).tolist():
            here = ranks[steps == step]
            at = step % self._work.span
            moments = {"started": self._started[here], "compute_done": self._done[here]}
            moments |= {name: seen[here, at] for name, seen in self._seen.items()}
            moments["step_end"] = np.full(len(here), self._now)
            awaited = self._awaited[here, at]
            self._recorder.step(
                step,
                here,
                moments,
                self._loads.of(step)[0],
                partial(_kept, awaited),
            )
            for seen in self._seen.values():
                seen[here, at] = -np.inf
            self._awaited[here, at] = NOTHING
            self._waiting[here] = False
            if step + 1 < self._work.steps:
                self._enter(here, step + 1)
            else:
                finished += len(here)
        if len(ranks):
            self._loads.forget_before(int(self._step.min()))
        return finished

    def _enter(self, ranks: Ranks, step: int) -> None:
        """Begin a step of some ranks: post its transfers, and compute."""
        load, taken = self._loads.of(step)
        self._step[ranks] = step
        self._started[ranks] = self._now
        self._done_at[ranks] = self._now + taken[ranks]
        entering = np.zeros(self._work.size, bool)
        entering[ranks] = True
        for flows, due in load.flows:
            self._post(flows, step, due, entering)
        for arrival in self._early.pop(step, ()):
            here = entering[arrival.flows["receiver"]]
            if here.any():
                self._deliver(_Arrival(arrival.senders[here], arrival.flows[here]))
            if not here.all():
                self._early[step].append(_Arrival(arrival.senders[~here], arrival.flows[~here]))

    def _post(self, flows: Flows, step: int, due: int, entering: Array) -> None:
        senders, receivers, eager = flows.senders, flows.receivers, flows.eager
        sending, receiving = entering[senders], entering[receivers]
        at = due % self._work.span
        self._open[senders[sending & ~eager], at] += 1
        self._open[receivers[receiving], at] += 1
        early = sending & eager
        if early.any():
            sent = self._seen["sent"]
            sent[senders[early], at] = np.maximum(sent[senders[early], at], self._now)
        posted = (sending & (self._step[receivers] >= step)) | (
            receiving & (self._step[senders] >= step)
        )
        ready = np.flatnonzero(np.where(eager, sending, posted))
        if not len(ready):
            return
        made = np.zeros(len(ready), _FLOW)
        made["receiver"] = receivers[ready]
        made["nbytes"] = flows.nbytes[ready]
        made["left"] = made["moving"] = flows.moving[ready]
        made["latency"] = flows.latency[ready]
        made["eager"] = eager[ready]
        made["step"], made["due"] = step, due
        made["posted"] = self._started[senders[ready]]
        connections = flows.way * self._work.size + senders[ready]
        idle = ~self._busy[connections]
        self._begin(connections[idle], made[idle])
        for connection, flow in zip(connections[~idle].tolist(), made[~idle], strict=True):
            self._queue[connection].append(flow)

    def _begin(self, connections: Ranks, flows: Any) -> None:
        """Let flows be the first of their connections; how fast they move is set later."""
        self._flow[connections] = flows
        self._busy[connections] = True
        self._speed[connections] = 0.0
        self._since[connections] = self._now

    def _set_speeds(self) -> None:
        """Share capacities anew among the flows that can move."""
        busy = np.flatnonzero(self._busy)
        flows = self._flow[busy]
        speed = np.ones(len(busy))
        if self._waits:
            both = self._waiting[busy % self._work.size] & self._waiting[flows["receiver"]]
            speed[~(both | flows["eager"])] = 0.0
        sharing = np.flatnonzero((speed > 0) & self._shares[busy] & (flows["moving"] > 0))
        if len(sharing):
            fastest = flows["nbytes"][sharing] / flows["moving"][sharing]
            speed[sharing] = max_min_rates(self._shared, busy[sharing], fastest) / fastest
        changed = speed != self._speed[busy]
        turned, before = busy[changed], self._speed[busy[changed]]
        gone = before * (self._now - self._since[turned])
        left = np.maximum(self._flow["left"][turned] - gone, 0.0)
        self._flow["left"][turned] = left
        self._since[turned], self._speed[turned] = self._now, speed[changed]
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = self._now + left / speed[changed]
        self._ends[turned] = np.where(speed[changed] > 0, ends, np.inf)


def _kept(awaited: Array, kept: Ranks) -> tuple[Array, Array]:
    """Return the peer that some ranks waited for, and when it posted what it sent."""
    told = awaited[kept]
    return told["peer"], np.where(told["received"], told["posted"], np.nan)
