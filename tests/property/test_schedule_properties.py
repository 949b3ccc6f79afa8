from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ringmpi.layout import LAYOUTS, Layout
from ringmpi.schedule import METHODS, Direction, check_schedule

layouts = st.builds(Layout, st.sampled_from(sorted(LAYOUTS)), st.integers(1, 60), st.integers(1, 16))


@settings(deadline=None, max_examples=100)
@given(layouts, st.sampled_from(sorted(METHODS)))
def test_every_schedule_passes_its_check(layout: Layout, method: str) -> None:
    check_schedule(layout, [METHODS[method](layout, rank) for rank in range(layout.size)])


@settings(deadline=None, max_examples=100)
@given(layouts)
def test_blocks_can_be_followed_from_slot_to_slot(layout: Layout) -> None:
    schedules = [METHODS["ring"](layout, rank) for rank in range(layout.size)]
    slots = [{0: rank} for rank in range(layout.size)]
    attended: list[list[int]] = [[] for _ in range(layout.size)]

    for steps in zip(*schedules, strict=True):
        on_the_way = {}
        for rank, step in enumerate(steps):
            attended[rank] += [slots[rank].get(attend.slot, -1) for attend in step.attends]
            for transfer in step.transfers:
                if transfer.direction is Direction.SEND:
                    on_the_way[rank, transfer.peer] = slots[rank][transfer.slot]
        for rank, step in enumerate(steps):
            for transfer in step.transfers:
                if transfer.direction is Direction.RECEIVE:
                    slots[rank][transfer.slot] = on_the_way.pop((transfer.peer, rank))
        assert not on_the_way

    busy = [block for block in range(layout.size) if layout.shard_len(block)]
    wanted = [[a.block for step in steps for a in step.attends] for steps in schedules]
    for found, asked in zip(attended, wanted, strict=True):
        pairs = [(f, a) for f, a in zip(found, asked, strict=True) if layout.shard_len(a)]
        assert all(f == a for f, a in pairs)
        assert sorted(a for _, a in pairs) == busy
