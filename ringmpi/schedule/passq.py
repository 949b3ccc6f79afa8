"""Queries travel, keys and values stay: less to send where queries are few (Yang et al. 2024, pass-Q)."""

from __future__ import annotations

from ringmpi.schedule.stay import ANSWER, ASKING, finished, keys_stay
from ringmpi.schedule.steps import Held, Part, Pass, Shards, Step
from ringmpi.schedule.walk import Slots, walk


def passq(shards: Shards, direction: Pass) -> list[Step]:
    """Return the steps in which queries walk the ring, followed by what they have been answered. Local.

    Queries make ``P - 1`` hops. Their running state, in the backward pass their dq, follows one step behind
    and makes one hop more, which brings it home. dk and dv stay with the keys.
    """
    own = Part(ASKING[direction], shards.rank)
    steps = walk(
        shards,
        Slots(),
        range(shards.size),
        origin=[Held(own)],
        travelling=lambda rank: [Part(ASKING[direction], rank)],
        attend=keys_stay(shards, direction),
        home=[Held(own.as_payload(ANSWER[direction]))],
    )
    return finished(steps, shards, direction)
