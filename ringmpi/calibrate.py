"""From this machine to a machine file: what its ranks compute, what its links carry, how regularly.

Under mpiexec, on the ranks that it is given. Compute is measured on all ranks at the same time, since they
may share memory and power; links one kind after the other, between two ranks, and from one rank to all of the
others.
"""

from __future__ import annotations

import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from itertools import groupby, product
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.agreed import agreed_device
from ringmpi.comm.job import Job
from ringmpi.comm.link import network_of, nodes_of
from ringmpi.comm.policy import PROGRESS
from ringmpi.comm.progress import thread_refusal
from ringmpi.comm.rates import LEAST, SIZES, Links, eager_limit
from ringmpi.config import Experiment
from ringmpi.devices import (
    Block,
    Device,
    Gradients,
    Outcome,
    Queries,
    Work,
    device_facts,
    make_device,
    slowness,
)
from ringmpi.devices.base import Sizes
from ringmpi.encoding import numpy_dtype
from ringmpi.errors import OK, ConfigError
from ringmpi.mask import Mask
from ringmpi.model.calibration import (
    FIRST_WORDS,
    LENGTHS,
    Calibration,
    LinkRates,
    Noise,
    bandwidths,
    machine_toml,
)
from ringmpi.model.machine import INTER, INTRA, Curve, Points
from ringmpi.provenance import command_line, processor
from ringmpi.report.console import speak
from ringmpi.report.tables import described
from ringmpi.schedule import Pass
from ringmpi.softmax import IDENTITY, State, state_dtype
from ringmpi.store import unwritable

Array = NDArray[Any]

#: Parts of the seconds for compute that go to one size of message, and to all of the noise.
LINK_SHARE = 0.02
NOISE_SHARE = 0.1

#: Times that a block is attended to at least and at most, and pieces of work whose spread is the noise.
BLOCKS = (2, 30)
PIECES = (10, 200)

#: Work that takes less tells of timers rather than of noise.
PIECE_SECONDS = 2e-3

#: Transfers of which the overlap is measured take at least so long, if any size does: many polls fit in.
OVERLAP_SECONDS = 0.05


def calibrate(
    experiments: Sequence[Experiment], lengths: Sequence[int], seconds: float, path: Path, job: Job
) -> int:
    """Measure the machine, write its file, and return the exit code. Collective.

    Parameters
    ----------
    experiments : sequence of Experiment
        One for each dtype, alike in all else: they say what computes, in which shapes, over which links.
    lengths : sequence of int
        Tokens of the blocks whose FLOP/s are measured, rising.
    seconds : float
        For the compute of all blocks; other measurements take a share of it each.
    path : Path
        Where the machine file goes.
    job : Job

    Raises
    ------
    ConfigError
        On every rank, if it cannot be measured or written.
    Interrupted
        On every rank, after a signal; no file is written then.
    """
    measuring = Measuring(experiments, seconds, job)
    job.team.agree(refusal(path) if job.team.rank == 0 else None)
    text = machine_toml(measuring.all(lengths))
    if job.team.rank == 0:
        write(path, text)
    measuring.say(text)
    measuring.say(f"# machine file: {path}; ringmpi plan --machine {shlex.quote(str(path))}")
    job.team.barrier()
    return OK


def refusal(path: Path) -> ConfigError | None:
    """Return why no machine file can be written to `path`, or None; makes its directory. Local."""
    if path.suffix != ".toml":
        return ConfigError(f"output={path}: a machine file is known by its .toml; use {path}.toml")
    refused = unwritable(path)
    if (
        refused is None
        and path.exists()
        and not path.read_text("utf-8", "replace").startswith(FIRST_WORDS)
    ):
        return ConfigError(
            f"output={path}: is there and calibrate did not write it, so it is not replaced; use another name"
        )
    return refused


def write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all. Local."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # The name must not appear before the data is on disk.
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Measuring:
    """A calibration under way on one rank. Collective, as are its methods unless they say otherwise.

    Parameters
    ----------
    experiments : sequence of Experiment
    seconds : float
        For the compute of all blocks.
    job : Job

    Raises
    ------
    ConfigError, MissingCapabilityError
        On every rank, if ranks were given different options or lack what is asked for.
    """

    def __init__(self, experiments: Sequence[Experiment], seconds: float, job: Job) -> None:
        self._experiments = experiments
        self._seconds = seconds
        self._job, self._team = job, job.team
        first = experiments[0]
        if len(set(self._team.allgather(repr(experiments)))) > 1:
            raise ConfigError("ranks were given different options; start all with one command")
        factors = slowness(first.slow, self._team.size)
        self._flops = None if first.flops is None else first.flops / factors[self._team.rank]
        self._network = network_of(first.link, first.link_map)
        if self._network is not None:
            self._network.check(self._team.size)
        self._hosts = self._team.hosts()
        nodes = nodes_of(self._network, self._team.size, lambda: self._hosts)()
        self._per_node = ranks_per_node(nodes)
        self._agreed = agreed_device(self._team, first.device, first.threads, first.matrix_unit)

    def say(self, line: str) -> None:
        """Print, on rank 0. Local."""
        if self._team.rank == 0:
            speak(lambda: print(line))

    def all(self, lengths: Sequence[int]) -> Calibration:
        """Measure everything."""
        first, team = self._experiments[0], self._team
        facts = device_facts(
            self._agreed.device,
            first.threads,
            first.matrix_unit,
            first.dtype,
            self._flops or 0.0,
            self._agreed.gpu,
            first.weights,
        )
        what = described(facts, self._agreed.reason)
        self.say(f"# ringmpi calibrate: {team.size} rank(s), {self._job.library}")
        self.say(f"# device: {what}")
        rates = self._compute(lengths)
        noise = self._noise(lengths)
        links = {kind: self._link(kind, *ranks) for kind, *ranks in self._kinds()}
        hosts = sorted(set(self._hosts))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / self._per_node
        link = first.link or first.link_map
        emulated = [f"links are emulated: {link}"] if link else []
        paced = [] if first.computes else ["compute is paced: the rates are those that were asked for"]
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        overlap, nbytes = self._overlap() if team.size > 1 else ({}, 0)
        kind = INTER if INTER in links else INTRA
        return Calibration(
            header=[
                command_line(),
                f"{now}, {team.size} rank(s) on {', '.join(hosts[:8])}",
                f"{self._job.library}; {processor()}",
                *emulated,
                *paced,
            ],
            about=f"{', '.join(hosts[:3])}: {what}, measured by ringmpi calibrate",
            memory=min(team.allgather(memory)),
            ranks_per_node=self._per_node,
            compute=rates,
            compute_how=(
                f"{first.batch} sequence(s), {first.heads} heads, {first.kv_heads} KV heads, head_dim "
                f"{first.head_dim}, no mask; median of repeats, then of ranks, all of them at once"
            ),
            noise=noise,
            links=links,
            overlap=overlap,
            overlap_how=(
                f"1 - (total - compute) / alone, {nbytes} bytes over links.{kind} beside as long a compute"
            ),
        )

    def _compute(self, lengths: Sequence[int]) -> dict[str, dict[Pass, Points]]:
        """Return FLOP/s by tokens, by pass, by dtype."""
        share = self._seconds / (len(self._experiments) * len(Pass) * len(lengths))
        found: dict[str, dict[Pass, Points]] = {}
        for experiment, direction in product(self._experiments, Pass):
            points: list[tuple[float, float]] = []
            last = 0.0
            for tokens in lengths:
                # The work grows with the square of the tokens.
                expected = last * (tokens / points[-1][0]) ** 2 if points else 0.0
                if expected > BLOCKS[0] * share:
                    self.say(
                        f"{experiment.dtype} {direction.value}: {tokens} tokens left out, too long"
                    )
                    break
                last, flops = self._block(experiment, direction, tokens, share)
                points.append((tokens, flops / last))
                told = f"{points[-1][1] / 1e9:.1f} GFLOP/s a rank"
                self.say(f"{experiment.dtype} {direction.value}: {tokens} tokens, {told}")
            found.setdefault(experiment.dtype, {})[direction] = points
        return found

    def _block(
        self, experiment: Experiment, direction: Pass, tokens: int, share: float
    ) -> tuple[float, int]:
        """Return the seconds and FLOPs of attending to a block, in about so many seconds."""
        bench = Bench(self._device(experiment), experiment, tokens)
        self._team.barrier()
        work = bench.work(direction)
        estimate = max(self._team.allgather(self._finish(work)))
        count = min(max(int(share / estimate), BLOCKS[0]), BLOCKS[1])
        mine = median(self._finish(bench.work(direction)) for _ in range(count))
        return median(self._team.allgather(mine)), work.tally.flops

    def _noise(self, lengths: Sequence[int]) -> Noise:
        """Return how unequally long the same work takes, on all ranks at once."""
        experiment = self._experiments[0]
        estimate, tokens = 0.0, lengths[0]
        for tokens in lengths:
            bench = Bench(self._device(experiment), experiment, tokens)
            estimate = max(self._team.allgather(self._finish(bench.work(Pass.FORWARD))))
            if estimate >= PIECE_SECONDS:
                break
        count = min(max(int(NOISE_SHARE * self._seconds / estimate), PIECES[0]), PIECES[1])
        self._team.barrier()
        pieces = [self._finish(bench.work(Pass.FORWARD)) for _ in range(count)]
        found = self._team.allgather((stdev(pieces) / fmean(pieces), max(pieces) / median(pieces)))
        relative, worst = zip(*found, strict=True)
        how = f"{count} blocks of {tokens} tokens, {experiment.dtype}, on each rank; median over ranks"
        return Noise(median(relative), max(worst), how)

    def _finish(self, work: Work) -> float:
        """Return how long a work takes. Local."""
        began = time.perf_counter()
        while not work.advance():
            self._job.watch.look(lambda: "calibrate: computing")
        return time.perf_counter() - began

    def _kinds(self) -> Iterator[tuple[Any, ...]]:
        """Yield the kinds of link that there are, one rank, and its peers over them. Local."""
        size, per_node = self._team.size, self._per_node
        if min(size, per_node) > 1:
            yield INTRA, 0, range(1, min(size, per_node))
        if size > per_node:
            yield INTER, 0, range(per_node, size, per_node)

    def _link(self, kind: str, rank: int, peers: Sequence[int]) -> LinkRates:
        """Return what the links of a kind take."""
        links, seconds = self._links("poll"), LINK_SHARE * self._seconds
        latency = links.latency(rank, peers[0], seconds)
        self.say(f"links.{kind}: ranks {rank} and {peers[0]}, latency {latency * 1e6:.1f} us")
        times: list[tuple[float, float]] = []
        for nbytes in SIZES:
            # What a message takes beyond the latency grows with its bytes.
            if times and latency + (times[-1][1] - latency) * nbytes / times[-1][0] > seconds:
                break
            times.append((nbytes, links.swap(rank, peers[0], nbytes, seconds)))
            rate = nbytes / times[-1][1] / 1e6
            self.say(f"links.{kind}: {nbytes} bytes in {times[-1][1] * 1e3:.3f} ms, {rate:.1f} MB/s")
        total = None
        if len(peers) > 1:
            largest = int(times[-1][0])
            there_and_back = links.spread(rank, peers, largest, seconds)
            total = len(peers) * largest / (there_and_back - 2 * latency)
        rates = bandwidths(latency, times)
        eager = None  # An emulated network holds messages back after MPI has moved them.
        if self._network is None:
            curve = Curve(tuple(rates))
            eager = eager_limit(self._team, rank, peers[0], lambda n: latency + n / curve.at(n))
        how = (
            f"ranks {rank} and {peers[0]} ({self._hosts[rank]}, {self._hosts[peers[0]]}): half a round trip "
            f"of {LEAST} bytes; both sending at once, less the latency; the least of many"
        )
        return LinkRates(latency, rates, total, eager, how)

    def _overlap(self) -> tuple[dict[str, float], int]:
        """Return which part of a transfer is hidden behind as much compute, by progress, and its bytes."""
        *_, (_, rank, peers) = self._kinds()
        links, nbytes = self._links("poll"), SIZES[0]
        for nbytes in SIZES:
            if links.swap(rank, peers[0], nbytes, 0.0) > OVERLAP_SECONDS:
                break
        found = {}
        for progress in PROGRESS:
            if thread_refusal(progress) is not None:
                continue
            links, seconds = self._links(progress), LINK_SHARE * self._seconds
            found[progress] = links.overlap(rank, peers[0], nbytes, seconds, self._busy())
            self.say(f"overlap: {found[progress]:.0%} of {nbytes} bytes with --progress {progress}")
        return found, nbytes

    def _busy(self) -> Callable[[float, Callable[[], None]], float]:
        """Return what computes for so many seconds. Local."""
        experiment = self._experiments[0]
        bench = Bench(self._device(experiment), experiment, LENGTHS[0])

        def compute(seconds: float, poll: Callable[[], None]) -> float:
            busy, work = 0.0, bench.work(Pass.FORWARD)
            while busy < seconds:
                began = time.perf_counter()
                if work.advance():
                    work = bench.work(Pass.FORWARD)
                busy += time.perf_counter() - began
                poll()
            return busy

        return compute

    def _links(self, progress: str) -> Links:
        return Links(self._team, self._network, progress, self._experiments[0].chunk_limit)

    def _device(self, experiment: Experiment) -> Device:
        return make_device(
            self._agreed.device,
            Mask(),
            experiment.head_dim**-0.5,
            experiment.threads,
            experiment.matrix_unit,
            self._flops,
            self._agreed.gpu,
            experiment.weights,
        )


class Bench:
    """A block and its queries, to be attended to again and again. Local.

    Parameters
    ----------
    device : Device
    experiment : Experiment
        Its batch, heads, head_dim and dtype.
    tokens : int
        Of the queries and of the block.
    """

    def __init__(self, device: Device, experiment: Experiment, tokens: int) -> None:
        rng = np.random.default_rng(experiment.seed)
        wide = (experiment.batch, experiment.heads, tokens, experiment.head_dim)
        tall = (experiment.batch, experiment.kv_heads, tokens, experiment.head_dim)
        dtype = numpy_dtype(experiment.dtype)
        q, k, v, dout = (rng.standard_normal(shape).astype(dtype) for shape in (wide, tall, tall, wide))
        state = state_dtype(dtype)
        positions = np.arange(tokens)
        self._device = device
        heads = (experiment.batch, experiment.heads, experiment.kv_heads)
        device.prepare([Sizes(*heads, tokens, tokens, experiment.head_dim)], dtype)
        q, k, v, dout = (device.place(array, dtype) for array in (q, k, v, dout))
        self._queries, self._block = Queries(q, positions), Block(k, v, positions)
        shapes = {"acc": wide, "row_max": wide[:-1], "row_sum": wide[:-1]}
        self._state = State(**{n: device.full(s, IDENTITY[n], state) for n, s in shapes.items()})
        self._gradients = Gradients(*(device.full(shape, 0.0, state) for shape in (wide, tall, tall)))
        # Any rows do, as long as no exponential overflows: the largest score is below the sum of all.
        rows = np.full(wide[:-1], np.log(tokens) + experiment.head_dim, state)
        self._outcome = Outcome(dout, device.place(rows, state), device.full(rows.shape, 0.0, state))

    def work(self, direction: Pass) -> Work:
        """Start to attend."""
        if direction is Pass.FORWARD:
            return self._device.attend(self._queries, self._block, self._state)
        return self._device.attend_backward(self._queries, self._outcome, self._block, self._gradients)


def ranks_per_node(nodes: Sequence[str]) -> int:
    """Return how many neighbouring ranks share a node. Local.

    Raises
    ------
    ConfigError
        If nodes have unlike many, or ranks that are no neighbours.

    Examples
    --------
    >>> ranks_per_node(["a", "a", "b", "b"])
    2
    """
    runs = [len(list(ranks)) for _, ranks in groupby(nodes)]
    if len(set(runs)) > 1 or len(set(nodes)) < len(runs):
        raise ConfigError(
            f"nodes have {', '.join(map(str, runs))} neighbouring ranks, and a machine file has one number; "
            f"start as many ranks on each node, neighbours together"
        )
    return runs[0]
