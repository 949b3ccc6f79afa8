"""Many runs: rank counts times parameters, each its own MPI job and its own file.

The sweep itself never touches MPI. A point whose complete and verified file is there is not run again, so
a sweep that was interrupted goes on where it stopped when it is started again. Several sweeps of the same
points may share them, each with points of its own: the table is always that of all files that are there.
"""

from __future__ import annotations

import csv
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import numpy as np

from ringmpi.comm.launcher import find_launcher, shown
from ringmpi.comm.link import network_of
from ringmpi.comm.signals import HEEDED_SIGNALS
from ringmpi.comm.threads import inherited_environment
from ringmpi.config import Experiment, experiment_from, options, parse
from ringmpi.devices import slowness
from ringmpi.digits import whole_number
from ringmpi.errors import BROKEN, FAILED_VERIFICATION, OK, ConfigError, Interrupted, StoreError
from ringmpi.metrics import Timings, by_rank, makespans
from ringmpi.problem import describe_input
from ringmpi.report.progress import track
from ringmpi.report.text import make_console, milliseconds, percent, plain_table
from ringmpi.schedule import GROUP_OPTIONS, METHODS, Pass, check_heads, inner_ranks
from ringmpi.store import ResultFile, unwritable
from ringmpi.unfinished import temporary_name
from ringmpi.verify import Verdict

#: The most ranks of a point: as many as the largest machines have cores.
MOST_RANKS = 10_000_000

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


@dataclass(frozen=True)
class Share:
    """One of several shares of the points of a sweep.

    Attributes
    ----------
    number : int
        From 1.
    of_all : int
    """

    number: int
    of_all: int

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str] = os.environ) -> Share:
        """Return the share that ``I/N`` or, in a task of a Slurm job array, ``array`` means.

        Raises
        ------
        ConfigError

        Examples
        --------
        >>> Share.parse("2/3")
        Share(number=2, of_all=3)
        """
        if text == "array":
            return cls._of_array_task(environment)
        given, _, of_all = text.partition("/")
        number, count = whole_number(given), whole_number(of_all)
        if not number or not count or number > count:
            raise ConfigError(f"share={text}: use I/N with I from 1 to N, such as 2/4, or array")
        return cls(number, count)

    @classmethod
    def _of_array_task(cls, environment: Mapping[str, str]) -> Share:
        names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT")]
        told = [environment.get(name, "") for name in names]
        if not all(map(str.isdecimal, told)):
            raise ConfigError(
                "share=array: this is no task of a Slurm job array; submit with --array, or use I/N"
            )
        task, least, most, count = map(int, told)
        # Tasks with gaps between their numbers, such as 1,2,7, have no number among each other that one of
        # them could know of; even steps have.
        step = (most - least) // (count - 1) if count > 1 else 1
        if least + step * (count - 1) != most or (task - least) % step:
            raise ConfigError(
                f"share=array: the {count} tasks from {least} to {most} are not evenly spaced; use an "
                f"array such as 0-{count - 1}, or --share I/N"
            )
        return cls((task - least) // step + 1, count)

    def of(self, points: Sequence[Point]) -> list[Point]:
        """Return the points of this share: all shares together have each of them once."""
        return list(points[self.number - 1 :: self.of_all])


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
    tokens_per_rank : int, optional
        The length of the problem grows with the ranks: so many tokens for each.
    share : str, optional
        ``I/N``: run only the I-th of N shares of the points; ``array``: the share of a task of a Slurm
        job array.

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
        tokens_per_rank: int | None = None,
        share: str | None = None,
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
        self._tokens_per_rank = tokens_per_rank
        if tokens_per_rank is not None:
            self._check_growth(tokens_per_rank, given)
        self._share = None if share is None else Share.parse(share)
        self.launcher = find_launcher(launcher)
        self.points = list(self._points(given))
        self._console = make_console()

    def show_commands(self) -> int:
        """Print the command of every point that is this sweep's to run."""
        for point in self._own():
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
            own = self._own()
            for done, point in enumerate(own):
                progress(done, len(own))
                self._run_point(point, f"[{done + 1}/{len(own)}]")
        return self._conclude()

    def _own(self) -> list[Point]:
        return self.points if self._share is None else self._share.of(self.points)

    def _check_growth(self, tokens: int, given: Mapping[str, Any]) -> None:
        if tokens < 1:
            raise ConfigError(f"tokens_per_rank={tokens}: must be a whole number from 1")
        for name in ("input", "seq_len", "documents"):
            if given.get(name) is not None or name in self.varied:
                raise ConfigError(
                    f"tokens_per_rank={tokens}: says how long the problem is, and so does {name}; "
                    f"leave one of them away"
                )

    def _points(self, given: Mapping[str, Any]) -> Iterator[Point]:
        found = describe_input(given["input"]) if given.get("input") else None
        for values in itertools.product(*self.varied.values()):
            varied = dict(zip(self.varied, values, strict=True))
            for ranks in self.counts:
                growing = (
                    {} if self._tokens_per_rank is None else {"seq_len": self._tokens_per_rank * ranks}
                )
                experiment = experiment_from({**given, **varied, **growing}, found)
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
        with _new_log(point.path) as output, _passing_signals_on() as start:
            code = start(command, output)
        log = Path(output.name)
        if code not in (OK, FAILED_VERIFICATION) or not point.path.exists():
            lines = "\n".join(f"  {line}" for line in _tail(log))
            self._console.print(f"exit code {code}; the end of {log}:\n{lines}")

    def _conclude(self) -> int:
        """Print the table, write it as CSV, and return the exit code."""
        rows = self._rows()
        self._write(rows)
        # Another share may have been finished meanwhile, and its table been overwritten by this one. Whoever
        # is last to write sees all that was there before.
        while self._share is not None and (now := self._rows()) != rows:
            rows = now
            self._write(rows)
        table = plain_table("sweep", list(rows[0]), [list(row.values()) for row in rows])
        make_console(TABLE_WIDTH).print(table)
        if any("*" in row["time ms"] for row in rows):
            self._console.print(
                "* more ranks or threads than cores: the time shows correctness, not speed; no efficiency"
            )
        self._console.print(f"# table: {self._table_path}", soft_wrap=True)
        own = set(map(id, self._own()))
        mine = [
            row["verdict"] for row, point in zip(rows, self.points, strict=True) if id(point) in own
        ]
        failed, missing = mine.count("FAILED"), mine.count("missing")
        elsewhere = [row["verdict"] for row in rows].count("missing") - missing
        words = [f"{len(mine)} points"]
        words += [f"{failed} FAILED verification"] if failed else []
        words += [f"{missing} without a result"] if missing else []
        words += ["all OK"] if not failed and not missing else []
        words += [f"{elsewhere} of other shares without a result yet"] if elsewhere else []
        self._console.print("# sweep: " + ", ".join(words))
        return BROKEN if missing else FAILED_VERIFICATION if failed else OK

    @property
    def _table_path(self) -> Path:
        return self.directory / "sweep.csv"

    def _rows(self) -> list[dict[str, str]]:
        growing = self._tokens_per_rank is not None
        return [_row(point, self._base(point), growing) for point in self.points]

    def _write(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Put the table in the place of an older one, as a whole."""
        unfinished = temporary_name(self._table_path)
        with unfinished.open("x", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        unfinished.replace(self._table_path)

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


def _row(point: Point, base: Point, growing: bool) -> dict[str, str]:
    """Return the table row of a point; times only beside a verdict."""
    row = {"ranks": str(point.ranks)}
    row |= {"seq_len": str(point.experiment.seq_len)} if growing else {}
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
                row["efficiency"] = percent(_speed(timings) / _speed_of(base))
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


def _speed_of(point: Point) -> float:
    """Return the speed of a point whose file may not be there; NaN then."""
    result = point.result()
    if result is None:
        return float("nan")
    with result:
        timings = result.timings()
        useless = result.oversubscribed or not len(timings.records)
        return float("nan") if useless else _speed(timings)


def _speed(timings: Timings) -> float:
    """Return FLOPs a rank and second, as in `report.across.scaling`; NaN where there are none."""
    work = float(timings.records["flops"][-1].sum()) or float("nan")
    ranks: int = timings.records.shape[1]
    return work / float(np.median(makespans(timings))) / ranks


def _new_log(result: Path) -> TextIO:
    """Open a new file for what a run says, beside those of earlier attempts."""
    for attempt in itertools.count(1):
        suffix = ".log" if attempt == 1 else f".{attempt}.log"
        try:
            return result.with_suffix(suffix).open("x")
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")


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
    counts = {whole_number(part) or 0 for part in text.split(",")}
    if not 0 < min(counts) <= max(counts) <= MOST_RANKS:
        raise ConfigError(
            f"ranks={text!r}: use whole numbers from 1 to {MOST_RANKS}, such as 1,2,3,4,5,8"
        )
    return sorted(counts)


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
