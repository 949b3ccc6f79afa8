"""A trace for Perfetto (ui.perfetto.dev): Chrome's trace-event JSON.

A process is one repeat of a pass of a file, a thread a rank, a slice a step with what the rank did in it
below; arrows are hops. Times are microseconds on rank 0's clock, from the first start in each file on; so
repeats follow each other as they did. The format is Google's "Trace Event Format" (Duca and Sinclair, 2016).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ringmpi.metrics import compute_time, stall_time
from ringmpi.report.culprits import culprit_name
from ringmpi.report.kinds import COMPUTE, INDEX, KINDS, shown
from ringmpi.report.view import View, Views
from ringmpi.store import ResultFile

Event = dict[str, Any]

#: In microseconds; the least that a trace tells.
NANOSECOND = 1e-3


def write_trace(results: Sequence[ResultFile], path: Path) -> None:
    """Write a trace of all repeats of all passes. Local.

    Parameters
    ----------
    results : sequence of ResultFile
    path : Path
    """
    with path.open("w", encoding="ascii") as file:
        file.write('{"displayTimeUnit":"ms","otherData":')
        json.dump({result.path.name: _about(result) for result in results}, file)
        file.write(',"traceEvents":[')
        for number, event in enumerate(events(results)):
            file.write(",\n" if number else "\n")
            json.dump(event, file, separators=(",", ":"), allow_nan=False)
        file.write("\n]}\n")


def events(results: Sequence[ResultFile]) -> Iterator[Event]:
    """Yield the events of a trace. Local."""
    processes, flows = count(1), count(1)
    for result in results:
        passes = [Views(result, direction) for direction in result.directions]
        origin = min((views.begins for views in passes), default=0.0)
        hosts = result.texts("ranks/hostname")
        for views in passes:
            for repeat in range(views.repeats):
                view = views.view(repeat)
                name = f"{result.path.stem}, {view.direction.value}, repeat {repeat + 1} of {views.repeats}"
                yield from _View(view, next(processes), view.origin - origin).events(name, hosts, flows)


class _View:
    """Tells a view as events of one process; a nanosecond is the least that it tells."""

    def __init__(self, view: View, pid: int, begin: float) -> None:
        self._view = view
        self._pid = pid
        self._begin = begin

    def events(self, name: str, hosts: Sequence[str], flows: Iterator[int]) -> Iterator[Event]:
        view = self._view
        yield self._named("process_name", 0, name=name)
        yield self._named("process_sort_index", 0, sort_index=self._pid)
        for rank in view.ranks.tolist():
            yield self._named("thread_name", rank, name=f"rank {rank} on {hosts[rank]}")
            yield self._named("thread_sort_index", rank, sort_index=rank)
        yield from self._steps()
        yield from self._pieces()
        yield from self._hops(flows)
        yield from self._doing()

    def _named(self, what: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": tid, "args": args}

    def _at(self, seconds: float) -> float:
        """Return microseconds, to the nanosecond."""
        return round((self._begin + seconds) * 1e6, 3)

    def _slice(self, name: str, rank: int, begin: float, end: float, args: Event) -> Event:
        at = self._at(begin)
        return {
            "ph": "X",
            "name": name,
            "cat": "ringmpi",
            "pid": self._pid,
            "tid": rank,
            "ts": at,
            "dur": round(self._at(end) - at, 3),
            "args": args,
        }

    def _steps(self) -> Iterator[Event]:
        records = self._view.records
        computed, stalls = compute_time(records), stall_time(records)
        for row, rank in enumerate(self._view.ranks.tolist()):
            for step, record in enumerate(records[row]):
                seconds = float(computed[row, step])
                told = {
                    "compute_us": seconds * 1e6,
                    "stall_us": float(stalls[row, step]) * 1e6,
                    "progress_us": float(record["polling"]) * 1e6,
                    "bytes_sent": record["bytes_sent"],
                    "pairs": record["pairs"],
                    "flops": record["flops"],
                    "flop_per_s": float(record["flops"]) / seconds if seconds else None,
                }
                args = {name: _plain(value) for name, value in told.items()}
                yield self._slice(f"step {step}", rank, record["started"], record["step_end"], args)

    def _pieces(self) -> Iterator[Event]:
        for rank, step, kind, blame, begin, end in self._view.pieces().tolist():
            args: Event = {"step": step}
            if blame >= 0:
                its = self._view.blames[blame]
                args["blamed_on"] = culprit_name(its.cause, its.culprit)
            yield self._slice(shown(KINDS[kind].name), rank, begin, end, args)

    def _hops(self, flows: Iterator[int]) -> Iterator[Event]:
        """Yield the beginning and the end of each hop, each inside of the slice of its step."""
        for arrow in self._view.arrows:
            hop, number = arrow.hop, next(flows)
            args = {"part": str(hop.part), "bytes": arrow.nbytes}
            for phase, rank, step, moment in (
                ("s", hop.sender, hop.step, arrow.posted),
                ("f", hop.receiver, hop.due, arrow.received),
            ):
                event = {
                    "ph": phase,
                    "name": "hop",
                    "cat": "hop",
                    "id": number,
                    "pid": self._pid,
                    "tid": rank,
                    "ts": self._inside(rank, step, moment),
                    "args": args,
                }
                # Bound to the slice around it, not to the next one.
                yield event | ({"bp": "e"} if phase == "f" else {})

    def _inside(self, rank: int, step: int, moment: float) -> float:
        """Return microseconds at which the slice of a step is open: at its end it is not any more."""
        record = self._view.records[np.searchsorted(self._view.ranks, rank), step]
        first, end = self._at(record["started"]), self._at(record["step_end"])
        return max(first, min(self._at(moment), round(end - NANOSECOND, 3)))

    def _doing(self) -> Iterator[Event]:
        """Yield how many ranks compute and how many stall, each time that it changes."""
        pieces = self._view.pieces()
        what = np.where(pieces["kind"] == INDEX[COMPUTE], 0, np.where(pieces["kind"] > 1, 1, -1))
        pieces, what = pieces[what >= 0], what[what >= 0]
        moments = np.concatenate([pieces["begin"], pieces["end"]])
        changes = np.zeros((len(moments), 2), int)
        changes[np.arange(len(moments)), np.tile(what, 2)] = np.repeat([1, -1], len(pieces))
        order = np.argsort(moments, kind="stable")
        doing = np.cumsum(changes[order], axis=0)
        # Of changes at one moment the last one tells what is so from then on.
        last = np.append(np.diff(moments[order]) > 0, True)[: len(moments)]
        for moment, (computing, stalling) in zip(
            moments[order][last].tolist(), doing[last].tolist(), strict=True
        ):
            yield {
                "ph": "C",
                "name": "ranks",
                "pid": self._pid,
                "tid": 0,
                "ts": self._at(moment),
                "args": {"computing": computing, "stalling": stalling},
            }


def _about(result: ResultFile) -> dict[str, Any]:
    return {"kind": result.kind, "command": result.command, "config": result.experiment.record()}


def _plain(value: Any) -> Any:
    """Return a number that JSON has: whole where it is, None for one that was not recorded."""
    if value is None or not np.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(value)
