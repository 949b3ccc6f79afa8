"""One run, in reading order: make the shards, attend, verify, time, write.

The first pass is verified before any other is timed, and every later pass must give the same bits.
"""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.attention import RingAttention
from ringmpi.comm.clocks import clock_offsets
from ringmpi.comm.job import Job
from ringmpi.comm.launcher import available_cores
from ringmpi.comm.team import Team
from ringmpi.config import Experiment
from ringmpi.devices import chosen_device
from ringmpi.errors import (
    FAILED_VERIFICATION,
    OK,
    ConfigError,
    Interrupted,
    RingMPIError,
    TransportError,
)
from ringmpi.layout import Layout
from ringmpi.problem import TENSORS, Problem, problem_of, sha256_of, shard_of
from ringmpi.provenance import machine_facts, peak_nbytes, rank_facts
from ringmpi.report.tables import make_console, report
from ringmpi.store import ResultFile, ResultWriter, refusal
from ringmpi.trace import RECORD
from ringmpi.verify import Verdict, verify

Array = NDArray[Any]


@dataclass
class Passes:
    """What the passes over the ring have given so far, on this rank."""

    out: Array | None = None
    lse: Array | None = None
    warmup: list[Array] = field(default_factory=list)
    timed: list[Array] = field(default_factory=list)
    alone: list[Array] = field(default_factory=list)
    barrier: list[float] = field(default_factory=list)


class Run:
    """A run under way on one rank.

    Parameters
    ----------
    experiment : Experiment
    job : Job
    """

    def __init__(self, experiment: Experiment, job: Job) -> None:
        self.experiment = experiment
        self.job = job
        self.team: Team = job.team
        self.passes = Passes()
        self.verdicts: list[Verdict] = []
        self.clocks: list[NDArray[np.float64]] = []
        self.layout = Layout(experiment.layout, experiment.seq_len, job.team.size)
        self.path = output_path(experiment, job.team.size)
        self.problem: Problem = problem_of(experiment)
        self.outputs_written = False

    def __call__(self) -> int:
        """Do everything, and return the exit code. Collective."""
        _agree_on_start(self.experiment, self.path, self.team)
        self.say(f"# ringmpi: {self.experiment.name} on {self.team.size} rank(s), {self.job.library}")
        with ResultWriter(self.path) if self.team.rank == 0 else nullcontext() as writer:
            interruption = self._until_interrupted(writer)
            if interruption is not None:
                self._require_finished_pass(interruption)
            self._write_rest(writer, interruption)
        if interruption is not None:
            self.team.barrier()  # Nobody leaves, which would end the job, before rank 0 has written.
            self.say(f"finished work is in {self.path}")
            raise interruption
        self.job.watch.disarm()
        failed = any(not verdict.passed for verdict in self.verdicts)
        self._show()
        return self.team.share(FAILED_VERIFICATION if failed else OK)

    def say(self, line: str) -> None:
        """Print a line, on rank 0."""
        if self.team.rank == 0:
            print(line, flush=True)

    def _until_interrupted(self, writer: ResultWriter | None) -> Interrupted | None:
        """Attend, verify and time; return what ended that early, if anything did."""
        try:
            self._measure(writer)
        except Interrupted as stop:
            self.team = self.job.closing
            return stop
        return None

    def _measure(self, writer: ResultWriter | None) -> None:
        experiment, passes = self.experiment, self.passes
        self.clocks.append(clock_offsets(self.team))
        runs = self.layout.runs(self.team.rank)
        q, k, v = (shard_of(self.problem, name, runs, experiment, self._heed) for name in TENSORS)
        with self._attention() as attention:
            for number in range(experiment.warmup + experiment.repeats):
                timed = number >= experiment.warmup
                waited = self._start_together()
                out, lse = attention.forward(q, k, v)
                self._same_bits(out, lse)
                passes.out, passes.lse = out, lse
                (passes.timed if timed else passes.warmup).append(attention.trace.records)
                if timed:
                    passes.barrier.append(waited)
                self._say_pass(number, attention.trace.records)
                if number == 0:
                    self._write_outputs(writer)
                    self._verify(writer)
                    if any(not verdict.passed for verdict in self.verdicts):
                        break  # A wrong result has no times.
            for _ in passes.timed:
                self._start_together()
                passes.alone.append(attention.transfers_alone().records)
        self.clocks.append(clock_offsets(self.team))

    def _attention(self) -> RingAttention:
        experiment = self.experiment
        return RingAttention(
            self.job.comm,
            seq_len=experiment.seq_len,
            layout=experiment.layout,
            causal=experiment.causal,
            window=experiment.window,
            documents=experiment.documents,
            softmax_scale=experiment.softmax_scale,
            method=experiment.method,
            device=experiment.device,
            progress=experiment.progress,
            chunk_limit=experiment.chunk_limit,
            check_transfers=experiment.check_transfers,
            watch=self.job.watch,
        )

    def _start_together(self) -> float:
        """Meet the other ranks, so that no lateness from before the pass shows as a stall in it."""
        before = time.perf_counter()
        self.team.barrier()
        return time.perf_counter() - before

    def _same_bits(self, out: Array, lse: Array) -> None:
        """Refuse a pass that gives other bits than the one before, which was verified."""
        passes = self.passes
        if passes.out is None or passes.lse is None:
            return
        same = passes.out.tobytes() == out.tobytes() and passes.lse.tobytes() == lse.tobytes()
        if not same:
            raise TransportError(
                "a repeat gave other bits than the pass before it, from the same inputs"
            )

    def _heed(self, doing: str = "makes its shard") -> None:
        """Heed signals and answer ranks that ask, between two pieces of long work. Local."""
        self.job.watch.look(lambda: doing)

    def _heed_verification(self, done: int, total: int) -> None:
        self._heed(f"verifies, {done} of {total} heads done")

    def _say_pass(self, number: int, records: Array) -> None:
        warmup, repeats = self.experiment.warmup, self.experiment.repeats
        timed = number >= warmup
        name = f"repeat {number - warmup + 1}/{repeats}" if timed else f"warm-up {number + 1}/{warmup}"
        seconds = records["step_end"][-1] - records["started"][0]
        self.say(f"{name}: {seconds * 1e3:.1f} ms on rank 0")

    def _write_outputs(self, writer: ResultWriter | None) -> None:
        """Bring out and lse to rank 0, piece by piece, and there into the file. Collective."""
        passes, experiment = self.passes, self.experiment
        assert passes.out is not None  # Called only after a finished pass.
        assert passes.lse is not None
        shape = (experiment.batch, experiment.heads, experiment.seq_len)
        for name, shard in (("out", passes.out), ("lse", passes.lse)):
            if writer is not None:
                writer.tensor(f"outputs/{name}", (*shape, *shard.shape[3:]), shard.dtype)
            for positions, piece in self.team.shards_by_piece(self.layout, shard):
                assert writer is not None  # Only rank 0 gets pieces.
                writer.write_rows(f"outputs/{name}", positions, piece)
        self.outputs_written = True

    def _verify(self, writer: ResultWriter | None) -> None:
        """Compare the written outputs with the reference, on rank 0. Collective."""
        experiment = self.experiment
        if experiment.verify == "none":
            return
        started = time.perf_counter()
        if writer is not None:
            self.verdicts = verify(
                writer, self.problem, experiment, self.layout, self._heed_verification
            )
        self.verdicts = self.team.share(self.verdicts)
        verdict = "passed" if all(verdict.passed for verdict in self.verdicts) else "FAILED"
        self.say(f"verification {verdict}: {time.perf_counter() - started:.1f} s ({experiment.verify})")

    def _require_finished_pass(self, interruption: Interrupted) -> None:
        """End without a file if some rank has nothing to put into it. Collective."""
        if not all(self.team.allgather(self.passes.out is not None)):
            self.say("interrupted before the first pass was done: no file is written")
            raise interruption
        finished = min(self.team.allgather(len(self.passes.timed)))
        self.passes = replace(
            self.passes,
            warmup=self.passes.warmup[: min(self.team.allgather(len(self.passes.warmup)))],
            timed=self.passes.timed[:finished],
            barrier=self.passes.barrier[:finished],
            alone=[],
        )

    def _write_rest(self, writer: ResultWriter | None, interruption: Interrupted | None) -> None:
        """Write everything but the outputs, and let the file appear. Collective."""
        team, experiment = self.team, self.experiment
        if not all(team.allgather(self.outputs_written)):
            self._write_outputs(writer)
        if experiment.store_inputs and interruption is None:
            self._write_inputs(writer)
        facts = team.allgather(self._facts_of_rank())
        self._write_records(writer)
        if writer is None:
            return
        writer.describe(experiment, shlex.join(["ringmpi", *sys.argv[1:]]))
        if interruption is not None:
            writer.mark_interrupted(interruption.signal_number)
        else:
            writer.facts("inputs", self._digests())
        if experiment.documents is not None:
            offsets = np.array(experiment.documents, np.int64)
            writer.table("inputs/documents", offsets, "token", "cumulative offsets")
        self._write_ranks(writer, facts)
        writer.facts("machine", self._facts_of_machine())
        clocks = np.stack(self.clocks)
        for column, (name, description) in enumerate(CLOCK_COLUMNS.items()):
            writer.table(f"clocks/{name}", clocks[:, :, column], "s", description)
        writer.verdicts(experiment.verify, self.verdicts)
        writer.commit()

    def _write_inputs(self, writer: ResultWriter | None) -> None:
        experiment, runs = self.experiment, self.layout.runs(self.team.rank)
        for name in TENSORS:
            shard = shard_of(self.problem, name, runs, experiment, self._heed)
            if writer is not None:
                shape = (*shard.shape[:2], experiment.seq_len, experiment.head_dim)
                writer.tensor(f"inputs/{name}", shape, shard.dtype)
            for positions, piece in self.team.shards_by_piece(self.layout, shard):
                assert writer is not None  # Only rank 0 gets pieces.
                writer.write_rows(f"inputs/{name}", positions, piece)

    def _write_records(self, writer: ResultWriter | None) -> None:
        """Bring the traces to rank 0, one rank after the other. Collective."""
        steps = self.layout.size
        for group, passes in (
            ("timings", self.passes.timed),
            ("timings/warmup", self.passes.warmup),
            ("timings/alone", self.passes.alone),
        ):
            if writer is not None:
                writer.records(group, (len(passes), steps, steps))
            mine = np.stack(passes) if passes else np.empty((0, steps), RECORD)
            for rank, records in self.team.collect(mine):
                assert writer is not None  # Only rank 0 gets them.
                writer.write_records(group, rank, records)
        barriers = self.team.allgather(self.passes.barrier)
        if writer is not None:
            waited = np.array(barriers, np.float64).reshape(self.team.size, -1).T
            writer.table(
                "timings/barrier", waited, "s", "wait before each repeat, in no other quantity"
            )

    def _facts_of_rank(self) -> dict[str, Any]:
        return rank_facts() | {
            "local_rank": self.job.local_rank,
            "device": chosen_device(self.experiment.device),
            "shard_len": self.layout.shard_len(self.team.rank),
            "peak_nbytes": peak_nbytes(),
        }

    def _facts_of_machine(self) -> dict[str, Any]:
        return machine_facts() | {
            "mpi_library": self.job.library,
            "thread_level": self.job.thread_level,
            "gpu_aware": False,
            "transport": "direct",
            "barrier": "repeat",
            "oversubscribed": self.team.size > available_cores(),
        }

    def _write_ranks(self, writer: ResultWriter, facts: list[dict[str, Any]]) -> None:
        for name, (unit, description) in RANK_COLUMNS.items():
            values = [fact[name] for fact in facts]
            if isinstance(values[0], str):
                writer.texts(f"ranks/{name}", values, description)
            else:
                writer.table(f"ranks/{name}", np.array(values, np.int64), unit, description)

    def _digests(self) -> dict[str, str]:
        return {f"{name}_sha256": sha256_of(self.problem, name, self.experiment) for name in TENSORS}

    def _show(self) -> None:
        if self.team.rank != 0:
            return
        with ResultFile(self.path) as result:
            report(result, make_console())


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


def output_path(experiment: Experiment, size: int) -> Path:
    """Return where the result goes: as asked, or a name in ``results/`` that says what was run. Local."""
    if experiment.output is not None:
        return Path(experiment.output)
    return Path("results") / f"{experiment.name}-p{size}.h5"


def _agree_on_start(experiment: Experiment, path: Path, team: Team) -> None:
    """Refuse on every rank what any rank must refuse. Collective."""
    error: RingMPIError | None = None
    if experiment.ranks is not None and experiment.ranks != team.size:
        error = ConfigError(
            f"ranks={experiment.ranks}: the job has {team.size}; start it with -n {experiment.ranks}"
        )
    elif team.rank == 0:
        error = refusal(path)
    team.agree(error)
    records = team.allgather(repr(experiment))
    if len(set(records)) > 1:
        raise ConfigError(
            "ranks were given different options or input files; start all with one command"
        )


def run(experiment: Experiment, job: Job) -> int:
    """Run an experiment on the ranks of a job, and return the exit code. Collective.

    Raises
    ------
    ConfigError
        On every rank, if it cannot be run here.
    Interrupted
        On every rank, after finished work is on disk.
    """
    return Run(experiment, job)()
