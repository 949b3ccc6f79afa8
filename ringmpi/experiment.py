"""One run, in reading order: make the shards, attend, verify, time, write.

The first pass is verified before any other is timed, and every later pass must give the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from ringmpi.agreed import Agreed, agreed_device
from ringmpi.attention import RingAttention
from ringmpi.comm.awareness import takes_device_pointers
from ringmpi.comm.clocks import clock_offsets, start_together
from ringmpi.comm.job import Job
from ringmpi.comm.link import network_of, nodes_of
from ringmpi.comm.progress import thread_refusal
from ringmpi.comm.team import Team
from ringmpi.config import Experiment
from ringmpi.devices import device_facts, slowness
from ringmpi.encoding import numpy_dtype
from ringmpi.errors import (
    FAILED_VERIFICATION,
    OK,
    ConfigError,
    Interrupted,
    RingMPIError,
    TransportError,
)
from ringmpi.problem import Problem, pieces_of, problem_of, sha256_of, shard_of, tensors_of
from ringmpi.provenance import memory_nbytes, peak_nbytes, rank_facts
from ringmpi.recording import Passes, Recording, Records
from ringmpi.report.console import speak
from ringmpi.report.progress import track
from ringmpi.report.tables import described, report
from ringmpi.report.text import make_console
from ringmpi.schedule import Pass, check_heads, inner_ranks
from ringmpi.store import ResultFile, ResultWriter, refusal
from ringmpi.verify import Verdict, verify
from ringmpi.writing import WRITING, writing_refusal

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
    inner, agreed = job.all_or_none(lambda: _agree_on_start(experiment, path, job.team))
    with ResultWriter(path) if job.team.rank == 0 else nullcontext() as writer:
        under_way = job.all_or_none(lambda: _begin(experiment, job, inner, agreed, writer))
        interruption = _common_end(job, under_way.measure())
        under_way.write(interruption)
    if interruption is not None:
        job.closing.barrier()  # Nobody leaves, which would end the job, before rank 0 has written.
        under_way.say(f"finished work is in {path}")
        raise interruption
    if job.team.rank == 0:
        with ResultFile(path) as result:
            speak(lambda: report(result, make_console()))
    return job.team.share(FAILED_VERIFICATION if under_way.failed else OK)


class Run:
    """A run under way on one rank. Its methods are collective unless they say otherwise.

    Parameters
    ----------
    experiment : Experiment
    job : Job
    inner : int
        Ranks of an inner group of the method.
    agreed : Agreed
        What computes.
    writer : ResultWriter or None
        None on all ranks but 0.
    """

    def __init__(
        self,
        experiment: Experiment,
        job: Job,
        inner: int,
        agreed: Agreed,
        writer: ResultWriter | None,
    ) -> None:
        self._experiment = experiment
        self._job = job
        self._writer = writer
        self._inner = inner
        self._agreed = agreed
        self._layouts = experiment.layouts(job.team.size)
        self._problem: Problem = problem_of(experiment)
        tensors = WRITING[experiment.io](writer, job.team)
        self._recording = Recording(writer, tensors, experiment, self._layouts)
        self._directions = list(Pass) if experiment.backward else [Pass.FORWARD]
        self._passes = Passes(records={direction: Records() for direction in self._directions})
        self._held_nbytes: dict[Pass, int] = {}
        self._waited = 0.0  # Before the last pass, for the others.
        self._staged_nbytes = 0
        self._verdicts: list[Verdict] = []
        self._clocks: list[NDArray[np.float64]] = []
        self._digests: dict[str, str] = {}

    @property
    def failed(self) -> bool:
        """Whether verification found something wrong. Local."""
        return any(not verdict.passed for verdict in self._verdicts)

    def say(self, line: str) -> None:
        """Print a line, on rank 0. Local."""
        if self._job.team.rank == 0:
            speak(lambda: print(line))

    def measure(self) -> Interrupted | None:
        """Attend, verify and time; return what ended that early, if anything did.

        All that may take long happens here, where signals are heeded.
        """
        name, size = self._experiment.name, self._job.team.size
        self.say(f"# ringmpi: {name} on {size} rank(s), {self._job.library}")
        self.say(f"# device: {described(self._facts_of_device(), self._agreed.reason)}")
        if self._agreed.gpu is not None:
            self.say(f"# transport: {' since '.join(self._transport_and_reason())}")
        if not self._experiment.computes:
            self.say("# nothing is computed, so nothing will be verified; transfers are real")
        try:
            self._clocks.append(clock_offsets(self._job.team))
            self._attend()
            self._clocks.append(clock_offsets(self._job.team))
            if self._experiment.computes:
                self._digest_inputs()
        except Interrupted as stop:
            return stop
        return None

    def write(self, interruption: Interrupted | None) -> None:
        """Write what is left and let the file appear; without a finished pass there is nothing."""
        # After an interruption some collective of the team may be half done.
        team = self._job.team if interruption is None else self._job.closing
        if interruption is not None:
            self._keep_common_passes(team, interruption)
        if self._experiment.computes:
            self._recording.outputs(team, self._passes)
        self._recording.timings(team, self._passes)
        self._recording.ranks(team, self._facts_of_rank(), self._facts_of_job())
        number = None if interruption is None else interruption.signal_number
        self._recording.conclude(team, self._clocks, self._verdicts, self._digests, number)

    def _attend(self) -> None:
        """Make the shards and all passes over them; both are given back at the end."""
        shards = self._make_shards()
        # Not closed: to give a communicator back may block, and the end of the job does it anyway.
        self._make_passes(self._attention(), shards)
        if self._experiment.store_inputs:
            for name, shard in shards.items():
                self._recording.tensor(self._job.team, "inputs", name, shard)

    def _make_shards(self) -> dict[str, Array]:
        experiment, rank = self._experiment, self._job.team.rank
        names = tensors_of(experiment)
        if not experiment.computes:
            return {name: self._zeros(name) for name in names}
        heads = experiment.batch * sum(map(self._problem.heads_of, names))
        with self._progress("making shards", heads) as between:
            return {
                name: shard_of(self._problem, name, self._layouts[name].runs(rank), experiment, between)
                for name in names
            }

    def _zeros(self, name: str) -> Array:
        """Return a shard to be moved and not computed with. Local."""
        experiment, tokens = self._experiment, self._layouts[name].shard_len(self._job.team.rank)
        shape = (experiment.batch, self._problem.heads_of(name), tokens, experiment.head_dim)
        return np.zeros(shape, numpy_dtype(experiment.dtype))

    def _make_passes(self, attention: RingAttention, shards: dict[str, Array]) -> None:
        passes, warmup = self._passes, self._experiment.warmup
        for number in range(warmup + self._experiment.repeats):
            results = self._make_pass(attention, shards, number)
            self._require_same_bits(results)
            passes.results = results
            if number == 0 and self._experiment.computes:
                self._recording.outputs(self._job.team, passes)
                self._verify()
                if self.failed:
                    return  # A wrong result has no times.
        for direction, records in passes.records.items():
            for _ in records.timed:
                records.alone.append(attention.transfers_alone(direction).records)

    def _make_pass(
        self, attention: RingAttention, shards: dict[str, Array], number: int
    ) -> dict[str, Array]:
        """Attend, and go back if asked to; return the results by name."""
        q, k, v = (shards[name] for name in "qkv")
        out, lse = attention.forward(q, k, v)
        self._note(attention, Pass.FORWARD, number)
        results = {"out": out, "lse": lse}
        if Pass.BACKWARD in self._directions:
            dq, dk, dv = attention.backward(shards["dout"], q, k, v, out, lse)
            self._note(attention, Pass.BACKWARD, number)
            results |= {"dq": dq, "dk": dk, "dv": dv}
        return results

    def _note(self, attention: RingAttention, direction: Pass, number: int) -> None:
        """Keep the trace of a pass that has just been made, and say how long it took."""
        records = self._passes.records[direction]
        warmup, repeats = self._experiment.warmup, self._experiment.repeats
        trace = attention.trace.records
        if number < warmup:
            records.warmup.append(trace)
        else:
            records.timed.append(trace)
            records.barrier.append(self._waited)
        self._held_nbytes[direction] = attention.held_nbytes(direction)
        self._staged_nbytes = attention.staged_nbytes
        timed = number >= warmup
        name = f"repeat {number - warmup + 1}/{repeats}" if timed else f"warm-up {number + 1}/{warmup}"
        back = " backward" if direction is Pass.BACKWARD else ""
        seconds = trace["step_end"][-1] - trace["started"][0]
        self.say(f"{name}{back}: {seconds * 1e3:.1f} ms on rank 0")

    def _attention(self) -> RingAttention:
        experiment = self._experiment
        attention = RingAttention(
            self._job.comm,
            seq_len=experiment.seq_len,
            query_len=experiment.num_queries,
            layout=experiment.layout,
            causal=experiment.causal,
            window=experiment.window,
            documents=experiment.documents,
            softmax_scale=experiment.softmax_scale,
            method=experiment.method,
            inner=self._inner,
            device=self._agreed.device,
            threads=experiment.threads,
            matrix_unit=experiment.matrix_unit,
            weights=experiment.weights,
            flops=experiment.flops,
            slow=experiment.slow,
            progress=experiment.progress,
            transport=experiment.transport,
            chunk_limit=experiment.chunk_limit,
            check_transfers=experiment.check_transfers,
            link=experiment.link,
            link_map=experiment.link_map,
            watch=self._job.watch,
        )
        attention.before_pass = self._start_together
        return attention

    def _start_together(self) -> None:
        """Meet the other ranks, so that no lateness from before the pass shows as a stall in it."""
        before = time.perf_counter()
        start_together(self._job.team, self._clocks[0][:, 1])
        self._waited = time.perf_counter() - before

    def _require_same_bits(self, results: dict[str, Array]) -> None:
        """Refuse a pass that gives other bits than the one before, the first of which is verified. Local."""
        for name, before in self._passes.results.items():
            if _bits(before) != _bits(results[name]):
                raise TransportError(
                    f"a repeat gave other bits of {name} than the pass before it, from the same inputs"
                )

    def _verify(self) -> None:
        """Compare the written outputs with the reference, on rank 0."""
        how = self._experiment.verify
        if how == "none":
            return

        started = time.perf_counter()
        if self._writer is not None:
            with self._progress("verifying") as between:
                self._verdicts = verify(
                    self._writer, self._problem, self._experiment, self._layouts["k"], between
                )
        self._verdicts = self._job.team.share(self._verdicts)
        verdict = "FAILED" if self.failed else "passed"
        self.say(f"verification {verdict}: {time.perf_counter() - started:.1f} s ({how})")

    def _digest_inputs(self) -> None:
        """Hash the inputs, on rank 0, which goes through all of them; the others wait for it."""
        experiment = self._experiment
        if self._writer is not None:
            pieces = {
                name: len(list(pieces_of(experiment.seq_len, experiment.head_dim, layout.first)))
                for name, layout in self._layouts.items()
            }
            names = tensors_of(experiment)
            total = experiment.batch * sum(self._problem.heads_of(n) * pieces[n] for n in names)
            with self._progress("hashing inputs", total) as between:
                for name in names:
                    digest = sha256_of(self._problem, name, experiment, between)
                    self._digests[f"{name}_sha256"] = digest
        self._job.team.barrier()

    @contextmanager
    def _progress(self, what: str, total: int = 0) -> Iterator[Callable[..., None]]:
        """Give what long work calls between two pieces: with nothing, or with how many of how many are done.

        It shows progress on rank 0, heeds signals, and answers ranks that ask. Local.
        """
        made = 0
        console = make_console() if self._job.team.rank == 0 else Console(quiet=True)
        with track(what, console) as show:

            def between(done: int | None = None, of: int = total) -> None:
                nonlocal made
                made = made + 1 if done is None else done
                show(made, of)
                self._job.watch.look(lambda: f"{what}, {made} of {of} done")

            yield between

    def _keep_common_passes(self, team: Team, interruption: Interrupted) -> None:
        """Drop passes that not all ranks have finished; end without a file if none is left."""
        if not all(team.allgather(bool(self._passes.results))):
            self.say("interrupted before the first pass was done: no file is written")
            raise interruption
        for direction, records in self._passes.records.items():
            counts = team.allgather((len(records.warmup), len(records.timed)))
            warmup, timed = (min(column) for column in zip(*counts, strict=True))
            self._passes.records[direction] = records.first(warmup, timed)

    def _facts_of_device(self) -> dict[str, Any]:
        experiment, team = self._experiment, self._job.team
        return device_facts(
            self._agreed.device,
            experiment.threads,
            experiment.matrix_unit,
            experiment.dtype,
            (experiment.flops or 0.0) / slowness(experiment.slow, team.size)[team.rank],
            self._agreed.gpu,
            experiment.weights,
        )

    def _transport_and_reason(self) -> list[str]:
        return [text for text in (self._agreed.transport, self._agreed.transport_reason) if text]

    def _facts_of_rank(self) -> dict[str, Any]:
        return (
            rank_facts()
            | self._facts_of_device()
            | {
                "local_rank": self._job.local_rank,
                "shard_len": self._layouts["k"].shard_len(self._job.team.rank),
                "query_shard_len": self._layouts["q"].shard_len(self._job.team.rank),
                "held_forward_nbytes": self._held_nbytes.get(Pass.FORWARD, 0),
                "held_backward_nbytes": self._held_nbytes.get(Pass.BACKWARD, 0),
                "staged_nbytes": self._staged_nbytes,
                "peak_nbytes": peak_nbytes(),
            }
        )

    def _facts_of_job(self) -> dict[str, Any]:
        return {
            "mpi_library": self._job.library,
            "thread_level": self._job.thread_level,
            "gpu_aware": takes_device_pointers(),
            "transport": self._agreed.transport,
            "transport_reason": self._agreed.transport_reason,
            "compute": "real"
            if self._experiment.computes
            else "paced: it takes time, nothing is computed",
            "inner_ranks": self._inner,
        }


def output_path(experiment: Experiment, size: int) -> Path:
    """Return where the result goes: as asked, or a name in ``results/`` that says what was run. Local."""
    if experiment.output is not None:
        return Path(experiment.output)
    return Path("results") / experiment.file_name(size)


def _agree_on_start(experiment: Experiment, path: Path, team: Team) -> tuple[int, Agreed]:
    """Refuse on every rank what any rank must refuse. Collective.

    Returns
    -------
    inner : int
        Ranks of an inner group.
    agreed : Agreed
        What computes.
    """
    error: RingMPIError | None = None
    same = experiment.input is not None and path.exists() and path.samefile(experiment.input)
    if same:
        error = ConfigError(
            f"output={path}: is the input, which a run never writes to; use another name"
        )
    elif experiment.ranks is not None and experiment.ranks != team.size:
        error = ConfigError(
            f"ranks={experiment.ranks}: the job has {team.size}; start it with -n {experiment.ranks}"
        )
    elif team.rank == 0:
        error = refusal(path)
    refused = error or thread_refusal(experiment.progress) or writing_refusal(experiment.io)
    team.agree(refused)
    hosts = team.hosts()
    team.agree(_memory_refusal(experiment, team, hosts.count(hosts[team.rank])))
    if len(set(team.allgather(repr(experiment)))) > 1:
        raise ConfigError(
            "ranks were given different options or input files; start all with one command"
        )
    slowness(experiment.slow, team.size)
    network = network_of(experiment.link, experiment.link_map)
    if network is not None:
        network.check(team.size)
    nodes = nodes_of(network, team.size, team.hosts)
    inner = inner_ranks(experiment.method, team.size, experiment.group_ranks, nodes)
    check_heads(experiment.method, inner, experiment.heads)
    agreed = agreed_device(
        team, experiment.device, experiment.threads, experiment.matrix_unit, experiment.transport
    )
    return inner, agreed


def _begin(
    experiment: Experiment, job: Job, inner: int, agreed: Agreed, writer: ResultWriter | None
) -> Run:
    """Tell all ranks of the file that rank 0 has begun, and return the run. Collective."""
    job.unfinished = job.team.share(None if writer is None else writer.temporary)
    return Run(experiment, job, inner, agreed, writer)


def _memory_refusal(experiment: Experiment, team: Team, neighbours: int) -> ConfigError | None:
    """Return why a node cannot hold the inputs of so many ranks, all like this one, or None. Local."""
    layouts = experiment.layouts(team.size)
    tokens = {name: layouts[name].shard_len(team.rank) for name in tensors_of(experiment)}
    heads = {name: experiment.kv_heads if name in "kv" else experiment.heads for name in tokens}
    values = sum(heads[name] * tokens[name] for name in tokens) * experiment.batch * experiment.head_dim
    together = values * numpy_dtype(experiment.dtype).itemsize * neighbours
    if together <= memory_nbytes():
        return None
    return ConfigError(
        f"seq_len={experiment.seq_len}: {', '.join(tokens)} of the ranks of a node take "
        f"{together / 1e9:.4g} GB, and it has {memory_nbytes() / 1e9:.4g} GB; use a shorter sequence, fewer "
        f"heads or more nodes"
    )


def _common_end(job: Job, interruption: Interrupted | None) -> Interrupted | None:
    """Return the interruption that any rank met: a signal may come while others are through. Collective.

    From here on signals are not heeded: what is left is short, and all ranks must do it alike.
    """
    job.watch.disarm()
    return job.closing.agreed_stop(interruption)


def _bits(array: Array) -> memoryview:
    """Return the bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data
