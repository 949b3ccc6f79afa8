r"""The verdict: a result may differ from the reference by no more than rounding explains.

With ``ref`` the float64 reference and ``single`` the plain single-pass result in the dtype of the state (for
float64 in another order of summation),
every element must satisfy

.. math:: |x_i - ref_i| \le 2 \max|single - ref| + 4 \epsilon \max|v| + r_i

where :math:`\epsilon` is that of the state's dtype and :math:`r_i` half a unit in the last place of
``ref_i`` if the output is rounded once to 16 bits, else 0. The factor 2 is flash-attention's rule: no more
than twice the error that an honest single pass makes in the same arithmetic; the second term is a floor for
inputs on which that pass happens to be exact. For ``lse``, which is not an average of values, the largest
``|lse|`` stands in for ``max|v|``. An element-wise rounding term is far stricter for 16-bit outputs than
one bound of the output's own epsilon: a lost key is seen.

The mean error has a bound of its own, since the last rounding hides in the maximum what a coarse accumulator
does to the mean: 1.05 times the mean error of ``single`` after the same rounding for 16-bit outputs (that
rounding dominates, so the mean must be flat over rank counts), twice it otherwise, plus one epsilon of the
mean ``|ref|``. NaN never passes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringmpi import reference
from ringmpi.config import Experiment, verify_rows
from ringmpi.encoding import numpy_dtype
from ringmpi.layout import Layout, Runs
from ringmpi.problem import Problem
from ringmpi.softmax import state_dtype

Array = NDArray[Any]

#: Rows and keys that the reference takes at a time: 256 x 512 float64 scores are 1 MiB,
#: which stays in the cache of a core or of its neighbours.
BLOCK_ROWS = 256
PIECE_KEYS = 512

#: Seconds between two looks at how far the threads have come.
PROGRESS_INTERVAL = 0.2


class Outputs(Protocol):
    """Where the result is read from."""

    def rows(self, tensor: str, batch: int, head: int, runs: Runs) -> Array:
        """Return rows of one head, shape (rows, head_dim) or (rows,)."""


@dataclass
class Verdict:
    """What was found of one tensor.

    Attributes
    ----------
    tensor : str
    passed : bool
    max_abs, mean_abs : float
        Error against the reference.
    beyond : float
        The largest error beyond the last rounding of its own element; `max_abs` where none is rounded again.
    bound, mean_bound : float
        What is allowed for `beyond` and `mean_abs`.
    single_max, single_mean : float
        Error of the plain single pass, rounded like the output.
    rows : int
        Rows compared, over batch and heads.
    index : list of int
        Batch, head, token (and column) of the worst element.
    rank : int
        The rank that owns it.
    found, expected : float
        Its two values.
    """

    tensor: str
    passed: bool
    max_abs: float
    mean_abs: float
    beyond: float
    bound: float
    mean_bound: float
    single_max: float
    single_mean: float
    rows: int
    index: list[int]
    rank: int
    found: float
    expected: float

    def record(self) -> dict[str, Any]:
        """Return everything by name."""
        return asdict(self)

    def failure(self) -> str:
        """Return where and by how much it fails, in one line."""
        kind = "element" if not self.beyond <= self.bound else "mean"
        if not np.isfinite(self.bound + self.mean_bound):
            kind = "bound (a plain single pass is not finite either, so nothing is allowed)"
        return (
            f"{self.tensor}{self.index} of rank {self.rank}: found {self.found:.9g}, expected "
            f"{self.expected:.9g}; {kind} out of bounds: error beyond rounding {self.beyond:.3g} "
            f"(allowed {self.bound:.3g}), mean {self.mean_abs:.3g} (allowed {self.mean_bound:.3g})"
        )


@dataclass
class _Comparison:
    """Errors of one tensor, added up over the parts that are compared on their own."""

    tensor: str
    rows: int = 0
    count: int = 0
    error_sum: float = 0.0
    single_sum: float = 0.0
    size_sum: float = 0.0
    largest: float = 0.0
    beyond: float = -np.inf
    single_error: float = 0.0
    single_largest: float = 0.0
    scale: float = 0.0
    worst: dict[str, Any] = field(default_factory=dict)

    def add(self, found: Array, exact: Array, single: Array, place: Callable[[Any], Any]) -> None:
        """Compare a part; `place` turns its index into one of the whole tensor."""
        if not found.size:
            return
        rounded = single.astype(found.dtype)
        error, single_error = _error(found, exact), _error(rounded, exact)
        rounding = _rounding(exact, found.dtype, single.dtype)
        beyond = error - rounding
        at = np.unravel_index(int(np.argmax(beyond)), beyond.shape)
        if beyond[at] > self.beyond:
            self.beyond = float(beyond[at])
            self.worst = {
                "index": place(at),
                "found": float(found[at]),
                "expected": float(exact[at]),
            }
        self.rows += len(found)
        self.count += found.size
        self.error_sum += float(error.sum())
        self.single_sum += float(single_error.sum())
        self.size_sum += float(_size(exact, least=1.0 if self.tensor == "lse" else 0.0).sum())
        self.largest = max(self.largest, float(error.max()))
        self.single_largest = max(self.single_largest, float(single_error.max()))
        self.single_error = max(self.single_error, float(_error(single, exact).max()))

    def merge(self, other: _Comparison) -> None:
        """Take in what was compared elsewhere."""
        for name in ("rows", "count", "error_sum", "single_sum", "size_sum"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.beyond > self.beyond:
            self.beyond, self.worst = other.beyond, other.worst
        for name in ("largest", "single_error", "single_largest", "scale"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    def verdict(self, out_dtype: np.dtype[Any], state: np.dtype[Any], layout: Layout) -> Verdict:
        eps = float(np.finfo(state).eps)
        allowed = 2 * self.single_error + 4 * eps * self.scale
        once_rounded = self.tensor == "out" and out_dtype.itemsize < state.itemsize
        factor = 1.05 if once_rounded else 2.0
        mean, single_mean = self.error_sum / self.count, self.single_sum / self.count
        mean_bound = factor * single_mean + eps * self.size_sum / self.count
        # Comparisons that NaN fails. A single pass that is itself not finite bounds nothing.
        bounded = bool(np.isfinite(allowed) and np.isfinite(mean_bound))
        passed = bounded and bool(self.beyond <= allowed and mean <= mean_bound)
        return Verdict(
            tensor=self.tensor,
            passed=passed,
            max_abs=self.largest,
            mean_abs=mean,
            beyond=self.beyond,
            bound=allowed,
            mean_bound=mean_bound,
            single_max=self.single_largest,
            single_mean=single_mean,
            rows=self.rows,
            rank=layout.owner(self.worst["index"][2])[0],
            **self.worst,
        )


def verify(
    outputs: Outputs,
    problem: Problem,
    experiment: Experiment,
    layout: Layout,
    progress: Callable[[int, int], None],
) -> list[Verdict]:
    """Compare a result with the reference, head by head, on all cores this process may use. Local.

    Parameters
    ----------
    outputs : Outputs
    problem : Problem
    experiment : Experiment
        Its `verify` says how many rows; sampled rows include the first and the last.
    layout : Layout
        Only to name the rank that owns the worst element.
    progress : callable
        Told a few times a second how many of how many heads are done; may raise to give up.

    Returns
    -------
    list of Verdict
        For ``out`` and ``lse``.
    """
    tasks = [(b, h) for b in range(experiment.batch) for h in range(experiment.kv_heads)]
    total = {"out": _Comparison("out"), "lse": _Comparison("lse")}
    stop = threading.Event()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        heads = [
            pool.submit(_verify_group, outputs, problem, experiment, *task, stop) for task in tasks
        ]
        try:
            pending = set(heads)
            while pending:
                _, pending = wait(pending, timeout=PROGRESS_INTERVAL)
                progress(len(heads) - len(pending), len(heads))
        except BaseException:
            stop.set()  # Leaving the pool waits for its threads, which look at this often.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for head in heads:  # In this order, so that sums have the same bits every time.
        for comparison in head.result():
            total[comparison.tensor].merge(comparison)
    dtype = numpy_dtype(experiment.dtype)
    state = state_dtype(dtype)
    return [comparison.verdict(dtype, state, layout) for comparison in total.values()]


def _verify_group(
    outputs: Outputs,
    problem: Problem,
    experiment: Experiment,
    batch: int,
    kv_head: int,
    stop: threading.Event,
) -> tuple[_Comparison, _Comparison]:
    """Compare the query heads that share a KV head."""
    out, lse = _Comparison("out"), _Comparison("lse")
    state: Any = state_dtype(numpy_dtype(experiment.dtype)).type
    group = experiment.heads // experiment.kv_heads
    scale = experiment.softmax_scale
    rule = reference.Rule(
        experiment.causal,
        experiment.window,
        experiment.documents,
        experiment.head_dim**-0.5 if scale is None else scale,
    )
    one_kv_head = range(batch, batch + 1), range(kv_head, kv_head + 1)

    def read(starts: range) -> Iterator[reference.Piece]:
        for start in starts:
            keys = range(start, min(start + PIECE_KEYS, experiment.seq_len))
            k, v = (problem.rows(t, (keys,), one_kv_head[1], one_kv_head[0])[0, 0] for t in "kv")
            yield np.arange(keys.start, keys.stop), k, v

    starts = range(0, experiment.seq_len, PIECE_KEYS)
    sampled = verify_rows(experiment.verify)
    # All rows of a head go over its keys many times, so they are held; a sample reads them anew.
    held = list(read(starts)) if sampled is None else None

    def pieces() -> Iterable[reference.Piece]:
        return read(starts) if held is None else held

    def pieces_backwards() -> Iterable[reference.Piece]:
        return read(starts[::-1]) if held is None else held[::-1]

    largest = max(
        float(np.abs(v[np.isfinite(v)], dtype=np.float64).max(initial=0)) for *_, v in pieces()
    )
    out.scale = largest
    for head in range(kv_head * group, (kv_head + 1) * group):
        for runs in _row_blocks(experiment, sampled):
            if stop.is_set():
                return out, lse
            positions = np.concatenate([np.arange(r.start, r.stop, r.step) for r in runs])
            q = problem.rows("q", runs, range(head, head + 1), one_kv_head[0])[0, 0]
            exact = reference.attend(q, positions, pieces, rule, np.float64)
            if state is np.float64:
                single = _attend_backwards(q, positions, pieces_backwards, rule)
            else:
                single = reference.attend(q, positions, pieces, rule, state)

            def place(at: Any, where: Array = positions, head: int = head) -> list[int]:
                return [batch, head, int(where[at[0]]), *map(int, at[1:])]

            out.add(outputs.rows("out", batch, head, runs), exact[0], single[0], place)
            lse.add(outputs.rows("lse", batch, head, runs), exact[1], single[1], place)
            finite = exact[1][np.isfinite(exact[1])]
            lse.scale = max(lse.scale, 1.0, float(np.abs(finite).max(initial=0)))
    return out, lse


def _attend_backwards(
    q: Array,
    positions: Array,
    pieces_backwards: Callable[[], Iterable[reference.Piece]],
    rule: reference.Rule,
) -> tuple[Array, Array]:
    """Return a plain pass in float64 that sums over keys and over columns from the end.

    The reference itself is computed in float64, so that a single pass in the same order would show no
    error at all. Another order changes nothing but the rounding.
    """

    def backwards() -> Iterator[reference.Piece]:
        for keys, k, v in pieces_backwards():
            yield keys[::-1], k[::-1, ::-1], v[::-1]

    return reference.attend(q[:, ::-1], positions, backwards, rule, np.float64)


def _row_blocks(experiment: Experiment, sampled: int | None) -> Iterator[Runs]:
    seq_len = experiment.seq_len
    if sampled is None or sampled >= seq_len:
        for start in range(0, seq_len, BLOCK_ROWS):
            yield (range(start, min(start + BLOCK_ROWS, seq_len)),)
        return
    drawn = np.random.default_rng(experiment.seed).choice(seq_len, sampled, replace=False)
    rows = sorted({0, seq_len - 1, *map(int, drawn)})
    for start in range(0, len(rows), BLOCK_ROWS):
        yield tuple(range(row, row + 1) for row in rows[start : start + BLOCK_ROWS])


def _size(exact: Array, least: float) -> Array:
    """Return ``|exact|``, at least `least`; 0 where it is not finite."""
    return np.where(np.isfinite(exact), np.maximum(np.abs(exact), least), 0)


def _error(found: Array, exact: Array) -> Array:
    """Return ``|found - exact|``; 0 where both are the same infinity, infinite where either is NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(found.astype(np.float64) - exact)
    error[found.astype(np.float64) == exact] = 0
    error[np.isnan(error)] = np.inf
    return np.asarray(error)


def _rounding(exact: Array, out: np.dtype[Any], state: np.dtype[Any]) -> Array:
    """Return half a unit in the last place of `out` at each exact value; 0 if it is not rounded again."""
    if out.itemsize >= state.itemsize:
        return np.zeros(exact.shape)
    import ml_dtypes

    info = ml_dtypes.finfo(out)  # type: ignore[no-untyped-call]  # ml_dtypes types only part of itself
    size = np.maximum(np.abs(np.nan_to_num(exact)), float(info.smallest_normal))
    # The state's own error may push a value over a power of two, where the unit doubles; frexp of a
    # value just below it gives the smaller unit, so one more ulp of the state is added.
    _, exponent = np.frexp(size * (1 + float(np.finfo(state).eps)))
    return np.asarray(np.ldexp(0.5, exponent - 1 - int(info.nmant)))
