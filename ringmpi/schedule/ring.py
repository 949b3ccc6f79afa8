"""Ring attention: KV blocks travel to the next rank, queries stay (Liu et al. 2023)."""

from __future__ import annotations

from ringmpi.layout import Layout
from ringmpi.schedule.steps import Attend, Direction, Step, Transfer


def ring(layout: Layout, rank: int) -> list[Step]:
    """Return the ``P`` steps of `rank`: the block of ``rank - s`` is attended to in step ``s``.

    The last step moves nothing, so a block makes ``P - 1`` hops, and a ring of one none. Two slots
    suffice: a block arrives in one while the other is read and sent. A block without tokens makes
    its steps but no transfers. Local.

    Examples
    --------
    >>> [step.attends[0].block for step in ring(Layout("contiguous", 30, 3), rank=1)]
    [1, 0, 2]
    """
    size = layout.size
    steps = []
    for number in range(size):
        held, coming = (rank - number) % size, (rank - number - 1) % size
        slot, other = number % 2, (number + 1) % 2
        transfers: list[Transfer] = []
        if number < size - 1:
            # The receive is posted first, so that an early message finds its buffer waiting.
            if layout.shard_len(coming):
                transfers.append(Transfer(Direction.RECEIVE, (rank - 1) % size, coming, other))
            if layout.shard_len(held):
                transfers.append(Transfer(Direction.SEND, (rank + 1) % size, held, slot))
        steps.append(Step(tuple(transfers), (Attend(held, slot),)))
    return steps
