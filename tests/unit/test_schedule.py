from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ringmpi.errors import ScheduleError
from ringmpi.layout import LAYOUTS, Layout
from ringmpi.schedule import METHODS, Attend, Direction, Step, Transfer, check_schedule

Schedules = list[list[Step]]


def schedules_of(method: str, layout: Layout) -> Schedules:
    return [METHODS[method](layout, rank) for rank in range(layout.size)]


@pytest.mark.parametrize("size", range(1, 17))
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("method", sorted(METHODS))
def test_schedules_of_all_ranks_fit_together(method: str, layout: str, size: int) -> None:
    whole = Layout(layout, 4 * size + 1, size)

    check_schedule(whole, schedules_of(method, whole))


@pytest.mark.parametrize(
    ("tokens", "size"), [(1, 2), (1, 3), (2, 3), (3, 4), (3, 7), (1, 16), (15, 16)]
)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("method", sorted(METHODS))
def test_schedules_fit_together_where_some_ranks_own_nothing(
    method: str, layout: str, tokens: int, size: int
) -> None:
    whole = Layout(layout, tokens, size)

    check_schedule(whole, schedules_of(method, whole))


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_a_ring_rank_attends_to_the_blocks_upstream_of_it_in_order(size: int) -> None:
    layout = Layout("contiguous", 2 * size, size)

    blocks = [[step.attends[0].block for step in steps] for steps in schedules_of("ring", layout)]

    assert blocks == [[(rank - step) % size for step in range(size)] for rank in range(size)]


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_a_ring_block_makes_one_hop_fewer_than_there_are_ranks(size: int) -> None:
    layout = Layout("contiguous", 2 * size, size)

    sent = [
        (transfer.block, transfer.peer)
        for steps in schedules_of("ring", layout)
        for step in steps
        for transfer in step.transfers
        if transfer.direction is Direction.SEND
    ]

    # From its owner onwards each rank gets it once, apart from the owner itself.
    visits = [(block, (block + hop) % size) for block in range(size) for hop in range(1, size)]
    assert sorted(sent) == sorted(visits)


def test_a_ring_posts_its_receive_before_its_send() -> None:
    layout = Layout("contiguous", 9, 3)

    orders = [
        [transfer.direction for transfer in step.transfers]
        for steps in schedules_of("ring", layout)
        for step in steps[:-1]
    ]

    assert orders == [[Direction.RECEIVE, Direction.SEND]] * 6


def test_a_ring_moves_no_empty_block() -> None:
    layout = Layout("contiguous", 2, 5)

    moved = {
        transfer.block
        for steps in schedules_of("ring", layout)
        for step in steps
        for transfer in step.transfers
    }

    assert moved == {0, 1}


def change(schedules: Schedules, rank: int, step: int, **changes: object) -> None:
    schedules[rank][step] = replace(schedules[rank][step], **changes)


def drop(schedules: Schedules, rank: int, step: int, direction: Direction) -> None:
    kept = (t for t in schedules[rank][step].transfers if t.direction is not direction)
    change(schedules, rank, step, transfers=tuple(kept))


def alter(schedules: Schedules, rank: int, step: int, direction: Direction, **changes: int) -> None:
    altered = (
        replace(t, **changes) if t.direction is direction else t
        for t in schedules[rank][step].transfers
    )
    change(schedules, rank, step, transfers=tuple(altered))


def no_receive(schedules: Schedules) -> None:
    drop(schedules, 1, 0, Direction.RECEIVE)


def no_send(schedules: Schedules) -> None:
    drop(schedules, 1, 1, Direction.SEND)


def no_hop(schedules: Schedules) -> None:
    drop(schedules, 0, 0, Direction.SEND)
    drop(schedules, 1, 0, Direction.RECEIVE)


def no_transfers(schedules: Schedules) -> None:
    for rank in range(4):
        for step in range(4):
            change(schedules, rank, step, transfers=())


def send_to_another(schedules: Schedules) -> None:
    alter(schedules, 2, 1, Direction.SEND, peer=0)


def receive_from_another(schedules: Schedules) -> None:
    alter(schedules, 2, 1, Direction.RECEIVE, peer=3)


def receive_another_block(schedules: Schedules) -> None:
    alter(schedules, 2, 0, Direction.RECEIVE, block=3)


def send_another_block(schedules: Schedules) -> None:
    alter(schedules, 2, 1, Direction.SEND, block=3)


def hop_of_another_block(schedules: Schedules) -> None:
    alter(schedules, 0, 1, Direction.SEND, block=2)
    alter(schedules, 1, 1, Direction.RECEIVE, block=2)


def overwritten_while_attended(schedules: Schedules) -> None:
    alter(schedules, 1, 1, Direction.RECEIVE, slot=1)
    drop(schedules, 1, 1, Direction.SEND)
    drop(schedules, 2, 1, Direction.RECEIVE)


def overwritten_while_sent(schedules: Schedules) -> None:
    change(schedules, 1, 1, attends=())
    alter(schedules, 1, 1, Direction.RECEIVE, slot=1)


def sent_from_the_other_slot(schedules: Schedules) -> None:
    alter(schedules, 3, 1, Direction.SEND, slot=0)


def two_arrive_in_one_slot(schedules: Schedules) -> None:
    for rank, direction in ((0, Direction.SEND), (1, Direction.RECEIVE)):
        one = next(t for t in schedules[rank][0].transfers if t.direction is direction)
        change(schedules, rank, 0, transfers=(one, *schedules[rank][0].transfers))


def attended_before_it_came(schedules: Schedules) -> None:
    change(schedules, 1, 0, attends=(Attend(1, 0), Attend(0, 1)))
    change(schedules, 1, 1, attends=())


def attended_twice(schedules: Schedules) -> None:
    (attend,) = schedules[1][2].attends
    change(schedules, 1, 2, attends=(attend, attend))


def never_attended(schedules: Schedules) -> None:
    change(schedules, 3, 2, attends=())


def own_block_not_attended(schedules: Schedules) -> None:
    change(schedules, 0, 0, attends=())


def last_step_moves(schedules: Schedules) -> None:
    for rank in range(4):
        held = schedules[rank][3].attends[0].block
        coming = schedules[(rank - 1) % 4][3].attends[0].block
        moves = (
            Transfer(Direction.RECEIVE, (rank - 1) % 4, coming, 0),
            Transfer(Direction.SEND, (rank + 1) % 4, held, 1),
        )
        change(schedules, rank, 3, transfers=moves)


def sent_to_itself(schedules: Schedules) -> None:
    alter(schedules, 2, 0, Direction.SEND, peer=2)


def both_ends_on_one_rank(schedules: Schedules) -> None:
    own = (Transfer(Direction.RECEIVE, 2, 2, 2), Transfer(Direction.SEND, 2, 2, 0))
    change(schedules, 2, 0, transfers=(*schedules[2][0].transfers, *own))


def one_step_more(schedules: Schedules) -> None:
    schedules[1].append(Step((), ()))


def one_step_fewer(schedules: Schedules) -> None:
    schedules[2].pop()


def one_rank_fewer(schedules: Schedules) -> None:
    schedules.pop()


DAMAGE = {
    "receive dropped": (no_receive, "rank 1, step 1: slot 1 holds block None, not block 0"),
    "send dropped": (no_send, "do not match"),
    "both ends of a hop dropped": (no_hop, "rank 1"),
    "all transfers dropped": (no_transfers, "slot"),
    "sent to another rank": (send_to_another, "do not match"),
    "received from another rank": (receive_from_another, "do not match"),
    "another block received": (receive_another_block, "rank 2"),
    "another block sent": (send_another_block, "slot 1 holds block 1, not block 3"),
    "another block hops": (hop_of_another_block, "rank 0"),
    "overwritten while attended": (overwritten_while_attended, "overwritten while block 0 is in use"),
    "overwritten while sent": (overwritten_while_sent, "overwritten while block 0 is in use"),
    "sent from the other slot": (sent_from_the_other_slot, "rank 3, step 1"),
    "two arrive in one slot": (two_arrive_in_one_slot, "slot 1 is received into twice"),
    "attended before it came": (attended_before_it_came, "rank 1, step 0"),
    "attended twice": (attended_twice, "rank 1 attends to blocks"),
    "never attended": (never_attended, "rank 3 attends to blocks"),
    "own block not attended": (own_block_not_attended, "rank 0 attends to blocks"),
    "last step moves": (last_step_moves, "last step"),
    "sent to itself": (sent_to_itself, "rank 2 sends to itself"),
    "both ends on one rank": (both_ends_on_one_rank, "rank 2 sends to itself"),
    "one step more": (one_step_more, "differ in length"),
    "one step fewer": (one_step_fewer, "differ in length"),
    "one rank fewer": (one_rank_fewer, "rank|match"),
}


@pytest.mark.parametrize(("damage", "told"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_caught(damage: Callable[[Schedules], None], told: str) -> None:
    layout = Layout("contiguous", 17, 4)
    schedules = schedules_of("ring", layout)
    damage(schedules)

    with pytest.raises(ScheduleError, match=told):
        check_schedule(layout, schedules)
