"""Rings: keys and values travel, queries stay (Liu et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from ringmpi.schedule.stay import finished, queries_stay
from ringmpi.schedule.steps import WHOLE, Held, Part, Pass, Payload, Shards, Share, Step
from ringmpi.schedule.walk import Slots, beside, walk


def ring(shards: Shards, direction: Pass) -> list[Step]:
    """Return the steps of the ring: the block of ``rank - s`` is attended to in step ``s``. Local.

    A block makes ``P - 1`` hops. In the backward pass its dk and dv follow it, one step behind, and
    make one hop more, which brings them home.

    Examples
    --------
    >>> from ringmpi.layout import Layout
    >>> whole = Layout("contiguous", 30, 3)
    >>> steps = ring(Shards(whole, whole, rank=1), Pass.FORWARD)
    >>> [step.attends[0].keys.part.owner for step in steps]
    [1, 0, 2]
    """
    return finished(_turn(shards, direction, Slots(), range(shards.size), WHOLE), shards, direction)


def bidirectional(shards: Shards, direction: Pass) -> list[Step]:
    """Return the steps of two rings, one each way round: half of each block travels in each. Local.

    Both directions of a link carry data, each half as much as in the ring.
    """
    slots, ranks = Slots(), range(shards.size)
    forth = _turn(shards, direction, slots, ranks, Share(0, 2))
    back = _turn(shards, direction, slots, ranks[::-1], Share(1, 2))
    return finished(beside(forth, back), shards, direction)


def _turn(
    shards: Shards, direction: Pass, slots: Slots, cycle: Sequence[int], tokens: Share
) -> list[Step]:
    own = Part(Payload.KV, shards.rank, tokens)
    return walk(
        shards,
        slots,
        cycle,
        origin=[Held(own)],
        travelling=lambda rank: [Part(Payload.KV, rank, tokens)],
        attend=queries_stay(shards, direction),
        home=[Held(own.as_payload(Payload.DKV))] if direction is Pass.BACKWARD else (),
    )
