"""What a plan says, and the Ring Attention paper's tables beside ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ringmpi.model.costs import FLOPS_PER_PAIR
from ringmpi.model.machine import Compute, Connection, Curve, built_in, machine_text, read_machine
from ringmpi.model.paper import Cell, figure_5, findings, table_1, table_2, table_3
from ringmpi.model.plan import Candidate, Plan
from ringmpi.report.text import make_console, milliseconds, plain_table
from ringmpi.schedule import GROUP_OPTIONS, Pass

#: Columns that the tables need where there is no terminal.
TABLE_WIDTH = 150


def show_machines() -> None:
    """Print the built-in machines."""
    machines = [read_machine(name) for name in built_in()]
    rows = [
        (
            machine.name,
            ", ".join(_rates(name, rates) for name, rates in machine.compute.items()),
            gigabytes(machine.memory),
            str(machine.ranks_per_node),
            *(_bandwidth(machine.links.get(kind)) for kind in ("intra", "inter")),
        )
        for machine in machines
    ]
    columns = (
        "machine",
        "TFLOP/s a rank, forward",
        "GB a rank",
        "ranks a node",
        "GB/s in a node",
        "GB/s between nodes",
    )
    console = make_console(TABLE_WIDTH)
    _table("built-in machines, one way bandwidths", columns, rows, console)
    for machine in machines:
        console.print(f"{machine.name}: {machine.about}", soft_wrap=True)


def show_machine(given: str) -> None:
    """Print the file of a machine."""
    read_machine(given)  # One that breaks a rule is nothing to begin with.
    make_console().print(machine_text(given), end="", soft_wrap=True)


def show_plan(plan: Plan, as_json: bool = False) -> None:
    """Print a plan as tables, or as JSON."""
    console = make_console(TABLE_WIDTH)
    if as_json:
        _json(plan.record(), console)
        return
    _describe(plan, console)
    _thresholds(plan, console)
    _memory(plan, console)
    _flops(plan, console)
    _methods(plan, console)


def _describe(plan: Plan, console: Console) -> None:
    experiment, model = plan.experiment, plan.model
    mask = "causal" if experiment.causal else "full"
    queries = "" if experiment.query_len is None else f", the last {experiment.query_len} attend"
    console.print(f"# machine  {plan.machine.name}: {plan.machine.about}", soft_wrap=True)
    console.print(
        f"# problem  {experiment.seq_len} tokens{queries}, batch {experiment.batch}, "
        f"{experiment.heads} heads, {experiment.kv_heads} KV heads of {experiment.head_dim}, "
        f"{experiment.dtype}, {mask} mask, {experiment.layout} shards on {plan.ranks} rank(s)",
        soft_wrap=True,
    )
    console.print(
        f"# model    {model.layers} layer(s) of hidden size {model.hidden}, "
        f"feedforward {model.feedforward}, {model.parameters / 1e9:.3g}e9 parameters",
        soft_wrap=True,
    )


def _thresholds(plan: Plan, console: Console) -> None:
    rows = [
        (
            row.direction.value,
            row.link,
            f"{row.ratio:.0f}",
            f"{row.factor:.3g}",
            f"{row.tokens:.0f}",
            "never" if row.with_latency is None else str(row.with_latency),
            "-" if row.with_latency is None else f"{row.with_latency * plan.ranks}",
            "yes" if row.hidden else "NO",
        )
        for row in plan.thresholds
    ]
    if not rows:
        console.print("overlap: one rank sends nothing")
        return
    here = -(-plan.experiment.num_queries // plan.ranks)
    columns = (
        "pass",
        "link",
        "F/B",
        "factor",
        "tokens a rank",
        "with latency",
        "in all",
        f"here {here}",
    )
    _table(
        "overlap: query tokens a rank from which a ring hides its transfers, factor * F/B",
        columns,
        rows,
        console,
    )
    console.print(
        f"  the busiest rank of each step may attend to {plan.share:.0%} of a block's pairs; "
        f"with latency: and with the rates of that length",
        soft_wrap=True,
    )


def _memory(plan: Plan, console: Console) -> None:
    rows = [
        (
            row.architecture,
            gigabytes(row.layer.attention),
            gigabytes(row.layer.feedforward),
            gigabytes(row.layer.total),
            gigabytes(row.held_nbytes),
            "yes" if row.held_nbytes <= plan.machine.memory else "NO",
            str(row.longest),
        )
        for row in plan.holdings
    ]
    columns = (
        "architecture",
        "attention GB",
        "feedforward GB",
        "a layer GB",
        "a rank GB",
        "fits",
        "longest context",
    )
    what = "training" if plan.experiment.backward else "forward only"
    _table(
        f"memory of a rank, {what}: activations of a layer, all together, and the most tokens that "
        f"fit into {gigabytes(plan.machine.memory)} GB",
        columns,
        rows,
        console,
    )


def _flops(plan: Plan, console: Console) -> None:
    rows = [
        (
            way.value,
            f"{plan.flops[way]:.4g}",
            f"{plan.flops[way] * plan.model.layers:.4g}",
            f"{plan.matrix_flops[way]:.4g}",
            f"{plan.flops[way] * plan.model.layers + plan.matrix_flops[way]:.4g}",
        )
        for way in Pass
    ]
    columns = ("pass", "attention of a layer", "attention", "all else", "together")
    per_pair = " and ".join(f"{count} {way.value}" for way, count in FLOPS_PER_PAIR.items())
    _table(
        f"FLOPs of all ranks; attention: {per_pair} for each allowed pair, head and element of head_dim",
        columns,
        rows,
        console,
    )


def _methods(plan: Plan, console: Console) -> None:
    ways = [way for way in Pass if any(way in candidate.passes for candidate in plan.candidates)]
    best = plan.ranking[0] if plan.ranking else None
    flops = sum(plan.flops[way] for way in ways)
    rows = []
    for candidate in plan.candidates:
        name = _named(candidate)
        if candidate.why_not:
            rows.append((name, *["-"] * (len(ways) + 6)))
            continue
        rows.append(
            (
                name,
                *(milliseconds(candidate.passes[way].seconds) for way in ways),
                milliseconds(candidate.seconds),
                milliseconds(candidate.waiting),
                f"{flops / plan.ranks / candidate.seconds / 1e12:.1f}",
                gigabytes(sum(candidate.passes[way].sent_nbytes for way in ways)),
                gigabytes(candidate.held_nbytes),
                "<" if candidate is best else "" if candidate.fits else "does not fit",
            )
        )
    columns = (
        "method",
        *(f"{way.value} ms" for way in ways),
        "together ms",
        "waits ms",
        "TFLOP/s a rank",
        "sent GB",
        "held GB",
        "best",
    )
    _table(
        "predicted, attention of one layer; waits, sent and held are of the rank with most",
        columns,
        rows,
        console,
    )
    for candidate in plan.candidates:
        if candidate.why_not:
            console.print(f"  {candidate.why_not}", soft_wrap=True)
    if best is None:
        console.print(f"# best: none: {plan.reason}", soft_wrap=True)
        return
    console.print(
        f"# best: {_named(best)}, {milliseconds(best.seconds)} ms: {plan.reason}", soft_wrap=True
    )
    if plan.balanced is not None and plan.balanced.seconds < best.seconds:
        console.print(
            f"# contiguous shards leave ranks without work: with --layout zigzag the best is "
            f"{_named(plan.balanced)}, {milliseconds(plan.balanced.seconds)} ms",
            soft_wrap=True,
        )


def show_paper(as_json: bool = False) -> None:
    """Print the paper's tables, each cell as printed and ours, and what its formulas do not give."""
    console = make_console(TABLE_WIDTH)
    first, second, third, figure = table_1(), table_2(), table_3(), figure_5()
    cells = [*first, *second, *third, *figure]
    if as_json:
        record = {"cells": list(map(asdict, cells)), "findings": list(map(asdict, findings()))}
        _json(record, console)
        return
    console.print(
        "# Liu et al. 2023, Ring Attention, arXiv:2310.01889: printed = ours, or printed != ours"
    )
    for title, table in (
        ("table 1: largest activations of a layer, bytes in bfloat16", first),
        (
            "table 2: least block and sequence of a device, thousands of tokens; F / B, and 6 of these",
            second,
        ),
        ("table 3: contexts of rings, thousands of tokens; n times the printed blockwise one", third),
        ("figure 5: FLOPs of a data set over those at 4096 tokens; (6 h + s) / (6 h + 4096)", figure),
    ):
        columns = list(dict.fromkeys(cell.column for cell in table))
        names = list(dict.fromkeys(cell.row for cell in table))
        rows = [[name, *(_compared(cell) for cell in table if cell.row == name)] for name in names]
        _table(title, ["", *columns], rows, console)
    agreeing = sum(cell.agrees for cell in cells)
    console.print(f"{agreeing} of {len(cells)} cells agree. What the paper's own formulas do not give:")
    for finding in findings():
        console.print(
            f"* {finding.place}: printed {finding.printed}; ours {finding.ours}: {finding.why}",
            soft_wrap=True,
        )


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print a table below its title, which may be wider."""
    console.print(title, soft_wrap=True)
    console.print(plain_table("", columns, rows))


def _json(record: dict[str, Any], console: Console) -> None:
    console.print(json.dumps(record, indent=1), soft_wrap=True)


def gigabytes(nbytes: float) -> str:
    """Return bytes as text in GB of 1e9 bytes.

    >>> gigabytes(33_554_432)
    '0.034'
    """
    return f"{nbytes / 1e9:.3f}" if nbytes < 1e12 else f"{nbytes / 1e9:.4g}"


def _compared(cell: Cell) -> str:
    return f"{cell.printed} {'=' if cell.agrees else '!='} {cell.ours}"


def _named(candidate: Candidate) -> str:
    grouped = candidate.method in GROUP_OPTIONS and candidate.passes
    return f"{candidate.method}:{candidate.inner}" if grouped else candidate.method


def _rates(name: str, rates: Compute) -> str:
    return f"{name} {_range(rates.forward, 1e12)}"


def _bandwidth(link: Connection | None) -> str:
    return "-" if link is None else _range(link.bandwidth, 1e9)


def _range(curve: Curve, unit: float) -> str:
    values = sorted({value / unit for _, value in curve.points})
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g}-{values[-1]:g}"
