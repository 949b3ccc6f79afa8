"""All keys and values are gathered first, then attended to at once, as in the training of Llama 3."""

from __future__ import annotations

from ringmpi.schedule.stay import finished, queries_stay
from ringmpi.schedule.steps import Chore, Clear, Copy, Held, Merge, Part, Pass, Payload, Shards, Step
from ringmpi.schedule.walk import Slots, receives, sends


def allgather(shards: Shards, direction: Pass) -> list[Step]:
    """Return the steps that gather, attend, and in the backward pass reduce and scatter. Local.

    Blocks go round the ring, ``P - 1`` hops, while nobody attends; every rank then holds all of them. In the
    backward pass it also holds a sum of dk and dv for each; these go round once more, each from the rank
    after its owner to the owner, added up on the way: ``P - 1`` hops.
    """
    size, rank, slots = shards.size, shards.rank, Slots()
    upstream, downstream = (rank - 1) % size, (rank + 1) % size
    numbers, sum_numbers = slots.take(size), slots.take(size)

    def keys(owner: int) -> Held:
        part = Part(Payload.KV, owner % size)
        return Held(part) if size == 1 else Held(part, numbers[owner % size])

    def gradient(owner: int, slot: int | None = None) -> Held:
        part = Part(Payload.DKV, owner % size)
        if owner % size == rank:
            return Held(part)
        return Held(part, sum_numbers[owner % size] if slot is None else slot)

    gather = [
        Step(
            (
                *receives(shards, upstream, [keys(rank - number - 1)]),
                *sends(shards, downstream, [keys(rank - number)]),
            ),
            before=(Copy(Held(keys(rank).part), keys(rank)),) if number == 0 else (),
        )
        for number in range(size - 1)
    ]
    backward = direction is Pass.BACKWARD
    meet = queries_stay(shards, direction)
    attends = (a for n in range(size) for a in meet(keys(n), gradient(n) if backward else None))
    cleared: list[Chore] = [Clear(gradient(n)) for n in range(size) if backward and n != rank]
    steps = [*gather, Step(attends=tuple(attends), before=tuple(cleared))]
    if backward:
        (room,) = slots.take(1)
        for number in range(size - 1):
            leaving, coming = gradient(rank - number - 1), gradient(rank - number - 2)
            arriving = Held(coming.part, room)
            transfers = (*receives(shards, upstream, [arriving]), *sends(shards, downstream, [leaving]))
            steps.append(Step(transfers, after=(Merge(arriving, coming),)))
    return finished(steps, shards, direction)
