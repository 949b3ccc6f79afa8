"""Every stall is blamed on what was put in to cause it, and on nothing where nothing was."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from walked import World, walked

from ringmpi.blame import SMALL, Blame, Cause, blame, least_stall
from ringmpi.metrics import stall_time
from ringmpi.schedule import METHODS, Pass
from ringmpi.timeline import Timeline

#: 96 tokens a rank make 9216 pairs a block, and a second; a causal diagonal block has half of that and 48.
TOKENS = 96
PAIR = 1 / TOKENS**2

SIZES = (3, 4, 8)


def full(size: int, **options: Any) -> dict[str, Any]:
    return {"seq_len": TOKENS * size, "heads": 8, "kv_heads": 8, **options}


def inner_of(method: str, size: int) -> int:
    """Return the size of inner groups: none where the ranks don't divide."""
    return 2 if method in ("hybrid", "double-ring") and size % 2 == 0 else 1


def totals(timeline: Timeline) -> dict[tuple[Cause, tuple[int, ...]], float]:
    found: dict[tuple[Cause, tuple[int, ...]], float] = defaultdict(float)
    for piece in blame(timeline):
        found[piece.cause, piece.culprit] += piece.seconds
    return dict(found)


def causes(timeline: Timeline) -> dict[Cause, float]:
    found: dict[Cause, float] = defaultdict(float)
    for (cause, _), seconds in totals(timeline).items():
        found[cause] += seconds
    return dict(found)


def stalled(timeline: Timeline) -> float:
    return float(stall_time(timeline.records).sum())


#: A way that means nothing beside a compute of a second a step.
QUICK = 0.01


def about(seconds: float) -> Any:
    """Return what equals a sum of up to a hundred stalls, some of which may be left out for their size."""
    return pytest.approx(seconds, rel=1e-9, abs=100 * QUICK / 10)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("direction", Pass)
@pytest.mark.parametrize("method", ["ring", "bidirectional", "double-ring"])
def test_nothing_is_blamed_where_compute_hides_all(method: str, direction: Pass, size: int) -> None:
    timeline = walked(
        full(size, method=method), size, World(PAIR, 0.1), inner_of(method, size), direction
    )
    found = blame(timeline)
    # Gradients that come home at the end of the way back have nothing left to hide behind.
    assert {piece.cause for piece in found} <= ({Cause.LINK} if direction is Pass.BACKWARD else set())
    assert all(timeline.records["pairs"][piece.rank, piece.step] == 0 for piece in found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rendezvous", [False, True], ids=["eager", "rendezvous"])
@pytest.mark.parametrize("culprit", [0, 1, -1], ids=["first", "second", "last"])
def test_a_slow_rank_is_blamed_for_all_stalls_of_all_others(
    size: int, culprit: int, rendezvous: bool
) -> None:
    """Three times as slow: a ring of three has so few steps that twice would make nobody wait."""
    slow = culprit % size
    timeline = walked(full(size), size, World(PAIR, QUICK, slow={slow: 3.0}, rendezvous=rendezvous))
    assert stalled(timeline) > 0.9
    assert totals(timeline) == {(Cause.LATE_SENDER, (slow,)): about(stalled(timeline))}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rendezvous", [False, True], ids=["eager", "rendezvous"])
def test_a_slow_link_is_blamed_for_the_stalls_of_all_downstream(size: int, rendezvous: bool) -> None:
    world = World(PAIR, QUICK, ways={(1, 2): 2.5}, rendezvous=rendezvous)
    timeline = walked(full(size), size, world)
    assert totals(timeline) == {(Cause.LINK, (1, 2)): about(stalled(timeline))}
    # Rank 3 has time to spare for one step of 1 s, and the second block comes 1.5 s late.
    assert size == 3 or {2, 3} <= {piece.rank for piece in blame(timeline)}


@pytest.mark.parametrize("size", SIZES)
def test_all_links_are_blamed_alike_where_all_are_slow(size: int) -> None:
    timeline = walked(full(size), size, World(PAIR, 1.5))
    expected = {(Cause.LINK, (r, (r + 1) % size)): about(0.5 * (size - 1)) for r in range(size)}
    assert totals(timeline) == expected


@pytest.mark.parametrize("size", SIZES)
def test_imbalance_of_causal_contiguous_shards_is_named_with_the_fullest_rank_first(size: int) -> None:
    """On the way back: three ranks have too few steps to wait on the way there."""
    timeline = walked(full(size, causal=True), size, World(PAIR, QUICK), direction=Pass.BACKWARD)
    found = totals(timeline)
    assert causes(timeline) == {Cause.IMBALANCE: about(stalled(timeline))}
    assert max(found, key=lambda key: found[key]) == (Cause.IMBALANCE, (size - 1,))


@pytest.mark.parametrize("size", SIZES)
def test_balanced_shards_leave_no_imbalance_to_blame(size: int) -> None:
    timeline = walked(full(size, causal=True, layout="zigzag"), size, World(PAIR, 0.05))
    assert causes(timeline) == {}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rendezvous", [False, True], ids=["eager", "rendezvous"])
def test_what_nobody_fetched_is_progress(size: int, rendezvous: bool) -> None:
    """Each of the hops would have been hidden, and takes its whole way after the compute instead."""
    timeline = walked(full(size), size, World(PAIR, 0.4, polls=False, rendezvous=rendezvous))
    assert causes(timeline) == {Cause.PROGRESS: about(0.4 * size * (size - 1))}
    assert {culprit for _, culprit in totals(timeline)} == {(rank,) for rank in range(size)}


def test_what_compute_could_not_hide_is_the_links_fault_also_without_progress() -> None:
    """Of a way of 1.5 s 1 s could have passed during the compute, and 0.5 s not."""
    timeline = walked(full(4), 4, World(PAIR, 1.5, polls=False))
    assert causes(timeline) == {Cause.LINK: about(0.5 * 12), Cause.PROGRESS: about(1.0 * 12)}


def test_two_causes_in_one_stall_get_a_piece_each() -> None:
    """Rank 1 posts its second block a second late, which then takes 1.5 s to rank 2."""
    timeline = walked(full(3), 3, World(PAIR, 0.1, slow={1: 3.0}, ways={(1, 2): 1.5}))
    # Rank 2 waits from 1 s to 1.5 s for the first block, computes till 2.5 s, and has the second, posted
    # at 3 s, at 4.5 s.
    pieces = [piece for piece in blame(timeline) if piece.rank == 2]
    assert pieces == [
        Blame(2, 0, 1.0, 1.5, Cause.LINK, (1, 2)),
        Blame(2, 1, 2.5, 3.0, Cause.LATE_SENDER, (1,)),
        Blame(2, 1, 3.0, 4.5, Cause.LINK, (1, 2)),
    ]


def test_more_pairs_and_slowness_of_one_rank_are_told_apart() -> None:
    """The last of four causal ranks is slow too: what it takes beyond the median rate is its own fault."""
    quick = walked(full(4, causal=True), 4, World(PAIR, QUICK))
    slow = walked(full(4, causal=True), 4, World(PAIR, QUICK, slow={3: 1.5}))
    alone, both = totals(quick), totals(slow)
    assert (Cause.LATE_SENDER, (3,)) not in alone
    assert both[Cause.IMBALANCE, (3,)] == pytest.approx(alone[Cause.IMBALANCE, (3,)], rel=0.1)
    assert both[Cause.LATE_SENDER, (3,)] > 0.4


def test_a_rank_that_begins_late_is_blamed_for_it() -> None:
    timeline = walked(full(4), 4, World(PAIR, 0.1, late={2: 5.0}))
    assert totals(timeline) == {(Cause.LATE_SENDER, (2,)): about(stalled(timeline))}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("direction", Pass)
def test_a_slow_rank_is_found_by_every_method(method: str, direction: Pass) -> None:
    world = World(PAIR, 1e-6, slow={2: 3.0})
    timeline = walked(full(4, method=method), 4, world, inner_of(method, 4), direction)
    found = totals(timeline)
    if stalled(timeline) < 0.1:
        assert found == {}  # All that is gathered comes before anything is computed.
        assert method == "allgather"
        assert direction is Pass.FORWARD
        return
    assert set(found) == {(Cause.LATE_SENDER, (2,))}
    assert sum(found.values()) == pytest.approx(stalled(timeline), rel=0.02)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("direction", Pass)
def test_a_slow_link_is_found_by_every_method(method: str, direction: Pass) -> None:
    world = World(PAIR, 1e-6, ways={(0, 1): 5.0})
    timeline = walked(full(4, method=method), 4, world, inner_of(method, 4), direction)
    found = totals(timeline)
    assert set(found) == {(Cause.LINK, (0, 1))}
    assert sum(found.values()) == pytest.approx(stalled(timeline), rel=0.02)


class TestWhatIsTooSmall:
    """Rank 2's link outlasts the compute of 1 s by a little."""

    def timeline(self, excess: float, error: float = 0.0) -> Timeline:
        timeline = walked(full(4), 4, World(PAIR, 0.1, ways={(1, 2): 1.0 + excess}))
        return replace(timeline, error=np.array([0.0, 0.0, error, 0.0]))

    def test_it_is_a_part_of_a_mean_step(self) -> None:
        timeline = self.timeline(0.5)
        steps = timeline.records.shape[1]
        assert least_stall(timeline, 2, 1) == SMALL * timeline.makespan / steps

    @pytest.mark.parametrize(("excess", "told"), [(0.04, False), (0.07, True)])
    def test_a_stall_below_it_means_nothing(self, excess: float, told: bool) -> None:
        # Steps of 1 s and a little, so 0.05 s and a little are the least that is told.
        assert bool(blame(self.timeline(excess))) is told

    @pytest.mark.parametrize(("error", "told"), [(0.0, True), (0.1, False)])
    def test_nor_does_one_that_the_clocks_could_have_made(self, error: float, told: bool) -> None:
        assert bool(blame(self.timeline(0.07, error))) is told

    def test_unknown_clocks_are_taken_as_right(self) -> None:
        assert blame(self.timeline(0.07, np.nan)) == blame(self.timeline(0.07))

    def test_small_pieces_of_a_stall_go_to_the_longer_one_beside_them(self) -> None:
        """The link takes 0.02 s longer than alone, which nobody's progress is blamed for."""
        timeline = self.timeline(0.5)
        timeline.records["received"][2, 0] += 0.02
        (piece,) = [p for p in blame(timeline) if (p.rank, p.step) == (2, 0)]
        assert (piece.cause, piece.culprit) == (Cause.LINK, (1, 2))
        assert piece.seconds == pytest.approx(0.52)


def test_without_a_pass_of_transfers_alone_what_is_not_lateness_is_the_links() -> None:
    timeline = walked(full(3), 3, World(PAIR, 0.4, polls=False))
    assert causes(replace(timeline, alone=timeline.alone[:0])) == {Cause.LINK: about(stalled(timeline))}


def test_traces_that_do_not_tell_what_was_waited_for_are_not_blamed() -> None:
    """Those of an older ringmpi."""
    timeline = walked(full(3), 3, World(PAIR, 1.5))
    timeline.records["waited_for"] = np.nan
    timeline.records["peer_posted"] = np.nan
    assert blame(timeline) == []


def test_the_senders_note_says_more_than_its_step_does() -> None:
    """Of two transfers that a sender posts in one step the second may be posted much later."""
    timeline = walked(full(3), 3, World(PAIR, 1.5))
    timeline.records["peer_posted"][2, 0] = 1.25
    pieces = [piece for piece in blame(timeline) if (piece.rank, piece.step) == (2, 0)]
    assert [(p.cause, p.begin, p.end) for p in pieces] == [
        (Cause.LATE_SENDER, 1.0, 1.25),
        (Cause.LINK, 1.25, 1.5),
    ]


def test_a_send_is_blamed_on_its_receiver() -> None:
    """A large send ends when the receiver takes it, and rank 2 has not even begun."""
    timeline = walked(full(3), 3, World(PAIR, 0.1, rendezvous=True, late={2: 4.0}))
    first = next(p for p in blame(timeline) if (p.rank, p.step) == (1, 0))
    assert not timeline.received_last(1, 0)
    assert (first.cause, first.culprit) == (Cause.LATE_SENDER, (2,))
    assert (first.begin, first.end) == (1.0, pytest.approx(4.1))


@pytest.mark.parametrize("seed", [199, 207, 229, 239])
def test_a_rank_does_not_wait_for_itself(seed: int) -> None:
    """Compute that varies a lot: a rank waits for one that waited for it before."""
    noise = np.random.default_rng(seed).uniform(0.2, 3, (4, 64))
    world = World(0.01, 0.1, noise=lambda rank, step: float(noise[rank, step]))
    options = {"seq_len": 40, "heads": 8, "kv_heads": 8, "method": "bidirectional"}
    pieces = blame(walked(options, 4, world, direction=Pass.BACKWARD))
    own = [p for p in pieces if p.cause in (Cause.LATE_SENDER, Cause.IMBALANCE)]
    assert own
    assert all(piece.culprit != (piece.rank,) for piece in own)
