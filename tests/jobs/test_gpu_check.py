"""The GPU check, as far as it goes without a GPU: what it refuses, whom it measures, and how it judges."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense import attend_dense, attend_dense_backward, pairs_between
from emulated.driver import EmulatedPlatform

from ringmpi.devices import cuda

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("jobs/gpu_check", "jobs/bench_cpu"):
        monkeypatch.syspath_prepend(str(ROOT / room))


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="has a GPU, which is checked itself")
def test_a_machine_without_a_gpu_is_told_so_in_one_line_before_anything_is_installed() -> None:
    done = subprocess.run(
        ["bash", ROOT / "jobs/gpu_check.sh"],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | {"OUT": "/nowhere"},
    )

    assert done.returncode == 3
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no GPU to check" in done.stderr


def row(contender: str, median: float | None, **other: Any) -> dict[str, Any]:
    case = {
        "dtype": "bfloat16",
        "direction": "forward",
        "mask": "full",
        "seq_len": 8192,
        "head_dim": 128,
        "heads": 16,
        "contender": contender,
    }
    return case | ({} if median is None else {"median_s": median}) | other


@pytest.mark.parametrize(("ours", "met"), [(1.6, True), (1.7, False)])
def test_we_are_held_against_the_better_backend(ours: float, met: bool) -> None:
    from aims import verdicts, with_ratios

    rows = with_ratios(
        [
            row("ringmpi-rounded", ours),
            row("ringmpi", 9.0),
            row("torch-flash", 1.0),
            row("torch-cudnn", 2.0),
            row("torch-cudnn", None, mask="causal", absent="not on this GPU"),
            row("ringmpi-rounded", 9.0, seq_len=4096),  # Too short to be aimed at.
            row("torch-flash", 1.0, seq_len=4096),
            row("ringmpi", 9.0, dtype="float32"),
            row("torch-math", 1.0, dtype="float32"),
        ]
    )

    assert rows[0]["against_torch"] == pytest.approx(1.0 / ours)
    speed = verdicts(rows, [])["speed"]
    assert speed["met"] is met
    assert speed["found"] == pytest.approx(1.0 / ours)


def test_without_torch_there_is_no_verdict() -> None:
    from aims import verdicts, with_ratios

    rows = with_ratios([row("ringmpi-rounded", 1.0), row("torch-flash", None, absent="not installed")])

    assert verdicts(rows, [])["speed"] == {
        "what": "least part of the better torch backend",
        "aim": 0.6,
        "found": None,
        "met": None,
    }


def test_an_aim_is_not_met_where_one_of_our_cases_has_no_time() -> None:
    from aims import failures, verdicts, with_ratios

    rows = with_ratios(
        [
            row("ringmpi-rounded", 1.0),
            row("torch-flash", 1.0),
            row("ringmpi-rounded", None, seq_len=16384, absent="is wrong"),
            row("torch-flash", 1.0, seq_len=16384),
        ]
    )

    assert verdicts(rows, [])["speed"]["met"] is False
    assert failures(rows) == ["bfloat16, forward, full, 16384, 128, 16: is wrong"]
    assert failures(rows[:2]) == []


def test_overlap_is_asked_only_of_two_ranks_with_a_gpu_each_and_compute_that_is_long_enough() -> None:
    from aims import verdicts

    def ring(ranks: int, compute: float, overlap: float | None, sharing: int = 1) -> dict[str, Any]:
        measured = {"compute_s": compute, "transfer_s": 1.0, "overlap": overlap}
        return measured | {"ranks": ranks, "gpu_sharing": sharing}

    rings = [ring(2, 2.0, 0.96), ring(2, 0.5, 0.1), ring(3, 2.0, 0.2), ring(2, 2.0, None)]
    rings.append(ring(2, 2.0, 0.3, sharing=2))
    assert verdicts([], rings)["overlap"]["met"] is True
    assert verdicts([], [*rings, ring(2, 2.0, 0.94)])["overlap"]["met"] is False


class Fake:
    """A contender that takes what it is told to, and has one of its results wrong, or none."""

    def __init__(self, name: str, wrong: str = "", fails: Exception | None = None) -> None:
        self.name, self._wrong, self._fails = name, wrong, fails
        self.times, self.forgot = 0, False

    def prepare(self, case: Any) -> None:
        if self._fails is not None:
            raise self._fails
        self._case = case

    def seconds(self) -> float:
        self.times += 1
        return float(self.times)

    def results(self) -> dict[str, Any]:
        found = dense(self._case)
        if self._wrong:
            found[self._wrong] = found[self._wrong] * np.float32(1.01)
        return found

    def forget(self) -> None:
        self.forgot = True


def dense(case: Any) -> dict[str, Any]:
    tensors = tuple(array.astype(np.float64) for array in case.inputs().values())
    allowed = pairs_between(np.arange(case.seq_len), np.arange(case.seq_len), causal=case.causal)
    scale = case.head_dim**-0.5
    out, lse = attend_dense(*tensors[:3], allowed, scale, np.float64)
    gradients = attend_dense_backward(tensors, allowed, scale, np.float64, (out, lse))
    found = dict(zip(case.tensors, (out, *gradients), strict=True))
    return {name: array.astype(np.float32) for name, array in found.items()}


@pytest.fixture
def case() -> Any:
    from case import BOTH, Case

    return Case("single", "float32", BOTH, "causal", 65, 8, 2)


@pytest.fixture
def judge() -> Any:
    from judge import Judge

    return Judge(threads=1, heads=1)


@pytest.mark.parametrize("wrong", ["out", "dq", "dk", "dv"])
def test_what_is_wrong_has_no_time_and_says_so(case: Any, judge: Any, wrong: str) -> None:
    from measure import measure

    good, bad = Fake("ringmpi"), Fake("other", wrong)
    rows = measure(case, [lambda: good, lambda: bad], judge, 3)

    # The first two times of each are not counted.
    assert rows[0]["samples_s"] == [3.0, 4.0, 5.0]
    assert rows[0]["median_s"] == 4.0
    assert rows[0]["tflops"] == pytest.approx(case.flops / 4 * 1e-12)
    assert "is wrong" in rows[1]["absent"]
    assert "median_s" not in rows[1]
    assert bad.times == 2
    assert good.forgot
    assert bad.forgot


def test_who_has_no_kernel_or_no_memory_is_absent_and_the_others_go_on(case: Any, judge: Any) -> None:
    from measure import measure
    from on_gpu import Unsupported

    makers: list[Any] = [
        lambda: Fake("a", fails=Unsupported("no kernel for this")),
        lambda: Fake("b", fails=RuntimeError("out of memory\nmore")),
        lambda: Fake("ringmpi"),
    ]
    rows = measure(case, makers, judge, 1)

    assert [row.get("absent") for row in rows] == ["no kernel for this", "out of memory", None]


def test_contenders_take_turns_in_coming_first(case: Any, judge: Any) -> None:
    from measure import measure

    order: list[str] = []

    class Told(Fake):
        def seconds(self) -> float:
            order.append(self.name)
            return super().seconds()

    measure(case, [lambda: Told("a"), lambda: Told("b")], judge, 2)

    assert order[4:] == ["a", "b", "b", "a"]


def test_a_machine_without_torch_has_our_times_alone(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from on_gpu import FLASH, Torch, Unsupported

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unsupported, match="torch is not installed"):
        Torch(FLASH).prepare(case)


@pytest.mark.parametrize(
    ("dtype", "weights"), [("float32", "exact"), ("bfloat16", "exact"), ("bfloat16", "rounded")]
)
def test_our_contender_is_right_on_an_emulated_gpu(
    monkeypatch: pytest.MonkeyPatch, case: Any, judge: Any, dtype: str, weights: str
) -> None:
    from measure import measure
    from on_gpu import Ringmpi

    monkeypatch.setattr(cuda._Here, "platform", EmulatedPlatform())
    (found,) = measure(replace(case, dtype=dtype), [lambda: Ringmpi(weights)], judge, 2)

    assert "absent" not in found, found
    assert found["contender"] == ("ringmpi-rounded" if weights == "rounded" else "ringmpi")
    assert len(found["samples_s"]) == 2


def test_what_was_found_is_on_disk_after_every_step(tmp_path: Path) -> None:
    from check import write

    found: dict[str, Any] = {"tests": {"exit_code": 0, "said": "7 passed"}, "rings": [], "rows": []}
    write(tmp_path / "gpu/x.json", found)
    assert json.loads((tmp_path / "gpu/x.json").read_text())["failed"] == []

    found["rings"].append({"command": "run", "failed": "not done in 600 s"})
    found["rows"].append(row("ringmpi", None, absent="is wrong"))
    found["tests"] = {"exit_code": 1, "said": "1 failed"}
    write(tmp_path / "gpu/x.json", found)
    assert len(json.loads((tmp_path / "gpu/x.json").read_text())["failed"]) == 3
