"""Measure our attention beside that of others, in turn, on the same threads. Started by jobs/bench_cpu.sh.

In a case every contender runs once, untimed, and what it returns is held against the float64 reference. Then
all run once in each alternation, in another order each time, while the others sleep; so what the machine does
beside them meets all alike, and the ratio of two times is that of one moment.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from case import BOTH, FORWARD, Case
from contenders import Absent, Contender
from figure import draw
from judge import Judge, Verdict
from lineup import BALANCED, PEERS, Place, aim, base_of, places, programs
from machine import Others, Peak, build_peaks, keep_to_cores
from ringmpi import provenance
from ringmpi.softmax import WEIGHTS
from table import CASE, COLUMNS, Row, Table, case_columns, ratios, times

#: Seconds between two contenders: the threads of BLAS and OpenMP spin for up to 30 ms before they sleep.
PAUSE = 0.05

#: Share of the cores that others may use before a case is called disturbed.
DISTURBED = 0.05


def main() -> None:
    """Measure all cases that the table lacks."""
    options = parse()
    # A scheduler's signal ends the contenders too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cores = keep_to_cores(options.threads)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_cpu.")))
        contenders = start(options, folder, stack)
        peaks = build_peaks(options.threads, folder)
        try:
            table = Table(options.csv, header(options, cores, contenders.values()))
        except ValueError as error:
            sys.exit(str(error))
        judge = Judge(options.threads)
        cases = [case for case in all_cases(options) if not table.has(case)]
        print(f"# {len(cases)} cases to measure, {len(table.rows)} rows are there", flush=True)
        for number, case in enumerate(cases, 1):
            began = time.monotonic()
            race = Race(case, contenders, peaks, options)
            race.check(judge)
            race.alternate()
            table.add(race.rows())
            took = time.monotonic() - began
            print(f"# case {number} of {len(cases)}, {took:.0f} s: {race.told()}", flush=True)
    summary(table.rows)
    draw(options.csv, options.figure)
    print(f"\n# table: {options.csv}\n# figure: {options.figure}")


class Race:
    """One case, and those who take part in it.

    Parameters
    ----------
    case : Case
    contenders : dict of Contender, by name
    peaks : list of Peak
    options : Namespace
    """

    def __init__(
        self,
        case: Case,
        contenders: dict[str, Contender],
        peaks: list[Peak],
        options: argparse.Namespace,
    ) -> None:
        self.case, self._contenders, self._options = case, contenders, options
        unit = "fma" if case.dtype == "float32" else peaks[-1].unit if peaks else ""
        # Of all threads, and of one for the contender that has one.
        counts = {options.threads} if case.part == "single" else {options.threads, 1}
        self._peaks = [peak for peak in peaks if peak.unit == unit and peak.threads in counts]
        self._others = Others()
        self._verdicts: dict[Place, Verdict] = {}
        self._present: list[Place] = []
        self._seconds: dict[Place | Peak, list[float]] = {peak: [] for peak in self._peaks}

    def check(self, judge: Judge) -> None:
        """Let each run once, and judge what it returns."""
        for name, contender in list(self._contenders.items()):
            try:
                contender.forget()
            except Absent as reason:
                print(f"# {name} takes part no more: it {reason}", flush=True)
                del self._contenders[name]
        for place in places(self.case, self._options.slow_limit):
            if place.name not in self._contenders:
                continue
            with _absence(place.name, self.case):
                contender = self._contenders[place.name]
                contender.prepare(self.case, place.layout)
                verdict = judge.verdict(self.case, contender.check(self.case, place.layout))
                self._verdicts[place] = verdict
                if verdict.passed:
                    self._present.append(place)
                    self._seconds[place] = []

    def alternate(self) -> None:
        """Measure all in turn, quick cases more often."""
        fewest, began = self._options.alternations, time.monotonic()
        for turn in itertools.count():
            enough = turn >= fewest and time.monotonic() - began > self._options.least_seconds
            if enough or turn >= 3 * fewest:
                return
            time.sleep(PAUSE)
            self._others.look()
            order: list[Place | Peak] = [*self._peaks, *self._present]
            start = turn % max(1, len(order))
            for each in order[start:] + order[:start]:
                time.sleep(PAUSE)
                if isinstance(each, Peak):
                    self._seconds[each].append(self.case.flops / each.gflops() * 1e-9)
                    continue
                try:
                    self._seconds[each].append(self._contenders[each.name].run(each.layout))
                except Absent as reason:
                    print(f"# {each.name}: {reason}", flush=True)
                    self._present.remove(each)
                    del self._seconds[each]

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        rows = [self._row(place, verdict) for place, verdict in self._verdicts.items()]
        rows += [self._peak_row(peak) for peak in self._peaks]
        share = self._others.share
        busy = {"others_busy": "" if share is None else f"{share:.3f}"}
        return [dict.fromkeys(COLUMNS, "") | row | busy for row in rows]

    def told(self) -> str:
        """Return the case and its ratios in one line."""
        case = self.case
        words = [case.part, case.dtype, case.direction, case.mask, f"{case.seq_len} x {case.head_dim}:"]
        for row in self.rows():
            name = f"{row['contender']} {row['layout']}".strip()
            if row["verdict"] == "wrong":
                words.append(f"{name} is WRONG;")
            elif row["ratio_median"]:
                words.append(f"{name} {row['ratio_median']}{'!' if row['met'] == 'no' else ''};")
            elif row["median_s"]:
                words.append(f"{name} {1e3 * float(row['median_s']):.1f} ms, {row['gflops']} GFLOP/s;")
        share = self._others.share
        if share is not None and share > DISTURBED:
            words.append(f"DISTURBED: other programs used {share:.0%} of the cores;")
        return " ".join(words).rstrip(";")

    def _row(self, place: Place, verdict: Verdict) -> Row:
        contender = self._contenders[place.name]
        row = case_columns(self.case) | {
            "contender": place.name,
            "layout": place.layout,
            "ranks": str(contender.ranks),
            "threads": str(contender.threads),
            "max_abs_difference": f"{verdict.max_abs:.2e}",
            "row_error": f"{verdict.row_error:.2e}",
            "verdict": "ok" if verdict.passed else "wrong",
        }
        if place not in self._seconds:
            return row
        row |= times(self.case, self._seconds[place])
        for peak in self._peaks:
            if peak.threads == contender.ranks * contender.threads:
                share = ratios(self._seconds[peak], self._seconds[place], None)["ratio_median"]
                row["share_of_peak"] = share
        return row | self._against(place, self._seconds[place])

    def _peak_row(self, peak: Peak) -> Row:
        row = case_columns(self.case) | {
            "contender": peak.name,
            "ranks": "1",
            "threads": str(peak.threads),
        }
        row |= times(self.case, self._seconds[peak])
        # The ratio to the time of all threads is the share of the peak that they reach.
        if peak.threads == self._options.threads:
            layout = "" if self.case.part == "single" else BALANCED[self.case.mask]
            row |= self._against(Place(peak.name, layout), self._seconds[peak])
        return row

    def _against(self, place: Place, seconds: Sequence[float]) -> Row:
        base = base_of(place, self._present)
        if base is None or base == place:
            return {}
        # NumPy may stand in, but aims at nothing.
        stands_in = base.name == "numpy"
        wanted = None if stands_in else aim(self.case, place, self._options.threads)
        against = f"{base.name} {base.layout}".strip()
        return {"against": against} | ratios(seconds, self._seconds[base], wanted)


@contextmanager
def _absence(name: str, case: Case) -> Iterator[None]:
    """Say why a contender has no row, and go on."""
    try:
        yield
    except Absent as reason:
        print(f"# {name} has no {case.dtype} {case.direction}: {reason}", flush=True)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="bench_cpu", description=__doc__, allow_abbrev=False)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--figure", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[])
    parser.add_argument("--python", default="", help="the one that has the peers")
    parser.add_argument("--device", choices=("native", "numpy"), required=True)
    parser.add_argument("--weights", choices=WEIGHTS, default="exact", help="of our own in bfloat16")
    for name, choices in (
        ("--parts", ("single", "ring")),
        ("--dtypes", ("float32", "bfloat16")),
        ("--passes", (FORWARD, BOTH)),
        ("--masks", ("full", "causal")),
    ):
        parser.add_argument(name, nargs="+", choices=choices, required=True)
    for name in ("--sizes", "--head-dims"):
        parser.add_argument(name, nargs="+", type=int, required=True)
    for name in ("--heads", "--threads", "--alternations", "--slow-limit"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--least-seconds", type=float, required=True, help="of a case, for quick ones")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one answer")
    return parser.parse_args()


def all_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Go through the cases, small ones first; those of one problem follow each other, for its reference."""
    problems = itertools.product(options.sizes, options.head_dims, options.masks, options.dtypes)
    for seq_len, head_dim, mask, dtype in problems:
        for direction, part in itertools.product(options.passes, options.parts):
            yield Case(part, dtype, direction, mask, seq_len, head_dim, options.heads)


def start(options: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Contender]:
    """Start the contenders that there are, and say which there are not."""
    found: dict[str, Contender] = {}
    device, weights = options.device, options.weights
    peers = (options.peers, options.python)
    waiting = programs(device, weights, options.threads, *peers)
    while waiting:
        program = waiting.pop(0)
        part = "ring" if program.name in ("one-rank", "jax-ring") or program.ranks > 1 else "single"
        if part not in options.parts:
            continue
        try:
            found[program.name] = Contender(program, folder, options.timeout)
        except Absent as reason:
            print(f"# left out: {program.name}, which {reason}", flush=True)
            if program.name == "native":
                print("# so numpy stands in for it, and no aim of the ring means anything", flush=True)
                waiting = [
                    each
                    for each in programs("numpy", weights, options.threads, *peers)
                    if each.name in {other.name for other in waiting}
                ]
        else:
            stack.callback(found[program.name].stop)
    return found


def header(options: argparse.Namespace, cores: int, contenders: Iterable[Contender]) -> dict[str, str]:
    """Return what the table says about itself."""
    versions = {"python": sys.version.split()[0]}
    for contender in contenders:
        versions |= contender.facts
    return {
        "machine": f"{provenance.processor()}, {cores} cores used, {provenance.system()}",
        "ringmpi": options.commit,
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(versions.items())),
        "settings": (
            f"heads {options.heads}, batch 1, threads or ranks {options.threads}, device {options.device}, "
            f"weights {options.weights}, alternations {options.alternations} and more"
        ),
        "command": options.command,
    }


def summary(rows: Sequence[Row]) -> None:
    """Print for each aim in how many cases it is met, and where least."""
    aims: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["aim"]:
            key = tuple(row[name] for name in ("contender", "dtype", "pass", "aim"))
            aims.setdefault(key, []).append(row)
    if not aims:
        return
    form = "{:24}{:10}{:18}{:>6}{:>9}{:>8}{:>8}  {}"
    print("\n" + form.format("against", "dtype", "pass", "aim", "met", "least", "median", "least in"))
    for key, found in aims.items():
        least = min(found, key=lambda row: float(row["ratio_median"]))
        ratio = [float(row["ratio_median"]) for row in found]
        met = f"{sum(row['met'] == 'yes' for row in found)} of {len(found)}"
        place = " ".join(least[name] for name in ("mask", "layout", "seq_len", "head_dim"))
        middle = statistics.median(ratio)
        print(form.format(*key, met, f"{min(ratio):.2f}", f"{middle:.2f}", place))
    disturbed = {
        tuple(row[name] for name in CASE) for row in rows if float(row["others_busy"] or 0) > DISTURBED
    }
    if disturbed:
        print(f"disturbed by other programs: {len(disturbed)} cases; column others_busy tells which")
    for row in rows:
        if row["verdict"] == "wrong":
            print("wrong:", *(row[name] for name in (*CASE, "contender", "layout")))


if __name__ == "__main__":
    main()
