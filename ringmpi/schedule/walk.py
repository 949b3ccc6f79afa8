"""The one movement that most methods are made of: parts walk round a cycle of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count, zip_longest

from ringmpi.schedule.steps import (
    HOME,
    Attend,
    Chore,
    Clear,
    Copy,
    Direction,
    Held,
    Merge,
    Part,
    Shards,
    Step,
    Transfer,
)


class Slots:
    """Hands out slots that nothing else uses."""

    def __init__(self) -> None:
        self._numbers = count()

    def take(self, number: int) -> list[int]:
        """Return so many new slots."""
        return [next(self._numbers) for _ in range(number)]


def receives(shards: Shards, peer: int, held: Iterable[Held], steps: int = 1) -> list[Transfer]:
    """Return the receives of parts from a peer; a part without tokens does not travel."""
    return _transfers(shards, Direction.RECEIVE, peer, held, steps)


def sends(shards: Shards, peer: int, held: Iterable[Held], steps: int = 1) -> list[Transfer]:
    """Return the sends of parts to a peer; a part without tokens does not travel."""
    return _transfers(shards, Direction.SEND, peer, held, steps)


def _transfers(
    shards: Shards, direction: Direction, peer: int, held: Iterable[Held], steps: int
) -> list[Transfer]:
    return [Transfer(direction, peer, h.part, h.slot, steps) for h in held if shards.tokens(h.part)]


def walk(
    shards: Shards,
    slots: Slots,
    cycle: Sequence[int],
    origin: Sequence[Held],
    travelling: Callable[[int], Sequence[Part]],
    attend: Callable[[Held, Held | None], Sequence[Attend]],
    home: Sequence[Held] = (),
) -> list[Step]:
    """Return the steps in which every rank of a cycle is visited by the parts of every other.

    In step ``s`` the parts of the rank ``s`` places back are here, are attended to, and are sent on, so
    parts make ``P - 1`` hops. What is computed for a visitor may follow it: summed up from rank to rank one
    step behind, it makes ``P`` hops, the last of which brings it home in a step of its own. So the compute
    of step ``s`` overlaps the parts for step ``s + 1`` and the sums of step ``s - 1``. Local.

    Parameters
    ----------
    shards : Shards
    slots : Slots
    cycle : sequence of int
        Ranks in the order of travel, this one among them.
    origin : sequence of Held
        The parts of this rank that travel; they are copied into slots first if they are at home.
    travelling : callable
        Returns the parts that travel from a rank of the cycle, in the order of `origin`.
    attend : callable
        Returns what to do about a visiting part, given where it is and where its result goes.
    home : sequence of Held
        Where the results of this rank's own parts come home to, in the order of `origin`; empty if
        results stay with the rank that computes them.
    """
    size, me = len(cycle), cycle.index(shards.rank)
    if size == 1:
        attends = (a for part, result in zip_longest(origin, home) for a in attend(part, result))
        return [Step(attends=tuple(attends), before=tuple(_cleared(home)))]
    upstream, downstream = cycle[me - 1], cycle[(me + 1) % size]

    def visitors(step: int, numbers: Sequence[int]) -> list[Held]:
        return _held(travelling(cycle[(me - step) % size]), numbers)

    def results(step: int, numbers: Sequence[int]) -> list[Held]:
        if not home:
            return []
        parts = travelling(cycle[(me - step) % size])
        payloads = (held.part.payload for held in home)
        return _held([p.as_payload(what) for p, what in zip(parts, payloads, strict=True)], numbers)

    packed = [held for held in origin if held.slot == HOME]
    copies = dict(zip(packed, slots.take(len(packed)), strict=True))
    rooms = [[copies.get(held, held.slot) for held in origin], slots.take(len(origin))]
    sums = [slots.take(len(home)) for _ in range(3)]  # Two in turn to compute into; one to arrive in.

    steps = []
    for number in range(size + bool(home)):
        here, computed = visitors(number, rooms[number % 2]), results(number, sums[number % 2])
        posted: list[Transfer] = []
        arrived: list[Held] = []
        # Receives are posted first, so that an early message finds its buffer waiting.
        if number < size - 1:
            posted += receives(shards, upstream, visitors(number + 1, rooms[(number + 1) % 2]))
        if number > 0:
            arrived = results(number, sums[2])
            posted += receives(shards, upstream, arrived)
        if number < size - 1:
            posted += sends(shards, downstream, here)
        if number > 0:
            posted += sends(shards, downstream, results(number - 1, sums[(number - 1) % 2]))

        before: list[Chore] = []
        if number == 0:
            before += [Copy(held, Held(held.part, slot)) for held, slot in copies.items()]
        if number == size:  # Only sums are on their way, and they are those of this rank.
            steps.append(Step(tuple(posted), after=tuple(map(Copy, arrived, home))))
            continue
        before += map(Clear, computed)
        attends = (a for part, result in zip_longest(here, computed) for a in attend(part, result))
        after = tuple(map(Merge, arrived, computed))
        steps.append(Step(tuple(posted), tuple(attends), tuple(before), after))
    return steps


def beside(a: Sequence[Step], b: Sequence[Step]) -> list[Step]:
    """Return the steps of two schedules of one length done together. Local."""
    return [
        Step(
            transfers=receives_first((*x.transfers, *y.transfers)),
            attends=x.attends + y.attends,
            before=x.before + y.before,
            after=x.after + y.after,
        )
        for x, y in zip(a, b, strict=True)
    ]


def receives_first(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Return the transfers in an order in which an early message finds its buffer waiting. Local."""
    return tuple(sorted(transfers, key=lambda transfer: transfer.direction is Direction.SEND))


def ending(steps: Sequence[Step], *chores: Chore) -> list[Step]:
    """Return the steps with chores after the last one. Local."""
    *others, last = steps
    return [*others, Step(last.transfers, last.attends, last.before, (*last.after, *chores))]


def _held(parts: Sequence[Part], numbers: Sequence[int]) -> list[Held]:
    return [Held(part, number) for part, number in zip(parts, numbers, strict=True)]


def _cleared(home: Sequence[Held]) -> list[Clear]:
    """Return how results that do not begin at home are begun."""
    return [Clear(held) for held in home if held.slot != HOME]
