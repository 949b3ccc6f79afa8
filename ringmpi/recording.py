"""From the ranks of a run into its file: who hands over what, and in which order.

Only rank 0 has a writer. Every method is collective, so that no rank is left with something to hand over.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.comm.team import Team
from ringmpi.config import Experiment
from ringmpi.layout import Layout
from ringmpi.provenance import machine_facts
from ringmpi.store import ResultWriter
from ringmpi.trace import RECORD
from ringmpi.verify import Verdict

Array = NDArray[Any]


@dataclass
class Passes:
    """What the passes over the ring have given so far, on one rank.

    Attributes
    ----------
    out, lse : ndarray or None
        Of the last finished pass.
    warmup, timed, alone : list of ndarray
        The records of each pass; `alone` with no compute beside the transfers.
    barrier : list of float
        Seconds waited before each timed pass.
    """

    out: Array | None = None
    lse: Array | None = None
    warmup: list[Array] = field(default_factory=list)
    timed: list[Array] = field(default_factory=list)
    alone: list[Array] = field(default_factory=list)
    barrier: list[float] = field(default_factory=list)


CLOCK_COLUMNS = {
    "measured_at": "on rank 0's clock, before and after the passes",
    "offset": "the rank's clock minus rank 0's",
    "error_bound": "the offset is right to within this",
}

RANK_COLUMNS = {
    "hostname": ("", "node"),
    "pid": ("1", "process"),
    "local_rank": ("1", "rank among those of its node"),
    "device": ("", "what computed"),
    "threads": ("1", "BLAS threads allowed"),
    "affinity": ("", "cores it may run on"),
    "shard_len": ("token", "tokens owned"),
    "peak_nbytes": ("B", "largest resident size"),
}


class Recording:
    """A result file in the making, seen from one rank.

    Parameters
    ----------
    writer : ResultWriter or None
        None on all ranks but 0.
    experiment : Experiment
    layout : Layout
    """

    def __init__(self, writer: ResultWriter | None, experiment: Experiment, layout: Layout) -> None:
        self.writer = writer
        self._experiment = experiment
        self._layout = layout
        self._has_outputs = False

    def outputs(self, team: Team, passes: Passes) -> None:
        """Write out and lse of the last finished pass, unless all ranks have handed them over before."""
        if all(team.allgather(self._has_outputs)):
            return
        for name, shard in (("out", passes.out), ("lse", passes.lse)):
            assert shard is not None  # Asked for only after a finished pass.
            self.tensor(team, f"outputs/{name}", shard)
        self._has_outputs = True

    def tensor(self, team: Team, name: str, shard: Array) -> None:
        """Write a tensor whose shards the ranks hold, shape (batch, heads, shard_len, ...)."""
        pieces = team.shards_by_piece(self._layout, shard)
        if self.writer is None:
            for _ in pieces:  # Handing over is what the loop does.
                continue
            return
        shape = (*shard.shape[:2], self._experiment.seq_len, *shard.shape[3:])
        self.writer.tensor(name, shape, shard.dtype)
        for positions, piece in pieces:
            self.writer.write_rows(name, positions, piece)

    def timings(self, team: Team, passes: Passes) -> None:
        """Write the traces, one rank after the other."""
        steps = self._layout.size
        for group, made in (
            ("timings", passes.timed),
            ("timings/warmup", passes.warmup),
            ("timings/alone", passes.alone),
        ):
            mine = np.stack(made) if made else np.empty((0, steps), RECORD)
            if self.writer is not None:
                self.writer.records(group, (len(made), steps, steps))
            for rank, records in team.collect(mine):
                if self.writer is not None:
                    self.writer.write_records(group, rank, records)
        waited = np.array(team.allgather(passes.barrier), np.float64).reshape(team.size, -1).T
        if self.writer is not None:
            description = "wait before each repeat, in no other quantity"
            self.writer.table("timings/barrier", waited, "s", description)

    def ranks(self, team: Team, mine: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        """Write what each rank says of itself, and what all have in common."""
        facts = team.allgather(dict(mine))
        if self.writer is None:
            return
        for name, (unit, description) in RANK_COLUMNS.items():
            values = [fact[name] for fact in facts]
            if isinstance(values[0], str):
                self.writer.texts(f"ranks/{name}", values, description)
            else:
                self.writer.table(f"ranks/{name}", np.array(values, np.int64), unit, description)
        shared = {"oversubscribed": oversubscribed(facts)}
        self.writer.facts("machine", machine_facts() | shared | dict(machine))

    def conclude(
        self,
        clocks: Sequence[Array],
        verdicts: Sequence[Verdict],
        digests: Mapping[str, str],
        signal_number: int | None,
    ) -> None:
        """Write what rank 0 knows, and let the file appear."""
        if self.writer is None:
            return
        self.writer.describe(self._experiment, shlex.join(["ringmpi", *sys.argv[1:]]))
        if signal_number is not None:
            self.writer.mark_interrupted(signal_number)
        self.writer.facts("inputs", digests)
        if self._experiment.documents is not None:
            offsets = np.array(self._experiment.documents, np.int64)
            self.writer.table("inputs/documents", offsets, "token", "cumulative offsets")
        measured = np.stack(clocks)
        for column, (name, description) in enumerate(CLOCK_COLUMNS.items()):
            self.writer.table(f"clocks/{name}", measured[:, :, column], "s", description)
        description = "seconds by which the offset grows a second; NaN if it was measured once"
        self.writer.table("clocks/drift", _drift(measured), "1", description)
        how = self._experiment.verify
        interrupted = signal_number is not None and not verdicts and how != "none"
        self.writer.verdicts("interrupted" if interrupted else how, verdicts)
        self.writer.commit()


def _drift(measured: Array) -> Array:
    """Return the slope of each rank's offset from the first measurement to the last, shape (ranks,)."""
    when, offset = measured[:, :, 0], measured[:, :, 1]
    if len(measured) < 2:
        return np.full(measured.shape[1], np.nan)
    return np.asarray((offset[-1] - offset[0]) / (when[-1] - when[0]))


def oversubscribed(facts: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether some node has more ranks than cores that they may run on. Local.

    >>> two = [{"hostname": "a", "affinity": "0"}, {"hostname": "a", "affinity": "1"}]
    >>> oversubscribed(two), oversubscribed([*two, {"hostname": "a", "affinity": "0,1"}])
    (False, True)
    """
    for host in {fact["hostname"] for fact in facts}:
        here = [fact["affinity"].split(",") for fact in facts if fact["hostname"] == host]
        if len(here) > len({core for cores in here for core in cores}):
            return True
    return False
