"""Rings in rings: an inner one inside each node, an outer one across nodes (Gu et al. 2024, LoongTrain)."""

from __future__ import annotations

from ringmpi.schedule.ring import ring
from ringmpi.schedule.stay import finished, queries_stay
from ringmpi.schedule.steps import (
    Chore,
    Clear,
    Copy,
    Held,
    Merge,
    Part,
    Pass,
    Payload,
    Shards,
    Step,
    Transfer,
)
from ringmpi.schedule.walk import Slots, receives, receives_first, sends


def double_ring(shards: Shards, direction: Pass) -> list[Step]:
    """Return the steps of inner rings of ``shards.inner`` neighbouring ranks, turn after turn. Local.

    In turn ``t`` a group has the blocks of the group ``t`` places back, which walk round its inner ring of
    ``W`` ranks. Meanwhile each rank sends the block that it began the turn with to the next group, and has
    the whole turn for it. A block makes ``W - 1`` inner hops in each group and one outer hop between two.

    In the backward pass dk and dv of a block are summed up round each inner ring, come home to where the
    block entered it in the first step of the next turn, are added to what came from the groups before, and
    have the turn to go to the next group.
    """
    inner, outer = shards.inner, shards.size // shards.inner
    if 1 in (inner, outer):
        return ring(shards, direction)
    route = _Route(shards)
    meet = queries_stay(shards, direction)
    backward = direction is Pass.BACKWARD
    steps = []
    for number in range(shards.size):
        keys = route.keys(number)
        gradient = route.computed(number) if backward else None
        transfers, after = route.of_keys(number), []
        if gradient is not None:
            transfers += route.of_gradients(number)
            after = route.sums(number)
        before: list[Chore] = [Copy(Held(keys.part), keys)] if number == 0 else []
        before += [] if gradient is None else [Clear(gradient)]
        attends = tuple(meet(keys, gradient))
        steps.append(Step(receives_first(transfers), attends, tuple(before), tuple(after)))
    if backward:
        last = shards.size
        transfers = route.of_gradients(last)
        steps.append(Step(receives_first(transfers), after=tuple(route.sums(last))))
        steps.append(route.homecoming())
    return finished(steps, shards, direction)


class _Route:
    """Where blocks and gradients are in each step, seen from one rank."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._inner = shards.inner
        self._outer = shards.size // shards.inner
        self._group, self._place = divmod(shards.rank, shards.inner)
        self._upstream, self._downstream = self._neighbour(-1), self._neighbour(1)
        self._group_before = (shards.rank - shards.inner) % shards.size
        self._group_after = (shards.rank + shards.inner) % shards.size
        slots = Slots()
        self._entered = slots.take(2)  # Blocks that begin a turn here, and go to the next group.
        self._walking = slots.take(2)
        self._computed = slots.take(2)
        self._arrived, self._from_before, self._total = slots.take(3)

    def keys(self, number: int) -> Held:
        """Return the block that is attended to in a step."""
        turn, place = divmod(number, self._inner)
        slot = self._walking[place % 2] if place else self._entered[turn % 2]
        return Held(Part(Payload.KV, self._owner(number)), slot)

    def computed(self, number: int) -> Held:
        """Return where dk and dv of a step are computed."""
        return Held(Part(Payload.DKV, self._owner(number)), self._computed[number % 2])

    def of_keys(self, number: int) -> list[Transfer]:
        """Return the transfers of blocks in a step, inner ones first."""
        shards, inner = self._shards, self._inner
        here, posted = self.keys(number), []
        walks_on = number % inner < inner - 1
        goes_out = number % inner == 0 and number + inner < shards.size
        if walks_on:
            posted += receives(shards, self._upstream, [self.keys(number + 1)])
        if goes_out:
            posted += receives(shards, self._group_before, [self.keys(number + inner)], inner)
        if walks_on:
            posted += sends(shards, self._downstream, [here])
        if goes_out:
            posted += sends(shards, self._group_after, [here], inner)
        return posted

    def of_gradients(self, number: int) -> list[Transfer]:
        """Return the transfers of sums in a step, one step behind their blocks."""
        if number == 0:
            return []
        shards, inner = self._shards, self._inner
        sent = self.computed(number - 1)
        posted = receives(shards, self._upstream, [self._coming(number)])
        goes_out = number % inner == 1 and number > inner
        if goes_out:
            posted += receives(shards, self._group_before, [self._outer_sum(number)], inner)
        posted += sends(shards, self._downstream, [sent])
        if goes_out:
            posted += sends(shards, self._group_after, [self._turned(number - 1)], inner)
        return posted

    def sums(self, number: int) -> list[Chore]:
        """Return how what arrived in a step is added up."""
        if number == 0:
            return []
        coming = self._coming(number)
        if number % self._inner:
            return [Merge(coming, self.computed(number))]
        total = self._turned(number)
        added: list[Chore] = [Copy(coming, total)]
        if number > self._inner:
            added.append(Merge(Held(coming.part, self._from_before), total))
        return added

    def homecoming(self) -> Step:
        """Return the last step: the total over all groups goes to the group of its owner."""
        shards = self._shards
        own = Held(Part(Payload.DKV, shards.rank), self._arrived)
        transfers = (
            *receives(shards, self._group_before, [own]),
            *sends(shards, self._group_after, [self._turned(shards.size)]),
        )
        return Step(transfers, after=(Copy(own, Held(own.part)),))

    def _neighbour(self, places: int) -> int:
        return self._group * self._inner + (self._place + places) % self._inner

    def _owner(self, number: int) -> int:
        turn, place = divmod(number, self._inner)
        group = (self._group - turn) % self._outer
        return group * self._inner + (self._place - place) % self._inner

    def _coming(self, number: int) -> Held:
        """Return the sum that comes over the inner ring: of the block here, or of that which began a turn."""
        turned = number % self._inner == 0
        owner = self._owner(number - self._inner) if turned else self._owner(number)
        return Held(Part(Payload.DKV, owner), self._arrived)

    def _turned(self, number: int) -> Held:
        """Return the total, over all groups so far, of the block that began the turn before a step."""
        return Held(Part(Payload.DKV, self._owner(number - self._inner)), self._total)

    def _outer_sum(self, number: int) -> Held:
        """Return what the groups before summed up for the block that began the turn of a step."""
        return Held(Part(Payload.DKV, self._owner(number - 1)), self._from_before)
