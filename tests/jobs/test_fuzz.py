"""The fuzz calls things by their name, its cases can be had again, and a short one finds nothing."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "jobs/fuzz"))
    monkeypatch.syspath_prepend(str(ROOT / "jobs/origin"))


@pytest.mark.parametrize(
    ("code", "told", "growth", "expected"),
    [
        (0, "", 0, ""),
        (1, "", 0, ""),
        (2, "ringmpi: seq_len=0: must be 1 or more\n", 0, ""),
        (3, "ringmpi: no compiler\n", 0, ""),
        (
            2,
            "ringmpi: rank 0 of 1: q cannot be read\nAbort(2) on node 0 (rank 0 in comm 0): app\n",
            0,
            "",
        ),
        (2, "", 0, "not one line"),
        (2, "ringmpi: one\nringmpi: two\n", 0, "not one line"),
        (2, "error: not ours\n", 0, "not one line"),
        (4, "ringmpi: broken\n", 0, "exit code"),
        (-11, "", 0, "exit code"),
        (1, "ringmpi: something\n", 0, "exit code"),
        (4, "Traceback (most recent call last):\nKeyError: 1\n", 0, "traceback"),
        (0, "", 2 << 30, "memory"),
        (-1000, "", 0, "hang"),
    ],
)
def test_what_must_not_be_is_called_by_its_name(
    code: int, told: str, growth: int, expected: str
) -> None:
    from attempt import Attempt

    assert Attempt(code, told, 1.0, growth).finding == expected


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import attempt

    monkeypatch.setattr(attempt, "LIMIT", 5.0)
    monkeypatch.setattr(attempt, "GROWTH", 1 << 26)
    made = attempt.Worker()
    yield made
    made.end()


def test_a_worker_goes_on_after_a_case_that_hangs_and_one_that_kills_it(
    worker: Any, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    # Nobody writes to it, and the script that is run instead of ringmpi waits for it or kills its process.
    hang, die = ["!", "open('fifo').read()"], ["!", "import os; os.kill(os.getpid(), 11)"]

    assert worker.attempt(["--version"], tmp_path).code == 0
    assert worker.attempt(hang, tmp_path).finding == "hang"
    refused = worker.attempt(["plan", "--machine", "nowhere"], tmp_path)
    assert (refused.code, refused.finding) == (2, "")
    died = worker.attempt(die, tmp_path)
    assert (died.code, died.finding) == (-11, "exit code")
    broken = worker.attempt(["!", "raise KeyError(1)"], tmp_path)
    assert (broken.code, broken.finding) == (4, "traceback")
    eaten = worker.attempt(["!", "global x; x = bytearray(b'1') * (1 << 27)"], tmp_path)
    assert eaten.finding == "memory"


def test_cases_can_be_had_again_and_differ(tmp_path: Path) -> None:
    from cases import KINDS

    for name in ("command lines", "configurations", "machine files"):
        draw = KINDS[name]
        lines = [
            [draw(random.Random(f"{turn}/{n}"), tmp_path) for n in range(40)] for turn in (1, 1, 2)
        ]
        assert lines[0] == lines[1] != lines[2]


def test_every_command_and_every_option_comes_up(tmp_path: Path) -> None:
    from cases import command_line, commands

    seen = {word for n in range(4000) for word in command_line(random.Random(n), tmp_path)}
    assert set(commands()) <= seen
    assert {option.flag for known in commands().values() for option in known} <= seen


@pytest.mark.timeout(180)
def test_a_short_fuzz_finds_nothing(tmp_path: Path) -> None:
    environment = os.environ | {
        "CASES": "15",
        "SECONDS_AT_MOST": "25",
        "OUT": str(tmp_path),
        "SEED": "1",
    }
    done = subprocess.run(
        ["bash", ROOT / "jobs/fuzz.sh"], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "fuzz.md").read_text()
    assert "Nothing was found that should not be." in page
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    assert [row[1].strip() for row in rows] == [
        "command lines",
        "configurations",
        "machine files",
        "inputs",
        "results",
    ]
    assert all(int(row[2]) >= 1 for row in rows)
