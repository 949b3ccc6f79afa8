"""The soak finds what is planted for it, and a short one of real runs finds nothing."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SEGMENT = f"/dev/shm/mpich_shm_planted_{os.getpid()}"

needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "jobs/soak"))
    monkeypatch.syspath_prepend(str(ROOT / "jobs/origin"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result as a run leaves it."""
    path = tmp_path_factory.mktemp("good") / "good.h5"
    small = "run --seq-len 9 --heads 4 --head-dim 2 --device numpy --repeats 1 --output"
    command = [sys.executable, "-m", "ringmpi", *small.split(), str(path)]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    return path


@dataclass
class Planted:
    """A launcher whose jobs do what a test has planted; ``$OUT`` is where their result goes."""

    script: str
    good: Path
    family: str = "hydra"

    def command(self, ranks: int, program: list[str]) -> list[str]:
        del ranks
        begin = f"OUT={shlex.quote(program[-1])}; GOOD={shlex.quote(str(self.good))}; "
        return ["bash", "-c", f"{begin}DIR=$(dirname $OUT)\n{self.script}"]


FINE = "echo '# ringmpi: fine'; cp $GOOD $DIR/.new && echo >>$DIR/.new && mv $DIR/.new $OUT"

#: A job that waits for a signal.
WAIT = "while :; do sleep 0.02; done"

#: What a job does, and how the soak must call it.
PLANTS = {
    "nothing wrong": (FINE, "none", []),
    "a process": (f"{FINE}; setsid sleep 60 &", "none", ["process"]),
    "half a file": ("head -c 3000 $GOOD >$OUT", "none", ["lost or half file"]),
    "an empty file": (": >$OUT", "none", ["lost or half file"]),
    "no file": ("true", "none", ["lost or half file"]),
    "the older file lost": ("rm $OUT; exit 9", "none", ["exit code", "lost or half file"]),
    "a temporary file": (f"{FINE}; touch $DIR/.result.h5.0-1-a.tmp", "none", ["temporary file"]),
    "a file in TMPDIR": (f"{FINE}; touch $TMPDIR/x", "none", ["temporary file"]),
    "a file where it ran": (f"{FINE}; touch core", "none", ["temporary file"]),
    "shared memory": (f"{FINE}; touch {SEGMENT}", "none", ["shared memory"]),
    "an exit code": (f"{FINE}; exit 3", "none", ["exit code"]),
    "a traceback": (f"{FINE}; echo Traceback >&2", "none", ["traceback"]),
    "a hang": (f"{FINE}; sleep 60", "none", ["hang", "process"]),
    "a signal's code": (
        f"echo '# ringmpi: on'; trap 'exit 7' TERM; {WAIT}",
        "term",
        ["exit code"],
    ),
    "slow to end": (
        f"echo '# ringmpi: on'; trap 'sleep 1; exit 143' TERM; {WAIT}",
        "term",
        ["late"],
    ),
    "a temporary file after a signal": (
        f"echo '# ringmpi: on'; trap 'touch $DIR/.result.h5.0-1-a.tmp; exit 143' TERM; {WAIT}",
        "term",
        ["temporary file"],
    ),
    "a signal heeded": (
        f"echo '# ringmpi: on'; trap 'exit 143' TERM; {WAIT}",
        "term",
        [],
    ),
}


@pytest.mark.parametrize(("script", "fault", "expected"), PLANTS.values(), ids=PLANTS.keys())
def test_what_is_planted_is_found(
    script: str,
    fault: str,
    expected: list[str],
    good: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import trial
    from drawing import Plan

    monkeypatch.setattr(trial, "LIMIT", 3.0)
    monkeypatch.setattr(trial, "PROMPT", 0.5)
    monkeypatch.setattr(trial, "LINGER", 0.3)
    launcher: Any = Planted(script, good)
    place = trial.Trial(tmp_path / "soak", launcher, late=fault == "term")
    place.output.write_bytes(good.read_bytes())
    try:
        outcome = place.run(Plan(1, fault, "", 0.0, 0, 0, older=True))
    finally:
        Path(SEGMENT).unlink(missing_ok=True)

    assert sorted({kind for kind, _ in outcome.found}) == expected, outcome


def test_what_a_killed_job_leaves_must_go_with_the_next_one(good: Path, tmp_path: Path) -> None:
    import trial
    from drawing import Plan

    leave = "PMI_RANK=0 sleep 60 & touch $DIR/.result.h5.0-1-a.tmp; wait $!; exit 9"
    launcher: Any = Planted(leave, good)
    place = trial.Trial(tmp_path / "soak", launcher)
    killed = place.run(Plan(2, "kill", "", 0.2, 0, 0, older=True))
    assert (killed.struck, killed.found, len(killed.left)) == (True, [], 1)

    launcher.script = FINE
    kept = place.run(Plan(3, "none", "", 0.0, 0, 0, older=True))
    assert [kind for kind, _ in kept.found] == ["temporary file"]


def test_every_plan_is_one_that_a_run_takes() -> None:
    from drawing import FAULTS, RANKS, plan
    from ringmpi import cli
    from ringmpi.config import experiment_from
    from ringmpi.sweep import _unfit

    plans = [plan(seed, number) for seed in range(3) for number in range(1, 101)]
    for planned in plans:
        arguments = cli._parser().parse_args(["run", *shlex.split(planned.options)])
        assert _unfit(experiment_from(cli._given(arguments)), RANKS) is None
    assert {planned.fault for planned in plans} == set(FAULTS)
    assert plans == [plan(seed, number) for seed in range(3) for number in range(1, 101)]


@needs_mounts
@pytest.mark.timeout(240)
def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    environment = os.environ | {
        "RUNS": "6",
        "LATE": "1",
        "OUT": str(tmp_path),
        "SEED": "0",
        "FIRST": "1",
    }
    done = subprocess.run(
        ["bash", ROOT / "jobs/soak.sh"], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("soak*.md")  # By the MPI library.
    page = path.read_text()
    assert "Nothing was found that should not be." in page
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    assert rows["all"].split("|")[2].strip() == "6"
    assert rows["disk that gets full"].split("|")[2].strip() == "1"
