"""Jobs that tests submit to a Slurm of their own, as people do, and what becomes of them."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cluster import ENDED, Cluster, Job

from ringmpi.recheck import verify_file
from ringmpi.store import ResultFile

ROOT = Path(__file__).parents[2]
CONSOLE = Path(sys.executable).parent / "ringmpi"
FAULTS = ROOT / "tests/cli/faults"

#: A problem that is soon done, in words of the scripts; of all of them, so that their jobs differ in little.
SMALL = {
    "HEADS": "2",
    "HEAD_DIM": "8",
    "KV_HEADS": "2",
    "SEQ_LEN": "96",
    "REPEATS": "1",
    "VERIFY": "full",
}

#: Columns of a sweep's table that differ from run to run.
TIMES = ("time ms", "min to max", "stall ms", "efficiency", "backward ms", "backward stall")

#: Seconds for a job to begin and end; others are before it in the queue.
PATIENCE = 150.0


@dataclass
class Submitted:
    """A job, its results, and what it says.

    Attributes
    ----------
    name : str
        As Slurm calls it: of a task of an array, ``7_0``.
    """

    cluster: Cluster
    checkout: Path
    script: str
    name: str

    @property
    def results(self) -> Path:
        """The folder that the script makes for it."""
        return self.checkout / "results" / f"{self.script}-{self.name.split('_')[0]}"

    @property
    def log(self) -> Path:
        """What Slurm keeps of its output."""
        return self.checkout / f"{self.script}-{self.name}.out"

    def said(self) -> str:
        """Return its output, and the logs of its runs."""
        logs = [self.log, *sorted(self.results.glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in logs if path.exists())

    def ended(self, *states: str, timeout: float = PATIENCE) -> Job:
        """Wait for its end, which must be in one of some states."""
        job = self.cluster.await_state(self.name, ENDED, timeout)
        assert job.state in states, f"{job}\n{self.said()}"
        return job

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something has happened in it."""

        def met() -> bool:
            state = self.cluster.job(self.name).state
            assert state not in ENDED, f"{state} before {what}\n{self.said()}"
            return bool(condition())

        self.cluster.await_(met, what, PATIENCE)

    def table(self, results: Path | None = None) -> list[dict[str, str]]:
        """Return the table of its sweep."""
        with ((results or self.results) / "sweep.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def files(self) -> list[Path]:
        """Return its result files."""
        return sorted(self.results.glob("*.h5"))

    def of_ranks(self, count: int) -> ResultFile:
        """Return the one result of so many ranks."""
        (found,) = self.results.glob(f"*-p{count}.h5")
        return ResultFile(found)


class Jobs:
    """Submits jobs.

    Parameters
    ----------
    cluster : Cluster
    checkout : Path
        An empty folder, which becomes a checkout with the scripts of this one.
    """

    def __init__(self, cluster: Cluster, checkout: Path) -> None:
        self.cluster, self.checkout = cluster, checkout
        (checkout / "jobs").symlink_to(ROOT / "jobs")

    def submit(
        self, script: str, *options: str, site: str = "local", env: Mapping[str, str] | None = None
    ) -> list[Submitted]:
        """Submit one of jobs/*.sbatch as a person does; return its tasks."""
        told = self.cluster.run(
            *("bash", self.checkout / "jobs/submit.sh", site, script, "--parsable", *options),
            env={**SMALL, "VENV": sys.prefix, **(env or {})},
            cwd=self.checkout,
        )
        job = told.stdout.split()[-1]
        last = next(
            (int(word.rpartition("-")[2]) for word in options if word.startswith("--array=")), 0
        )
        return [
            Submitted(self.cluster, self.checkout, script, f"{job}_{task}") for task in range(last + 1)
        ]

    def slowed(self, folder: Path, seconds: float) -> dict[str, str]:
        """Return what makes runs on 2 ranks sleep in each attend, the first time that the job runs.

        They mark that they do so by a file ``sleep-0`` in `folder`.
        """
        folder.mkdir()
        launcher = folder / "srun"
        launcher.write_text(
            '#!/bin/sh\n[ -z "$SLURM_RESTART_COUNT" ] || unset RINGMPI_TEST_FAULT\nexec srun "$@"\n'
        )
        launcher.chmod(0o755)
        return {
            "LAUNCHER": f"{shlex.quote(str(launcher))} --mpi=pmi2",
            "RINGMPI_TEST_FAULT": f"sleep:size=2:place=attend:call=each:seconds={seconds:g}",
            "RINGMPI_TEST_MARKS": str(folder),
            "PYTHONPATH": str(FAULTS),
        }


class Interrupted:
    """A sweep whose first point is soon done, and whose second one takes its time, the first time it is run.

    Parameters
    ----------
    jobs : Jobs
    folder : Path
        A new one.
    options : str
        Of sbatch.
    seconds : float
        That each attend of the second point takes.
    env : str
    """

    SCRIPT = "exactness"
    SWEPT: ClassVar = {"RANKS": "1,2,3", "DTYPES": "float32", "LAYOUTS": "zigzag"}

    def __init__(self, jobs: Jobs, folder: Path, *options: str, seconds: float = 3, **env: str) -> None:
        self.jobs = jobs
        self._mark = folder / "sleep-0"
        slowed = jobs.slowed(folder, seconds)
        (self.job,) = jobs.submit(self.SCRIPT, *options, env=self.SWEPT | slowed | env)
        self._finished: dict[Path, bytes] = {}

    def await_second_point(self) -> None:
        """Wait until it is under way, and note what is finished."""
        self.job.until(self._mark.exists, "the second point is under way")
        self._finished = {path: path.read_bytes() for path in self.job.files()}
        assert [path.stem.rpartition("-p")[2] for path in self._finished] == ["1"]

    def finished_is_there(self) -> None:
        """What was finished is there to the last bit, and right."""
        assert self._finished
        for path, content in self._finished.items():
            assert path.read_bytes() == content
            assert verified(path)

    def go_on(self) -> Submitted:
        """Submit another job that goes on with what this one has left."""
        (later,) = self.jobs.submit(self.SCRIPT, env=self.SWEPT | {"OUT": str(self.job.results)})
        return later


def scheduler(result: ResultFile) -> dict[str, str]:
    """Return the scheduler's variables as a result has them."""
    told: dict[str, str] = json.loads(result.facts("machine")["scheduler"])
    return told


def verified(result: Path) -> bool:
    """Return whether a result file holds against the reference, computed anew."""
    verdicts = verify_file(str(result), "full", lambda done, total: None)
    return bool(verdicts) and all(verdict.passed for verdict in verdicts)


def without_times(table: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return a sweep's table without what no two sweeps have in common."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in table]
