"""What stays at home meets what comes by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringmpi.schedule.steps import Attend, Finish, Held, Part, Pass, Payload, Shards, Step
from ringmpi.schedule.walk import ending

#: What a query needs to attend.
ASKING = {Pass.FORWARD: Payload.Q, Pass.BACKWARD: Payload.QDOUT}

#: What attending gives to a query.
ANSWER = {Pass.FORWARD: Payload.STATE, Pass.BACKWARD: Payload.DQ}

Meeting = Callable[[Held, Held | None], Sequence[Attend]]


def queries_stay(shards: Shards, direction: Pass) -> Meeting:
    """Return how the queries of a rank, at home, attend to keys that come by. Local."""
    asking = Held(Part(ASKING[direction], shards.rank))
    answer = Held(Part(ANSWER[direction], shards.rank))

    def attend(keys: Held, gradient: Held | None) -> list[Attend]:
        return [Attend(asking, keys, (answer,) if gradient is None else (answer, gradient))]

    return attend


def keys_stay(shards: Shards, direction: Pass) -> Meeting:
    """Return how queries that come by attend to the keys of a rank, at home. Local."""
    keys = Held(Part(Payload.KV, shards.rank))
    gradient = Held(Part(Payload.DKV, shards.rank))

    def attend(asking: Held, answer: Held | None) -> list[Attend]:
        assert answer is not None  # Queries are always followed by what they are answered.
        into = (answer,) if direction is Pass.FORWARD else (answer, gradient)
        return [Attend(asking, keys, into)]

    return attend


def finished(steps: Sequence[Step], shards: Shards, direction: Pass) -> list[Step]:
    """Return the steps, in the forward pass with the state at home made out and lse at the end. Local."""
    if direction is Pass.BACKWARD:
        return list(steps)
    state = Held(Part(Payload.STATE, shards.rank))
    return ending(steps, Finish(state, Held(state.part.as_payload(Payload.OUT))))
