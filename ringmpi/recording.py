"""From the ranks of a run into its file: who hands over what, and in which order.

Only rank 0 has a writer. Every method is collective, so that no rank is left with something to hand over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.config import Experiment
from ringmpi.devices import PACED
from ringmpi.layout import Layout
from ringmpi.metrics import Clocks
from ringmpi.provenance import command_line, machine_facts
from ringmpi.schedule import Pass
from ringmpi.store import TIMINGS, ResultWriter
from ringmpi.trace import RECORD
from ringmpi.verify import Verdict
from ringmpi.writing import TensorWriting

if TYPE_CHECKING:
    from ringmpi.comm.team import Team

Array = NDArray[Any]


@dataclass
class Records:
    """What passes of one direction have left so far, on one rank.

    Attributes
    ----------
    warmup, timed, alone : list of ndarray
        The trace of each pass; `alone` with no compute beside the transfers.
    barrier : list of float
        Seconds waited before each timed pass.
    """

    warmup: list[Array] = field(default_factory=list)
    timed: list[Array] = field(default_factory=list)
    alone: list[Array] = field(default_factory=list)
    barrier: list[float] = field(default_factory=list)

    def first(self, warmup: int, timed: int) -> Records:
        """Return what so many passes have left, none of them alone."""
        return Records(self.warmup[:warmup], self.timed[:timed], [], self.barrier[:timed])


@dataclass
class Passes:
    """What the passes have given so far, on one rank.

    Attributes
    ----------
    results : dict of str to ndarray
        ``out``, ``lse`` and the gradients of the last pass that is finished, backward included.
    records : dict of Pass to Records
        Of the directions that are run.
    """

    results: dict[str, Array] = field(default_factory=dict)
    records: dict[Pass, Records] = field(default_factory=dict)


CLOCK_COLUMNS = {
    "measured_at": "on rank 0's clock, before and after the passes",
    "offset": "the rank's clock minus rank 0's",
    "error_bound": "the offset is right to within this",
}

#: By their names in `metrics.Clocks`: of both measurements together. Of one alone no drift is known: NaN.
CLOCK_RESULTS = {
    "drift": ("1", "seconds by which the offset grows a second"),
    "drift_error": ("1", "the drift is right to within this"),
    "corrected_error": (
        "s",
        "a moment between the measurements, on rank 0's clock, is right to within this",
    ),
}

RANK_COLUMNS = {
    "hostname": ("", "node"),
    "pid": ("1", "process"),
    "local_rank": ("1", "rank among those of its node"),
    "device": ("", "what computed"),
    "instruction_set": ("", "of the native device"),
    "gpu": ("", "the GPU's name and architecture"),
    "gpu_identity": ("", "its UUID, the same for all ranks that share it"),
    "gpu_sharing": ("1", "ranks that compute on it; 0 without one"),
    "matrix_unit": ("", "whether the native device used it"),
    "weights": ("", "exact, or rounded to the dtype of the inputs before they multiply"),
    "paced_flops": ("1/s", "FLOP/s of a paced rank, which computes nothing; 0 with another device"),
    "compile_s": ("s", "compiling the device's code, or waiting for it; in no other quantity"),
    "threads": ("1", "of the native device; with another one those that BLAS may use, 0 if unknown"),
    "affinity": ("", "cores it may run on"),
    "cpu_quota": ("1", "cores' worth of time that its control group has; 0 for no limit"),
    "shard_len": ("token", "keys owned"),
    "query_shard_len": ("token", "queries owned"),
    "held_forward_nbytes": ("B", "buffers of the forward pass, beside the rank's own tensors"),
    "held_backward_nbytes": ("B", "buffers of the backward pass, beside the rank's own tensors"),
    "staged_nbytes": ("B", "pinned host memory that blocks of a GPU travel through"),
    "peak_nbytes": ("B", "largest resident size"),
}


class Recording:
    """A result file in the making, seen from one rank.

    Parameters
    ----------
    writer : ResultWriter or None
        None on all ranks but 0.
    tensors : TensorWriting
        How tensors get into the file.
    experiment : Experiment
    layouts : dict of str to Layout
        Of every tensor by name.
    """

    def __init__(
        self,
        writer: ResultWriter | None,
        tensors: TensorWriting,
        experiment: Experiment,
        layouts: Mapping[str, Layout],
    ) -> None:
        self.writer = writer
        self._tensors = tensors
        self._experiment = experiment
        self._layouts = layouts
        self._has_outputs = False

    def outputs(self, team: Team, passes: Passes) -> None:
        """Write the results of the last finished pass, unless all ranks have handed them over before."""
        if all(team.allgather(self._has_outputs)):
            return
        for name, shard in passes.results.items():
            self.tensor(team, "outputs", name, shard)
        self._has_outputs = True

    def tensor(self, team: Team, group: str, name: str, shard: Array) -> None:
        """Write a tensor whose shards the ranks hold, shape (batch, heads, shard_len, ...)."""
        self._tensors.write(team, f"{group}/{name}", self._layouts[name], shard)

    def timings(self, team: Team, passes: Passes) -> None:
        """Write the traces, one rank after the other."""
        for direction, records in passes.records.items():
            group = TIMINGS[direction]
            steps = len((records.warmup + records.timed)[0])
            for name, made in (
                (group, records.timed),
                (f"{group}/warmup", records.warmup),
                (f"{group}/alone", records.alone),
            ):
                mine = np.stack(made) if made else np.empty((0, steps), RECORD)
                if self.writer is not None:
                    self.writer.records(name, (len(made), team.size, steps))
                for rank, found in team.collect(mine):
                    if self.writer is not None:
                        self.writer.write_records(name, rank, found)
            waited = np.array(team.allgather(records.barrier), np.float64).reshape(team.size, -1).T
            if self.writer is not None:
                description = "wait before each repeat, in no other quantity"
                self.writer.table(f"{group}/barrier", waited, "s", description)

    def ranks(self, team: Team, mine: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        """Write what each rank says of itself, and what all have in common."""
        facts = team.allgather(dict(mine))
        if self.writer is None:
            return
        write_ranks(self.writer, facts)
        shared = {"oversubscribed": oversubscribed(facts)}
        self.writer.facts("machine", machine_facts() | shared | dict(machine))

    def conclude(
        self,
        team: Team,
        clocks: Sequence[Array],
        verdicts: Sequence[Verdict],
        digests: Mapping[str, str],
        signal_number: int | None,
    ) -> None:
        """Write what rank 0 knows, and let the file appear."""
        self._tensors.finish(team)
        if self.writer is None:
            return
        self.writer.describe(self._experiment, command_line())
        if signal_number is not None:
            self.writer.mark_interrupted(signal_number)
        self.writer.facts("inputs", digests)
        if self._experiment.documents is not None:
            offsets = np.array(self._experiment.documents, np.int64)
            self.writer.table("inputs/documents", offsets, "token", "cumulative offsets")
        write_clocks(self.writer, np.stack(clocks))
        how = self._experiment.verify
        interrupted = signal_number is not None and not verdicts and how != "none"
        self.writer.verdicts("interrupted" if interrupted else how, verdicts)
        self.writer.commit()


def write_ranks(writer: ResultWriter, facts: Sequence[Mapping[str, Any]]) -> None:
    """Write what every rank says of itself, by the names of `RANK_COLUMNS`. Local."""
    for name, (unit, description) in RANK_COLUMNS.items():
        values = [fact[name] for fact in facts]
        if isinstance(values[0], str):
            writer.texts(f"ranks/{name}", values, description)
        else:
            dtype = np.float64 if isinstance(values[0], float) else np.int64
            writer.table(f"ranks/{name}", np.array(values, dtype), unit, description)


def write_clocks(writer: ResultWriter, measured: Array) -> None:
    """Write how clocks compare, shape (measurements, ranks, CLOCK_COLUMNS). Local."""
    for column, (name, description) in enumerate(CLOCK_COLUMNS.items()):
        writer.table(f"clocks/{name}", measured[:, :, column], "s", description)
    together = Clocks(*np.moveaxis(measured, 2, 0))
    for name, (unit, description) in CLOCK_RESULTS.items():
        writer.table(f"clocks/{name}", getattr(together, name), unit, description)


def oversubscribed(facts: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether some node has more threads than cores that its ranks may run on. Local.

    Paced ranks are not counted: they sleep. A control group that limits their time is that of the whole job.

    >>> two = [{"hostname": "a", "affinity": core, "threads": 1} for core in "01"]
    >>> oversubscribed(two), oversubscribed([*two, {"hostname": "a", "affinity": "0,1", "threads": 0}])
    (False, True)
    >>> oversubscribed([{"hostname": "a", "affinity": "0,1", "threads": 3}])
    True
    >>> oversubscribed([rank | {"cpu_quota": 1.5} for rank in two])
    True
    """
    for host in {fact["hostname"] for fact in facts}:
        here = [f for f in facts if f["hostname"] == host and f.get("device") != PACED]
        cores = {core for fact in here for core in fact["affinity"].split(",")}
        quotas = [fact["cpu_quota"] for fact in here if fact.get("cpu_quota")]
        if sum(max(1, fact["threads"]) for fact in here) > min([len(cores), *quotas]):
            return True
    return False
