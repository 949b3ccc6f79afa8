"""A trace for Perfetto: valid JSON, slices that nest, arrows between their slices, the file's numbers."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import AFTER, Rule, write_result

from ringmpi.metrics import compute_time, stall_time
from ringmpi.report.perfetto import write_trace
from ringmpi.schedule import Pass
from ringmpi.schedule.hops import hops
from ringmpi.store import ResultFile

#: A trace tells nanoseconds, in microseconds; two of them may be rounded.
ROUNDED = 2e-3


def trace(folder: Path, *paths: Path) -> dict[str, Any]:
    results = [ResultFile(path) for path in paths]
    write_trace(results, folder / "t.json")
    told: dict[str, Any] = json.loads((folder / "t.json").read_text("ascii"))
    return told


def events(told: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in told["traceEvents"] if event["ph"] == phase]


@pytest.fixture
def slow_rank(tmp_path: Path) -> Path:
    """Four ranks, of which one is slow, forward and backward."""
    return write_result(
        tmp_path / "a.h5",
        4,
        rule=Rule(lambda rank, step: 0.02 if rank == 1 else 0.002),
        backward=True,
        repeats=2,
    )


def test_every_repeat_of_every_pass_is_a_process_and_every_rank_a_thread(
    tmp_path: Path, slow_rank: Path
) -> None:
    told = trace(tmp_path, slow_rank, write_result(tmp_path / "b.h5", 2, repeats=1))
    names = {e["pid"]: e["args"]["name"] for e in events(told, "M") if e["name"] == "process_name"}
    assert list(names.values()) == [
        "a, forward, repeat 1 of 2",
        "a, forward, repeat 2 of 2",
        "a, backward, repeat 1 of 2",
        "a, backward, repeat 2 of 2",
        "b, forward, repeat 1 of 1",
    ]
    threads = defaultdict(list)
    for event in events(told, "M"):
        if event["name"] == "thread_name":
            threads[event["pid"]].append((event["tid"], event["args"]["name"]))
    assert threads[1] == [(rank, f"rank {rank} on node{rank % 2}") for rank in range(4)]
    assert len(threads[5]) == 2
    assert {e["pid"] for e in events(told, "X")} == set(names)


def test_slices_tell_the_numbers_of_the_file(tmp_path: Path, slow_rank: Path) -> None:
    told = trace(tmp_path, slow_rank)
    with ResultFile(slow_rank) as result:
        timings = [result.timings(direction) for direction in Pass]
    first = min(timing.records["started"].min() for timing in timings)
    steps = [event for event in events(told, "X") if event["name"].startswith("step ")]
    assert len(steps) == 2 * sum(timing.records[0].size for timing in timings)
    for event in steps:
        records = timings[(event["pid"] - 1) // 2].records[(event["pid"] - 1) % 2]
        step = int(event["name"].removeprefix("step "))
        record = records[event["tid"], step]
        assert event["ts"] == pytest.approx((record["started"] - first) * 1e6, abs=ROUNDED)
        assert event["dur"] == pytest.approx(
            (record["step_end"] - record["started"]) * 1e6, abs=ROUNDED
        )
        args = event["args"]
        assert args["compute_us"] == pytest.approx(float(compute_time(record)) * 1e6, abs=ROUNDED)
        assert args["stall_us"] == pytest.approx(float(stall_time(record)) * 1e6, abs=ROUNDED)
        assert (args["bytes_sent"], args["pairs"]) == (record["bytes_sent"], record["pairs"])
        assert args["flop_per_s"] == pytest.approx(1e9, rel=1e-6)


def test_what_a_rank_did_lies_in_its_step_and_adds_up_to_it(tmp_path: Path, slow_rank: Path) -> None:
    slices = defaultdict(list)
    for event in events(trace(tmp_path, slow_rank), "X"):
        step = event["args"].get("step", event["name"].removeprefix("step "))
        slices[event["pid"], event["tid"], int(step)].append(event)
    assert any(event["name"] == "stall: late sender" for found in slices.values() for event in found)
    for found in slices.values():
        (whole,) = [event for event in found if event["name"].startswith("step ")]
        parts = [event for event in found if event is not whole]
        for part in parts:
            assert part["ts"] >= whole["ts"]
            assert part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + ROUNDED
        # Each of at most a dozen parts may be rounded by half a nanosecond at both ends.
        assert sum(part["dur"] for part in parts) == pytest.approx(whole["dur"], abs=12e-3)


def test_blamed_stalls_name_who_is_to_blame(tmp_path: Path, slow_rank: Path) -> None:
    blamed = [e for e in events(trace(tmp_path, slow_rank), "X") if e["name"] == "stall: late sender"]
    assert {event["args"]["blamed_on"] for event in blamed} == {"rank 1"}


@pytest.mark.parametrize("after", [AFTER, 0.0], ids=["", "steps that end as the last hop arrives"])
def test_every_hop_is_an_arrow_from_the_senders_slice_to_the_receivers(
    tmp_path: Path, after: float
) -> None:
    rule = Rule(lambda rank, step: 0.02 if rank == 1 else 0.002, after=after)
    path = write_result(tmp_path / "a.h5", 4, rule=rule, backward=True, repeats=2)
    told = trace(tmp_path, path)
    starts, ends = ({e["id"]: e for e in events(told, phase)} for phase in "sf")
    assert len(starts) == len(events(told, "s"))
    assert starts.keys() == ends.keys()
    steps = {
        (e["pid"], e["tid"], int(e["name"].removeprefix("step "))): e
        for e in events(told, "X")
        if e["name"].startswith("step ")
    }

    def around(event: dict[str, Any]) -> int:
        """Return the step whose slice is open at an event; Perfetto binds it to that one."""
        (step,) = [
            step
            for (pid, rank, step), s in steps.items()
            if (pid, rank) == (event["pid"], event["tid"])
            and s["ts"] <= event["ts"] < s["ts"] + s["dur"]
        ]
        return step

    with ResultFile(path) as result:
        expected = {
            direction: sorted(
                (hop.sender, hop.step, hop.receiver, hop.due)
                for hop in hops(result.experiment.schedules(4, 1, direction))
            )
            for direction in Pass
        }
    found = defaultdict(list)
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert (start["name"], start["cat"], start["pid"]) == (end["name"], end["cat"], end["pid"])
        assert end["ts"] > start["ts"]
        assert start["args"]["bytes"] > 0
        found[start["pid"]].append((start["tid"], around(start), end["tid"], around(end)))
    assert [sorted(found[pid]) for pid in range(1, 5)] == [
        expected[direction] for direction in Pass for _ in range(2)
    ]


def test_the_counter_tells_how_many_ranks_compute_and_stall(tmp_path: Path, slow_rank: Path) -> None:
    told = trace(tmp_path, slow_rank)
    counted = [event for event in events(told, "C") if event["pid"] == 1]
    times = [event["ts"] for event in counted]
    assert times == sorted(set(times))
    pieces = [e for e in events(told, "X") if e["pid"] == 1 and not e["name"].startswith("step ")]
    for event, following in pairwise(counted):
        middle = (event["ts"] + following["ts"]) / 2
        open_at = [e["name"] for e in pieces if e["ts"] <= middle < e["ts"] + e["dur"]]
        if following["ts"] - event["ts"] > 4 * ROUNDED:
            assert event["args"] == {
                "computing": open_at.count("compute"),
                "stalling": sum(name.startswith("stall") for name in open_at),
            }
    assert counted[-1]["args"] == {"computing": 0, "stalling": 0}
    assert max(event["args"]["stalling"] for event in counted) == 3


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {"alone": False}),
        (3, {"repeats": 0, "interrupted": 15}),
        (3, {"kind": "simulated", "offsets": (0.0, -3.0, 5.0)}),
        (2, {"rule": Rule(flops=float("nan"))}),
    ],
    ids=["one rank", "nothing timed", "simulated", "nothing counted"],
)
def test_any_file_gives_valid_json(tmp_path: Path, size: int, options: dict[str, Any]) -> None:
    told = trace(tmp_path, write_result(tmp_path / 'odd"<name>.h5', size, **options))
    repeats = options.get("repeats", 3)
    steps = [e for e in events(told, "X") if e["name"].startswith("step ")]
    assert len(steps) == repeats * size * size
    assert all(np.isfinite(e["ts"]) and e["ts"] >= 0 for e in steps)
    assert told["otherData"]['odd"<name>.h5']["kind"] == options.get("kind", "measured")
