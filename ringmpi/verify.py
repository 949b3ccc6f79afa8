"""The verdict: outputs, wherever they are read from, against the reference, head by head.

What is allowed stands in `ringmpi.comparison`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringmpi import reference
from ringmpi.comm.cores import available_cores
from ringmpi.comm.threads import blas_threads
from ringmpi.comparison import Comparison, Sizes, Verdict, gradient_sizes, largest_of, rounding_of
from ringmpi.config import Experiment, verify_rows
from ringmpi.encoding import numpy_dtype
from ringmpi.layout import Layout, Runs
from ringmpi.problem import TENSORS, Problem, positions_of
from ringmpi.softmax import SIGNIFICANT_DIGITS, state_dtype

__all__ = ["Outputs", "Verdict", "verify"]

Array = NDArray[Any]
Positions = NDArray[np.int64]

#: Rows and keys that the reference takes at a time: 256 x 512 float64 scores are 1 MiB,
#: which stays in the cache of a core or of its neighbours.
BLOCK_ROWS = 256
PIECE_KEYS = 512

#: Seconds between two looks at how far the threads have come.
PROGRESS_INTERVAL = 0.2

#: What is judged, in this order, and whether its tokens are the keys' or the queries'.
FORWARD = {"out": "q", "lse": "q"}
BACKWARD = {"dq": "q", "dk": "k", "dv": "k"}


class Outputs(Protocol):
    """Where the result is read from."""

    def rows(self, tensor: str, batch: int, head: int, runs: Runs) -> Array:
        """Return rows of one head at global positions, shape (rows, head_dim) or (rows,)."""


#: Inputs may be so large that sums and errors overflow. What comes of it is infinite or NaN and never passes.
QUIET = np.errstate(over="ignore", invalid="ignore")


@QUIET
def verify(
    outputs: Outputs,
    problem: Problem,
    experiment: Experiment,
    layout: Layout,
    progress: Callable[[int, int], None],
) -> list[Verdict]:
    """Compare a result with the reference, head by head, on all cores this process may use. Local.

    A thread holds a KV head's inputs and, for gradients, the inputs of one query head, and sums of two
    sizes in float64.

    Parameters
    ----------
    outputs : Outputs
    problem : Problem
    experiment : Experiment
        Its `verify` says how many rows of ``out``, ``lse`` and ``dq``, and how many keys of ``dk`` and
        ``dv``; samples include the first and the last. The gradients of any key need the statistics of all
        rows, so with `backward` a sample costs a whole forward pass of the reference, and of the single pass.
    layout : Layout
        Of the keys. Only to name the rank that owns the worst element.
    progress : callable
        Told a few times a second how many of how many heads are done; may raise to give up.

    Returns
    -------
    list of Verdict
        For ``out`` and ``lse``; with `backward` for ``dq``, ``dk`` and ``dv`` too.
    """
    tasks = [(b, h) for b in range(experiment.batch) for h in range(experiment.kv_heads)]
    stop = threading.Event()
    with ThreadPoolExecutor(max(1, available_cores() // max(1, blas_threads()))) as pool:
        heads = [
            pool.submit(_verify_group, outputs, _Group(problem, experiment, *task), stop)
            for task in tasks
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
    total = _comparisons(experiment)
    for head in heads:  # In this order, so that sums have the same bits every time.
        for tensor, comparison in head.result().items():
            total[tensor].merge(comparison)
    dtype = numpy_dtype(experiment.dtype)
    first = experiment.seq_len - experiment.num_queries
    owners = {"q": replace(layout, seq_len=experiment.num_queries, first=first), "k": layout}
    return [
        comparison.verdict(
            dtype, state_dtype(dtype), owners[(FORWARD | BACKWARD)[tensor]], experiment.weights
        )
        for tensor, comparison in total.items()
    ]


def _comparisons(experiment: Experiment) -> dict[str, Comparison]:
    tensors = FORWARD | BACKWARD if experiment.backward else FORWARD
    return {tensor: Comparison(tensor) for tensor in tensors}


@QUIET  # Of its own, as errors are handled by thread.
def _verify_group(outputs: Outputs, group: _Group, stop: threading.Event) -> dict[str, Comparison]:
    """Compare the query heads that share a KV head."""
    judge = _Judge(outputs, group, stop)
    for head in group.heads:
        blocks = judge.compare_rows(head)
        if group.experiment.backward:
            judge.sum_keys(blocks)
    if group.experiment.backward:
        judge.compare_keys()
    return judge.found


class _Stopped(Exception):  # noqa: N818  # it is no error
    """Ends a thread whose result nobody waits for."""


class _Group:
    """A KV head of one sequence, and the query heads that share it: where their inputs come from."""

    def __init__(self, problem: Problem, experiment: Experiment, batch: int, kv_head: int) -> None:
        self._problem = problem
        self.experiment, self.batch, self.kv_head = experiment, batch, kv_head
        size = experiment.heads // experiment.kv_heads
        self.heads = range(kv_head * size, (kv_head + 1) * size)

    def rows(self, tensor: str, head: int, positions: Positions) -> Array:
        """Return rows of one head, shape (rows, head_dim)."""
        one = range(head, head + 1), range(self.batch, self.batch + 1)
        return np.asarray(self._problem.rows(tensor, _runs(positions), *one)[0, 0])

    def piece(self, keys: Positions) -> reference.Piece:
        """Return some keys and their values."""
        return keys, self.rows("k", self.kv_head, keys), self.rows("v", self.kv_head, keys)

    def pieces(self, backwards: bool = False) -> Iterator[reference.Piece]:
        """Read all keys and values, piece by piece."""
        seq_len = self.experiment.seq_len
        starts = range(0, seq_len, PIECE_KEYS)
        for start in starts[::-1] if backwards else starts:
            yield self.piece(np.arange(start, min(start + PIECE_KEYS, seq_len)))


@dataclass(frozen=True)
class _Pass:
    """A way to compute a head: as the reference, or as the single pass that sets the bound.

    Attributes
    ----------
    rule : Rule
    pieces : callable
        Goes through all keys, forwards or backwards.
    dtype : type
    mirrored : bool
        Sum over queries, keys and columns from the end. The reference itself is computed in float64, so that
        a single pass in the same order would show no error at all. Another order changes nothing but the
        rounding.
    digits : int or None
        Binary digits of weights, where they are rounded.
    """

    rule: reference.Rule
    pieces: Callable[[bool], Iterable[reference.Piece]]
    dtype: Any
    mirrored: bool = False
    digits: int | None = None

    def attend(self, q: Array, positions: Positions) -> tuple[Array, Array]:
        q, positions = map(self._turned, (q, positions))
        out, lse = reference.attend(q, positions, self._pieces, self.rule, self.dtype, self.digits)
        return self._turned(out), self._turned(lse)

    def rows(
        self, positions: Positions, q: Array, dout: Array, out: Array, lse: Array
    ) -> reference.Rows:
        """Return rows with what their gradients need."""
        delta = reference.delta_of(self._turned(dout), self._turned(out), self.dtype)
        return reference.Rows(positions, q, dout, lse, self._turned(delta))

    def query_gradient(self, rows: reference.Rows) -> Array:
        rows = reference.Rows(*map(self._turned, rows))
        dq = reference.query_gradient(rows, self._pieces, self.rule, self.dtype, self.digits)
        return self._turned(dq)

    def key_gradients(
        self, piece: reference.Piece, blocks: list[reference.Rows]
    ) -> tuple[Array, Array]:
        keys, k, v = map(self._turned, piece)
        turned = (
            reference.Rows(*map(self._turned, rows))
            for rows in (blocks[::-1] if self.mirrored else blocks)
        )
        dk, dv = reference.key_gradients((keys, k, v), turned, self.rule, self.dtype, self.digits)
        return self._turned(dk), self._turned(dv)

    def _pieces(self) -> Iterator[reference.Piece]:
        for keys, k, v in self.pieces(self.mirrored):
            yield self._turned(keys), self._turned(k), self._turned(v)

    def _turned(self, array: Array) -> Array:
        return np.flip(array) if self.mirrored else array


def _passes(experiment: Experiment, pieces: Callable[[bool], Iterable[reference.Piece]]) -> list[_Pass]:
    """Return the exact pass and the single one."""
    state = state_dtype(numpy_dtype(experiment.dtype)).type
    digits = SIGNIFICANT_DIGITS[experiment.dtype] if experiment.weights == "rounded" else None
    scale = experiment.softmax_scale
    rule = reference.Rule(
        experiment.causal,
        experiment.window,
        experiment.documents,
        experiment.head_dim**-0.5 if scale is None else scale,
    )
    return [
        _Pass(rule, pieces, np.float64),
        _Pass(rule, pieces, state, state is np.float64, digits),
    ]


class _Judge:
    """Compares the outputs of one group.

    Attributes
    ----------
    found : dict of Comparison, by tensor
    """

    def __init__(self, outputs: Outputs, group: _Group, stop: threading.Event) -> None:
        experiment = group.experiment
        self.found = _comparisons(experiment)
        self._outputs, self._group, self._stop = outputs, group, stop
        self._rows, self._keys = _chosen(experiment)
        # The gradients of any key need the statistics of all rows.
        covered = positions_of("q", experiment)
        self._attending = np.arange(covered.start, covered.stop) if experiment.backward else self._rows
        pieces: Callable[[bool], Iterable[reference.Piece]] = group.pieces
        if len(self._attending) == len(covered):
            # All rows of a head go over its keys many times, so they are held; a sample reads them anew.
            pieces = _held(group.pieces())
        self._passes = _passes(experiment, pieces)
        self._sizes = {name: Sizes() for name in TENSORS}
        for _, k, v in pieces(False):
            self._sizes["k"].add(k)
            self._sizes["v"].add(v)
        if experiment.backward:
            whole = len(self._keys) == experiment.seq_len
            chosen = map(group.piece, _blocks(self._keys, PIECE_KEYS))
            self._key_pieces = list(pieces(False) if whole else chosen)
            self._sums = [
                [
                    [np.zeros(k.shape, each.dtype), np.zeros(v.shape, each.dtype)]
                    for each in self._passes
                ]
                for _, k, v in self._key_pieces
            ]

    def compare_rows(self, head: int) -> list[list[reference.Rows]]:
        """Compare ``out``, ``lse`` and ``dq`` of a head; return all its rows, for each pass."""
        blocks: list[list[reference.Rows]] = [[] for _ in self._passes]
        for positions in _blocks(self._attending, BLOCK_ROWS):
            self._look()
            q = self._group.rows("q", head, positions)
            results = [each.attend(q, positions) for each in self._passes]
            first, last = np.searchsorted(self._rows, (positions[0], positions[-1] + 1))
            chosen = np.searchsorted(positions, self._rows[first:last])
            self._compare_forward(head, positions[chosen], [(o[chosen], e[chosen]) for o, e in results])
            if self._group.experiment.backward:
                dout = self._group.rows("dout", head, positions)
                given = self._given(head, positions, results[0][0])
                for each, (out, lse), kept in zip(self._passes, results, blocks, strict=True):
                    kept.append(each.rows(positions, q, dout, out if given is None else given, lse))
                self._compare_dq(head, [_part(kept[-1], chosen) for kept in blocks])
        return blocks

    def sum_keys(self, blocks: list[list[reference.Rows]]) -> None:
        """Add what the rows of a head contribute to ``dk`` and ``dv``."""
        for rows in blocks[0]:
            self._sizes["q"].add(rows.q)
            self._sizes["dout"].add(rows.dout)
        for piece, sums in zip(self._key_pieces, self._sums, strict=True):
            self._look()
            for each, rows_of_pass, (dk, dv) in zip(self._passes, blocks, sums, strict=True):
                more = each.key_gradients(piece, rows_of_pass)
                dk += more[0]
                dv += more[1]

    def compare_keys(self) -> None:
        """Compare ``dk`` and ``dv``, once all heads of the group are summed."""
        scale, least = self._gradient_sizes(self._sizes["dout"], "q")
        head = self._group.kv_head
        for (keys, *_), sums in zip(self._key_pieces, self._sums, strict=True):
            dk, dv = zip(*sums, strict=True)
            self._compare("dk", head, keys, dk, max(scale, largest_of(dk[0])), least)
            self._compare("dv", head, keys, dv, largest_of(dv[0]))

    def _given(self, head: int, positions: Positions, exact: Array) -> Array | None:
        """Return ``out`` as a backward pass was given it, if it was rounded to 16 bits.

        What is no neighbour of the exact value is not trusted.
        """
        dtype = numpy_dtype(self._group.experiment.dtype)
        if dtype == state_dtype(dtype):
            return None
        written = self._outputs.rows("out", self._group.batch, head, _runs(positions))
        near = np.abs(written - exact) <= 2 * rounding_of(exact, dtype, state_dtype(dtype))
        return np.where(near, written, exact.astype(dtype))

    def _compare_forward(
        self, head: int, positions: Positions, results: list[tuple[Array, Array]]
    ) -> None:
        """Compare rows of ``out`` and ``lse``, told for each pass."""
        out, lse = zip(*results, strict=True)
        self._compare("out", head, positions, out, self._sizes["v"].largest)
        self._compare("lse", head, positions, lse, max(1.0, largest_of(lse[0])), least=1.0)

    def _compare_dq(self, head: int, rows: list[reference.Rows]) -> None:
        """Compare rows of ``dq``, told for each pass."""
        scale, least = self._gradient_sizes(Sizes().add(rows[0].dout), "k")
        passes = zip(self._passes, rows, strict=True)
        dq = [each.query_gradient(rows_of_pass) for each, rows_of_pass in passes]
        self._compare("dq", head, rows[0].positions, dq, max(scale, largest_of(dq[0])), least)

    def _gradient_sizes(self, dout: Sizes, other: str) -> tuple[float, float]:
        scale = self._passes[0].rule.softmax_scale
        width = self._group.experiment.head_dim
        return gradient_sizes(scale, width, dout, self._sizes["v"], self._sizes[other])

    def _compare(
        self,
        tensor: str,
        head: int,
        positions: Positions,
        results: Sequence[Array],
        scale: float,
        least: float = 0.0,
    ) -> None:
        """Compare rows of a tensor with the results of both passes."""
        if not len(positions):
            return
        batch, found = self._group.batch, self.found[tensor]
        rows = self._outputs.rows(tensor, batch, head, _runs(positions))

        def place(at: Any) -> list[int]:
            return [batch, head, int(positions[at[0]]), *map(int, at[1:])]

        exact, single = results
        found.add(rows, exact, single, place, least)
        found.scale = max(found.scale, scale)

    def _look(self) -> None:
        if self._stop.is_set():
            raise _Stopped


def _part(rows: reference.Rows, chosen: Positions) -> reference.Rows:
    return reference.Rows(*(values[chosen] for values in rows))


def _held(
    pieces: Iterable[reference.Piece],
) -> Callable[[bool], Iterable[reference.Piece]]:
    """Return what goes through kept pieces, forwards or backwards."""
    kept = list(pieces)
    return lambda backwards: kept[::-1] if backwards else kept


def _chosen(experiment: Experiment) -> tuple[Positions, Positions]:
    """Return the rows and the keys that are compared, ascending."""
    sampled = verify_rows(experiment.verify)
    random = np.random.default_rng(experiment.seed)

    def some(covered: range) -> Positions:
        if sampled is None or sampled >= len(covered):
            return np.arange(covered.start, covered.stop)
        drawn = random.choice(len(covered), sampled, replace=False)
        return covered.start + np.unique(np.append(drawn, (0, len(covered) - 1)))

    return some(positions_of("q", experiment)), some(positions_of("k", experiment))


def _blocks(positions: Positions, size: int) -> Iterator[Positions]:
    for start in range(0, len(positions), size):
        yield positions[start : start + size]


def _runs(positions: Positions) -> Runs:
    """Return ascending positions as runs without gaps."""
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return tuple(range(int(run[0]), int(run[-1]) + 1) for run in np.split(positions, cuts))
