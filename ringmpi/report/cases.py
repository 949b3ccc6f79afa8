"""What each pass of each file says, as a row of texts, and which rows belong to one case.

A case is all that is alike but the method: problem, layout, ranks, link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmpi.metrics import by_rank, makespans
from ringmpi.report.text import megabytes, milliseconds
from ringmpi.schedule import GROUP_OPTIONS, Pass
from ringmpi.store import ResultFile
from ringmpi.verify import Verdict

#: Tensors that a pass gives, on all of which the verdict is; of those but lse the worst error is told.
GIVES = {Pass.FORWARD: ("out", "lse"), Pass.BACKWARD: ("dq", "dk", "dv")}

#: Options in which results of one case may differ: what is compared, and what changes no result.
FREE = ("method", "output", "ranks", "verify", "timeout", *GROUP_OPTIONS.values())

#: What is told of a pass, in milliseconds, MB of 1e6 bytes, and numbers.
TIMES = ("time ms", "min ms", "max ms", "stall ms", "compute ms")
COUNTS = ("sent MB", "messages", "hops", "held MB")
ERRORS = ("tensor", "max error", "single pass", "mean error", "single mean", "verdict")
MARKS = ("fastest", "oversubscribed")

Row = dict[str, str]


@dataclass(frozen=True)
class Cases:
    """Rows, and what tells them apart.

    Attributes
    ----------
    differing : list of str
        The options, apart from the method's own, in which the results differ, and ``kind`` if some are
        simulated; each row has them too.
    rows : list of Row
        Sent bytes, messages, hops and held bytes are of the rank with the most.
    """

    differing: list[str]
    rows: list[Row]

    def by_case(self) -> list[list[Row]]:
        """Return the rows of each case and pass; the fastest of each is marked."""
        found = defaultdict(list)
        for row in self.rows:
            found[tuple(row[name] for name in ("ranks", "pass", *self.differing))].append(row)
        return list(found.values())

    def words(self, row: Row) -> str:
        """Return what tells the case of a row from the others."""
        return ", ".join(f"{name} {row[name]}" for name in ("ranks", *self.differing))


def cases_of(results: Sequence[ResultFile]) -> Cases:
    """Return what results say, side by side. Local."""
    differing = _differing(results)
    rows = []
    for result in results:
        record = result.experiment.record() | {"kind": result.kind}
        varied = {name: _text(record[name]) for name in differing}
        rows += [_row(result, direction) | varied for direction in result.directions]
    cases = Cases(differing, rows)
    for case in cases.by_case():
        _mark_fastest(case)
    return cases


def _row(result: ResultFile, direction: Pass) -> Row:
    """Return what one pass of a file says."""
    machine, method = result.facts("machine"), result.experiment.method
    grouped = f"{method}:{machine['inner_ranks']}" if method in GROUP_OPTIONS else method
    row = dict.fromkeys((*TIMES, *COUNTS, *MARKS), "-") | {
        "method": grouped,
        "ranks": str(result.size),
        "pass": direction.value,
        "fastest": "",
        "oversubscribed": "yes" if result.oversubscribed else "",
    }
    held = f"ranks/held_{direction.value}_nbytes"
    if result.has(held):
        row["held MB"] = megabytes(result.column(held).max())
    timings = result.timings(direction)
    summaries = by_rank(timings)
    if summaries:
        spans = makespans(timings)
        row |= {
            "time ms": milliseconds(float(np.median(spans))),
            "min ms": milliseconds(spans.min()),
            "max ms": milliseconds(spans.max()),
            "stall ms": milliseconds(max(rank.stall for rank in summaries)),
            "compute ms": milliseconds(max(rank.compute for rank in summaries)),
            "sent MB": megabytes(max(rank.counts["bytes_sent"] for rank in summaries)),
        }
        for name in ("messages", "hops"):
            known = [rank.counts[name] for rank in summaries if name in rank.counts]
            row[name] = str(max(known, default="-"))  # A file of an older ringmpi knows of none.
    return row | _errors(result, direction)


def _errors(result: ResultFile, direction: Pass) -> Row:
    """Return the errors of a pass: of its tensor with the worst one, and the verdict on all."""
    row = dict.fromkeys(ERRORS, "-")
    found = [verdict for verdict in result.verdicts() if verdict.tensor in GIVES[direction]]
    if not found:
        return row | {"verdict": "not verified"}
    worst = max((verdict for verdict in found if verdict.tensor != "lse"), key=_badness)
    return row | {
        "tensor": worst.tensor,
        "max error": f"{worst.max_abs:.2e}",
        "single pass": f"{worst.single_max:.2e}",
        "mean error": f"{worst.mean_abs:.2e}",
        "single mean": f"{worst.single_mean:.2e}",
        "verdict": "OK" if all(verdict.passed for verdict in found) else "FAILED",
    }


def _badness(verdict: Verdict) -> float:
    """Return how the error of a tensor compares with that of a single pass; NaN is worst."""
    ratio = verdict.max_abs / (verdict.single_max or 1.0)
    return ratio if ratio == ratio else np.inf


def _differing(results: Sequence[ResultFile]) -> list[str]:
    """Return the options, apart from the method's own, in which the results differ."""
    records = [result.experiment.record() | {"kind": result.kind} for result in results]
    return [
        name for name in records[0] if name not in FREE and len({_text(r[name]) for r in records}) > 1
    ]


def _mark_fastest(case: Sequence[Row]) -> None:
    """Mark the row of the shortest time; a wrong result has none."""
    timed = [row for row in case if row["time ms"] != "-" and row["verdict"] != "FAILED"]
    if timed:
        min(timed, key=lambda row: float(row["time ms"]))["fastest"] = "<"


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
