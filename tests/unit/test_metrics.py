from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ringmpi.metrics import (
    Clocks,
    Timings,
    by_rank,
    compute_time,
    makespans,
    overhead_time,
    overlap,
    rates,
    stall_time,
    step_time,
    typical_repeat,
)
from ringmpi.trace import COUNTS, RECORD

Array = np.ndarray[Any, np.dtype[Any]]

NAN = math.nan

#: Times are sums and differences of numbers below 128 with few binary digits, so they are exact.


def steps(*moments: dict[str, float]) -> Array:
    """Return records of one rank; a moment that is not given is NaN, a count 0."""
    records = np.zeros(len(moments), RECORD)
    for number, given in enumerate(moments):
        for name in RECORD.names or ():
            records[name][number] = given.get(name, 0 if name in COUNTS else NAN)
    return records


def step(
    start: float, compute: float, received: float, sent: float, **counts: float
) -> dict[str, float]:
    """Return a step that launches 0.25 s after its start and ends 0.5 s after everything is done."""
    done = start + 0.25 + compute
    last = max(done, *(at for at in (received, sent) if not math.isnan(at)), done)
    return {
        "started": start,
        "posted": start + 0.125,
        "launched": start + 0.25,
        "compute_done": done,
        "received": received,
        "sent": sent,
        "step_end": last + 0.5,
        **counts,
    }


def timings(records: Array, alone: Array | None = None, offsets: Any = (0.0,)) -> Timings:
    offset = np.asarray(offsets)[None]
    clocks = Clocks(np.zeros_like(offset), offset, np.zeros_like(offset))
    return Timings(records, records[:0] if alone is None else alone, clocks)


@pytest.mark.parametrize(
    ("received", "sent", "stall"),
    [
        (13.0, 12.0, 0.75),
        (12.0, 13.0, 0.75),
        (11.0, 12.0, 0.0),
        (NAN, 13.0, 0.75),
        (13.0, NAN, 0.75),
        (NAN, NAN, 0.0),
    ],
    ids=["receive last", "send last", "hidden", "only sent", "only received", "no transfer"],
)
def test_the_stall_is_what_transfers_take_longer_than_the_compute(
    received: float, sent: float, stall: float
) -> None:
    records = steps(step(10.0, compute=2.0, received=received, sent=sent))

    assert stall_time(records).tolist() == [stall]
    assert compute_time(records).tolist() == [2.0]
    assert overhead_time(records).tolist() == [0.75]
    assert step_time(records).tolist() == [2.75 + stall]


@pytest.mark.parametrize("seed", [1, 3, 7])
def test_compute_stall_and_overhead_add_up_to_the_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    moments = np.cumsum(rng.uniform(0, 2, size=(17, 7)), axis=1)
    names = ("started", "posted", "launched", "compute_done", "received", "sent", "step_end")
    records = np.zeros(17, RECORD)
    for column, name in enumerate(names):
        records[name] = moments[:, column]
    records["received"][::3], records["sent"][::2] = NAN, NAN

    total = compute_time(records) + stall_time(records) + overhead_time(records)

    # Two subtractions and two additions of numbers below 14.
    assert (np.abs(total - step_time(records)) <= 4 * 14 * np.finfo(np.float64).eps).all()
    assert (stall_time(records) >= 0).all()
    assert (overhead_time(records) >= 0).all()


@pytest.mark.parametrize(
    ("stall", "alone", "hidden"),
    [(0.0, 2.0, 1.0), (0.5, 2.0, 0.75), (2.0, 2.0, 0.0), (3.0, 2.0, 0.0)],
    ids=["all hidden", "most", "nothing", "slower than alone"],
)
def test_overlap_is_the_hidden_part_of_the_transfers_alone(
    stall: float, alone: float, hidden: float
) -> None:
    busy = steps(step(0.0, compute=4.0, received=4.25 + stall, sent=1.0))[None, None]
    silent = steps(step(0.0, compute=0.0, received=0.25 + alone, sent=0.5))[None, None]

    assert overlap(timings(busy, silent)).tolist() == [hidden]


def test_overlap_does_not_exist_where_nothing_moved() -> None:
    silent = steps(step(0.0, compute=0.0, received=NAN, sent=NAN))[None, None]

    assert np.isnan(overlap(timings(silent, silent))).all()


def test_overlap_is_unknown_where_transfers_were_never_made_alone() -> None:
    records = steps(step(0.0, compute=1.0, received=2.0, sent=2.0))[None, None]

    assert np.isnan(overlap(timings(records, records[:0]))).all()


def two_ranks(offsets: tuple[float, float]) -> Timings:
    """Two repeats of two ranks, as seen by clocks that are off by the given seconds."""
    plans = [[(0.0, 3.0), (1.0, 2.0)], [(10.5, 1.0), (10.0, 4.0)]]
    records = np.stack(
        [
            np.stack(
                [
                    steps(
                        step(start + off, length, start + off + 1, start + off + 1),
                        step(start + off + 8, length, start + off + 9, start + off + 9),
                    )
                    for (start, length), off in zip(ranks, offsets, strict=True)
                ]
            )
            for ranks in plans
        ]
    )
    return timings(records, records, offsets)


@pytest.mark.parametrize(
    "offsets", [(0.0, 0.0), (0.0, 0.25), (0.0, -0.1)], ids=["none", "ahead", "behind"]
)
def test_makespans_are_on_corrected_clocks(offsets: tuple[float, float]) -> None:
    spans = makespans(two_ranks(offsets))

    # First start 0 to last end 8 + 3.75 of rank 0; then 10 to 10 + 8 + 4.75 of rank 1. Moments near 24
    # are rounded when the offset is added and when it is taken away.
    expected = np.array([11.75, 12.75])
    assert (np.abs(spans - expected) <= 8 * 24 * np.finfo(np.float64).eps).all()


@pytest.mark.parametrize("offset", [0.25, -0.1])
def test_durations_do_not_depend_on_clock_offsets(offset: float) -> None:
    right, off = two_ranks((0.0, 0.0)).records, two_ranks((0.0, offset)).records

    for duration in (compute_time, stall_time, overhead_time, step_time):
        # Differences of moments below 24, each rounded once.
        budget = 6 * 24 * np.finfo(np.float64).eps
        assert (np.abs(duration(right) - duration(off)) <= budget).all()


def test_a_rank_is_summed_over_steps_with_medians_over_repeats() -> None:
    repeats = [
        steps(
            step(0.0, compute=length, received=length + 1.25, sent=0.5, flops=10, pairs=3, messages=1),
            step(50.0, compute=1.0, received=NAN, sent=NAN, flops=20, pairs=4),
        )
        for length in (8.0, 2.0, 4.0)
    ]
    records = np.stack(repeats)[:, None]
    alone = np.stack([steps(step(0.0, 0.0, 4.25, 0.5), step(5.0, 0.0, NAN, NAN))])[:, None]

    (rank,) = by_rank(timings(records, alone))

    assert rank.rank == 0
    assert (rank.compute, rank.stall, rank.overhead, rank.total) == (5.0, 1.0, 1.5, 7.5)
    assert rank.overlap == 0.75
    assert rank.counts["flops"] == 30
    assert rank.counts["pairs"] == 7
    assert rank.counts["messages"] == 1
    assert set(rank.counts) == set(COUNTS)


def test_ranks_keep_their_own_numbers() -> None:
    summaries = by_rank(two_ranks((0.0, 0.25)))

    assert [rank.rank for rank in summaries] == [0, 1]
    # Medians of sums 2 (3, 1) and 2 (2, 4); moments near 24 are rounded with the offset.
    budget = 8 * 24 * np.finfo(np.float64).eps
    for rank, expected in zip(summaries, (4.0, 6.0), strict=True):
        assert abs(rank.compute - expected) <= budget


def test_a_run_without_repeats_has_no_ranks_to_report() -> None:
    assert by_rank(timings(np.empty((0, 3, 3), RECORD), offsets=np.zeros(3))) == []


def test_timed_ranks_are_reported_where_transfers_were_never_made_alone() -> None:
    records = two_ranks((0.0, 0.0)).records

    summaries = by_rank(timings(records, records[:0], np.zeros(2)))

    assert [math.isnan(rank.overlap) for rank in summaries] == [True, True]


#: Rank 1's clock is 0.25 s ahead at 100 s on rank 0's clock, and gains a millisecond a second until 164 s.
DRIFTING = Clocks(
    np.array([[100.0, 100.0], [164.0, 164.0]]),
    np.array([[0.0, 0.25], [0.0, 0.314]]),
    np.array([[0.0, 1e-6], [0.0, 3e-6]]),
)


def seen_by_rank_1(true: Array) -> Array:
    return true + 0.25 + (true - 100.0) * 1e-3


def test_moments_between_two_measurements_lie_on_the_line_through_them() -> None:
    true = np.array([90.0, 100.0, 116.0, 132.5, 164.0, 200.0])
    found = DRIFTING.corrected(np.array([[true, seen_by_rank_1(true)]]))
    # Exact but for roundings of numbers below 256.
    assert np.abs(found - true).max() <= 8 * 256 * np.finfo(np.float64).eps


def test_drift_and_errors_are_told_of_both_measurements_together() -> None:
    eps = np.finfo(np.float64).eps
    assert DRIFTING.drift.tolist() == pytest.approx([0.0, 1e-3], abs=eps)
    assert DRIFTING.drift_error.tolist() == pytest.approx([0.0, 4e-6 / 64], abs=eps)
    assert DRIFTING.corrected_error.tolist() == [0.0, 3e-6]


def test_any_line_within_the_bounds_of_its_ends_is_within_the_bound_between_them() -> None:
    rng = np.random.default_rng(5)
    true = np.linspace(100.0, 164.0, 33)
    for wrong in rng.uniform(-1, 1, (50, 2)):
        measured = Clocks(
            DRIFTING.measured_at,
            DRIFTING.offset + np.array([[0.0, wrong[0] * 1e-6], [0.0, wrong[1] * 3e-6]]),
            DRIFTING.error_bound,
        )
        found = measured.corrected(np.array([[true, seen_by_rank_1(true)]]))[0, 1]
        # The line of a clock that runs a thousandth fast is stretched by that.
        assert np.abs(found - true).max() <= 3e-6 * 1.002


def test_after_one_measurement_no_drift_is_known() -> None:
    tables = (DRIFTING.measured_at, DRIFTING.offset, DRIFTING.error_bound)
    once = Clocks(*(table[:1] for table in tables))
    assert np.isnan(once.drift).all()
    assert np.isnan(once.drift_error).all()
    assert once.corrected_error.tolist() == [0.0, 1e-6]
    assert once.corrected(np.array([[[130.0], [130.25]]])).tolist() == [[[130.0], [130.0]]]


def test_merged_records_have_all_moments_on_one_clock_and_all_else_as_it_was() -> None:
    """Rank 0 notes when rank 1 posted on the clock of rank 1, and the other way round."""
    true = np.array([110.0, 120.0, 130.0])
    records = np.zeros((1, 2, 3), RECORD)
    for name in ("started", "posted", "launched", "compute_done", "received", "sent", "step_end"):
        records[name] = [true, seen_by_rank_1(true)]
    records["waited_for"] = [[[1, 1, np.nan], [0, 0, np.nan]]]
    records["peer_posted"][0, 0] = [*seen_by_rank_1(true[:2] - 5.0), np.nan]
    records["peer_posted"][0, 1] = [*(true[:2] - 7.0), np.nan]
    records["pairs"], records["polling"] = 17, 0.5
    merged = DRIFTING.merged(records)
    rounding = 8 * 256 * np.finfo(np.float64).eps
    for name in ("started", "posted", "launched", "compute_done", "received", "sent", "step_end"):
        assert np.abs(merged[name] - true).max() <= rounding
    assert np.abs(merged["peer_posted"][0, 0, :2] - (true[:2] - 5.0)).max() <= rounding
    assert np.abs(merged["peer_posted"][0, 1, :2] - (true[:2] - 7.0)).max() <= rounding
    assert np.isnan(merged["peer_posted"][0, :, 2]).all()
    for name in ("pairs", "polling", "waited_for"):
        assert np.array_equal(merged[name], records[name], equal_nan=True)


def test_the_typical_repeat_is_of_median_length() -> None:
    """Of 111.75 s, 11.75 s and 12.75 s."""
    found = two_ranks((0.0, 0.0)).records
    records = np.concatenate([found[:1], found])
    records["step_end"][0] += 100.0
    assert typical_repeat(timings(records, offsets=np.zeros(2))) == 2


def test_rates_are_of_all_compute_and_of_transfers_alone() -> None:
    """Medians over ranks and repeats: 6 FLOP in 2 s, 8 in 4 s, 10 in 2 s; bytes are of the silent pass."""
    busy = np.stack(
        [
            steps(
                step(0.0, compute, received=90.0, sent=1.0, flops=flops / 2, bytes_sent=999),
                step(100.0, compute, received=190.0, sent=101.0, flops=flops / 2, bytes_sent=999),
            )
            for compute, flops in ((1.0, 6), (2.0, 8), (1.0, 10))
        ]
    )[None]
    silent = np.stack(
        [
            steps(
                step(0.0, 0.0, received=0.25 + wait, sent=0.5, bytes_sent=64),
                step(5.0, 0.0, received=5.25 + wait, sent=5.5, bytes_sent=64),
            )
            for wait in (1.0, 4.0, 2.0)
        ]
    )[None]

    assert rates(timings(busy, silent, np.zeros(3))) == (3.0, 32.0)


def test_rates_are_unknown_where_nothing_was_computed_or_moved_alone() -> None:
    busy = steps(step(0.0, compute=2.0, received=NAN, sent=NAN, flops=8))[None, None]

    flops, bandwidth = rates(timings(busy))
    assert flops == 4.0
    assert math.isnan(bandwidth)
    assert all(map(math.isnan, rates(timings(busy[:0]))))
    silent = steps(step(0.0, compute=0.0, received=NAN, sent=NAN))[None, None]
    assert all(map(math.isnan, rates(timings(silent, silent))))


def test_a_count_that_was_not_recorded_is_left_out() -> None:
    records = two_ranks((0.0, 0.0)).records
    records["hops"] = NAN

    for rank in by_rank(timings(records, records, np.zeros(2))):
        assert set(rank.counts) == set(COUNTS) - {"hops"}
