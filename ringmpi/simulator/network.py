"""What connections share, and how much of it each gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.model.machine import DRAGONFLY, INTER, INTRA, Machine

Array = NDArray[Any]
Ranks = NDArray[np.intp]

#: Rates that differ by less than this part are one: what is left of a capacity is a difference of sums.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Shared:
    """The capacities that may hold up connections, and which connections use which.

    Connection ``way * size + sender`` is that of a sender in a way.

    Attributes
    ----------
    capacity : ndarray of float64, shape (capacities + 1,)
        Bytes a second; the last one stands for none, and is infinite.
    uses : ndarray of intp, shape (connections, k)
        Capacities of each connection, filled up with the last one.
    """

    capacity: Array
    uses: Ranks

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return len(self.capacity) > 1


def shared_capacities(
    machine: Machine, size: int, connections: Iterable[tuple[int, Ranks, Ranks]]
) -> Shared:
    """Return the capacities that connections share, without those that never hold up anything.

    A capacity is left out if it holds even where all connections that ever use it send at once, as fast as
    they can. Local.

    Parameters
    ----------
    machine : Machine
    size : int
        Number of ranks.
    connections : iterable of (int, ndarray of intp, ndarray of intp)
        Number of a way, senders, and the receiver of each.
    """
    ways = list(connections)
    total = (max((way for way, _, _ in ways), default=-1) + 1) * size
    found: list[tuple[Ranks, Ranks, Array]] = []  # Connections, key of what each uses, bytes a second.
    fastest = np.zeros(total)
    for way, senders, receivers in ways:
        inter = senders // machine.ranks_per_node != receivers // machine.ranks_per_node
        for kind, here in ((INTRA, ~inter), (INTER, inter)):
            if here.any():
                numbers = way * size + senders[here]
                fastest[numbers] = max(rate for _, rate in machine.links[kind].bandwidth.points)
                for number, (places, capacity) in enumerate(
                    _uses(machine, size, kind, senders[here], receivers[here])
                ):
                    found.append((numbers, (places * 2 + (kind == INTER)) * 8 + number, capacity))
    if not found:
        return Shared(np.array([np.inf]), np.zeros((total, 1), np.intp))

    numbers, keys, capacities = (np.concatenate(column) for column in zip(*found, strict=True))
    known, first, place = np.unique(keys, return_index=True, return_inverse=True)
    capacity = capacities[first]
    wanted = np.bincount(place, fastest[numbers], len(known))
    binding = wanted > capacity * (1 + ROUNDING)
    renumbered = np.cumsum(binding) - 1
    keep = binding[place]
    numbers, place = numbers[keep], renumbered[place[keep]]
    order = np.argsort(numbers, kind="stable")
    numbers, place = numbers[order], place[order]
    column = np.arange(len(numbers)) - np.searchsorted(numbers, numbers)
    uses = np.full((total, int(column.max(initial=0)) + 1), int(binding.sum()), np.intp)
    uses[numbers, column] = place
    return Shared(np.append(capacity[binding], np.inf), uses)


def _uses(
    machine: Machine, size: int, kind: str, senders: Ranks, receivers: Ranks
) -> Iterable[tuple[Ranks, Array]]:
    """Yield what connections of one kind of link use: the places of it, and its bytes a second there."""
    link, per_node = machine.links[kind], machine.ranks_per_node
    nodes = -(-size // per_node)
    ranks_of = np.minimum(per_node, size - np.arange(nodes) * per_node)
    of_node = np.minimum(link.node_total, ranks_of * link.total)
    for ends in (senders, receivers):
        yield ends, np.full(len(ends), link.total)
        yield ends // per_node, of_node[ends // per_node]
    topology = machine.topology
    if kind != INTER or topology is None:
        return
    group = topology.ranks_per_group
    far = senders // group != receivers // group
    if not far.any():
        return
    # Of a whole group, however few of its ranks take part.
    leaving = topology.taper * (group // per_node) * min(link.node_total, per_node * link.total)
    nowhere = size * size  # No place has this number: what stays in its group uses no uplink.
    places = [senders // group, receivers // group]
    capacities = [leaving, leaving]
    if topology.kind == DRAGONFLY:
        places.append(senders // group * size + receivers // group)
        capacities.append(leaving / (topology.groups - 1))
    for place, capacity in zip(places, capacities, strict=True):
        yield np.where(far, place, nowhere), np.where(far, capacity, np.inf)


def max_min_rates(shared: Shared, moving: Ranks, fastest: Array) -> Array:
    """Return how fast connections are that move at once, max-min fairly. Local.

    None can be faster without a slower one, or one as slow, becoming slower still.

    Parameters
    ----------
    shared : Shared
    moving : ndarray of intp, shape (n,)
        Connections.
    fastest : ndarray of float64, shape (n,)
        Bytes a second of each, alone.

    Returns
    -------
    ndarray of float64, shape (n,)

    Notes
    -----
    In each round a capacity is divided equally among those that are not settled. That is a lower bound of
    what they get in the end, as those that settle for less leave more to the others; so who can have all it
    can use, has. And a capacity that no user is held up more by another one, settles all its users.
    """
    uses, left = shared.uses[moving], shared.capacity.copy()
    none = len(left) - 1
    rates = np.zeros(len(moving))
    open_ones = np.arange(len(moving))
    while len(open_ones):
        mine = uses[open_ones]
        users = np.bincount(mine.ravel(), minlength=none + 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.maximum(left, 0.0) / users
        share[none] = np.inf
        held_up = share[mine].min(axis=1)
        rate = np.minimum(held_up, fastest[open_ones])
        least = np.full(none + 1, np.inf)
        np.minimum.at(least, mine.ravel(), np.repeat(rate, mine.shape[1]))
        tight = least >= share * (1 - ROUNDING)
        tight[none] = False
        settled = (fastest[open_ones] <= held_up) | tight[mine].any(axis=1)
        rates[open_ones[settled]] = rate[settled]
        np.subtract.at(left, mine[settled].ravel(), np.repeat(rate[settled], mine.shape[1]))
        left[none] = np.inf
        open_ones = open_ones[~settled]
    return rates
