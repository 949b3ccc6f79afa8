"""Heads are shared inside a group of ranks, the sequence among groups.

One group of all ranks is DeepSpeed Ulysses (Jacobs et al. 2023), several are USP (Fang and Zhao 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

from ringmpi.schedule.ring import ring
from ringmpi.schedule.stay import ANSWER, ASKING
from ringmpi.schedule.steps import (
    Attend,
    Chore,
    Clear,
    Copy,
    Finish,
    Held,
    Merge,
    Part,
    Pass,
    Payload,
    Shards,
    Share,
    Step,
    Transfer,
)
from ringmpi.schedule.walk import Slots, receives, sends, walk


def hybrid(shards: Shards, direction: Pass) -> list[Step]:
    """Return the steps of an all-to-all inside groups around a ring across them. Local.

    Groups are of ``shards.inner`` neighbouring ranks. An all-to-all gives each rank its share of the heads,
    for the tokens of its whole group; rings of the ranks with the same share attend; an all-to-all brings
    every token's results home. Where query heads of several ranks read one KV head, each gets a copy of it,
    and its gradients are added up at home.
    """
    degree, rank = shards.inner, shards.rank
    if degree == 1:
        return ring(shards, direction)
    slots = Slots()
    members = range(rank - rank % degree, rank - rank % degree + degree)
    mine = Share(rank % degree, degree)

    def parts(payload: Payload, owners: Sequence[int]) -> list[Part]:
        return [Part(payload, owner, heads=mine) for owner in owners]

    def shares(payload: Payload) -> list[Part]:
        return [Part(payload, rank, heads=Share(index, degree)) for index in range(degree)]

    def places() -> list[int]:
        return slots.take(degree)

    asking, answer = ASKING[direction], ANSWER[direction]
    # What leaves from here for each member, and comes back; and what lies here of each member.
    own_asking, own_keys = _at(shares(asking), places()), _at(shares(Payload.KV), places())
    all_asking, all_keys = (
        _at(parts(asking, members), places()),
        _at(parts(Payload.KV, members), places()),
    )
    answers = _at(parts(answer, members), places())
    gradients = _at(parts(Payload.DKV, members), places()) if direction is Pass.BACKWARD else []

    def attend(keys: Held, gradient: Held | None) -> list[Attend]:
        return [
            Attend(queries, keys, (answer,) if gradient is None else (answer, gradient))
            for queries, answer in zip(all_asking, answers, strict=True)
        ]

    here = members.index(rank)
    kept = [Copy(Held(held.part), held) for held in (all_asking[here], all_keys[here])]
    packed = [
        Copy(Held(held.part), held)
        for leaving in (own_asking, own_keys)
        for index, held in enumerate(leaving)
        if index != here
    ]
    scatter = Step(
        _all_to_all(shards, members, (all_asking, all_keys), (own_asking, own_keys)),
        before=(*kept, *packed, *map(Clear, answers)),
    )
    rings = walk(
        shards,
        slots,
        cycle=range(rank % degree, shards.size, degree),
        origin=all_keys,
        travelling=lambda other: parts(
            Payload.KV, range(other - other % degree, other - other % degree + degree)
        ),
        attend=attend,
        home=gradients,
    )

    # Results leave from where each member's queries and gradients lie, and arrive where this rank's left.
    if direction is Pass.FORWARD:
        leaving = [_as(held, Payload.OUT) for held in all_asking]
        coming = [_as(held, Payload.OUT) for held in own_asking]
        before: list[Chore] = [Finish(a, out) for a, out in zip(answers, leaving, strict=True)]
        transfers = _all_to_all(shards, members, (coming,), (leaving,))
        coming[here] = leaving[here]
        after: list[Chore] = [Copy(held, Held(held.part)) for held in coming]
    else:
        queries = [_as(held, answer) for held in own_asking]
        keys = [_as(held, Payload.DKV) for held in own_keys]
        before = []
        transfers = _all_to_all(shards, members, (queries, keys), (answers, gradients))
        queries[here], keys[here] = answers[here], gradients[here]
        after = [Copy(held, Held(held.part)) for held in queries]
        after += [Merge(held, Held(held.part)) for held in keys]
    return [scatter, *rings, Step(transfers, before=tuple(before), after=tuple(after))]


def ulysses(shards: Shards, direction: Pass) -> list[Step]:
    """Return the steps of all-to-alls from sequence to heads and back, all ranks being one group. Local."""
    return hybrid(Shards(shards.keys, shards.queries, shards.rank, shards.size), direction)


def _at(parts: Sequence[Part], numbers: Sequence[int]) -> list[Held]:
    return [Held(part, number) for part, number in zip(parts, numbers, strict=True)]


def _as(held: Held, payload: Payload) -> Held:
    return Held(held.part.as_payload(payload), held.slot)


def _all_to_all(
    shards: Shards,
    members: range,
    coming: Sequence[Sequence[Held]],
    leaving: Sequence[Sequence[Held]],
) -> tuple[Transfer, ...]:
    """Return the transfers of one part of each kind from every member to every other."""
    others = [(index, peer) for index, peer in enumerate(members) if peer != shards.rank]
    posted: list[Transfer] = []
    for index, peer in others:
        posted += receives(shards, peer, [kind[index] for kind in coming])
    for index, peer in others:
        posted += sends(shards, peer, [kind[index] for kind in leaving])
    return tuple(posted)
