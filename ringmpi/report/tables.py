"""What a result file says, as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from ringmpi.encoding import numpy_dtype
from ringmpi.metrics import RankSummary, by_rank, makespans, rates
from ringmpi.model.travel import Prompt
from ringmpi.report.culprits import blame_table
from ringmpi.report.text import megabytes, milliseconds, percent, plain_table, rate
from ringmpi.schedule import GROUP_OPTIONS, Pass
from ringmpi.store import ResultFile
from ringmpi.verify import Verdict

#: What the column `polling` holds, by policy; a run that waits has none.
COST_OF = {
    "poll": "calls into MPI delay the compute by",
    "thread": "the helper thread takes, beside the compute,",
}


#: Ranks that a table has a row for; of more, some are shown.
MOST_ROWS = 64


def described(facts: Mapping[str, Any], reason: str = "") -> str:
    """Return in a few words what computed on a rank.

    Parameters
    ----------
    facts : mapping
        As in ``/ranks``.
    reason : str
        Why it is not the preferred device.

    >>> described({"device": "native", "instruction_set": "AVX2", "matrix_unit": "off", "threads": 2})
    'native (AVX2), 2 thread(s) a rank'
    >>> described({"device": "numpy", "instruction_set": ""}, "there is no compiler")
    'numpy, since there is no compiler'
    >>> described({"device": "numpy", "instruction_set": "", "weights": "rounded"})
    'numpy, weights rounded'
    >>> described({"device": "paced", "instruction_set": "", "paced_flops": 50e12})
    'paced at 50 TFLOP/s a rank, computes nothing'
    >>> described({"device": "cuda", "instruction_set": "", "gpu": "NVIDIA H200, sm_90", "gpu_sharing": 2})
    'cuda (NVIDIA H200, sm_90), shared by 2 ranks'
    """
    words = str(facts["device"])
    if facts.get("paced_flops"):
        words += f" at {facts['paced_flops'] / 1e12:g} TFLOP/s a rank, computes nothing"
    if facts.get("gpu"):
        shared = f", shared by {facts['gpu_sharing']} ranks" if facts["gpu_sharing"] > 1 else ""
        words += f" ({facts['gpu']}){shared}"
    if facts["instruction_set"]:
        unit = " with matrix unit" if facts["matrix_unit"] == "on" else ""
        words += f" ({facts['instruction_set']}{unit}), {facts['threads']} thread(s) a rank"
    if facts.get("weights") == "rounded":
        words += ", weights rounded"
    return f"{words}, since {reason}" if reason else words


def _devices(result: ResultFile) -> str:
    """Return what computed, each kind once; files of an older ringmpi tell only its name."""
    columns: dict[str, list[Any]] = {"device": result.texts("ranks/device")}
    if not result.has("ranks/instruction_set"):
        return ", ".join(sorted(set(columns["device"])))
    columns |= {name: result.texts(f"ranks/{name}") for name in ("instruction_set", "matrix_unit")}
    if result.has("ranks/weights"):
        columns["weights"] = result.texts("ranks/weights")
    if result.has("ranks/paced_flops"):
        columns["paced_flops"] = result.column("ranks/paced_flops").tolist()
    threads = result.column("ranks/threads").tolist()
    ranks = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    told = {described(rank | {"threads": n}) for rank, n in zip(ranks, threads, strict=True)}
    compiled = float(result.column("ranks/compile_s").max())
    return "; ".join(sorted(told)) + (f"; compiled in {compiled:.1f} s" if compiled else "")


def describe(result: ResultFile, console: Console) -> None:
    """Print what was run and where, as lines that begin with ``#``."""
    machine = result.facts("machine")
    hosts = sorted(set(result.texts("ranks/hostname")))
    console.print(f"# {result.path}", soft_wrap=True)
    console.print(f"# command  {result.command}", soft_wrap=True)
    console.print(f"# ranks    {result.size} on {len(hosts)} host(s): {', '.join(hosts[:8])}")
    if result.kind == "simulated":
        _describe_simulated(result, machine, console)
    else:
        console.print(f"# mpi      {machine.get('mpi_library')}, {machine.get('processor')}")
        console.print(f"# device   {_devices(result)}")
    if result.oversubscribed:
        console.print(
            "# note     more ranks or threads than cores: results are right, times mean little"
        )
    experiment = result.experiment
    if experiment.method in GROUP_OPTIONS:
        console.print(f"# groups   {experiment.method}: {machine.get('inner_ranks')} ranks each")
    link = experiment.link or experiment.link_map
    if link is not None and result.kind == "measured":
        console.print(f"# link     {link} is emulated: times are those of another machine")
    if not experiment.computes:
        console.print("# note     compute is paced: nothing was computed, so nothing could be verified")
    if experiment.slow is not None and result.kind == "measured":
        console.print(f"# note     ranks made slower: {experiment.slow}")
    if result.interrupted is not None:
        console.print(f"# note     ended early by signal {result.interrupted}")


def _describe_simulated(result: ResultFile, machine: Mapping[str, Any], console: Console) -> None:
    """Print which machine was simulated, and how."""
    experiment = result.experiment
    links = f", links {experiment.link}" if experiment.link is not None else ""
    console.print(
        f"# machine  simulated: {machine['processor']}, {machine['ranks_per_node']} rank(s) a node{links}; "
        f"progress {experiment.progress}"
    )
    disturbed = {"noise": machine["noise"]} if machine["noise"] else {}
    disturbed |= json.loads(machine["disturbed"])
    if disturbed:
        told = ", ".join(f"{name} {value}" for name, value in disturbed.items())
        console.print(f"# uneven   {told}; seed {experiment.seed}")


def _shown(summaries: Sequence[RankSummary], watched: Sequence[int]) -> list[RankSummary]:
    """Return the ranks that a table has room for: all, or those watched, and the extremes."""
    if len(summaries) <= MOST_ROWS:
        return list(summaries)
    extremes = [
        max(summaries, key=lambda rank: rank.stall),
        max(summaries, key=lambda rank: rank.compute),
    ]
    spread = watched if len(watched) < len(summaries) else range(0, len(summaries), len(summaries) // 8)
    return [summaries[rank] for rank in sorted({*spread, *(rank.rank for rank in extremes)})]


def rank_table(result: ResultFile, direction: Pass, console: Console) -> None:
    """Print compute, stall and overhead of every rank in a pass, and the time of the whole."""
    timings = result.timings(direction)
    summaries = by_rank(timings)
    if not summaries:
        console.print(f"no repeat of the {direction.value} pass was timed")
        return
    repeats = len(timings.records)
    shown = _shown(summaries, result.watched(direction)[0])
    rows = [
        (
            str(rank.rank),
            milliseconds(rank.compute),
            milliseconds(rank.stall),
            milliseconds(rank.overhead),
            milliseconds(rank.total),
            percent(rank.overlap),
            rate(rank.flops, rank.compute),
            megabytes(rank.counts["bytes_sent"]),
            str(rank.counts.get("tiles", "-")),
            str(rank.counts.get("tiles_skipped", "-")),
        )
        for rank in shown
    ]
    columns = (
        "rank",
        "compute ms",
        "stall ms",
        "overhead ms",
        "total ms",
        "overlap",
        "GFLOP/s",
        "sent MB",
        "tiles",
        "skipped",
    )
    console.print(
        plain_table(
            f"{direction.value}, per rank, sums over steps, medians of {repeats} repeat(s)",
            columns,
            rows,
        )
    )
    if len(shown) < len(summaries):
        console.print(
            f"# {len(shown)} of {result.size} ranks, those with most stall and compute among them"
        )
    spans = makespans(timings)
    flops = sum(rank.flops for rank in summaries)
    console.print(
        f"whole: {milliseconds(float(np.median(spans)))} ms "
        f"({milliseconds(spans.min())} to {milliseconds(spans.max())}), "
        f"{rate(flops, float(np.median(spans)))} GFLOP/s on {result.size} rank(s)"
    )


def cost_of_progress(result: ResultFile, direction: Pass, console: Console) -> None:
    """Print what progress took of the compute, or beside it."""
    policy = result.experiment.progress
    told = [
        (rank.polling, rank.polling / rank.compute)
        for rank in by_rank(result.timings(direction))
        if np.isfinite(rank.polling) and rank.compute > 0
    ]
    if policy not in COST_OF or not told:
        return
    taken, parts = zip(*told, strict=True)
    console.print(
        f"progress {policy}: {COST_OF[policy]} {milliseconds(float(np.mean(taken)))} ms a rank, "
        f"{np.mean(parts):.1%} of the compute, at most {max(parts):.1%}"
    )


def share_of_device(result: ResultFile, direction: Pass, console: Console) -> None:
    """Print how much of the compute, as the host saw it, a GPU was at work by its own clock."""
    shares = [
        rank.device_time / rank.compute
        for rank in by_rank(result.timings(direction))
        if rank.device_time > 0 and rank.compute > 0
    ]
    if shares:
        console.print(
            f"device: by its own clock the GPU was at work in {np.mean(shares):.1%} of the compute, "
            f"at least {min(shares):.1%} on a rank"
        )


def who_travels(result: ResultFile, console: Console) -> None:
    """Print the rule of who should travel, where only some positions attend."""
    experiment = result.experiment
    if experiment.query_len is None or not result.size > 1:
        return
    prompt = Prompt(
        new=experiment.num_queries,
        cached=experiment.seq_len - experiment.num_queries,
        ranks=result.size,
        heads=experiment.heads,
        kv_heads=experiment.kv_heads,
        itemsize=numpy_dtype(experiment.dtype).itemsize,
    )
    flops, bandwidth = rates(result.timings())
    travellers = (
        "queries (passq)" if prompt.queries_should_travel(flops, bandwidth) else "k and v (ring)"
    )
    least = prompt.hidden_from(flops, bandwidth)
    hidden = (
        "unknown, nothing was timed alone" if np.isnan(least) else f"{least:.0f} new tokens or more"
    )
    console.print(
        f"who should travel: {travellers}, by the rule of arXiv:2411.01783; this run: {experiment.method}\n"
        f"  new of all tokens {prompt.new}/{prompt.new + prompt.cached} = {prompt.share:.3g}, queries are "
        f"smaller below 2 kv_heads / heads = {prompt.largest_share:.3g}\n"
        f"  compute hides k and v from: {hidden} (measured: {flops / 1e9:.1f} GFLOP/s and "
        f"{bandwidth / 1e6:.1f} MB/s a rank)"
    )


def verdict_table(verdicts: Sequence[Verdict], how: str, console: Console) -> None:
    """Print what verification found, the last line being the verdict."""
    if not verdicts:
        console.print(f"# verdict: not verified ({how})")
        return
    columns = (
        "tensor",
        "rows",
        "max error",
        "single pass",
        "beyond rounding",
        "allowed",
        "mean error",
        "allowed",
        "verdict",
    )
    rows = [
        (
            verdict.tensor,
            str(verdict.rows),
            f"{verdict.max_abs:.2e}",
            f"{verdict.single_max:.2e}",
            f"{verdict.beyond:.2e}",
            f"{verdict.bound:.2e}",
            f"{verdict.mean_abs:.2e}",
            f"{verdict.mean_bound:.2e}",
            "ok" if verdict.passed else "FAILED",
        )
        for verdict in verdicts
    ]
    console.print(plain_table(f"against the float64 reference ({how})", columns, rows))
    failed = [verdict for verdict in verdicts if not verdict.passed]
    for verdict in failed:
        console.print(verdict.failure(), soft_wrap=True)
    console.print("# verdict: " + ("FAILED" if failed else "OK"))


def report(result: ResultFile, console: Console) -> None:
    """Print everything that a result file says."""
    describe(result, console)
    for direction in result.directions:
        rank_table(result, direction, console)
        cost_of_progress(result, direction, console)
        share_of_device(result, direction, console)
        blame_table(result, direction, console)
    who_travels(result, console)
    verdict_table(result.verdicts(), str(result.facts("verification").get("how", "none")), console)
