"""One case run to its end, in a process that lives on or in its own, and whether it ended as it must."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Seconds after which a case hangs; the slowest draw a picture, some two seconds.
LIMIT = 30.0

#: Bytes by which a case may make its process grow. The problems have a few kilobytes; pictures need most.
GROWTH = 1 << 30

#: Exit codes: taken; a verdict; refused; not to be had on this machine.
TAKEN, FAILED, REFUSED, MISSING = 0, 1, 2, 3


@dataclass(frozen=True)
class Attempt:
    """How a case ended.

    Attributes
    ----------
    code : int
        Negative for a signal; -1000 for one that did not end.
    told : str
        What it wrote to stderr.
    seconds : float
    growth : int
        Bytes by which the largest size of its process has grown.
    """

    code: int
    told: str
    seconds: float
    growth: int

    @property
    def finding(self) -> str:
        """What is wrong with it, in a word; empty if nothing is."""
        # What MPICH adds to an abort is not ours.
        lines = [
            line for line in self.told.splitlines() if line.strip() and not line.startswith("Abort(")
        ]
        if self.code == HANGS:
            return "hang"
        if "Traceback (most recent call last)" in self.told:
            return "traceback"
        if self.growth > GROWTH:
            return "memory"
        if self.code not in (TAKEN, FAILED, REFUSED, MISSING):
            return "exit code"
        if self.code in (REFUSED, MISSING) and (
            len(lines) != 1 or not lines[0].startswith("ringmpi: ")
        ):
            return "not one line"
        if self.code == FAILED and lines:
            return "exit code"
        return ""


HANGS = -1000


def alone(arguments: Sequence[str], folder: Path) -> Attempt:
    """Run a case as a user would."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ringmpi", *arguments],
            cwd=folder,
            capture_output=True,
            timeout=LIMIT,
            check=False,
            stdin=subprocess.DEVNULL,
            preexec_fn=_limit_memory,
        )
    except subprocess.TimeoutExpired:
        return Attempt(HANGS, "", time.monotonic() - started, 0)
    return Attempt(done.returncode, done.stderr.decode(errors="replace"), time.monotonic() - started, 0)


def _limit_memory() -> None:
    # MPI libraries map some gigabytes that they never touch.
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))


class Worker:
    """A process that runs case after case, and is replaced when one kills it."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._begin()

    def _begin(self) -> None:
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._connection.recv()  # It is ready: what follows is the time of a case.

    def attempt(self, arguments: Sequence[str], folder: Path) -> Attempt:
        """Run a case, and tell how it ended."""
        started = time.monotonic()
        stderr = folder / "stderr"
        self._connection.send((list(arguments), str(folder), str(stderr)))
        code, growth = HANGS, 0
        try:
            if self._connection.poll(LIMIT):
                code, growth = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(LIMIT)
            code = self._process.exitcode if self._process.exitcode is not None else HANGS
        seconds = time.monotonic() - started
        if not self._process.is_alive() or code == HANGS:
            self.end()
            self._begin()
        told = stderr.read_text(errors="replace") if stderr.exists() else ""
        return Attempt(code, told, seconds, growth)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection[Any, Any]) -> None:
    """Run cases as they come: what `ringmpi` does for arguments, with MPI started once and never ended."""
    from mpi4py import MPI

    import ringmpi.store  # noqa: F401 - loaded before the memory is limited, as is what follows
    from ringmpi.cli import main

    MPI.Finalize = lambda: None
    _limit_memory()
    environment = os.environ.copy()
    connection.send(None)
    while True:
        try:
            arguments, folder, stderr = connection.recv()
        except EOFError:
            return
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with Path(stderr).open("w") as told, tempfile.TemporaryFile() as shown:
            kept = os.dup(1), os.dup(2)
            os.dup2(shown.fileno(), 1)
            os.dup2(told.fileno(), 2)
            try:
                code = _code(main, arguments)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os.dup2(kept[0], 1)
                os.dup2(kept[1], 2)
                os.close(kept[0])
                os.close(kept[1])
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        growth = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        connection.send((code, growth))


def _code(main: Any, arguments: list[str]) -> int:
    """Return the exit code of a command line; asking for help or the version ends the interpreter.

    After ``!`` comes Python that is run in its place, to see that what it does is found.
    """
    if arguments[:1] == ["!"]:
        try:
            exec(arguments[1], {})  # noqa: S102 - of a test
        except Exception:
            traceback.print_exc()
            return 4
        return 0
    with contextlib.suppress(SystemExit):
        return int(main(arguments))
    return 0
