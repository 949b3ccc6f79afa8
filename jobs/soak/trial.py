"""One run of the soak: started, disturbed, waited for, and looked at."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import remains
from drawing import RANKS, Plan
from ringmpi.cli import main as ringmpi
from ringmpi.comm.launcher import Launcher

#: Seconds after which a run hangs: those of a short run on a busy machine many times over, and more than the
#: 10 s within which a failure ends a job.
LIMIT = 120.0

#: Seconds from a fault to the end: 10 s as promised, or one step; the launcher's own; and a busy machine.
PROMPT = 30.0

#: Seconds that processes may outlive their launcher: a rank that nobody ends leaves by itself after 5 s.
LINGER = 10.0

#: The first word that a run says, when MPI is started and nothing of it has a name any more.
FIRST_WORD = "# ringmpi:"

#: Exit codes: a rank failed; ended by SIGTERM in order; killed by SIGTERM before ringmpi heeds it, as Hydra
#: says it and as Open MPI's mpiexec, which gives ranks no time, does.
BROKEN, TERMINATED = 4, 128 + signal.SIGTERM
NOT_HEEDED = (signal.SIGTERM, TERMINATED)
OPEN_MPI_TERMINATED = (1, TERMINATED)

#: What can be found; the columns of the table.
FINDINGS = (
    "hang",
    "late",
    "exit code",
    "lost or half file",
    "process",
    "shared memory",
    "temporary file",
    "traceback",
)


@dataclass
class Outcome:
    """What came of a run.

    Attributes
    ----------
    struck : bool
        Whether the fault came before the end.
    codes : list of int
        Of each job.
    file : str
        ``new``, ``older`` or ``none``: what is at the place of the output.
    seconds : float
    found : list of (str, str)
        What should not be: one of `FINDINGS`, and in words.
    left : list of str
        What a killed job could not remove and a later one must.
    """

    struck: bool = False
    codes: list[int] = field(default_factory=list)
    file: str = "none"
    seconds: float = 0.0
    found: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class Trial:
    """A place where runs follow one another.

    Parameters
    ----------
    folder : Path
        Where everything happens; one trial at a time.
    launcher : Launcher
    late : bool
        Strike no earlier than when a run has said its first word.
    """

    def __init__(self, folder: Path, launcher: Launcher, *, late: bool = False) -> None:
        self._folder, self._launcher, self._late = folder, launcher, late
        self._usual = 2.0  # Seconds of an undisturbed run; measured as they are made.
        self.output = folder / "out/result.h5"
        self._disk = folder / "disk"
        self._own_temporary = folder / "tmp"
        for made in (self.output.parent, self._disk, self._own_temporary, folder / "cwd"):
            made.mkdir(parents=True)

    def run(self, plan: Plan) -> Outcome:
        """Make one run, and tell what came of it."""
        if not plan.older:
            self.output.unlink(missing_ok=True)
        with self._place(plan) as output:
            return self._run(plan, output)

    @contextlib.contextmanager
    def _place(self, plan: Plan) -> Iterator[Path]:
        """Give a place for the output; for a disk that gets full on a small one."""
        if plan.fault != "full":
            yield self.output
            return
        _privileged("mount", "-t", "tmpfs", "-o", f"size={plan.space}k", "soak", str(self._disk))
        try:
            yield self._disk / self.output.name
        finally:
            _privileged("umount", str(self._disk))

    def _run(self, plan: Plan, output: Path) -> Outcome:
        outcome = Outcome()
        names, before = remains.segments(), remains.files(output.parent)
        older = digest(output)
        started = time.monotonic()
        jobs = [
            Job(self._folder, self._launcher, plan, output, number)
            for number in range(2 if plan.fault == "writers" else 1)
        ]
        try:
            outcome.struck = self._strike(plan, jobs[0], started)
            struck_at = time.monotonic()
            for job in jobs:
                code = job.wait(LIMIT)
                late = time.monotonic() - struck_at
                if outcome.struck and plan.fault in ("kill", "term") and late > PROMPT:
                    outcome.found.append(("late", f"ended {late:.0f} s after the fault"))
                if code is None:
                    outcome.found.append(("hang", f"still there after {LIMIT:g} s"))
                else:
                    outcome.codes.append(code)
            outcome.seconds = time.monotonic() - started
            for job in jobs:
                for pid, rank in remains.linger(job.mark, LINGER).items():
                    whose = f" of rank {rank}" if rank else ""
                    outcome.found.append(("process", f"{pid}{whose} is still there"))
        finally:
            for job in jobs:
                job.end()
        if plan.fault == "none" and not outcome.found:
            self._usual = 0.7 * self._usual + 0.3 * outcome.seconds
        began = any(job.said(FIRST_WORD) for job in jobs)
        killed = outcome.struck and self._kills(plan.fault, began)
        self._judge_files(plan, outcome, output, older, before, killed=killed)
        self._judge_codes(plan, outcome, jobs, began)
        excused = outcome.struck and not began
        for name in remains.dead_segments(names):
            if excused:
                outcome.left.append(f"{remains.SHARED_MEMORY}/{name}")
            else:
                outcome.found.append(("shared memory", name))
        return outcome

    def _strike(self, plan: Plan, job: Job, started: float) -> bool:
        """Let the fault happen, if it is one that has a moment; return whether it came before the end."""
        if plan.fault not in ("kill", "term"):
            return plan.fault != "none"
        begin = started
        while self._late and not job.said(FIRST_WORD) and job.alive():
            begin = time.monotonic()
            time.sleep(0.01)
        share = 0.3 if self._late else 1.0  # Of the usual time most has passed before the first word.
        while job.alive() and time.monotonic() < begin + plan.moment * share * self._usual:
            time.sleep(0.005)
        while job.alive():
            pid = (
                job.process.pid if plan.fault == "term" else remains.rank_process(job.mark, plan.victim)
            )
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if plan.fault == "term" else signal.SIGKILL)
                    return True
            time.sleep(0.005)
        return False

    def _kills(self, fault: str, began: bool) -> bool:
        """Return whether a fault leaves the ranks no time to tidy up."""
        # Open MPI's mpiexec kills them a quarter of a second after SIGTERM.
        unheeded = not began or self._launcher.family == "openmpi"
        return fault == "kill" or (fault == "term" and unheeded)

    def _judge_files(
        self,
        plan: Plan,
        outcome: Outcome,
        output: Path,
        older: str | None,
        before: set[Path],
        *,
        killed: bool,
    ) -> None:
        """Look for files that are lost, half, or left behind."""
        now = digest(output)
        outcome.file = "none" if now is None else "older" if now == older else "new"
        if now is None and older is not None:
            outcome.found.append(("lost or half file", "the older result is gone"))
        if outcome.file == "new":
            told = complaint(output, "--device paced" in plan.options)
            if told:
                outcome.found.append(("lost or half file", told))
        if 0 in outcome.codes and outcome.file != "new":
            outcome.found.append(("lost or half file", f"exit code 0, and the file is {outcome.file}"))
        here = remains.files(output.parent) - {output}
        for path in sorted(here):
            if path in before and 0 not in outcome.codes:
                continue  # Whoever ends before it writes has no reason to look.
            if killed and path not in before and path.suffix == ".tmp" and 0 not in outcome.codes:
                outcome.left.append(str(path))
            else:
                outcome.found.append(("temporary file", path.name))
        for folder in (self._own_temporary, self._folder / "cwd"):
            for path in sorted(remains.files(folder)):
                outcome.found.append(("temporary file", str(path.relative_to(self._folder))))
                path.unlink()

    def _judge_codes(self, plan: Plan, outcome: Outcome, jobs: Sequence[Job], began: bool) -> None:
        """Hold exit codes and words against what the README promises."""
        codes = set(outcome.codes)
        if plan.fault == "kill" and outcome.struck:
            # Which code a launcher has for a killed rank is its own matter; 0 means that all was done before.
            right = True
        elif plan.fault == "term" and outcome.struck:
            allowed = {0, TERMINATED, *(() if began else NOT_HEEDED)}
            if self._launcher.family == "openmpi":
                allowed |= set(OPEN_MPI_TERMINATED)
            right = codes <= allowed
        elif plan.fault == "full":
            right = codes <= {0, BROKEN}
            if BROKEN in codes and "cannot be written: No space left on device" not in jobs[0].text(
                "stderr"
            ):
                outcome.found.append(("exit code", "4 without the words that tell of the full disk"))
        else:
            right = codes == {0}
        if not right and codes:
            outcome.found.append(("exit code", f"{sorted(codes)}: {jobs[0].last_words()}"))
        killed = plan.fault == "kill" and outcome.struck
        if not killed and any("Traceback" in job.text("stderr") for job in jobs):
            outcome.found.append(("traceback", jobs[0].last_words()))


class Job:
    """An MPI job of a trial."""

    def __init__(self, folder: Path, launcher: Launcher, plan: Plan, output: Path, number: int) -> None:
        self.mark = f"{folder}/{plan.number}/{number}"
        self._texts = {name: folder / f"{name}-{number}" for name in ("stdout", "stderr")}
        program = [
            sys.executable,
            "-m",
            "ringmpi",
            "run",
            *shlex.split(plan.options),
            "--output",
            str(output),
        ]
        environment = os.environ | {remains.MARK: self.mark, "TMPDIR": str(folder / "tmp")}
        # Files, not pipes: a process that outlives the launcher would hold a pipe open.
        with self._texts["stdout"].open("w") as out, self._texts["stderr"].open("w") as err:
            self.process = subprocess.Popen(
                launcher.command(RANKS, program),
                cwd=folder / "cwd",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def alive(self) -> bool:
        """Return whether the launcher is there."""
        return self.process.poll() is None

    def wait(self, seconds: float) -> int | None:
        """Return the exit code of the launcher; None if it is still there after some seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def text(self, name: str) -> str:
        """Return what it has said so far on stdout or stderr."""
        return self._texts[name].read_text(errors="replace")

    def said(self, word: str) -> bool:
        """Return whether it has said a word on stdout."""
        return word in self.text("stdout")

    def last_words(self) -> str:
        """Return the end of what it said of errors."""
        return " / ".join(self.text("stderr").strip().splitlines()[-3:])

    def end(self) -> None:
        """Kill what is left of it, and nothing else."""
        if self.alive():
            self.process.kill()
            self.process.wait()
        for pid in remains.processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _privileged(*command: str) -> None:
    """Run a command of the system, which is found by its name."""
    subprocess.run(command, check=True, timeout=LIMIT)


def digest(path: Path) -> str | None:
    """Return what tells a file from another one; None if there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def complaint(path: Path, paced: bool) -> str:
    """Return what ringmpi has against a result, or an empty text; of a paced run there is no verdict."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = ringmpi(["report" if paced else "verify", str(path)])
    return "" if code == 0 else f"exit code {code}: {told.getvalue().strip().splitlines()[-1]}"
