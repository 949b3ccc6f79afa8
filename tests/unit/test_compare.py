"""Tables over result files that are made by hand, with times that are known."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ringmpi.config import experiment_from
from ringmpi.errors import BAD_PARAMETER, ConfigError
from ringmpi.report.show import Asked, report_files
from ringmpi.schedule import Pass
from ringmpi.store import TIMINGS, ResultWriter
from ringmpi.trace import MOMENTS, RECORD
from ringmpi.verify import Verdict

Rows = list[dict[str, str]]

RANKS = 2


def verdict(tensor: str, error: float = 1e-7, single: float = 2e-7, passed: bool = True) -> Verdict:
    return Verdict(
        tensor,
        passed,
        error,
        error / 4,
        error,
        1e-6,
        1e-6,
        single,
        single / 4,
        8,
        [0, 0, 0, 0],
        0,
        1.0,
        1.0,
    )


FORWARD = (verdict("out"), verdict("lse"))
GRADIENTS = tuple(verdict(name) for name in ("dq", "dk", "dv"))


def records(seconds: list[float], **counts: int) -> Any:
    """Return passes of two ranks and two steps that take the given times, half of it on each step.

    Rank 1 computes a quarter of each step and stalls for the rest; rank 0 computes half of it. It sends
    twice what rank 0 does.
    """
    found = np.zeros((len(seconds), RANKS, 2), RECORD)
    for repeat, total in enumerate(seconds):
        for rank, part in enumerate((0.5, 0.25)):
            for step in range(2):
                at = 10.0 * repeat + step * total / 2
                moments = dict.fromkeys(MOMENTS, at) | {
                    "compute_done": at + part * total / 2,
                    "received": at + total / 2,
                    "sent": at,
                    "step_end": at + total / 2,
                }
                for name, value in (moments | {n: v * (rank + 1) for n, v in counts.items()}).items():
                    found[name][repeat, rank, step] = value
    return found


def result(
    path: Path,
    forward: list[float],
    backward: list[float] | None = None,
    verdicts: tuple[Verdict, ...] = FORWARD,
    *,
    crowded: bool = False,
    groups: int = 1,
    ranks: int = RANKS,
    **options: Any,
) -> str:
    """Write a result whose repeats took the given seconds, and return its path."""
    given: dict[str, Any] = {"seq_len": 8, "heads": 2, "head_dim": 4, "backward": backward is not None}
    passes = {Pass.FORWARD: forward} | ({} if backward is None else {Pass.BACKWARD: backward})
    with ResultWriter(path) as writer:
        for direction, seconds in passes.items():
            made = records(seconds, bytes_sent=1_000_000, messages=3, hops=2, flops=10**9)
            made = made[:, [0, *[1] * (ranks - 1)]]  # Further ranks are like rank 1.
            for group in (TIMINGS[direction], f"{TIMINGS[direction]}/alone"):
                writer.records(group, made.shape)
                for rank in range(ranks):
                    writer.write_records(group, rank, made[:, rank])
        writer.texts("ranks/hostname", ["node"] * ranks, "node")
        writer.texts("ranks/device", ["numpy"] * ranks, "what computed")
        for number, direction in enumerate(Pass):
            held = np.array([1_500_000, *[2_500_000] * (ranks - 1)]) * (number + 1)
            writer.table(f"ranks/held_{direction.value}_nbytes", held, "B", "buffers")
        for name in ("measured_at", "offset"):
            writer.table(f"clocks/{name}", np.zeros((1, ranks)), "s", name)
        writer.table("clocks/drift", np.zeros(ranks), "1", "drift")
        writer.facts("machine", {"oversubscribed": crowded, "inner_ranks": groups})
        writer.verdicts("full" if verdicts else "none", verdicts)
        writer.describe(experiment_from(given | options), "ringmpi run")
        writer.commit()
    return str(path)


class Told:
    """What a comparison prints, and its rows."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._path, self._capsys = tmp_path / "table.csv", capsys

    def __call__(self, *paths: str) -> tuple[Rows, list[str]]:
        report_files(paths, Asked(compare=True, csv=str(self._path)))
        with self._path.open(newline="") as file:
            return list(csv.DictReader(file)), self._capsys.readouterr().out.splitlines()


@pytest.fixture
def told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    return Told(tmp_path, capsys)


def marked(rows: Rows) -> list[tuple[str, str]]:
    return [(row["method"], row["pass"]) for row in rows if row["fastest"]]


def test_a_row_tells_the_slowest_rank_and_the_one_that_sends_and_holds_most(
    tmp_path: Path, told: Told
) -> None:
    (row, back), _ = told(
        result(tmp_path / "a.h5", [0.5, 0.125, 0.25], [1.0], (*FORWARD, *GRADIENTS), method="passq")
    )

    assert (row["method"], row["ranks"], row["pass"]) == ("passq", "2", "forward")
    # The median repeat of 0.25 s; rank 0 computes half of it, rank 1 stalls for three quarters.
    assert (row["time ms"], row["min ms"], row["max ms"]) == ("250.00", "125.00", "500.00")
    assert (row["compute ms"], row["stall ms"]) == ("125.00", "187.50")
    # Rank 1, over two steps.
    assert (row["sent MB"], row["messages"], row["hops"]) == ("4.000", "12", "8")
    assert (row["held MB"], back["held MB"]) == ("2.500", "5.000")
    assert (back["method"], back["pass"], back["time ms"]) == ("passq", "backward", "1000.00")
    assert row["oversubscribed"] == ""


def test_errors_are_of_the_tensor_that_is_worst_for_a_plain_single_pass(
    tmp_path: Path, told: Told
) -> None:
    gradients = (verdict("dq", 8e-7, 9e-7), verdict("dk", 3e-7, 1e-7), verdict("dv", 4e-7, 4e-7))

    (forward, back), _ = told(result(tmp_path / "a.h5", [1.0], [1.0], (*FORWARD, *gradients)))

    assert (forward["tensor"], forward["verdict"]) == ("out", "OK")
    assert (back["tensor"], back["max error"], back["single pass"]) == ("dk", "3.00e-07", "1.00e-07")
    assert (back["mean error"], back["single mean"]) == ("7.50e-08", "2.50e-08")


def test_the_fastest_of_each_pass_is_marked_once(tmp_path: Path, told: Told) -> None:
    everything = (*FORWARD, *GRADIENTS)
    paths = [
        result(tmp_path / f"{name}.h5", [there], [back], everything, method=name)
        for name, there, back in (("ring", 0.9, 0.5), ("passq", 0.5, 0.9), ("allgather", 0.5, 0.7))
    ]

    rows, lines = told(*paths)

    # Of two that took as long, the first.
    assert marked(rows) == [("ring", "backward"), ("passq", "forward")]
    assert "# fastest forward (ranks 2): passq" in lines
    assert "# fastest backward (ranks 2): ring" in lines


def test_times_are_compared_as_numbers(tmp_path: Path, told: Told) -> None:
    paths = [
        result(tmp_path / f"{name}.h5", [seconds], method=name)
        for name, seconds in (("ring", 0.1), ("passq", 0.02), ("allgather", 1.0))
    ]

    rows, _ = told(*paths)

    assert marked(rows) == [("passq", "forward")]


def test_results_that_differ_in_more_than_the_method_are_other_cases(
    tmp_path: Path, told: Told
) -> None:
    paths = [
        result(tmp_path / f"{number}.h5", [seconds], **options)
        for number, (seconds, options) in enumerate(
            [
                (0.4, {"method": "ring"}),
                (0.3, {"method": "passq"}),
                (0.2, {"method": "ring", "link": "1Gbit/s,1ms"}),
                (0.1, {"method": "passq", "link": "1Gbit/s,1ms", "seq_len": 16}),
                (0.9, {"method": "passq", "link": "1Gbit/s,1ms"}),
            ]
        )
    ]

    rows, lines = told(*paths)

    assert [(row["seq_len"], row["link"]) for row in rows] == [
        ("8", "None"),
        ("8", "None"),
        ("8", "1Gbit/s,1ms"),
        ("16", "1Gbit/s,1ms"),
        ("8", "1Gbit/s,1ms"),
    ]
    assert [bool(row["fastest"]) for row in rows] == [False, True, True, True, False]
    named = [line for line in lines if line.startswith("# fastest")]
    # A case of one has no fastest that is worth a line.
    assert len(named) == 2
    assert any("link 1Gbit/s,1ms" in line and line.endswith(": ring") for line in named)
    assert any("link None" in line and line.endswith(": passq") for line in named)


def test_rank_counts_are_other_cases(tmp_path: Path, told: Told) -> None:
    paths = [
        result(tmp_path / "two.h5", [0.4]),
        result(tmp_path / "three.h5", [0.2], ranks=3),
        result(tmp_path / "other.h5", [0.3], method="passq"),
    ]

    rows, lines = told(*paths)

    assert [(row["ranks"], bool(row["fastest"])) for row in rows] == [
        ("2", False),
        ("3", True),
        ("2", True),
    ]
    assert [line for line in lines if line.startswith("# fastest")] == [
        "# fastest forward (ranks 2): passq"
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"output": "elsewhere.h5"},
        {"ranks": 2},
        {"verify": "sample:3"},
        {"inner": 2},
        {"ulysses_degree": 2},
        {"timeout": 7.0},
    ],
    ids=str,
)
def test_what_changes_no_result_makes_no_other_case(
    tmp_path: Path, told: Told, options: dict[str, Any]
) -> None:
    rows, lines = told(
        result(tmp_path / "a.h5", [0.4]), result(tmp_path / "b.h5", [0.3], method="passq", **options)
    )

    assert marked(rows) == [("passq", "forward")]
    assert "# fastest forward (ranks 2): passq" in lines
    assert set(options).isdisjoint(set(rows[0]) - {"ranks"})


def test_a_method_of_groups_is_named_with_their_size(tmp_path: Path, told: Told) -> None:
    rows, lines = told(
        result(tmp_path / "a.h5", [0.4], method="double-ring", groups=1),
        result(tmp_path / "b.h5", [0.5], method="hybrid", groups=2),
        result(tmp_path / "c.h5", [0.6], method="ulysses", groups=2),
    )

    assert [row["method"] for row in rows] == ["double-ring:1", "hybrid:2", "ulysses"]
    assert "# fastest forward (ranks 2): double-ring:1" in lines


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_wrong_result_is_shown_and_is_never_the_fastest(
    tmp_path: Path, told: Told, which: str
) -> None:
    wrong = "lse" if which == "forward" else "dv"
    verdicts = tuple(verdict(v.tensor, passed=v.tensor != wrong) for v in (*FORWARD, *GRADIENTS))
    paths = [
        result(tmp_path / "fast.h5", [0.1], [0.1], verdicts, method="passq"),
        result(tmp_path / "good.h5", [0.9], [0.9], (*FORWARD, *GRADIENTS), method="ring"),
    ]

    rows, lines = told(*paths)

    found = {(row["method"], row["pass"]): row["verdict"] for row in rows}
    assert [key for key, told_verdict in found.items() if told_verdict != "OK"] == [("passq", which)]
    assert found["passq", which] == "FAILED"
    assert ("ring", which) in marked(rows)
    assert ("passq", which) not in marked(rows)
    assert f"# fastest {which} (ranks 2): ring" in lines


def test_a_file_without_a_timed_repeat_has_a_row_and_no_times(tmp_path: Path, told: Told) -> None:
    failed = (verdict("out", passed=False), verdict("lse"))

    rows, lines = told(
        result(tmp_path / "a.h5", [], verdicts=failed, method="passq"), result(tmp_path / "b.h5", [0.5])
    )

    assert [row["time ms"] for row in rows] == ["-", "500.00"]
    assert (rows[0]["verdict"], rows[0]["sent MB"], rows[0]["held MB"]) == ("FAILED", "-", "2.500")
    assert marked(rows) == [("ring", "forward")]
    assert any(line.split()[:3] == ["passq", "2", "forward"] for line in lines)


def test_a_file_of_an_older_ringmpi_lacks_what_that_did_not_record(tmp_path: Path, told: Told) -> None:
    older, newer = result(tmp_path / "a.h5", [0.5]), result(tmp_path / "b.h5", [0.75], method="passq")
    with h5py.File(older, "r+") as file:
        for name in ("held_forward_nbytes", "held_backward_nbytes"):
            del file[f"ranks/{name}"]
        for group in ("timings", "timings/alone"):
            del file[f"{group}/hops"]

    rows, _ = told(older, newer)

    assert [(row["hops"], row["held MB"]) for row in rows] == [("-", "-"), ("8", "2.500")]
    assert [row["messages"] for row in rows] == ["12", "12"]
    assert marked(rows) == [("ring", "forward")]
    report_files([older], Asked())


def test_a_tensor_that_is_nan_is_the_worst(tmp_path: Path, told: Told) -> None:
    lost = verdict("dv", math.nan, passed=False)

    (_, back), _ = told(
        result(tmp_path / "a.h5", [0.5], [0.5], (*FORWARD, *GRADIENTS[:2], lost), method="passq")
    )

    assert (back["tensor"], back["max error"], back["verdict"]) == ("dv", "nan", "FAILED")


def test_what_was_not_verified_says_so(tmp_path: Path, told: Told) -> None:
    rows, _ = told(result(tmp_path / "a.h5", [0.5], verdicts=()))

    assert (rows[0]["verdict"], rows[0]["max error"]) == ("not verified", "-")


def test_times_of_crowded_cores_are_marked(tmp_path: Path, told: Told) -> None:
    rows, lines = told(
        result(tmp_path / "a.h5", [0.5], crowded=True), result(tmp_path / "b.h5", [0.7], method="passq")
    )

    assert [row["oversubscribed"] for row in rows] == ["yes", ""]
    # A file for programs has numbers only.
    assert [row["time ms"] for row in rows] == ["500.00", "700.00"]
    assert any("500.00*" in line for line in lines)
    assert not any("700.00*" in line for line in lines)
    assert "* more ranks or threads than cores: the time shows correctness, not speed" in lines


@pytest.mark.parametrize("place", ["folder", "below a file"])
def test_a_table_that_cannot_be_written_is_refused(tmp_path: Path, place: str) -> None:
    path = result(tmp_path / "a.h5", [0.5])
    target = tmp_path if place == "folder" else tmp_path / "a.h5" / "table.csv"

    with pytest.raises(ConfigError) as refusal:
        report_files([path], Asked(csv=str(target)))

    assert f"csv={target}: cannot be written: " in str(refusal.value)
    assert "use another name" in str(refusal.value)
    assert refusal.value.exit_code == BAD_PARAMETER


def test_the_rule_of_who_should_travel_is_told_where_only_some_positions_attend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rates are those of the records: 1e9 FLOP in 0.125 s of a rank's two steps, or 2e9 in 0.0625 s."""
    path = result(
        tmp_path / "a.h5", [0.25], seq_len=80, query_len=8, heads=8, kv_heads=2, method="ring"
    )

    report_files([path], Asked())

    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("who should travel"))
    # FLOP/s: 2e9 / 0.125 and 4e9 / 0.0625, of which 40e9 is the middle; bytes: 2e6 / 0.125, 4e6 / 0.1875.
    flops, bandwidth = (16e9 + 64e9) / 2, (2e6 / 0.125 + 4e6 / 0.1875) / 2
    least = RANKS * flops * 2 * 4 / (2 * 8 * bandwidth)
    assert lines[at] == (
        "who should travel: queries (passq), by the rule of arXiv:2411.01783; this run: ring"
    )
    assert "new of all tokens 8/80 = 0.1, " in lines[at + 1]
    assert "2 kv_heads / heads = 0.5" in lines[at + 1]
    assert f"from: {least:.0f} new tokens or more" in lines[at + 2]
    assert (
        f"(measured: {flops / 1e9:.1f} GFLOP/s and {bandwidth / 1e6:.1f} MB/s a rank)" in lines[at + 2]
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"query_len": 60}, "k and v (ring)"),
        ({"query_len": 8, "kv_heads": 8}, "queries (passq)"),
        ({}, None),
    ],
    ids=["many queries", "few queries, many KV heads", "all queries"],
)
def test_who_should_travel_follows_from_the_sizes_where_nothing_is_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], told: str | None
) -> None:
    path = result(tmp_path / "a.h5", [0.25], **{"seq_len": 80, "heads": 8, "kv_heads": 2} | options)

    report_files([path], Asked())

    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("who should")]
    assert len(found) == (told is not None)
    assert all(f"who should travel: {told}, " in line for line in found)
