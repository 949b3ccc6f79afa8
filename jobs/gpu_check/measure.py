"""Cases one after the other: contenders in turn, results judged before they are timed, all times kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from case import BOTH, FORWARD, Case
from judge import Judge
from on_gpu import Contender, Unsupported

Row = dict[str, Any]


def cases(
    dtypes: Sequence[str], head_dims: Sequence[int], lengths: Sequence[int], heads: int
) -> Iterator[Case]:
    """Yield every case; both directions of a problem follow each other, as the judge keeps its reference."""
    masks = ("full", "causal")
    for dtype, head_dim, mask, length, direction in product(
        dtypes, head_dims, masks, lengths, (FORWARD, BOTH)
    ):
        yield Case("single", dtype, direction, mask, length, head_dim, heads)


def measure(
    case: Case, makers: Iterable[Callable[[], Contender]], judge: Judge, alternations: int
) -> list[Row]:
    """Return a row for each contender; one without a time has ``absent``, which says why."""
    rows, ready = [], []
    for make in makers:
        contender = make()
        row = told(case, contender.name)
        rows.append(row)
        try:
            contender.prepare(case)
            contender.seconds()  # Not counted: it compiles, and sets up.
            contender.seconds()  # What the first one has left must not matter to the second, which is judged.
            verdict = judge.verdict(case, contender.results())
            row |= {"max_abs_difference": verdict.max_abs, "row_error": verdict.row_error}
            if verdict.passed:
                ready.append((row, contender))
                continue
            row["absent"] = f"is wrong: a row is off by {verdict.row_error:.2g} of its length"
        except (Unsupported, RuntimeError) as reason:  # Such as memory that does not suffice.
            row["absent"] = str(reason).partition("\n")[0] or type(reason).__name__
        contender.forget()
    samples: dict[str, list[float]] = {contender.name: [] for _, contender in ready}
    for number in range(alternations):
        first = number % max(1, len(ready))  # Who comes first finds the GPU cooler.
        for _, contender in ready[first:] + ready[:first]:
            samples[contender.name].append(contender.seconds())
    for row, contender in ready:
        row |= times(case, samples[contender.name])
        contender.forget()
    return rows


def times(case: Case, seconds: Sequence[float]) -> Row:
    """Return the columns of measured times."""
    middle = statistics.median(seconds)
    return {
        "median_s": middle,
        "min_s": min(seconds),
        "max_s": max(seconds),
        "samples_s": list(seconds),
        "tflops": case.flops / middle * 1e-12,
    }


def told(case: Case, contender: str) -> Row:
    """Return what names a row."""
    return {
        "dtype": case.dtype,
        "direction": case.direction,
        "mask": case.mask,
        "seq_len": case.seq_len,
        "head_dim": case.head_dim,
        "heads": case.heads,
        "contender": contender,
    }
