"""The GPU check, as far as it goes without a GPU: what it refuses, whom it measures, and how it judges."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
            row("ringmpi", ours),
            row("torch-flash", 1.0),
            row("torch-cudnn", 2.0),
            row("torch-cudnn", None, mask="causal", absent="not on this GPU"),
            row("ringmpi", 9.0, seq_len=4096),  # Too short to be aimed at.
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

    rows = with_ratios([row("ringmpi", 1.0), row("torch-flash", None, absent="not installed")])

    assert verdicts(rows, [])["speed"] == {
        "what": "least part of the better torch backend",
        "aim": 0.6,
        "found": None,
        "met": None,
    }


def test_overlap_is_asked_only_of_two_ranks_whose_compute_is_long_enough() -> None:
    from aims import verdicts

    def ring(ranks: int, compute: float, overlap: float | None) -> dict[str, Any]:
        return {"ranks": ranks, "compute_s": compute, "transfer_s": 1.0, "overlap": overlap}

    rings = [ring(2, 2.0, 0.96), ring(2, 0.5, 0.1), ring(3, 2.0, 0.2), ring(2, 2.0, None)]
    assert verdicts([], rings)["overlap"]["met"] is True
    assert verdicts([], [*rings, ring(2, 2.0, 0.94)])["overlap"]["met"] is False


class Fake:
    """A contender that takes what it is told to, and is right or wrong by its error."""

    def __init__(self, name: str, error: float = 0.0, refuses: bool = False) -> None:
        self.name, self._error, self._refuses = name, error, refuses
        self.times = 0

    def prepare(self, case: Any) -> None:
        from on_gpu import Unsupported

        if self._refuses:
            raise Unsupported("no kernel for this")
        self._case = case

    def seconds(self) -> float:
        self.times += 1
        return float(self.times)

    def results(self) -> dict[str, Any]:
        from judged import exact

        return {name: array * (1 + self._error) for name, array in exact(self._case).items()}


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small case, and beside it dense attention and its slope, in float64."""
    import sys
    from types import ModuleType

    from dense import attend_dense, attend_dense_backward, pairs_between

    from case import BOTH, Case

    def exact(case: Any) -> dict[str, Any]:
        tensors = tuple(array.astype(np.float64) for array in case.inputs().values())
        allowed = pairs_between(np.arange(case.seq_len), np.arange(case.seq_len), causal=case.causal)
        scale = case.head_dim**-0.5
        out, lse = attend_dense(*tensors[:3], allowed, scale, np.float64)
        dq, _, _ = attend_dense_backward(tensors, allowed, scale, np.float64, (out, lse))
        return {"out": out.astype(np.float32), "dq": dq.astype(np.float32)}

    judged = ModuleType("judged")
    judged.exact = exact  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "judged", judged)
    return Case("single", "float32", BOTH, "causal", 65, 8, 2)


def test_what_is_wrong_or_absent_has_no_time_and_says_why(case: Any) -> None:
    from measure import measure

    makers: list[Any] = [
        lambda: Fake("ringmpi"),
        lambda: Fake("wrong", error=1e-2),
        lambda: Fake("absent", refuses=True),
    ]
    rows = {found["contender"]: found for found in measure(case, makers, 3)}

    # The first time of each is not counted.
    assert (rows["ringmpi"]["min_s"], rows["ringmpi"]["median_s"], rows["ringmpi"]["max_s"]) == (
        2,
        3,
        4,
    )
    assert rows["ringmpi"]["tflops"] == pytest.approx(case.flops / 3 * 1e-12)
    assert "is wrong" in rows["wrong"]["absent"]
    assert "median_s" not in rows["wrong"]
    assert rows["absent"]["absent"] == "no kernel for this"


def test_a_result_that_is_nan_is_wrong(case: Any) -> None:
    from measure import wrong_rows

    fake = Fake("x", error=float("nan"))
    fake.prepare(case)

    assert "is wrong" in str(wrong_rows(case, fake.results()))


def test_our_contender_measures_on_an_emulated_gpu(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    from emulated.driver import EmulatedPlatform

    from measure import measure
    from on_gpu import Ringmpi
    from ringmpi.devices import cuda

    monkeypatch.setattr(cuda._Here, "platform", EmulatedPlatform())
    (found,) = measure(case, [Ringmpi], 2)

    assert "absent" not in found, found
    assert found["alternations"] == 2
