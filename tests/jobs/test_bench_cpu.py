"""The benchmark of the CPU: what it writes adds up, and wrong results are seen. No time is judged here."""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "jobs/bench_cpu"


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def bench(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script in the environment of the tests, without peers, at tiny sizes."""
    job = folder / "jobs/bench_cpu.sh"
    if not job.exists():
        job.parent.mkdir()
        job.write_text((ROOT / "jobs/bench_cpu.sh").read_text())
        (job.parent / "environment.sh").write_text("")
        (job.parent / "bench_cpu").symlink_to(BENCH)
    small = {
        "QUICK": "1",
        "PEERS": "none",
        "SIZES": "96",
        "HEAD_DIMS": "16",
        "OUT": str(folder / "out"),
    }
    return subprocess.run(
        ["bash", job],
        env=os.environ | small | variables,
        capture_output=True,
        text=True,
        timeout=110,
    )


def rows_of(folder: Path) -> list[dict[str, str]]:
    lines = (folder / "out/bench_cpu.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def samples(row: dict[str, str]) -> list[float]:
    return [float(second) for second in row["samples_s"].split()]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    done = bench(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_case_has_all_contenders_and_right_results(measured: Path) -> None:
    rows = rows_of(measured)
    cases = {tuple(row[name] for name in ("part", "dtype", "pass", "mask")) for row in rows}
    assert len(cases) == 16
    for part, dtype, direction, mask in cases:
        wanted = {"part": part, "dtype": dtype, "pass": direction, "mask": mask}
        names = {
            f"{row['contender']} {row['layout']}".strip()
            for row in rows
            if wanted.items() <= row.items() and not row["contender"].startswith("peak-")
        }
        rings = {"full": {"ring contiguous", "one-rank contiguous"}}
        rings["causal"] = {"ring contiguous", "ring zigzag", "one-rank zigzag"}
        natives = {"native", "native-unsliced"}
        expected = rings[mask] if part == "ring" else {*natives, "numpy"}
        assert names in (expected, expected - natives)  # Where there is no compiler.
    for row in rows:
        if not row["contender"].startswith("peak-"):
            assert row["verdict"] == "ok"
            assert float(row["row_error"]) < (1e-5 if row["dtype"] == "float32" else 2e-2)
            assert float(row["max_abs_difference"]) > 0


def test_rounded_weights_are_measured_beside_exact_ones(tmp_path: Path) -> None:
    done = bench(
        tmp_path, WEIGHTS="rounded", PASSES="forward", MASKS="full", PARTS="single", SIZES="512"
    )

    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["dtype"], row["contender"]): row for row in rows_of(tmp_path)}
    assert {row["verdict"] for row in rows.values()} <= {"ok", ""}
    assert ("float32", "native-exact") not in rows
    exact, rounded = (rows["bfloat16", name] for name in ("native-exact", "native"))
    assert exact["against"] == "native"
    if "AVX-512 BF16" in (tmp_path / "out/bench_cpu.csv").read_text():
        assert float(rounded["row_error"]) > float(exact["row_error"])


def test_columns_follow_from_the_samples(measured: Path) -> None:
    rows = rows_of(measured)
    keys = ("part", "dtype", "pass", "mask", "contender", "layout", "threads")
    by_name = {tuple(row[name] for name in keys): row for row in rows}
    assert len(by_name) == len(rows)
    compared = 0
    for row in rows:
        seconds = samples(row)
        assert len(seconds) == int(row["alternations"]) == 2
        assert float(row["median_s"]) == pytest.approx(statistics.median(seconds), rel=1e-4)
        assert (float(row["min_s"]), float(row["max_s"])) == (min(seconds), max(seconds))
        pairs = 96 * 97 // 2 if row["mask"] == "causal" else 96**2
        flops = 4 * 2 * pairs * 16 * (3.5 if "backward" in row["pass"] else 1)
        assert float(row["gflops"]) * 1e9 == pytest.approx(flops / float(row["median_s"]), rel=1e-3)
        if row["ratio_median"] and not row["contender"].startswith("peak-"):
            name, _, layout = row["against"].partition(" ")
            case = [row[key] for key in ("part", "dtype", "pass", "mask")]
            base = [each for each in rows if [*case, name, layout] == [each[key] for key in keys[:-1]]]
            ratios = [mine / ours for mine, ours in zip(seconds, samples(base[0]), strict=True)]
            for column, value in (
                ("ratio_median", statistics.median(ratios)),
                ("ratio_min", min(ratios)),
                ("ratio_max", max(ratios)),
            ):
                assert float(row[column]) == pytest.approx(value, rel=1e-3, abs=1e-3)
            compared += 1
        assert row["others_busy"] == "" or 0 <= float(row["others_busy"]) <= 1
        if row["aim"]:
            assert row["met"] == ("yes" if float(row["ratio_median"]) >= float(row["aim"]) else "no")
        else:
            assert row["met"] == ""
    assert compared >= 8


def test_table_says_where_it_comes_from_and_is_drawn(measured: Path) -> None:
    lines = (measured / "out/bench_cpu.csv").read_text().splitlines()
    names = [line[2:].split(":")[0] for line in lines if line.startswith("# ")]
    assert names == ["machine", "ringmpi", "versions", "settings", "command"]
    picture = (measured / "out/figures/bench_cpu.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_part_of_a_table_is_drawn(measured: Path, tmp_path: Path) -> None:
    from figure import draw

    table = tmp_path / "part.csv"
    lines = (measured / "out/bench_cpu.csv").read_text().splitlines(keepends=True)
    table.write_text("".join(line for line in lines if not line.startswith(("ring,", "single,bf"))))
    draw(table, tmp_path / "part.png")
    assert (tmp_path / "part.png").read_bytes().startswith(b"\x89PNG")


def test_it_goes_on_where_it_stopped_and_mixes_nothing(measured: Path) -> None:
    table = measured / "out/bench_cpu.csv"
    before = table.read_text()
    again = bench(measured, DTYPES="float32", PARTS="single")
    assert again.returncode == 1  # Without the ring's rank its table would say less.
    assert "was measured with versions" in again.stderr
    other = bench(measured, ALTERNATIONS="3")
    assert other.returncode == 1
    assert f"{table} was measured with settings: heads 2," in other.stderr
    assert table.read_text() == before

    kept = before.splitlines(keepends=True)
    last = [line for line in kept if line.startswith("ring,bfloat16,forward+backward,causal,")]
    table.write_text("".join(line for line in kept if line not in last))
    resumed = bench(measured)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "# 1 cases to measure" in resumed.stdout
    assert len(table.read_text().splitlines()) == len(kept)


def test_judge_refuses_wrong_results() -> None:
    from case import Case
    from judge import Judge

    judge = Judge(1)
    for dtype, mask in (("float32", "causal"), ("bfloat16", "full")):
        case = Case("single", dtype, "forward+backward", mask, 96, 16, 2)
        right = {name: array.astype(np.float32) for name, array in judge._reference(case).items()}
        assert judge.verdict(case, right).passed
        for name in case.tensors:
            for wrong in spoilt(right[name]):
                assert not judge.verdict(case, right | {name: wrong}).passed


def spoilt(array: Any) -> list[Any]:
    """Return zeros, heads and rows in another order, a wrong row, a wrong scale, and a NaN."""
    row, nan = array.copy(), array.copy()
    row[0, 1, 50] = -row[0, 1, 50]
    nan[0, 0, 3, 5] = np.nan
    return [np.zeros_like(array), array[:, ::-1], np.roll(array, 1, axis=2), row, 1.1 * array, nan]


def test_work_is_that_of_allowed_pairs() -> None:
    from case import Case

    full = Case("single", "float32", "forward", "full", 100, 8, 3)
    causal = Case("single", "float32", "forward+backward", "causal", 100, 8, 3)
    assert full.flops == 4 * 3 * 100 * 100 * 8
    assert causal.flops == 3.5 * 4 * 3 * 5050 * 8


def test_aims_are_those_of_the_project() -> None:
    from case import Case
    from lineup import Place, aim

    def wanted(name: str, layout: str = "", **other: Any) -> float | None:
        given = {
            "part": "single",
            "dtype": "float32",
            "direction": "forward",
            "mask": "full",
            "seq_len": 4096,
            "head_dim": 128,
            "heads": 2,
        }
        return aim(Case(**(given | other)), Place(name, layout), 2)

    assert wanted("torch-sdpa") == 1.1
    assert wanted("torch-sdpa", dtype="bfloat16", direction="forward+backward") == 2.0
    assert wanted("torch-ring", "zigzag", direction="forward+backward") == 1.4
    assert wanted("torch-ring", "contiguous") is None
    assert wanted("peak-fma") == 0.75
    assert wanted("peak-fma", head_dim=64) is None
    assert wanted("one-rank", "zigzag", part="ring") == pytest.approx(2 / 1.05)
