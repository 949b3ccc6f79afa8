"""Jobs that tests start, watch and, at a time limit, end: all of their processes and no other."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from ringmpi.comm.launcher import Launcher, find_launcher

#: Runs a command of ringmpi in this process; returns its exit code and what it printed.
Here = Callable[..., tuple[int, str]]

FAULTS = Path(__file__).parent / "faults"
CONSOLE = Path(sys.executable).parent / "ringmpi"

#: Variables of the surroundings that would change what a job believes of itself.
FOREIGN = ("RINGMPI_", "SLURM_", "PMI_", "PMIX_RANK", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_")

#: Seconds that the ranks of a job may outlive its launcher: by design a rank that nobody ends leaves by
#: itself 5 s after its last step.
LINGER = 10.0

#: Jobs that run beside the test that looks at another: they mostly start up and shut down, which is waiting.
AT_ONCE = 3


@cache
def launcher() -> Launcher:
    return find_launcher()


def under_open_mpi() -> bool:
    return launcher().family == "openmpi"


@dataclass
class Ended:
    """A job that ended by itself."""

    args: list[str]
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    ended_at: float
    work: Path
    marks: Path
    survivors: list[int]

    def complaints(self) -> list[str]:
        """Return what ringmpi says on stderr, on all ranks together."""
        return [line for line in self.stderr.splitlines() if line.startswith("ringmpi:")]

    def files(self) -> list[str]:
        """Return what lies in the folder in which the job ran."""
        return sorted(
            str(path.relative_to(self.work)) for path in self.work.rglob("*") if path.is_file()
        )

    def since(self, mark: str) -> float:
        """Return the seconds from the latest mark of a name to the end."""
        found = [float(path.read_text()) for path in self.marks.glob(f"{mark}-*")]
        assert found, f"nothing was marked {mark}: {sorted(p.name for p in self.marks.iterdir())}"
        return self.ended_at - max(found)

    def told(self) -> str:
        """Return everything a person needs to see what went wrong."""
        return (
            f"\n$ {shlex.join(self.args)}\nexit code {self.returncode} after {self.seconds:.1f} s\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


class Running:
    """A job under way, in a folder of its own."""

    def __init__(self, command: Sequence[str | Path], folder: Path, env: Mapping[str, str]) -> None:
        self.work, self.marks = folder / "work", folder / "marks"
        self.work.mkdir(parents=True, exist_ok=True)
        self.marks.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.args = [str(word) for word in command]
        own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        paths = [str(FAULTS), *filter(None, [own.get("PYTHONPATH", "")])]
        own |= {"PYTHONPATH": os.pathsep.join(paths), "RINGMPI_TEST_MARKS": str(self.marks)}
        self.started = time.monotonic()
        # Files, not pipes: a rank that outlives the launcher would hold a pipe open.
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            self.process = subprocess.Popen(
                self.args,
                cwd=self.work,
                env=own | dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, timeout: float) -> Ended:
        """Wait for the end; a job that is still there after the time limit is a failure."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end_all()
            late = self._ended(-1, [])
            raise AssertionError(f"still running after {timeout:g} s{late.told()}") from None
        ended_at, seconds = time.time(), time.monotonic() - self.started
        ended = self._ended(code, self._survivors())
        ended.ended_at, ended.seconds = ended_at, seconds
        self.end_all()
        assert not ended.survivors, f"ranks {ended.survivors} are still there{ended.told()}"
        return ended

    def rank_pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that have started."""
        found = {path.name.partition("-")[2]: path for path in self.marks.glob("pid-*")}
        return {int(rank): int(path.read_text()) for rank, path in found.items() if rank.isdigit()}

    def await_mark(self, name: str, timeout: float = 40.0) -> None:
        """Wait until a mark is there; `name` may be a pattern."""
        limit = time.monotonic() + timeout
        while not list(self.marks.glob(name)):
            if time.monotonic() > limit or self.process.poll() is not None:
                told = self._ended(self.process.poll() or 0, []).told()
                self.end_all()
                raise AssertionError(f"{name} was never marked{told}")
            time.sleep(0.02)

    def note(self, name: str) -> None:
        """Mark that something happens now."""
        (self.marks / f"{name}-test").write_text(repr(time.time()))

    def end_all(self) -> None:
        """Kill what is left of the job, and nothing else."""
        leader = self.process.pid
        left = []
        if self.process.poll() is None:
            left = [process.pid for process in psutil.Process(leader).children(recursive=True)]
            os.killpg(leader, signal.SIGKILL)
            self.process.wait()
        for pid in {*left, *self._alive()}:
            if psutil.pid_exists(pid) and self._is_ours(pid):
                os.kill(pid, signal.SIGKILL)

    def _survivors(self) -> list[int]:
        limit = time.monotonic() + LINGER
        while self._alive() and time.monotonic() < limit:
            time.sleep(0.05)
        alive = self._alive()
        return [rank for rank, pid in self.rank_pids().items() if pid in alive]

    def _alive(self) -> list[int]:
        return [pid for pid in self.rank_pids().values() if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        """Return whether a process id still belongs to this job: ids are used again."""
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return process.environ().get("RINGMPI_TEST_MARKS") == str(self.marks)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def _ended(self, code: int, survivors: list[int]) -> Ended:
        texts = [(self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr")]
        seconds = time.monotonic() - self.started
        return Ended(self.args, code, *texts, seconds, time.time(), self.work, self.marks, survivors)


def no_files(work: Path) -> None:
    """Leave the folder of a job empty."""
    del work


def nothing(running: Running) -> None:
    """Only watch."""
    del running


@dataclass(frozen=True, eq=False)
class Scenario:
    """A job that a test looks at after its end.

    With `ranks` of 0 no launcher starts it. `files` fills the folder in which it runs; `meanwhile` is
    done while it runs. Several tests may look at one job.
    """

    ranks: int
    args: str
    fault: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    as_module: bool = False
    files: Callable[[Path], None] = no_files
    meanwhile: Callable[[Running], None] = nothing
    timeout: float = 60.0

    def command(self) -> list[str]:
        """Return the whole command line."""
        return command_line(self.ranks, *shlex.split(self.args), as_module=self.as_module)

    def run(self, folder: Path) -> Ended:
        """Run it to its end."""
        (folder / "work").mkdir(parents=True)
        self.files(folder / "work")
        running = Running(self.command(), folder, {"RINGMPI_TEST_FAULT": self.fault, **self.env})
        try:
            self.meanwhile(running)
            return running.wait(self.timeout)
        finally:
            running.end_all()


def command_line(ranks: int, *args: str, as_module: bool = False) -> list[str]:
    """Return the command that starts ringmpi on some ranks; on one without a launcher for 0."""
    program = [sys.executable, "-m", "ringmpi", *args] if as_module else [str(CONSOLE), *args]
    return launcher().command(ranks, program) if ranks else program


class Queue:
    """Runs the scenarios of a session ahead of their tests, a few at a time, in order."""

    def __init__(self, scenarios: Sequence[Scenario], folder: Path) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._numbers = itertools.count()
        self._folder = folder
        self._jobs: dict[int, Future[Ended]] = {}
        # Long ones first, so that none of them is left to run alone at the end.
        for scenario in sorted(scenarios, key=lambda scenario: -scenario.timeout):
            if id(scenario) not in self._jobs:
                self._jobs[id(scenario)] = self._pool.submit(scenario.run, self._new_folder())

    def result(self, scenario: Scenario) -> Ended:
        """Return how a scenario ended, waiting for it; one that no test announced is run now."""
        if id(scenario) not in self._jobs:
            self._jobs[id(scenario)] = Future()
            self._jobs[id(scenario)].set_result(scenario.run(self._new_folder()))
        return self._jobs[id(scenario)].result()

    def close(self) -> None:
        """Drop what has not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _new_folder(self) -> Path:
        return self._folder / str(next(self._numbers))
