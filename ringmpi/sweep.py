"""Many runs: rank counts times parameters, each its own MPI job and its own file.

The sweep itself never touches MPI. A point whose complete and verified file is there is not run again, so
a sweep that was interrupted goes on where it stopped when it is started again.
"""

from __future__ import annotations

import csv
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from ringmpi.comm.launcher import find_launcher, shown
from ringmpi.comm.link import network_of
from ringmpi.comm.signals import HEEDED_SIGNALS
from ringmpi.comm.threads import inherited_environment
from ringmpi.config import Experiment, experiment_from, options, parse
from ringmpi.devices import slowness
from ringmpi.errors import BROKEN, FAILED_VERIFICATION, OK, ConfigError, Interrupted, StoreError
from ringmpi.metrics import by_rank, makespans
from ringmpi.problem import describe_input
from ringmpi.report.progress import track
from ringmpi.report.text import make_console, milliseconds, percent, plain_table
from ringmpi.schedule import GROUP_OPTIONS, METHODS, Pass, check_heads, inner_ranks
from ringmpi.store import ResultFile, unwritable
from ringmpi.verify import Verdict

#: Seconds that the running job has to end after a signal was passed on, before it is killed. A job stops
#: within 5 s or one step, whichever is longer.
CHILD_GRACE = 60.0

#: Last lines of a failed job's log that are shown.
TAIL_LINES = 15


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes
    ----------
    ranks : int
    varied : dict
        The values of the varied options.
    experiment : Experiment
    path : Path
        Its result file.
    """

    ranks: int
    varied: dict[str, Any]
    experiment: Experiment
    path: Path

    def program(self) -> list[str]:
        """Return the program that each rank runs."""
        words = [sys.executable, "-m", "ringmpi", "run", "--output", str(self.path)]
        words += ["--ranks", str(self.ranks)]
        for name, declared in options().items():
            value = getattr(self.experiment, name)
            described = self.experiment.input is not None and name in FROM_FILE
            if name in ("output", "ranks") or described or value == declared.default:
                continue
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag)
            else:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words += [flag, text]
        return words

    def result(self) -> ResultFile | None:
        """Return the result file if it is there, of this very experiment, and not cut short."""
        try:
            result = ResultFile(self.path)
        except StoreError:
            return None
        same = {**result.experiment.record(), "output": None, "ranks": None}
        if result.interrupted is not None or same != {**self.experiment.record(), "ranks": None}:
            return None
        return result

    def done(self) -> bool:
        """Return whether nothing is left to do: a complete file is there, and no verdict in it is bad."""
        result = self.result()
        if result is None:
            return False
        with result:
            return all(verdict.passed for verdict in result.verdicts())


#: Characters that the widest table needs where there is no terminal.
TABLE_WIDTH = 200

#: Columns of the table where the backward pass is run too.
BACKWARD_COLUMNS = ("gradient error", "gradient single", "backward ms", "backward stall")

#: Options whose values contain commas.
HAS_COMMAS = ("documents", "link", "link_map", "slow")

#: The method that stands for all of them; those that a rank count does not allow are left out.
ALL = "all"

#: What an input file says of itself, and need not be repeated on the command line.
FROM_FILE = ("seq_len", "batch", "heads", "kv_heads", "head_dim", "documents")


class Sweep:
    """Rank counts times parameters.

    Parameters
    ----------
    given : mapping
        Options that all points share.
    ranks : str
        Rank counts, such as ``1,2,4``.
    vary : sequence of str
        ``OPTION=VALUE,VALUE``; for options whose values contain commas, separate values by ``;``.
    directory : str
    launcher : str

    Raises
    ------
    ConfigError
        If any point breaks a rule; all are checked before the first is run.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        ranks: str,
        vary: Sequence[str],
        directory: str,
        launcher: str,
    ) -> None:
        self.directory = Path(directory)
        self.counts = _rank_counts(ranks)
        self.left_out: list[str] = []
        self.varied = dict(_varied(entry) for entry in vary)
        if len(self.varied) < len(vary):
            raise ConfigError(
                f"vary={' '.join(vary)}: an option is given twice; name all its values once"
            )
        self._all_methods = given.get("method") == ALL
        if self._all_methods and "method" in self.varied:
            raise ConfigError("vary=method: --method all varies it already; leave one of them away")
        if self._all_methods:
            self.varied = {"method": list(METHODS), **self.varied}
        self.launcher = find_launcher(launcher)
        self.points = list(self._points(given))
        self._console = make_console()

    def show_commands(self) -> int:
        """Print the command of every point."""
        for point in self.points:
            print(shown(self.launcher.command(point.ranks, point.program())))
        return OK

    def run(self) -> int:
        """Run what is not done yet, print one table over all points, and return the exit code. Local.

        Raises
        ------
        Interrupted
            After a signal; finished points stay.
        """
        refused = unwritable(self.directory / "sweep.csv")
        if refused:
            raise refused
        for line in self.left_out:
            self._console.print(line, soft_wrap=True)
        with track("sweep", self._console) as progress:
            for done, point in enumerate(self.points):
                progress(done, len(self.points))
                self._run_point(point, f"[{done + 1}/{len(self.points)}]")
        return self._conclude()

    def _points(self, given: Mapping[str, Any]) -> Iterator[Point]:
        found = describe_input(given["input"]) if given.get("input") else None
        for values in itertools.product(*self.varied.values()):
            varied = dict(zip(self.varied, values, strict=True))
            experiment = experiment_from({**given, **varied}, found)
            for ranks in self.counts:
                refused = _unfit(experiment, ranks)
                if refused is not None and not self._all_methods:
                    raise refused
                if refused is not None:
                    self.left_out.append(f"left out: {experiment.method} on {ranks} rank(s): {refused}")
                    continue
                yield Point(ranks, varied, experiment, self.directory / experiment.file_name(ranks))

    def _run_point(self, point: Point, number: str) -> None:
        if point.done():
            self._console.print(f"{number} done before: {point.path.name}", soft_wrap=True)
            return
        command = self.launcher.command(point.ranks, point.program())
        self._console.print(f"{number} {shown(command)}", soft_wrap=True)
        log = point.path.with_suffix(".log")
        with log.open("w") as output, _passing_signals_on() as start:
            code = start(command, output)
        if code not in (OK, FAILED_VERIFICATION) or not point.path.exists():
            lines = "\n".join(f"  {line}" for line in _tail(log))
            self._console.print(f"exit code {code}; the end of {log}:\n{lines}")

    def _conclude(self) -> int:
        """Print the table, write it as CSV, and return the exit code."""
        rows = [_row(point, self._base(point)) for point in self.points]
        table = plain_table("sweep", list(rows[0]), [list(row.values()) for row in rows])
        make_console(TABLE_WIDTH).print(table)
        if any("*" in row["time ms"] for row in rows):
            self._console.print(
                "* more ranks or threads than cores: the time shows correctness, not speed; no efficiency"
            )
        path = self.directory / "sweep.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        self._console.print(f"# table: {path}", soft_wrap=True)
        failed = sum(row["verdict"] == "FAILED" for row in rows)
        missing = sum(row["verdict"] == "missing" for row in rows)
        words = [f"{len(rows)} points"]
        words += [f"{failed} FAILED verification"] if failed else []
        words += [f"{missing} without a result"] if missing else []
        self._console.print(
            "# sweep: " + (", ".join(words) if failed or missing else f"{words[0]}, all OK")
        )
        return BROKEN if missing else FAILED_VERIFICATION if failed else OK

    def _base(self, point: Point) -> Point:
        """Return the point with the fewest ranks among those with the same parameters."""
        same = (other for other in self.points if other.varied == point.varied)
        return min(same, key=lambda other: other.ranks)


def _unfit(experiment: Experiment, ranks: int) -> ConfigError | None:
    """Return why the method cannot run on so many ranks, as far as that is known beforehand, or None."""
    given = experiment.group_ranks
    network = network_of(experiment.link, experiment.link_map)
    try:
        slowness(experiment.slow, ranks)
        if network is not None:
            network.check(ranks)
        # Without the option the groups are the ranks of a node, and which these are shows only in the run.
        inner = inner_ranks(experiment.method, ranks, given, lambda: [""] * ranks)
        if given is not None or experiment.method not in GROUP_OPTIONS:
            check_heads(experiment.method, inner, experiment.heads)
    except ConfigError as error:
        return error
    return None


def _row(point: Point, base: Point) -> dict[str, str]:
    """Return the table row of a point; times only beside a verdict."""
    row = {"ranks": str(point.ranks)}
    row |= {name: str(value) for name, value in point.varied.items()}
    names = (
        "max error",
        "single pass",
        "mean error",
        "single mean",
        "time ms",
        "min to max",
        "stall ms",
        *(BACKWARD_COLUMNS if point.experiment.backward else ()),
    )
    row |= dict.fromkeys((*names, "efficiency"), "-")
    result = point.result()
    if result is None:
        return row | {"verdict": "missing"}
    with result:
        verdicts = result.verdicts()
        if verdicts:
            out = verdicts[0]
            row["max error"], row["single pass"] = f"{out.max_abs:.2e}", f"{out.single_max:.2e}"
            row["mean error"], row["single mean"] = f"{out.mean_abs:.2e}", f"{out.single_mean:.2e}"
        timings = result.timings()
        if len(timings.records):
            crowded = result.oversubscribed
            spans = makespans(timings)
            row["time ms"] = milliseconds(float(np.median(spans))) + ("*" if crowded else "")
            row["min to max"] = f"{milliseconds(spans.min())} to {milliseconds(spans.max())}"
            row["stall ms"] = milliseconds(max(rank.stall for rank in by_rank(timings)))
            if point.experiment.backward:
                row |= _backward(result, verdicts, "*" if crowded else "")
            if not crowded:
                row["efficiency"] = percent(_efficiency(point, base, float(np.median(spans))))
    failed = any(not verdict.passed for verdict in verdicts)
    return row | {"verdict": "FAILED" if failed else "OK" if verdicts else "not verified"}


def _backward(result: ResultFile, verdicts: Sequence[Verdict], mark: str) -> dict[str, str]:
    """Return the columns of the backward pass: the largest errors of the three gradients, and the times."""
    row = dict.fromkeys(BACKWARD_COLUMNS, "-")
    gradients = [verdict for verdict in verdicts if verdict.tensor in ("dq", "dk", "dv")]
    if gradients:
        row["gradient error"] = f"{max(verdict.max_abs for verdict in gradients):.2e}"
        row["gradient single"] = f"{max(verdict.single_max for verdict in gradients):.2e}"
    timings = result.timings(Pass.BACKWARD)
    if len(timings.records):
        row["backward ms"] = milliseconds(float(np.median(makespans(timings)))) + mark
        row["backward stall"] = milliseconds(max(rank.stall for rank in by_rank(timings)))
    return row


def _efficiency(point: Point, base: Point, seconds: float) -> float:
    """Return the rank-seconds of the base over those of the point; NaN without a base to go by."""
    result = base.result()
    if result is None:
        return float("nan")
    with result:
        timings = result.timings()
        if result.oversubscribed or not len(timings.records):
            return float("nan")
        before = float(np.median(makespans(timings)))
    return base.ranks * before / (point.ranks * seconds)


def _tail(log: Path) -> list[str]:
    """Return the last lines that a job wrote: its own ones, if there are any, not the launcher's farewell."""
    lines = log.read_text(errors="replace").splitlines()
    own = [line for line in lines if line.startswith("ringmpi:")]
    return (own or lines)[-TAIL_LINES:]


@contextmanager
def _passing_signals_on() -> Iterator[Callable[[list[str], Any], int]]:
    """Give a function that runs a command; a signal that comes meanwhile goes to it, and ends the sweep."""
    received: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def remember(number: int, _: FrameType | None) -> None:
        received.append(number)
        for child in children:
            child.send_signal(number)

    def start(command: list[str], output: Any) -> int:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=inherited_environment(),
        )
        children.append(child)
        while True:
            try:
                code = child.wait(timeout=CHILD_GRACE if received else 1.0)
            except subprocess.TimeoutExpired:
                if received:
                    child.kill()
                continue
            break
        if received:
            raise Interrupted(received[0])
        return code

    before = {number: signal.signal(number, remember) for number in HEEDED_SIGNALS}
    try:
        yield start
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _rank_counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"ranks={text!r}: use whole numbers from 1, such as 1,2,3,4,5,8")
    return sorted({int(part) for part in parts})


def _varied(entry: str) -> tuple[str, list[Any]]:
    name, _, text = entry.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    fixed = ("ranks", "output", "input")
    if name not in options() or name in fixed or not text:
        raise ConfigError(
            f"vary={entry!r}: use OPTION=VALUE,VALUE with an option of run, such as dtype=float32,float64"
        )
    values = text.split(";" if ";" in text or name in HAS_COMMAS else ",")
    if options()[name].metadata["kind"] is bool:
        truth = {"true": True, "false": False}
        if not set(values) <= set(truth):
            raise ConfigError(f"vary={entry!r}: {name} takes true and false")
        return name, [truth[value] for value in values]
    return name, [parse(name, value) for value in values]
