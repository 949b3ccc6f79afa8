"""Cases one after the other: contenders in turn, results held against a reference, times kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from case import BOTH, FORWARD, Array, Case
from on_gpu import Contender, Unsupported
from ringmpi import reference
from ringmpi.encoding import numpy_dtype

#: Rows whose output is held against a float64 reference, which takes some minutes in all.
SAMPLED = 32

#: Error of a row of out or dq, as a part of its length or that of a typical row: rounding to the dtype, of
#: inputs that are exact. Eight bits leave 2**-9 an element; dq is a difference of some of them.
ALLOWED = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}

Row = dict[str, Any]


def cases(
    dtypes: Sequence[str], head_dims: Sequence[int], lengths: Sequence[int], heads: int
) -> Iterator[Case]:
    """Yield every case."""
    masks = ("full", "causal")
    for dtype, head_dim, mask, direction, length in product(
        dtypes, head_dims, masks, (FORWARD, BOTH), lengths
    ):
        yield Case("single", dtype, direction, mask, length, head_dim, heads)


def measure(case: Case, makers: Iterable[Callable[[], Contender]], alternations: int) -> Iterator[Row]:
    """Yield a row for each contender: all of them in turn, so that what the GPU's clock does meets all."""
    ready: list[Contender] = []
    for make in makers:
        contender = make()
        try:
            contender.prepare(case)
            contender.seconds()
            wrong = wrong_rows(case, contender.results())
        except Unsupported as reason:
            yield told(case, contender.name) | {"absent": str(reason)}
            continue
        if wrong is None:
            ready.append(contender)
        else:
            yield told(case, contender.name) | {"absent": wrong}
    times: dict[str, list[float]] = {contender.name: [] for contender in ready}
    for _ in range(alternations):
        for contender in ready:
            times[contender.name].append(contender.seconds())
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        yield told(case, name) | {
            "median_s": middle,
            "min_s": min(seconds),
            "max_s": max(seconds),
            "alternations": len(seconds),
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


def wrong_rows(case: Case, results: dict[str, Array]) -> str | None:
    """Return what is wrong with sampled rows of the first head, or None; nothing wrong is timed."""
    dtype = numpy_dtype(case.dtype)
    q, k, v, dout = (array[0, 0].astype(dtype).astype(np.float64) for array in case.inputs().values())
    rule = reference.Rule(case.causal, None, None, case.head_dim**-0.5)
    at = np.unique(np.linspace(0, case.seq_len - 1, SAMPLED).round().astype(np.int64))
    everything = [(np.arange(case.seq_len), k, v)]
    out, lse = reference.attend(q[at], at, lambda: iter(everything), rule, np.float64)
    exact = {"out": out}
    if case.backward:
        delta = reference.delta_of(dout[at], out, np.float64)
        rows = reference.Rows(at, q[at], dout[at], lse, delta)
        exact["dq"] = reference.query_gradient(rows, lambda: iter(everything), rule, np.float64)
    for name, right in exact.items():
        error = np.linalg.norm(results[name][0, 0][at] - right, axis=-1)
        lengths = np.linalg.norm(right, axis=-1)
        worst = float((error / np.maximum(lengths, np.sqrt(np.mean(lengths**2)))).max())
        if not worst <= ALLOWED[case.dtype]:  # NaN is not below either.
            return f"{name} is wrong: a row is off by {worst:.2g} of its length"
    return None
