"""Measure rings across the overlap threshold beside what plan and simulate say. Started by jobs/lab.sh."""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crossing import HIDDEN, vanishes_at
from ringmpi.metrics import by_rank, makespans
from ringmpi.store import ResultFile
from setting import Setting, settings

#: Seconds for one command; the longest takes about one minute.
LIMIT = 600

#: From this many times the threshold on polling must hide all, and it is also measured what waiting hides.
BEYOND = 1.25

#: For what computes, before a run; links take as long again.
CALIBRATION_SECONDS = "3"

#: How far a vanishing point and a time may be from what was predicted.
LENGTH_TOLERANCE = 0.20
TIME_TOLERANCE = 0.10

Row = dict[str, Any]


def main() -> None:
    """Measure all settings whose files are not there yet, and write the tables."""
    options = parse()
    folder: Path = options.work
    folder.mkdir(parents=True, exist_ok=True)
    points, verdicts = [], []
    for setting in settings(options.media, options.ranks, options.rates):
        found = Study(setting, folder / setting.name, options.repeats, options.factors).points()
        points += found
        verdicts.append(verdict(setting, found))
        print(f"# {setting.name}: {told(verdicts[-1])}", flush=True)
    header = [f"# bash jobs/lab.sh; ringmpi {options.commit}", f"# {machine_of(options.work)}"]
    write(options.out / "lab/overlap.csv", header, points)
    write(options.out / "lab/settings.csv", header, verdicts)
    close = sum(row["time_within"] for row in verdicts)
    vanished = sum(row["length_within"] for row in verdicts)
    print(
        f"# of {len(verdicts)} settings: time within {TIME_TOLERANCE:.0%} of the simulated one in {close}; "
        f"vanishing point within {LENGTH_TOLERANCE:.0%} of the predicted one in {vanished}"
    )


class Study:
    """One setting: its machine file, its threshold, and runs around it.

    Parameters
    ----------
    setting : Setting
    folder : Path
        Of its files.
    repeats : int
    factors : sequence of float
        Block lengths in thresholds.
    """

    def __init__(self, setting: Setting, folder: Path, repeats: int, factors: Sequence[float]) -> None:
        self._setting = setting
        self._folder = folder
        self._repeats = repeats
        self._factors = factors
        folder.mkdir(exist_ok=True)
        self._machine = folder / "machine.toml"
        self._calibrate(self._machine)

    def points(self) -> list[Row]:
        """Return what was measured and simulated at every block length."""
        threshold = self._threshold()
        rows = []
        for factor in self._factors:
            for progress in ("poll", "wait") if factor >= BEYOND else ("poll",):
                rows.append(self._point(round(factor * threshold), progress, threshold))
        return rows

    def _calibrate(self, machine: Path, *options: str) -> None:
        """Write a machine file, unless it is there."""
        if not machine.exists():
            setting = self._setting
            where = ("--output", str(machine))
            call(setting.launched("calibrate", *setting.shape, *setting.device, *options, *where))

    def _machine_now(self, tokens: int) -> Path:
        """Return the file of the machine right before a run: neighbours change what it computes."""
        if not self._setting.real:
            return self._machine
        machine = self._folder / f"{tokens}.toml"
        self._calibrate(machine, "--lengths", str(tokens), "--seconds", CALIBRATION_SECONDS)
        return machine

    def _threshold(self) -> int:
        """Return the predicted block length, with latency and measured rates."""
        size = str(self._setting.ranks)
        command = [
            "ringmpi",
            "plan",
            "--json",
            "--machine",
            str(self._machine),
            "--ranks",
            size,
            *self._setting.shape,
        ]
        plan = json.loads(call(command))
        found = [row["with_latency"] for row in plan["thresholds"] if row["direction"] == "forward"]
        if None in found:
            raise SystemExit(f"{self._machine}: no block length hides its transfer")
        return int(max(found))

    def _point(self, tokens: int, progress: str, threshold: int) -> Row:
        ranks = self._setting.ranks
        problem = ("--seq-len", str(tokens * ranks), "--progress", progress, *self._setting.shape)
        measured, simulated = (
            self._folder / f"{tokens}-{progress}-{kind}.h5" for kind in ("measured", "simulated")
        )
        machine = self._machine_now(tokens)
        if not measured.exists():
            how = (
                "--repeats",
                str(self._repeats),
                "--verify",
                "sample:16" if self._setting.real else "none",
            )
            run = ("run", *problem, *self._setting.device, *how, "--output", str(measured))
            call(self._setting.launched(*run))
        if not simulated.exists():
            # The median of what happens: the noise of a calibration is that of much shorter steps.
            on = ("--machine", str(machine), "--ranks", str(ranks), "--noise", "0")
            call(["ringmpi", "simulate", *problem, *on, "--output", str(simulated)])
        seen, thought = numbers(measured), numbers(simulated)
        return {
            "interconnect": self._setting.medium,
            "ranks": ranks,
            "compute": "native" if self._setting.real else "paced",
            "rate_mbit": self._setting.rate,
            "progress": progress,
            "tokens": tokens,
            "predicted_threshold": threshold,
            **{f"measured_{name}": value for name, value in seen.items()},
            **{f"simulated_{name}": value for name, value in thought.items()},
            "time_ratio": seen["total_s"] / thought["total_s"],
        }


def numbers(path: Path) -> dict[str, float]:
    """Return what a file says of a pass; of ranks the median."""
    with ResultFile(path) as result:
        timings = result.timings()
        ranks = by_rank(timings)
        spans = makespans(timings)
    return {
        "compute_s": statistics.median(rank.compute for rank in ranks),
        "stall_s": statistics.median(rank.stall for rank in ranks),
        "overlap": statistics.median(rank.overlap for rank in ranks),
        "total_s": float(np.median(spans)),
    }


def verdict(setting: Setting, points: Sequence[Row]) -> Row:
    """Return how the predictions of one setting have done."""
    polled = [row for row in points if row["progress"] == "poll"]
    lengths = [row["tokens"] for row in polled]
    threshold = polled[0]["predicted_threshold"]
    measured, simulated = (
        vanishes_at(lengths, [row[f"{kind}_overlap"] for row in polled])
        for kind in ("measured", "simulated")
    )
    beyond = [row for row in points if row["tokens"] >= round(BEYOND * threshold)]
    ratios = [row["time_ratio"] for row in polled]
    typical = statistics.median(ratios)
    return {
        "setting": setting.name,
        "predicted_threshold": threshold,
        "measured_vanishing": measured,
        "simulated_vanishing": simulated,
        "length_ratio": None if measured is None else measured / threshold,
        "length_within": measured is not None and abs(measured / threshold - 1) <= LENGTH_TOLERANCE,
        "time_ratio": typical,
        "time_ratio_min": min(ratios),
        "time_ratio_max": max(ratios),
        "time_within": abs(typical - 1) <= TIME_TOLERANCE,
        "overlap_poll_min": min(r["measured_overlap"] for r in beyond if r["progress"] == "poll"),
        "overlap_wait_max": max(r["measured_overlap"] for r in beyond if r["progress"] == "wait"),
    }


def told(row: Row) -> str:
    """Return a verdict in one line."""
    vanishing = row["measured_vanishing"]
    at = "nowhere" if vanishing is None else f"at {vanishing:.0f} tokens"
    return (
        f"stall vanishes (overlap {HIDDEN}) {at}, predicted {row['predicted_threshold']}; "
        f"time over simulated {row['time_ratio']:.2f} ({row['time_ratio_min']:.2f} to "
        f"{row['time_ratio_max']:.2f}); overlap beyond {BEYOND}: poll {row['overlap_poll_min']:.2f}, "
        f"wait {row['overlap_wait_max']:.2f}"
    )


def call(command: Sequence[str]) -> str:
    """Run a command and return what it prints; end with its words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        sys.exit(f"$ {shlex.join(command)}\n{done.stdout}{done.stderr}exit code {done.returncode}")
    return done.stdout


def machine_of(folder: Path) -> str:
    """Return where the files of a folder were measured."""
    newest = max(folder.glob("*/*-measured.h5"), key=lambda path: path.stat().st_mtime)
    with ResultFile(newest) as result:
        facts = result.facts("machine")
    return f"{facts['processor']}, {os.cpu_count()} cores; {facts['mpi_library']}; {facts['platform']}"


def write(path: Path, header: Sequence[str], rows: Sequence[Row]) -> None:
    """Write rows as CSV after lines of comment, floats with six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.writelines(line + "\n" for line in header)
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        for row in rows:
            short = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
            table.writerow(short)
    print(f"# table: {path}")


def parse() -> argparse.Namespace:
    """Return the options that the script gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--media", nargs="+", choices=("netlab", "link"), required=True)
    parser.add_argument("--ranks", nargs="+", type=int, required=True)
    parser.add_argument("--rates", nargs="+", type=int, required=True)
    parser.add_argument("--factors", nargs="+", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
