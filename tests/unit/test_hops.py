"""What travels, seen from above all ranks."""

from __future__ import annotations

import pytest

from ringmpi.config import experiment_from
from ringmpi.schedule import METHODS, Pass
from ringmpi.schedule.hops import Hop, hops
from ringmpi.schedule.steps import Direction, Part, Payload


def test_a_ring_of_three_passes_every_block_on_twice() -> None:
    schedules = experiment_from({"seq_len": 30}).schedules(3, 1, Pass.FORWARD)
    found = set(hops(schedules))
    expected = {
        Hop(step, step, rank, (rank + 1) % 3, Part(Payload.KV, (rank - step) % 3))
        for step in range(2)
        for rank in range(3)
    }
    assert found == expected


@pytest.mark.parametrize("direction", Pass)
@pytest.mark.parametrize("method", METHODS)
def test_every_hop_is_received_when_it_is_said_to_be(method: str, direction: Pass) -> None:
    inner = 2 if method in ("hybrid", "double-ring") else 1
    schedules = experiment_from({"seq_len": 40, "method": method}).schedules(4, inner, direction)
    received = [
        (number, number + transfer.steps - 1, transfer.peer, rank, transfer.part)
        for rank, steps in enumerate(schedules)
        for number, step in enumerate(steps)
        for transfer in step.transfers
        if transfer.direction is Direction.RECEIVE
    ]
    told = [(hop.step, hop.due, hop.sender, hop.receiver, hop.part) for hop in hops(schedules)]
    assert len(told) > 0
    assert sorted(told, key=repr) == sorted(received, key=repr)
