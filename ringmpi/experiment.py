"""One run, in reading order: make the shards, attend, verify, time, write.

The first pass is verified before any other is timed, and every later pass must give the same bits.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.attention import RingAttention
from ringmpi.comm.clocks import clock_offsets
from ringmpi.comm.job import Job
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
from ringmpi.provenance import peak_nbytes, rank_facts
from ringmpi.recording import Passes, Recording
from ringmpi.report.tables import make_console, report
from ringmpi.store import ResultFile, ResultWriter, refusal
from ringmpi.verify import Verdict, verify

Array = NDArray[Any]


def run(experiment: Experiment, job: Job) -> int:
    """Run an experiment on the ranks of a job, and return the exit code. Collective.

    Raises
    ------
    ConfigError
        On every rank, if it cannot be run here.
    Interrupted
        On every rank, after finished work is on disk.
    """
    path = output_path(experiment, job.team.size)
    _agree_on_start(experiment, path, job.team)
    with ResultWriter(path) if job.team.rank == 0 else nullcontext() as writer:
        under_way = Run(experiment, job, writer)
        interruption = under_way.measure()
        under_way.write(interruption)
    if interruption is not None:
        job.closing.barrier()  # Nobody leaves, which would end the job, before rank 0 has written.
        under_way.say(f"finished work is in {path}")
        raise interruption
    if job.team.rank == 0:
        with ResultFile(path) as result:
            report(result, make_console())
    return job.team.share(FAILED_VERIFICATION if under_way.failed else OK)


class Run:
    """A run under way on one rank. Its methods are collective unless they say otherwise.

    Parameters
    ----------
    experiment : Experiment
    job : Job
    writer : ResultWriter or None
        None on all ranks but 0.
    """

    def __init__(self, experiment: Experiment, job: Job, writer: ResultWriter | None) -> None:
        self._experiment = experiment
        self._job = job
        self._writer = writer
        self._layout = Layout(experiment.layout, experiment.seq_len, job.team.size)
        self._problem: Problem = problem_of(experiment)
        self._recording = Recording(writer, experiment, self._layout)
        self._passes = Passes()
        self._verdicts: list[Verdict] = []
        self._clocks: list[NDArray[np.float64]] = []

    @property
    def failed(self) -> bool:
        """Whether verification found something wrong. Local."""
        return any(not verdict.passed for verdict in self._verdicts)

    def say(self, line: str) -> None:
        """Print a line, on rank 0. Local."""
        if self._job.team.rank == 0:
            print(line, flush=True)

    def measure(self) -> Interrupted | None:
        """Attend, verify and time; return what ended that early, if anything did."""
        name, size = self._experiment.name, self._job.team.size
        self.say(f"# ringmpi: {name} on {size} rank(s), {self._job.library}")
        try:
            self._clocks.append(clock_offsets(self._job.team))
            with self._attention() as attention:
                self._make_passes(attention, *self._make_shards())
            self._clocks.append(clock_offsets(self._job.team))
        except Interrupted as stop:
            return stop
        return None

    def write(self, interruption: Interrupted | None) -> None:
        """Write what there is and let the file appear; without a finished pass there is nothing."""
        # After an interruption some collective of the team may be half done.
        team = self._job.team if interruption is None else self._job.closing
        if interruption is not None:
            self._keep_common_passes(team, interruption)
        self._recording.outputs(team, self._passes)
        if self._experiment.store_inputs and interruption is None:
            for name, shard in zip(TENSORS, self._make_shards(), strict=True):
                self._recording.tensor(team, f"inputs/{name}", shard)
        self._recording.timings(team, self._passes)
        self._recording.ranks(team, self._facts_of_rank(), self._facts_of_job())
        self._job.watch.disarm()  # What is left is done by rank 0 alone, and the others wait for it.
        digests = self._digests() if interruption is None else {}
        number = None if interruption is None else interruption.signal_number
        self._recording.conclude(self._clocks, self._verdicts, digests, number)

    def _make_shards(self) -> list[Array]:
        runs = self._layout.runs(self._job.team.rank)
        return [
            shard_of(self._problem, name, runs, self._experiment, lambda: self._heed("makes its shard"))
            for name in TENSORS
        ]

    def _make_passes(self, attention: RingAttention, q: Array, k: Array, v: Array) -> None:
        passes, warmup = self._passes, self._experiment.warmup
        for number in range(warmup + self._experiment.repeats):
            waited = self._start_together()
            out, lse = attention.forward(q, k, v)
            self._require_same_bits(out, lse)
            passes.out, passes.lse = out, lse
            if number < warmup:
                passes.warmup.append(attention.trace.records)
            else:
                passes.timed.append(attention.trace.records)
                passes.barrier.append(waited)
            self._say_pass(number, attention.trace.records)
            if number == 0:
                self._recording.outputs(self._job.team, passes)
                self._verify()
                if self.failed:
                    return  # A wrong result has no times.
        for _ in passes.timed:
            self._start_together()
            passes.alone.append(attention.transfers_alone().records)

    def _attention(self) -> RingAttention:
        experiment = self._experiment
        return RingAttention(
            self._job.comm,
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
            watch=self._job.watch,
        )

    def _start_together(self) -> float:
        """Meet the other ranks, so that no lateness from before the pass shows as a stall in it."""
        before = time.perf_counter()
        self._job.team.barrier()
        return time.perf_counter() - before

    def _require_same_bits(self, out: Array, lse: Array) -> None:
        """Refuse a pass that gives other bits than the one before, the first of which is verified. Local."""
        before = self._passes.out, self._passes.lse
        for old, new in zip(before, (out, lse), strict=True):
            if old is not None and _bits(old) != _bits(new):
                raise TransportError(
                    "a repeat gave other bits than the pass before it, from the same inputs"
                )

    def _verify(self) -> None:
        """Compare the written outputs with the reference, on rank 0."""
        how = self._experiment.verify
        if how == "none":
            return

        def heed(done: int, total: int) -> None:
            self._heed(f"verifies, {done} of {total} heads done")

        started = time.perf_counter()
        if self._writer is not None:
            self._verdicts = verify(self._writer, self._problem, self._experiment, self._layout, heed)
        self._verdicts = self._job.team.share(self._verdicts)
        verdict = "FAILED" if self.failed else "passed"
        self.say(f"verification {verdict}: {time.perf_counter() - started:.1f} s ({how})")

    def _heed(self, doing: str) -> None:
        """Heed signals and answer ranks that ask, between two pieces of long work. Local."""
        self._job.watch.look(lambda: doing)

    def _say_pass(self, number: int, records: Array) -> None:
        warmup, repeats = self._experiment.warmup, self._experiment.repeats
        timed = number >= warmup
        name = f"repeat {number - warmup + 1}/{repeats}" if timed else f"warm-up {number + 1}/{warmup}"
        seconds = records["step_end"][-1] - records["started"][0]
        self.say(f"{name}: {seconds * 1e3:.1f} ms on rank 0")

    def _keep_common_passes(self, team: Team, interruption: Interrupted) -> None:
        """Drop passes that not all ranks have finished; end without a file if none is left."""
        passes = self._passes
        if not all(team.allgather(passes.out is not None)):
            self.say("interrupted before the first pass was done: no file is written")
            raise interruption
        counts = team.allgather((len(passes.warmup), len(passes.timed)))
        warmup, timed = (min(column) for column in zip(*counts, strict=True))
        self._passes = replace(
            passes,
            warmup=passes.warmup[:warmup],
            timed=passes.timed[:timed],
            barrier=passes.barrier[:timed],
            alone=[],
        )

    def _facts_of_rank(self) -> dict[str, Any]:
        return rank_facts() | {
            "local_rank": self._job.local_rank,
            "device": chosen_device(self._experiment.device),
            "shard_len": self._layout.shard_len(self._job.team.rank),
            "peak_nbytes": peak_nbytes(),
        }

    def _facts_of_job(self) -> dict[str, Any]:
        return {
            "mpi_library": self._job.library,
            "thread_level": self._job.thread_level,
            "gpu_aware": False,
            "transport": "direct",
            "barrier": "repeat",
        }

    def _digests(self) -> dict[str, str]:
        if self._writer is None:
            return {}
        return {f"{name}_sha256": sha256_of(self._problem, name, self._experiment) for name in TENSORS}


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
    if len(set(team.allgather(repr(experiment)))) > 1:
        raise ConfigError(
            "ranks were given different options or input files; start all with one command"
        )


def _bits(array: Array) -> memoryview:
    """Return the bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data
