"""One clock for all ranks: what was waited for, and what cannot have been so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from walked import World, walked

from ringmpi.schedule import Pass
from ringmpi.schedule.steps import Payload
from ringmpi.timeline import Contradiction, Timeline

#: Blocks of 8 by 8 pairs, a second each.
PAIR = 1 / 64


def ring(direction: Pass = Pass.FORWARD, **world: float) -> Timeline:
    return walked({"seq_len": 32}, 4, World(PAIR, **{"way": 0.25, **world}), direction=direction)


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("direction", Pass)
def test_what_really_happened_does_not_contradict_itself(direction: Pass, rendezvous: bool) -> None:
    assert list(ring(direction, rendezvous=rendezvous).contradictions()) == []


class TestContradictions:
    """Rank 2 receives its second block a quarter of a second after rank 1 has posted it."""

    @pytest.fixture
    def timeline(self) -> Timeline:
        found = ring()
        assert found.records["received"][2, 1] - found.records["posted"][1, 1] == 0.25
        return found

    def test_a_receive_before_its_sends_note_is_told_with_how_much(self, timeline: Timeline) -> None:
        timeline.records["received"][2, 1] -= 0.75
        (found,) = timeline.contradictions()
        hop = next(hop for hop in timeline.hops if (hop.sender, hop.step) == (1, 1))
        assert found == Contradiction(hop, 0.5)

    def test_what_clocks_may_err_by_is_allowed(self, timeline: Timeline) -> None:
        timeline.records["received"][2, 1] -= 0.75
        errors = np.array([0.0, 0.25, 0.125, 0.0])
        (found,) = replace(timeline, error=errors).contradictions()
        assert found.seconds == 0.125
        assert list(replace(timeline, error=2 * errors).contradictions()) == []

    def test_nothing_is_claimed_of_clocks_whose_error_is_unknown(self, timeline: Timeline) -> None:
        timeline.records["received"][2, 1] -= 0.75
        assert list(replace(timeline, error=np.full(4, np.nan)).contradictions()) == []

    def test_a_late_note_shows_what_the_start_of_the_step_does_not(self, timeline: Timeline) -> None:
        timeline.records["peer_posted"][2, 1] = timeline.records["received"][2, 1] + 0.5
        (found,) = timeline.contradictions()
        assert found.seconds == 0.5

    def test_without_a_note_the_start_of_the_senders_step_counts(self, timeline: Timeline) -> None:
        timeline.records["peer_posted"] = np.nan
        timeline.records["waited_for"] = np.nan
        timeline.records["received"][2, 1] -= 0.75
        (found,) = timeline.contradictions()
        assert found.seconds == 0.5


class TestAwaited:
    """On the way back a rank has k and v, and in all steps but the first gradients, of the same peer."""

    def test_the_hop_of_the_peer_and_the_direction(self) -> None:
        timeline = ring()
        hop = timeline.awaited(2, 1)
        assert hop is not None
        assert (hop.sender, hop.receiver, hop.step, hop.due) == (1, 2, 1, 1)
        timeline.records["sent"][2, 1] = timeline.records["received"][2, 1] + 1
        timeline.records["waited_for"][2, 1] = 3
        hop = timeline.awaited(2, 1)
        assert hop is not None
        assert (hop.sender, hop.receiver) == (2, 3)

    def test_the_peers_posting_is_in_its_records_where_no_note_tells_it(self) -> None:
        timeline = ring()
        hop = timeline.awaited(2, 1)
        assert hop is not None
        timeline.records["peer_posted"][2, 1] = 1.125
        assert timeline.peer_posted(2, 1, hop) == 1.125
        timeline.records["peer_posted"][2, 1] = np.nan
        assert timeline.peer_posted(2, 1, hop) == timeline.records["posted"][1, 1]

    def test_a_note_tells_hops_apart_that_were_posted_in_different_steps(self) -> None:
        """Those of the outer ring have two steps of the inner ring to come."""
        options = {"seq_len": 32, "method": "double-ring"}
        timeline = walked(options, 4, World(PAIR, 0.25), inner=2)
        both = [hop for hop in timeline.hops if hop.due - hop.step == 1]
        hop = both[0]
        step, rank = hop.due, hop.receiver
        assert hop.part.payload is Payload.KV
        timeline.records["waited_for"][rank, step] = hop.sender
        timeline.records["peer_posted"][rank, step] = timeline.records["posted"][hop.sender, hop.step]
        assert timeline.awaited(rank, step) is hop

    def test_nothing_is_awaited_where_the_trace_does_not_tell(self) -> None:
        timeline = ring()
        timeline.records["waited_for"][2, 1] = np.nan
        assert timeline.awaited(2, 1) is None

    def test_a_hop_that_the_schedules_do_not_have_is_none(self) -> None:
        timeline = ring()
        timeline.records["waited_for"][2, 1] = 0
        assert timeline.awaited(2, 1) is None


def test_the_makespan_is_from_the_first_start_to_the_last_end() -> None:
    timeline = ring(way=1.5)
    assert timeline.makespan == 4 + 3 * 0.5
