"""Prove of the schedules of all ranks that they fit together."""

from __future__ import annotations

from collections.abc import Sequence

from ringmpi.errors import ScheduleError
from ringmpi.layout import Layout
from ringmpi.schedule.steps import Direction, Step


def check_schedule(layout: Layout, schedules: Sequence[Sequence[Step]]) -> None:
    """Raise unless the schedules of all ranks together compute the whole attention.

    Checked: every send meets one receive in the same step and the other way round; nothing is sent
    to oneself; a slot holds the block that is sent from it or attended to in it, and is not received
    into while it is in use; every rank attends to every non-empty block exactly once; the last step
    sends nothing. Local.

    Parameters
    ----------
    layout : Layout
    schedules : sequence of sequence of Step
        One a rank, all of the same length.

    Raises
    ------
    ScheduleError
        Naming the rank, the step and the rule.
    """
    if len({len(schedule) for schedule in schedules}) != 1:
        raise ScheduleError("schedules differ in length: every rank takes part in every step")
    for rank, schedule in enumerate(schedules):
        _check_slots(rank, schedule, layout)
        _check_blocks(rank, schedule, layout)
        if schedule[-1].transfers:
            raise ScheduleError(f"rank {rank}: the last step moves a block that nobody needs")
    for number, steps in enumerate(zip(*schedules, strict=True)):
        _check_messages(number, steps)


def _check_messages(number: int, steps: Sequence[Step]) -> None:
    sent, received = [], []
    for rank, step in enumerate(steps):
        for transfer in step.transfers:
            if transfer.peer == rank:
                raise ScheduleError(f"step {number}: rank {rank} sends to itself")
            if transfer.direction is Direction.SEND:
                sent.append((rank, transfer.peer, transfer.block))
            else:
                received.append((transfer.peer, rank, transfer.block))
    if sorted(sent) != sorted(received):
        odd = sorted(set(sent) ^ set(received))
        raise ScheduleError(f"step {number}: sends and receives do not match: {odd}")


def _check_slots(rank: int, schedule: Sequence[Step], layout: Layout) -> None:
    held = {0: rank}  # A rank starts with its own block in slot 0.
    for number, step in enumerate(schedule):
        where = f"rank {rank}, step {number}"
        arriving: dict[int, int] = {}
        used = [(attend.slot, attend.block) for attend in step.attends]
        for transfer in step.transfers:
            if transfer.direction is Direction.SEND:
                used.append((transfer.slot, transfer.block))
            elif transfer.slot in arriving:
                raise ScheduleError(f"{where}: slot {transfer.slot} is received into twice")
            else:
                arriving[transfer.slot] = transfer.block
        for slot, block in used:
            if not layout.shard_len(block):
                continue  # Nothing of it is read, so nothing of it need be there.
            if slot in arriving:
                raise ScheduleError(
                    f"{where}: slot {slot} is overwritten while block {block} is in use"
                )
            if held.get(slot) != block:
                raise ScheduleError(
                    f"{where}: slot {slot} holds block {held.get(slot)}, not block {block}"
                )
        held.update(arriving)


def _check_blocks(rank: int, schedule: Sequence[Step], layout: Layout) -> None:
    seen = sorted(attend.block for step in schedule for attend in step.attends)
    needed = [block for block in range(layout.size) if layout.shard_len(block)]
    attended = [block for block in seen if layout.shard_len(block)]
    if attended != needed:
        raise ScheduleError(f"rank {rank} attends to blocks {attended}, not once to each of {needed}")
