"""How long a method takes on a machine: its schedule, walked step by step.

In each step every rank attends at the rate of the machine while the transfers posted so far go on; a step
ends when on all ranks the attends are done and the transfers that are due have arrived. So a step takes
``max(compute, transfer)`` over all ranks. The rules:

* An attend takes ``flops / F``, with F at the geometric mean of its query and key tokens; masked pairs are
  free.
* The messages of a step between two ranks take ``latency + nbytes / bandwidth`` together; all messages of a
  step over one kind of link also share what a rank can send (and receive) in total over it. Latencies
  overlap.
* Transfers that have several steps are not slowed down by those of later steps.
* Copying, clearing, merging and finishing take no time; nor does starting anything.
* MPI makes progress by itself.

Where all ranks compute alike, ranks that do not wait for each other at the end of a step take as long; with
contiguous causal shards the last rank is the busiest of each step, and theirs is the time too. `simulator`
lets every rank go on by itself, and heeds what ranks of a node or of a group of nodes share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ringmpi.model.machine import Curve, Machine
from ringmpi.model.prices import Prices, Task, held_nbytes
from ringmpi.schedule import METHODS, Pass, Shards, Step
from ringmpi.schedule.steps import Attend, Direction, Transfer

#: Up to this many ranks all schedules are walked, beyond it those of a few: P schedules have P^2 steps.
WALK_ALL = 16


@dataclass(frozen=True)
class Prediction:
    """What one pass of a method is predicted to take.

    Attributes
    ----------
    seconds : float
        From the first start to the last end.
    compute : float
        Seconds that the rank with most work attends.
    sent_nbytes, held_nbytes : int
        Of the rank with most: bytes sent, and bytes of buffers beside its own tensors.
    """

    seconds: float
    compute: float
    sent_nbytes: int
    held_nbytes: int

    @property
    def waiting(self) -> float:
        """Seconds in which the rank with most work waits, for a transfer or for another rank."""
        return self.seconds - self.compute


@dataclass
class _Rank:
    """What has happened on one rank so far."""

    number: int
    steps: list[Step]
    compute: float = 0.0
    sent_nbytes: int = 0
    due: dict[int, float] = field(
        default_factory=dict
    )  # When the transfers due in a step have arrived.


class _Walk:
    """Prices the steps of a rank."""

    def __init__(self, prices: Prices, machine: Machine) -> None:
        self._prices = prices
        self._machine = machine

    def compute(self, attends: Iterable[Attend]) -> float:
        return sum(map(self._prices.seconds, attends))

    def transfers(self, rank: int, posted: Iterable[Transfer]) -> dict[int, float]:
        """Return how long the transfers of a step take, by the number of steps that they have."""
        ways = [(self._machine.kind(rank, t.peer), t, self._prices.nbytes(t.part)) for t in posted]
        pair: dict[tuple[Direction, int], float] = defaultdict(float)
        total: dict[tuple[Direction, str], float] = defaultdict(float)
        for kind, transfer, nbytes in ways:
            link = self._machine.links[kind]
            pair[transfer.direction, transfer.peer] += nbytes / link.bandwidth.at(nbytes)
            total[transfer.direction, kind] += nbytes / link.total
        longest: dict[int, float] = defaultdict(float)
        for kind, transfer, nbytes in ways:
            way = transfer.direction
            moving = max(pair[way, transfer.peer], total[way, kind])
            seconds = self._machine.links[kind].latency.at(nbytes) + moving
            longest[transfer.steps] = max(longest[transfer.steps], seconds)
        return longest

    def sent(self, posted: Iterable[Transfer]) -> int:
        return sum(self._prices.nbytes(t.part) for t in posted if t.direction is Direction.SEND)


def predict(
    task: Task, method: str, inner: int, machine: Machine, rates: Curve, direction: Pass
) -> Prediction:
    """Return how long one pass of a method takes. Local.

    Beyond `WALK_ALL` ranks those are walked that `watched` returns.

    Parameters
    ----------
    task : Task
    method : str
        One of `METHODS`.
    inner : int
        Ranks of an inner group.
    machine : Machine
        With links for all ranks, see `Machine.check_ranks`.
    rates : Curve
        FLOP/s of a rank in this pass, by tokens of a block.
    direction : Pass
    """
    prices = Prices(task, rates, direction)
    walk = _Walk(prices, machine)
    ranks = []
    for number in watched(task.size):
        shards = Shards(task.keys, task.queries, number, inner)
        ranks.append(_Rank(number, METHODS[method](shards, direction)))
    now = 0.0
    for number in range(len(ranks[0].steps)):
        end = now
        for rank in ranks:
            step = rank.steps[number]
            compute = walk.compute(step.attends)
            rank.compute += compute
            rank.sent_nbytes += walk.sent(step.transfers)
            for steps, seconds in walk.transfers(rank.number, step.transfers).items():
                last = number + steps - 1
                rank.due[last] = max(rank.due.get(last, 0.0), now + seconds)
            end = max(end, now + compute, rank.due.pop(number, 0.0))
        now = end
    return Prediction(
        seconds=now,
        compute=max(rank.compute for rank in ranks),
        sent_nbytes=max(rank.sent_nbytes for rank in ranks),
        held_nbytes=max(held_nbytes(rank.steps, prices) for rank in ranks),
    )


def watched(size: int) -> list[int]:
    """Return the ranks that are walked: all, or enough to have the slowest of every step among them.

    The first and the last rank have the longest shards, the least and the most causal work, and the links
    between nodes; zigzag halves of blocks give most work somewhere in between.
    """
    if size <= WALK_ALL:
        return list(range(size))
    return sorted({0, 1, size // 4, size // 2, size - 2, size - 1})
