"""Traces of runs that never were: a schedule walked in time, with causes of stalls put in by the test.

Every rank goes on by itself. Each hop has a link of its own that carries nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.config import experiment_from
from ringmpi.mask import Mask
from ringmpi.metrics import Clocks, Timings
from ringmpi.schedule import Pass, Shards, Step
from ringmpi.schedule.hops import Hop, hops
from ringmpi.schedule.steps import OF_KEYS, Part
from ringmpi.timeline import Timeline, timeline_of
from ringmpi.trace import RECORD

Array = NDArray[Any]


@dataclass(frozen=True)
class World:
    """How fast everything is.

    Attributes
    ----------
    pair : float
        Seconds for a pair of one head.
    way : float
        Seconds from posting to arrival, of any hop.
    slow : mapping of int to float
        Ranks that take so many times as long to compute.
    ways : mapping of (sender, receiver) to float
        Links with a way of their own.
    polls : bool
        Whether data moves while the receiver computes.
    rendezvous : bool
        Whether a send ends only when it is received; else at once.
    late : mapping of int to float
        Seconds after the others at which a rank begins.
    noise : callable
        What the compute of a rank takes more in a step, as a factor.
    """

    pair: float = 1.0
    way: float = 1.0
    slow: Mapping[int, float] = field(default_factory=dict)
    ways: Mapping[tuple[int, int], float] = field(default_factory=dict)
    polls: bool = True
    rendezvous: bool = False
    late: Mapping[int, float] = field(default_factory=dict)
    noise: Callable[[int, int], float] = lambda rank, step: 1.0

    def silent(self) -> World:
        """Return the same links with nothing to compute."""
        return World(0.0, self.way, {}, self.ways, self.polls, self.rendezvous)


def walk(schedules: list[list[Step]], pairs: Array, world: World) -> Array:
    """Return the records of one pass, shape (ranks, steps), by one clock."""
    ranks, steps = pairs.shape
    records = np.full((ranks, steps), np.nan, RECORD)
    records["pairs"], records["flops"] = pairs, pairs
    free = np.array([world.late.get(rank, 0.0) for rank in range(ranks)])
    travelling = list(hops(schedules))
    for step in range(steps):
        for rank in range(ranks):
            compute = (
                pairs[rank, step] * world.pair * world.slow.get(rank, 1.0) * world.noise(rank, step)
            )
            mine = records[rank, step : step + 1]
            for name in ("started", "posted", "launched"):
                mine[name] = free[rank]
            mine["compute_done"] = free[rank] + compute
        due = [hop for hop in travelling if hop.due == step]
        come = {id(hop): _arrival(records, hop, world) for hop in due}
        for rank in range(ranks):
            mine = records[rank, step : step + 1]
            ends: list[tuple[float, bool, int, float]] = []
            for hop in due:
                posted = float(records["posted"][hop.sender, hop.step])
                if hop.receiver == rank:
                    ends.append((come[id(hop)], True, hop.sender, posted))
                elif hop.sender == rank:
                    sent = come[id(hop)] if world.rendezvous else posted
                    ends.append((sent, False, hop.receiver, np.nan))
            for received, name in ((True, "received"), (False, "sent")):
                mine[name] = max((end[0] for end in ends if end[1] == received), default=np.nan)
            if ends:
                _, _, mine["waited_for"], mine["peer_posted"] = max(ends, key=lambda end: end[:2])
            last = max([float(mine["compute_done"][0]), *(end[0] for end in ends)])
            mine["step_end"] = free[rank] = last
    return records


def _arrival(records: Array, hop: Hop, world: World) -> float:
    way = world.ways.get((hop.sender, hop.receiver), world.way)
    posted = float(records["posted"][hop.sender, hop.step])
    if world.rendezvous:
        posted = max(posted, float(records["posted"][hop.receiver, hop.step]))
    if not world.polls:
        posted = max(posted, float(records["compute_done"][hop.receiver, hop.due]))
    return posted + way


def pairs_of(options: dict[str, Any], size: int, inner: int, direction: Pass) -> Array:
    """Return the allowed pairs of each rank and step, by one head's share of the heads."""
    experiment = experiment_from(options)
    mask = Mask(experiment.causal, experiment.window, experiment.documents)
    layouts = experiment.layouts(size)
    schedules = experiment.schedules(size, inner, direction)
    found = np.zeros((size, len(schedules[0])))
    for rank, steps in enumerate(schedules):
        shards = Shards(layouts["k"], layouts["q"], rank, inner)

        def positions(part: Part, shards: Shards = shards) -> Any:
            layout = shards.keys if part.payload in OF_KEYS else shards.queries
            tokens = shards.tokens(part)
            return layout.positions(part.owner)[tokens.start : tokens.stop]

        for number, step in enumerate(steps):
            found[rank, number] = sum(
                mask.pairs(positions(attend.queries.part), positions(attend.keys.part))
                / attend.queries.part.heads.pieces
                for attend in step.attends
            )
    return found


def walked(
    options: dict[str, Any],
    size: int,
    world: World,
    inner: int = 1,
    direction: Pass = Pass.FORWARD,
    clocks: Clocks | None = None,
) -> Timeline:
    """Return the timeline of an experiment in a world, with a pass of its transfers alone."""
    schedules = experiment_from(options).schedules(size, inner, direction)
    pairs = pairs_of(options, size, inner, direction)
    zeros = np.zeros((1, size))
    timings = Timings(
        walk(schedules, pairs, world)[None],
        walk(schedules, pairs, world.silent())[None],
        clocks or Clocks(zeros, zeros, zeros),
    )
    return timeline_of(timings, 0, schedules)
