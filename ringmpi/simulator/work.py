"""What all ranks do in each step: the schedules, as arrays over ranks.

Schedules of ``P`` ranks have ``P^2`` steps, and 16384 of them don't fit into memory. But where every shard
has tokens, the schedule of a rank is rank 0's, turned round. This is compared with the schedules
themselves, of some ranks in each simulation and of all in the tests. Where shards are empty, all schedules
are made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.errors import ConfigError
from ringmpi.model.costs import FLOPS_PER_PAIR
from ringmpi.model.machine import INTER, INTRA, Connection, Machine
from ringmpi.model.prices import Prices, Task, held_nbytes
from ringmpi.schedule import METHODS, Pass, Shards, Step
from ringmpi.schedule.steps import OF_KEYS, Attend, Direction, Held, Part, Share, Transfer, parts_held
from ringmpi.simulator.blocks import Blocks, Owners, priced
from ringmpi.simulator.flows import Flows, Load
from ringmpi.simulator.turn import Turn, check_turned

Array = NDArray[Any]
Ranks = NDArray[np.intp]


#: Steps of all schedules together that are made where one does not stand for all: about a minute.
MOST_STEPS = 2**20


#: Up to so many ranks two schedules are compared with rank 0's, beyond it one: each takes a second then.
MOST_COMPARED = 4096


@dataclass(frozen=True)
class _Sizes:
    """What flights of one kind of part cost, by kind of owner and share of heads."""

    nbytes: Array
    messages: Array
    moving: dict[str, Array]
    latency: dict[str, Array]
    eager: dict[str, Array]


class Work:
    """What all ranks of a pass do. Local.

    Parameters
    ----------
    task : Task
    method : str
        One of `METHODS`.
    inner : int
        Ranks of an inner group.
    machine : Machine
        With links for all ranks, see `Machine.check_ranks`.
    dtype : str
        Of q, k and v.
    direction : Pass
    chunk_limit : int
        Bytes of the largest message.

    Raises
    ------
    ConfigError
        If it would take hours.

    Attributes
    ----------
    size, steps : int
        Numbers of ranks and of steps.
    span : int
        The most steps that a transfer has.
    flops_per_pair : int
    held_nbytes : ndarray of int64, shape (ranks,)
        Bytes of buffers.
    """

    def __init__(
        self,
        task: Task,
        method: str,
        inner: int,
        machine: Machine,
        dtype: str,
        direction: Pass,
        chunk_limit: int,
    ) -> None:
        self.size = task.size
        self._nothing = np.zeros(task.size)
        self.flops_per_pair = FLOPS_PER_PAIR[direction] * task.shape.head_dim
        self._task, self._machine = task, machine
        self._prices = Prices(task, machine.rates(dtype).of(direction), direction)
        self._chunk_limit = chunk_limit
        keys = Owners(task.keys)
        queries = keys if task.queries == task.keys else Owners(task.queries)
        # By whether a part goes with the positions of keys.
        self._owners = {True: keys, False: queries}
        self._sizes: dict[tuple[Any, ...], _Sizes] = {}
        self._ways: dict[tuple[bool, int], int] = {}
        self._kinds: dict[int, Array] = {}
        self._flows: dict[tuple[Any, ...], Flows] = {}

        def schedule(rank: int) -> list[Step]:
            return METHODS[method](Shards(task.keys, task.queries, rank, inner), direction)

        own = schedule(0)
        self.steps = len(own)
        self._turn = Turn(task.size, inner)
        if self._alike(own):
            self._schedules = [own]
            for rank in self._compared():
                check_turned(own, schedule(rank), self._turn, rank)
            self._blocks = Blocks(task, self._prices, keys, queries)
            held = self._turned_held(own)
        else:
            if task.size * self.steps > MOST_STEPS:
                raise ConfigError(
                    f"seq_len={task.keys.seq_len} on {task.size} ranks: some shards, or shares of "
                    f"them, have no "
                    f"tokens, so that all schedules must be made, of {self.steps} steps each; use at least "
                    f"{4 * task.size} tokens"
                )
            self._schedules = [own, *map(schedule, range(1, task.size))]
            held = np.array([held_nbytes(steps, self._prices) for steps in self._schedules])
        self.held_nbytes: Array = held
        self.span = max(
            (t.steps for steps in self._schedules for step in steps for t in step.transfers), default=1
        )

    def _turned_held(self, own: Sequence[Step]) -> Array:
        """Return the bytes of buffers of every rank: of each slot the largest part that is ever in it."""
        slots: dict[int, Array] = {}
        different = {}
        for held in parts_held(own):
            part, matters = held.part, len(self._owners[held.part.payload in OF_KEYS]) > 1
            owner = part.owner if matters else 0
            different[held.slot, part.payload, part.tokens, part.heads, owner] = part
        for (slot, *_), part in different.items():
            nbytes = self._sizes_of(part).nbytes.take(self._codes(part))
            slots[slot] = np.maximum(slots[slot], nbytes) if slot in slots else nbytes
        return np.sum(list(slots.values()), axis=0) if slots else self._nothing

    @property
    def by_turning(self) -> bool:
        """Whether the schedule of rank 0 stands for all."""
        return len(self._schedules) < self.size

    def load(self, number: int, computing: bool = True) -> Load:
        """Return what all ranks do in a step; the attends only if asked for. Local."""
        flows = list(self._all_flows(number))
        nothing = self._nothing
        compute, pairs = self._attended(number) if computing else (nothing, nothing)
        if len(flows) == 1:
            return Load(compute, pairs, flows, flows[0][0].sent(self.size))
        sent = dict.fromkeys(Load.SENT, nothing)
        for flow, _ in flows:
            sent = {name: sent[name] + counts for name, counts in flow.sent(self.size).items()}
        return Load(compute, pairs, flows, sent)

    def connections(self) -> Iterator[tuple[int, Ranks, Ranks]]:
        """Yield the number of each way, its senders and their receivers. Local."""
        peers = defaultdict(set)
        for rank, steps in enumerate(self._schedules):
            for step in steps:
                for transfer in _sends(step):
                    peers[(transfer.peer - rank) % self.size].add(rank)
        for away, ranks in peers.items():
            if self.by_turning:
                yield self._way(True, away), self._turn.ranks, self._turn.all_on(away)
            else:
                senders = np.array(sorted(ranks), np.intp)
                yield self._way(False, away), senders, (senders + away) % self.size

    def _alike(self, own: Sequence[Step]) -> bool:
        """Return whether all parts of all ranks have tokens, so that none is left out of a schedule."""
        parts = [t.part for step in own for t in step.transfers]
        parts += [held.part for step in own for a in step.attends for held in (a.queries, a.keys)]
        pieces = max((part.tokens.pieces for part in parts), default=1)
        return min(owners.shortest for owners in self._owners.values()) >= pieces

    def _compared(self) -> list[int]:
        """Return whose schedules are compared with rank 0's: the last, and of not too many one between."""
        between = {self.size // 2} if self.size <= MOST_COMPARED else set()
        return sorted((between | {self.size - 1}) - {0})

    def _attended(self, number: int) -> tuple[Array, Array]:
        """Return seconds and pairs of a step's attends."""
        if self.by_turning:
            found = [self._attended_turned(a) for a in self._schedules[0][number].attends]
            return reduce(_both, found) if found else (self._nothing, self._nothing)
        seconds, pairs = np.zeros(self.size), np.zeros(self.size)
        for rank, steps in enumerate(self._schedules):
            for attend in steps[number].attends:
                met, taken = priced(self._prices, attend.queries.part, attend.keys.part)
                seconds[rank] += taken
                pairs[rank] += met
        return seconds, pairs

    def _attended_turned(self, attend: Attend) -> tuple[Array, Array]:
        """Return seconds and pairs, on all ranks, of an attend of rank 0's schedule."""
        owners = attend.queries.part.owner, attend.keys.part.owner
        asking, asked = map(self._turn.all_on, owners)
        if attend.queries.part.heads.pieces == 1:
            pairs, seconds = self._blocks.of(attend, asking, asked, self._turn.cuts(*owners))
            return seconds, pairs
        seconds, pairs = np.zeros(self.size), np.zeros(self.size)
        for mine, ranks in self._by_heads(attend):
            pairs[ranks], seconds[ranks] = self._blocks.of(mine, asking[ranks], asked[ranks])
        return seconds, pairs

    def _by_heads(self, attend: Attend) -> Iterator[tuple[Attend, slice]]:
        """Yield an attend with each share of heads that some ranks have, and those ranks."""
        share = attend.queries.part.heads
        for place in range(self._turn.inner):
            here = self._turn.share(share, place)
            queries, keys = (replace(h.part, heads=here) for h in (attend.queries, attend.keys))
            yield Attend(Held(queries), Held(keys), ()), slice(place, None, self._turn.inner)

    def _all_flows(self, number: int) -> Iterator[tuple[Flows, int]]:
        """Yield what is sent in a step, and when it is due: one flow for all that two ranks have due then."""
        if self.by_turning:
            together: dict[tuple[int, int], list[Part]] = defaultdict(list)
            for transfer in _sends(self._schedules[0][number]):
                together[transfer.peer, transfer.steps].append(transfer.part)
            for (peer, steps), parts in together.items():
                yield self._turned_flows(peer, parts), number + steps - 1
            return
        apart: dict[tuple[int, int], dict[int, list[Part]]] = defaultdict(lambda: defaultdict(list))
        for rank, schedule in enumerate(self._schedules):
            for transfer in _sends(schedule[number]):
                way = (transfer.peer - rank) % self.size
                apart[way, transfer.steps][rank].append(transfer.part)
        for (way, steps), by_rank in apart.items():
            yield self._listed_flows(way, by_rank), number + steps - 1

    def _turned_flows(self, peer: int, parts: Sequence[Part]) -> Flows:
        """Return the flows that consist of the same parts of all ranks, counted on."""
        ranks, receivers = self._turn.ranks, self._turn.all_on(peer)
        few = all(len(self._owners[part.payload in OF_KEYS]) == 1 for part in parts)
        known = (peer, *((part.payload, part.tokens, part.heads) for part in parts))
        if few and known in self._flows:
            return self._flows[known]
        inter = self._inter(peer, ranks, receivers)
        nbytes, messages, moving = (np.zeros(self.size) for _ in range(3))
        latency, eager = np.zeros(self.size), np.ones(self.size, bool)
        for part in parts:
            sizes, code = self._sizes_of(part), self._codes(part)
            nbytes += sizes.nbytes.take(code)
            messages += sizes.messages.take(code)
            for kind, here in ((INTRA, ~inter), (INTER, inter)):
                if not here.any():
                    continue
                moving[here] += sizes.moving[kind][code[here]]
                latency[here] = np.maximum(latency[here], sizes.latency[kind][code[here]])
                eager[here] &= sizes.eager[kind][code[here]]
        latency += self._further(ranks, receivers)
        way, number = self._way(True, peer), np.full(self.size, float(len(parts)))
        turn = peer if self._turn.plain else 0
        flows = Flows(
            way,
            ranks,
            receivers,
            nbytes,
            moving,
            latency,
            eager,
            number,
            messages,
            bool(eager.any()),
            turn,
        )
        if few:
            self._flows[known] = flows
        return flows

    def _listed_flows(self, way: int, by_rank: dict[int, list[Part]]) -> Flows:
        """Return flows that consist of different parts of some ranks."""
        senders = np.array(sorted(by_rank), np.intp)
        receivers = (senders + way) % self.size
        rows = []
        for sender, receiver in zip(senders.tolist(), receivers.tolist(), strict=True):
            link = self._machine.links[self._machine.kind(sender, receiver)]
            sizes = [self._prices.nbytes(part) for part in by_rank[sender]]
            rows.append(
                (
                    sum(sizes),
                    sum(nbytes / link.bandwidth.at(nbytes) for nbytes in sizes),
                    max(map(link.latency.at, sizes)),
                    max(sizes) <= link.eager_limit,
                    sum(-(-nbytes // self._chunk_limit) for nbytes in sizes),
                    len(sizes),
                )
            )
        nbytes, moving, latency, eager, messages, parts = (
            np.array(column) for column in zip(*rows, strict=True)
        )
        latency = latency + self._further(senders, receivers)
        return Flows(
            self._way(False, way),
            senders,
            receivers,
            nbytes.astype(np.float64),
            moving,
            latency,
            eager,
            parts.astype(np.float64),
            messages.astype(np.float64),
            bool(eager.any()),
        )

    def _sizes_of(self, part: Part) -> _Sizes:
        """Return what a part costs, by the code of its owner and its heads."""
        known = part.payload, part.tokens, part.heads.pieces
        if known not in self._sizes:
            owners = self._owners[part.payload in OF_KEYS]
            nbytes = [
                self._prices.nbytes(
                    Part(part.payload, first, part.tokens, Share(index, part.heads.pieces))
                )
                for first, _ in owners.examples
                for index in range(part.heads.pieces)
            ]
            links = self._machine.links

            def of_links(price: Callable[[Connection, int], float]) -> dict[str, Array]:
                return {
                    kind: np.array([price(link, size) for size in nbytes])
                    for kind, link in links.items()
                }

            self._sizes[known] = _Sizes(
                np.array(nbytes, np.float64),
                np.array([-(-size // self._chunk_limit) for size in nbytes], np.float64),
                of_links(lambda link, size: size / link.bandwidth.at(size)),
                of_links(lambda link, size: link.latency.at(size)),
                of_links(lambda link, size: size <= link.eager_limit),
            )
        return self._sizes[known]

    def _codes(self, part: Part) -> Ranks:
        """Return which entry of its sizes a part of rank 0's schedule is on every rank."""
        kinds = self._owners[part.payload in OF_KEYS].kind.take(self._turn.all_on(part.owner))
        if part.heads.pieces == 1:
            return kinds
        index = part.heads.index
        if part.heads.pieces == self._turn.inner:
            places = (index + self._turn.ranks % self._turn.inner) % self._turn.inner
        else:
            places = np.full(self.size, index)
        return np.asarray(kinds * part.heads.pieces + places, np.intp)

    def _inter(self, peer: int, senders: Ranks, receivers: Ranks) -> Array:
        if peer not in self._kinds:
            per_node = self._machine.ranks_per_node
            self._kinds[peer] = senders // per_node != receivers // per_node
        return self._kinds[peer]

    def _further(self, senders: Ranks, receivers: Ranks) -> Array:
        """Return the seconds that messages between groups of nodes take longer."""
        topology = self._machine.topology
        if topology is None or not topology.latency:
            return np.zeros(len(senders))
        width = topology.ranks_per_group
        return np.asarray((senders // width != receivers // width) * topology.latency)

    def _way(self, turned: bool, number: int) -> int:
        return self._ways.setdefault((turned, number), len(self._ways))


def _both(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    return one[0] + other[0], one[1] + other[1]


def _sends(step: Step) -> Iterator[Transfer]:
    return (transfer for transfer in step.transfers if transfer.direction is Direction.SEND)
