"""Whether a result is right: no time is reported without that."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from case import Array, Case
from ringmpi import reference
from ringmpi.encoding import numpy_dtype

#: Rows of a block and keys of a piece; their float64 scores are 8 MiB a thread.
BLOCK_ROWS, PIECE_KEYS = 512, 2048

#: Error that a row may have, as a share of its length or that of a typical row, whichever is more: at least
#: so much, or so much times the root of the number of tokens. In bfloat16 all contenders, NumPy with its
#: float32 state among them, come to 2e-2 at 512 tokens and to 6.5e-2 at 8192 causal ones: gradients are
#: differences, of which `out` as it was rounded to 8 bits is a part, and a typical row is a mean over ever
#: more tokens. float16 has 3 bits more. In float32 they stay below 1e-5. Gradients of another head are off by
#: 1 and more.
ALLOWED = {"float32": (1e-4, 0.0), "float16": (5e-2 / 8, 1e-3 / 8), "bfloat16": (5e-2, 1e-3)}


@dataclass(frozen=True)
class Verdict:
    """What was found of all results of a contender.

    Attributes
    ----------
    passed : bool
    max_abs : float
        The largest error of an element.
    row_error : float
        The largest error of a row, as `ALLOWED` counts it.
    """

    passed: bool
    max_abs: float
    row_error: float


class Judge:
    """Compares with the dense float64 reference, all elements, and keeps that of the last problem.

    Parameters
    ----------
    threads : int
        For the reference.
    heads : int, optional
        Looks at the first so many only, where all would take too long.
    """

    def __init__(self, threads: int, heads: int | None = None) -> None:
        self._threads = threads
        self._heads = heads
        self._problem: tuple[object, ...] = ()
        self._tensors: dict[str, Array] = {}
        self._rows: list[list[reference.Rows]] = []

    def verdict(self, case: Case, results: dict[str, Array]) -> Verdict:
        """Judge the results of a case."""
        exact = self._reference(case)
        elements, rows = [], []
        for name in case.tensors:
            error = results[name][:, : self._heads].astype(np.float64) - exact[name]
            lengths = np.linalg.norm(exact[name], axis=-1)
            typical = np.sqrt(np.mean(np.square(lengths)))
            elements.append(np.abs(error).max())
            rows.append((np.linalg.norm(error, axis=-1) / np.maximum(lengths, typical)).max())
        # A NaN stays one in a maximum of NumPy, and is below no bound.
        max_abs, row_error = float(np.max(elements)), float(np.max(rows))
        least, growth = ALLOWED[case.dtype]
        allowed = max(least, growth * case.seq_len**0.5)
        return Verdict(row_error <= allowed, max_abs, row_error)

    def _reference(self, case: Case) -> dict[str, Array]:
        problem = (case.dtype, case.mask, case.seq_len, case.head_dim, case.heads)
        if problem != self._problem:
            self._problem, self._tensors, self._rows = problem, {}, []
        if set(case.tensors) <= set(self._tensors):
            return self._tensors
        dtype = numpy_dtype(case.dtype)
        drawn = {name: array[0, : self._heads] for name, array in case.inputs().items()}
        inputs = {name: array.astype(dtype).astype(np.float64) for name, array in drawn.items()}
        rule = reference.Rule(case.causal, None, None, case.head_dim**-0.5)
        with ThreadPoolExecutor(self._threads) as pool:
            if not self._rows:
                self._attend(case, inputs, rule, pool)
            if case.backward:
                self._go_back(case, inputs, rule, pool)
        return self._tensors

    def _attend(
        self, case: Case, inputs: dict[str, Array], rule: reference.Rule, pool: ThreadPoolExecutor
    ) -> None:
        def block(head: int, start: int) -> tuple[Array, reference.Rows]:
            positions = np.arange(start, min(start + BLOCK_ROWS, case.seq_len))
            q, dout = (inputs[name][head, positions] for name in ("q", "dout"))
            out, lse = reference.attend(
                q, positions, lambda: pieces(inputs, head, positions[-1], case), rule, np.float64
            )
            delta = reference.delta_of(dout, out, np.float64)
            return out, reference.Rows(positions, q, dout, lse, delta)

        starts = range(0, case.seq_len, BLOCK_ROWS)
        found = [list(pool.map(partial(block, head), starts)) for head in range(len(inputs["q"]))]
        self._tensors["out"] = joined([np.concatenate([out for out, _ in head]) for head in found])
        self._rows = [[rows for _, rows in head] for head in found]

    def _go_back(
        self, case: Case, inputs: dict[str, Array], rule: reference.Rule, pool: ThreadPoolExecutor
    ) -> None:
        def dq(head: int, rows: reference.Rows) -> Array:
            return reference.query_gradient(
                rows, lambda: pieces(inputs, head, rows.positions[-1], case), rule, np.float64
            )

        def dkv(head: int, piece: reference.Piece) -> tuple[Array, Array]:
            seen_by = (r for r in self._rows[head] if not case.causal or r.positions[-1] >= piece[0][0])
            return reference.key_gradients(piece, seen_by, rule, np.float64)

        found: dict[str, list[Array]] = {"dq": [], "dk": [], "dv": []}
        for head in range(len(inputs["q"])):
            found["dq"].append(np.concatenate(list(pool.map(partial(dq, head), self._rows[head]))))
            every = pieces(inputs, head, case.seq_len, case)
            dk, dv = zip(*pool.map(partial(dkv, head), every), strict=True)
            found["dk"].append(np.concatenate(dk))
            found["dv"].append(np.concatenate(dv))
        self._tensors |= {name: joined(heads) for name, heads in found.items()}


def joined(heads: list[Array]) -> Array:
    """Return heads as one tensor with a batch of 1."""
    return np.stack(heads)[None]


def pieces(inputs: dict[str, Array], head: int, last: int, case: Case) -> Iterator[reference.Piece]:
    """Go through the keys that any row up to `last` sees."""
    for start in range(0, min(last + 1, case.seq_len) if case.causal else case.seq_len, PIECE_KEYS):
        keys = np.arange(start, min(start + PIECE_KEYS, case.seq_len))
        yield keys, inputs["k"][head, keys], inputs["v"][head, keys]
