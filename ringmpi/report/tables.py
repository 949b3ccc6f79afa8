"""What a result file says, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from ringmpi.encoding import numpy_dtype
from ringmpi.metrics import by_rank, makespans, rates
from ringmpi.model.travel import Prompt
from ringmpi.report.text import megabytes, milliseconds, percent, plain_table, rate
from ringmpi.schedule import GROUP_OPTIONS, Pass
from ringmpi.store import ResultFile
from ringmpi.verify import Verdict


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
    """
    words = str(facts["device"])
    if facts["instruction_set"]:
        unit = " with matrix unit" if facts["matrix_unit"] == "on" else ""
        words += f" ({facts['instruction_set']}{unit}), {facts['threads']} thread(s) a rank"
    return f"{words}, since {reason}" if reason else words


def _devices(result: ResultFile) -> str:
    """Return what computed, each kind once; files of an older ringmpi tell only its name."""
    columns = {"device": result.texts("ranks/device")}
    if not result.has("ranks/instruction_set"):
        return ", ".join(sorted(set(columns["device"])))
    columns |= {name: result.texts(f"ranks/{name}") for name in ("instruction_set", "matrix_unit")}
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
    console.print(f"# mpi      {machine.get('mpi_library')}, {machine.get('processor')}")
    console.print(f"# device   {_devices(result)}")
    if machine.get("oversubscribed"):
        console.print(
            "# note     more ranks or threads than cores: results are right, times mean little"
        )
    experiment = result.experiment
    if experiment.method in GROUP_OPTIONS:
        console.print(f"# groups   {experiment.method}: {machine.get('inner_ranks')} ranks each")
    if experiment.link is not None:
        console.print(f"# link     {experiment.link} is emulated: times are those of another machine")
    if result.interrupted is not None:
        console.print(f"# note     ended early by signal {result.interrupted}")


def rank_table(result: ResultFile, direction: Pass, console: Console) -> None:
    """Print compute, stall and overhead of every rank in a pass, and the time of the whole."""
    timings = result.timings(direction)
    summaries = by_rank(timings)
    if not summaries:
        console.print(f"no repeat of the {direction.value} pass was timed")
        return
    repeats = len(timings.records)
    rows = [
        (
            str(rank.rank),
            milliseconds(rank.compute),
            milliseconds(rank.stall),
            milliseconds(rank.overhead),
            milliseconds(rank.total),
            percent(rank.overlap),
            rate(rank.counts["flops"], rank.compute),
            megabytes(rank.counts["bytes_sent"]),
            str(rank.counts["tiles"]),
            str(rank.counts["tiles_skipped"]),
        )
        for rank in summaries
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
    spans = makespans(timings)
    flops = sum(rank.counts["flops"] for rank in summaries)
    console.print(
        f"whole: {milliseconds(float(np.median(spans)))} ms "
        f"({milliseconds(spans.min())} to {milliseconds(spans.max())}), "
        f"{rate(flops, float(np.median(spans)))} GFLOP/s on {result.size} rank(s)"
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
    who_travels(result, console)
    verdict_table(result.verdicts(), str(result.facts("verification").get("how", "none")), console)
