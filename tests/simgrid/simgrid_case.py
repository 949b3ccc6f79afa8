"""A simulated experiment as SimGrid is told it: links and programs, made from schedules and machine alone.

Shares with ringmpi's simulator what a part and an attend cost, and nothing of when anything happens.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations
from math import isfinite
from typing import Any

from ringmpi.model.machine import DRAGONFLY, INTER, Machine
from ringmpi.model.prices import Prices, Task
from ringmpi.schedule import METHODS, Pass, Shards
from ringmpi.schedule.hops import hops
from ringmpi.simulator.disturbance import Disturbance


def simgrid_case(
    task: Task,
    method: str,
    inner: int,
    machine: Machine,
    direction: Pass,
    disturbance: Disturbance,
    *,
    waits: bool,
) -> dict[str, Any]:
    """Return what `replay` reads. What two ranks exchange in a step, due together, is one message."""
    size = task.size
    (rates,) = machine.compute.values()
    prices = Prices(task, rates.of(direction), direction)
    schedules = [
        METHODS[method](Shards(task.keys, task.queries, r, inner), direction) for r in range(size)
    ]
    programs: list[list[dict[str, Any]]] = [
        [{"compute": 0.0, "sends": [], "receives": [], "due": []} for _ in steps] for steps in schedules
    ]
    for rank, steps in enumerate(schedules):
        for number, step in enumerate(steps):
            seconds = sum(map(prices.seconds, step.attends)) * disturbance.slow.get(rank, 1.0)
            programs[rank][number]["compute"] = seconds + disturbance.delays.get((rank, number), 0.0)

    together: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for hop in hops(schedules):
        together[hop.step, hop.due, hop.sender, hop.receiver].append(prices.nbytes(hop.part))
    for number, ((step, due, sender, receiver), sizes) in enumerate(together.items()):
        eager = max(sizes) <= machine.links[machine.kind(sender, receiver)].eager_limit
        programs[sender][step]["sends"].append((number, receiver, sum(sizes), eager))
        programs[receiver][step]["receives"].append((number, sender, sum(sizes), eager))
        if not eager:
            programs[sender][due]["due"].append(number)
        programs[receiver][due]["due"].append(number)
    return _platform(machine, size) | {"programs": programs, "waits": waits}


def _platform(machine: Machine, size: int) -> dict[str, Any]:
    """Return the links that ranks, nodes and groups have, and the way from each rank to each."""
    links: dict[str, float] = {}
    routes = []
    for sender, receiver in permutations(range(size), 2):
        kind = machine.kind(sender, receiver)
        link, topology = machine.links[kind], machine.topology
        over = {f"{kind} pair {sender} {receiver}": link.bandwidth.last}
        latency = link.latency.last
        for end, rank in (("out of", sender), ("into", receiver)):
            over[f"{kind} {end} rank {rank}"] = link.total
            if isfinite(link.node_total):
                over[f"{kind} {end} node {machine.node(rank)}"] = link.node_total
        if kind == INTER and topology is not None:
            nodes = topology.ranks_per_group // machine.ranks_per_node
            nics = nodes * min(link.node_total, machine.ranks_per_node * link.total)
            groups = sender // topology.ranks_per_group, receiver // topology.ranks_per_group
            if groups[0] != groups[1]:
                latency += topology.latency
                over[f"out of group {groups[0]}"] = over[f"into group {groups[1]}"] = (
                    topology.taper * nics
                )
                if topology.kind == DRAGONFLY:
                    over[f"group {groups[0]} to {groups[1]}"] = (
                        topology.taper * nics / (topology.groups - 1)
                    )
        links |= over
        routes.append((sender, receiver, list(over), latency))
    return {"links": links, "routes": routes}
