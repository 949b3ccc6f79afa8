"""The driver's side of a contender: starting its processes, and asking them."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from case import Array, Case

#: Seconds that imports may take, on a cold disk.
START_LIMIT = 180.0


class Absent(Exception):  # noqa: N818  # others go on without it
    """Raised where a contender cannot be started, does not offer a case, or is gone; says why."""


@dataclass(frozen=True)
class Program:
    """How a contender is started.

    Attributes
    ----------
    name : str
    commands : sequence of list of str
        One a process, whatever it starts; ``{address}`` and ``{store}`` stand for the driver's socket and for
        a new file.
    ranks : int
        Processes that will call.
    threads : int
        Of each of them.
    environment : mapping
        Variables beside those of the driver.
    """

    name: str
    commands: Sequence[list[str]]
    ranks: int = 1
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


class Contender:
    """The running processes of a program.

    Parameters
    ----------
    program : Program
    folder : Path
        For its socket and its log.
    limit : float
        Seconds after which an answer is given up.

    Raises
    ------
    Absent
        If it does not start.
    """

    def __init__(self, program: Program, folder: Path, limit: float) -> None:
        self.name, self.ranks, self.threads = program.name, program.ranks, program.threads
        self.facts: dict[str, str] = {}
        self._limit = limit
        self._log = folder / f"{program.name}.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._callers: list[Connection] = []
        address = folder / f"{program.name}.socket"
        names = {"{address}": str(address), "{store}": str(folder / f"{program.name}.store")}
        threads = str(program.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            **program.environment,
        }
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            listener.bind(str(address))
            listener.listen(program.ranks)
            listener.settimeout(1.0)
            for command in program.commands:
                self._processes.append(
                    subprocess.Popen(
                        [names.get(word, word) for word in command],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                    )
                )
            try:
                self._meet(listener)
            except Absent:
                self.stop()
                raise

    def prepare(self, case: Case, layout: str) -> None:
        """Make a case ready to run."""
        self._ask("prepare", layout, case)

    def check(self, case: Case, layout: str) -> dict[str, Array]:
        """Run once, and return the results of all ranks in the order of the sequence."""
        answers = self._ask("check", layout)
        if len(answers) == 1 and answers[0][0] is None:
            results: dict[str, Array] = answers[0][1]
            return results
        whole = {name: array.repeat(self.ranks, axis=2) for name, array in answers[0][1].items()}
        assert all(array.shape[2] == case.seq_len for array in whole.values())
        for positions, results in answers:
            for name, array in results.items():
                whole[name][:, :, positions] = array
        return whole

    def run(self, layout: str) -> float:
        """Run once; return the seconds from the first rank's start to the last one's end."""
        starts, ends = zip(*self._ask("run", layout), strict=True)
        return float(max(ends) - min(starts))

    def forget(self) -> None:
        """Give the memory of all cases back."""
        self._ask("forget", "")

    def stop(self) -> None:
        """Hang up, which ends the processes, and end those that do not heed it."""
        for caller in self._callers:
            caller.close()
        self._callers.clear()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.terminate()  # A launcher ends its ranks.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()
                process.wait()
        self._processes.clear()

    def _meet(self, listener: socket.socket) -> None:
        """Wait until all ranks have called."""
        callers: dict[int, Connection] = {}
        deadline = time.monotonic() + START_LIMIT
        while len(callers) < self.ranks:
            try:
                call, _ = listener.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes):
                    raise Absent(f"does not start: {self._last_words()}") from None
                if time.monotonic() > deadline:
                    raise Absent(f"did not start in {START_LIMIT:.0f} s") from None
                continue
            call.setblocking(True)
            caller = Connection(call.detach())
            self._callers.append(caller)
            try:
                rank, self.facts = caller.recv()
            except EOFError:
                raise Absent(f"does not start: {self._last_words()}") from None
            callers[rank] = caller
        self._callers = [callers[rank] for rank in range(self.ranks)]

    def _ask(self, command: str, layout: str, case: Case | None = None) -> list[Any]:
        """Give all ranks a command, and return what they answer."""
        if not self._callers:
            raise Absent("is gone")
        try:
            for caller in self._callers:
                caller.send((command, layout, case))
            answers = self._answers()
        except (OSError, EOFError):
            self.stop()
            raise Absent(f"ended: {self._last_words()}") from None
        for kind, said in answers:
            if kind == "unsupported":
                raise Absent(said)
            if kind == "failed":
                raise Absent(f"failed: {said}")
        return [said for _, said in answers]

    def _answers(self) -> list[tuple[str, Any]]:
        """Wait for all ranks at once: a rank that failed is heard while the others wait for it."""
        found: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + self._limit
        with selectors.DefaultSelector() as waiting:
            for rank, caller in enumerate(self._callers):
                waiting.register(caller, selectors.EVENT_READ, rank)
            while len(found) < self.ranks:
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                failed = [said for kind, said in found.values() if kind == "failed"]
                if not ready:
                    self.stop()
                    raise Absent(failed[0] if failed else f"gave no answer in {self._limit:.0f} s")
                for key, _ in ready:
                    found[key.data] = self._callers[key.data].recv()
                    waiting.unregister(key.fileobj)
                    if found[key.data][0] == "failed":
                        # The others may sit in a collective call that it never comes to.
                        deadline = min(deadline, time.monotonic() + 10)
        return [found[rank] for rank in range(self.ranks)]

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
