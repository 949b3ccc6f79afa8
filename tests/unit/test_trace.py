from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ringmpi.trace import (
    AWAITED,
    COSTS,
    COUNTS,
    DEVICE_TIMES,
    MOMENTS,
    QUANTITIES,
    RECORD,
    Tally,
    Trace,
)


def ticking() -> Iterator[float]:
    seconds = 100.0
    while True:
        yield seconds
        seconds += 1


@pytest.fixture
def trace() -> Trace:
    ticks = ticking()
    return Trace(3, clock=lambda: next(ticks))


def test_every_quantity_is_a_64_bit_column_with_a_unit() -> None:
    assert (
        set(RECORD.names or ())
        == set(QUANTITIES)
        == {
            *(*MOMENTS, *AWAITED, *COSTS),
            *(*DEVICE_TIMES, *COUNTS),
        }
    )
    assert {RECORD[name] for name in QUANTITIES} == {np.dtype(np.float64)}
    assert {MOMENTS[name].unit for name in MOMENTS} == {"s"}
    assert all(quantity.unit and quantity.description for quantity in QUANTITIES.values())


def test_the_quantities_of_the_file_format_are_there() -> None:
    wanted = {
        "launched",
        "posted",
        "compute_done",
        "received",
        "sent",
        "step_end",
        "bytes_sent",
        "messages",
        "hops",
        "flops",
        "waited_for",
        "peer_posted",
        "polling",
    }

    assert wanted <= set(QUANTITIES)


def test_a_moment_that_has_not_come_is_nan_and_a_count_zero(trace: Trace) -> None:
    assert all(np.isnan(trace.records[name]).all() for name in (*MOMENTS, *AWAITED))
    assert all((trace.records[name] == 0).all() for name in (*COSTS, *DEVICE_TIMES, *COUNTS))


def test_moments_are_marked_in_the_step_that_was_begun(trace: Trace) -> None:
    trace.begin(1)
    trace.mark("posted")

    assert trace.records["started"].tolist()[1] == 100
    assert trace.records["posted"].tolist()[1] == 101
    assert np.isnan(trace.records["started"][[0, 2]]).all()


def test_a_moment_that_was_noted_earlier_is_kept(trace: Trace) -> None:
    trace.begin(0)

    trace.note(received=17.0, sent=0.0)

    assert trace.records["received"][0] == 17
    assert trace.records["sent"][0] == 0
    assert np.isnan(trace.records["sent"][1:]).all()


def test_counts_add_up_within_a_step(trace: Trace) -> None:
    trace.begin(2)

    trace.count(pairs=3, flops=12)
    trace.count(pairs=4)

    assert trace.records["pairs"].tolist() == [0, 0, 7]
    assert trace.records["flops"].tolist() == [0, 0, 12]


def test_a_tally_counts_by_the_names_of_the_columns() -> None:
    tally = Tally(pairs=1, computed_pairs=2, flops=3, tiles=4, tiles_unmasked=5, tiles_skipped=6)

    counts = tally.counts()
    counts["pairs"] = 99

    assert set(counts) <= {*DEVICE_TIMES, *COUNTS}
    assert tally.pairs == 1


def test_the_clock_of_a_trace_never_falls() -> None:
    trace = Trace(100)

    for number in range(100):
        trace.begin(number)

    assert (np.diff(trace.records["started"]) >= 0).all()
