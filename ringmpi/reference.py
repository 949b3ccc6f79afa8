r"""The judge: dense attention, one row after the other against every key, and its gradients.

It shares nothing with what it judges: no schedule, no device, no softmax state, no tiles, and its own
reading of the mask. A row is computed in two plain passes over the keys: its largest score first, then
the sums, with that maximum fixed. Keys come in pieces only to bound memory.

The gradients are those of :math:`\sum out \cdot dout`. With :math:`p_{ij} = e^{s_{ij} - lse_i}` and
:math:`ds_{ij} = p_{ij} (dout_i \cdot v_j - \delta_i)`, where :math:`\delta_i = dout_i \cdot out_i`, they are

.. math:: dq_i = scale \sum_j ds_{ij} k_j, \quad dk_j = scale \sum_i ds_{ij} q_i, \quad
   dv_j = \sum_i p_{ij} dout_i

over allowed pairs. A pair that is not allowed is left out, never multiplied by 0, so that a NaN behind the
mask reaches nobody; nor does a pair whose score is minus infinity, since it weighs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: A piece of the keys: their positions, k and v of shape (tokens, head_dim).
Piece = tuple[NDArray[np.int64], Array, Array]


class Rows(NamedTuple):
    """Query rows of one head, with what their gradients need of the forward pass.

    Attributes
    ----------
    positions : ndarray of int64, shape (rows,)
        Global positions.
    q, dout : ndarray, shape (rows, head_dim)
    lse, delta : ndarray, shape (rows,)
        ``delta`` is that of `delta_of`.
    """

    positions: NDArray[np.int64]
    q: Array
    dout: Array
    lse: Array
    delta: Array


@dataclass(frozen=True)
class Rule:
    """Which keys a query may see, and the factor of the scores."""

    causal: bool
    window: int | None
    documents: Sequence[int] | None
    softmax_scale: float

    def hidden(self, queries: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the pairs that are not allowed, shape (queries, keys)."""
        query, key = queries[:, None], keys[None, :]
        hidden = np.zeros((len(queries), len(keys)), np.bool_)
        if self.causal:
            hidden |= key > query
        if self.window is not None:
            hidden |= key < query - self.window
        if self.documents is not None:
            # A document's number: how many documents end at or before the token.
            ends = np.asarray(self.documents[1:])
            hidden |= np.searchsorted(ends, query, "right") != np.searchsorted(ends, key, "right")
        return hidden


def attend(
    q: Array,
    positions: NDArray[np.int64],
    pieces: Callable[[], Iterable[Piece]],
    rule: Rule,
    dtype: type[np.floating[Any]],
    digits: int | None = None,
) -> tuple[Array, Array]:
    """Attend rows of one head to all keys of one KV head. Local.

    Parameters
    ----------
    q : ndarray, shape (rows, head_dim)
    positions : ndarray of int64, shape (rows,)
        Global positions of the rows.
    pieces : callable
        Called twice, goes through all keys each time.
    rule : Rule
    dtype : type
        What everything is computed in: float64 for the reference; the state's dtype for the plain
        single-pass result that sets the bound.
    digits : int, optional
        Binary digits that weights are rounded to before they multiply.

    Returns
    -------
    out : ndarray of `dtype`, shape (rows, head_dim)
    lse : ndarray of `dtype`, shape (rows,)
    """
    q = q.astype(dtype)
    scale = dtype(rule.softmax_scale)

    def visible() -> Iterator[tuple[Array, Array, NDArray[np.bool_]]]:
        """Yield scores, values and what is hidden, for pieces of which anything is seen."""
        for keys, k, v in pieces():
            hidden = rule.hidden(positions, keys)
            if not hidden.all():
                scores = (q @ k.astype(dtype).T) * scale
                scores[hidden] = -np.inf
                yield scores, v.astype(dtype), hidden

    # Hidden scores may overflow or be NaN before they are replaced.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        largest = np.full(len(q), -np.inf, dtype)
        for scores, _, _ in visible():
            largest = np.maximum(largest, scores.max(axis=1))

        shift = np.where(np.isneginf(largest), 0, largest)[:, None]
        total = np.zeros(len(q), dtype)
        out = np.zeros(q.shape, dtype)
        for scores, v, hidden in visible():
            weights = np.exp(scores - shift)
            total += weights.sum(axis=1)
            out += _weighted(_rounded(weights, digits), v, ~hidden)
        out = np.where(total[:, None] == 0, 0, out / total[:, None])
        return out, largest + np.log(total)


def delta_of(dout: Array, out: Array, dtype: type[np.floating[Any]]) -> Array:
    """Return the sum of ``dout * out`` of each row, computed in `dtype`, shape (rows,). Local."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray((dout.astype(dtype) * out.astype(dtype)).sum(axis=1))


def query_gradient(
    rows: Rows,
    pieces: Callable[[], Iterable[Piece]],
    rule: Rule,
    dtype: type[np.floating[Any]],
    digits: int | None = None,
) -> Array:
    """Sum the gradient of some query rows of one head over all keys of one KV head. Local.

    Parameters
    ----------
    rows : Rows
    pieces : callable
        Called once, goes through all keys.
    rule : Rule
    dtype : type
        What everything is computed in.
    digits : int, optional
        Binary digits that weights and their gradients are rounded to before they multiply.

    Returns
    -------
    dq : ndarray of `dtype`, shape (rows, head_dim)
        0 in rows that see no key.
    """
    dq = np.zeros(rows.q.shape, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in pieces():
            hidden = rule.hidden(rows.positions, piece[0])
            if not hidden.all():
                _, slopes, allowed = _weights_and_slopes(rows, piece, hidden, rule, dtype)
                dq += _weighted(_rounded(slopes, digits), piece[1].astype(dtype), allowed)
        return np.asarray(dq * dtype(rule.softmax_scale))


def key_gradients(
    piece: Piece,
    blocks: Iterable[Rows],
    rule: Rule,
    dtype: type[np.floating[Any]],
    digits: int | None = None,
) -> tuple[Array, Array]:
    """Sum the gradients of some keys and values over query rows of one head. Local.

    The gradients of a KV head are the sums over the query heads that share it.

    Parameters
    ----------
    piece : Piece
        Any keys, with their values.
    blocks : iterable of Rows
        All rows of the head.
    rule : Rule
    dtype : type
        What everything is computed in.
    digits : int, optional
        Binary digits that weights and their gradients are rounded to before they multiply.

    Returns
    -------
    dk, dv : ndarray of `dtype`, shape (tokens, head_dim)
        0 for keys that no row sees.
    """
    dk, dv = np.zeros(piece[1].shape, dtype), np.zeros(piece[2].shape, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in blocks:
            hidden = rule.hidden(rows.positions, piece[0])
            if not hidden.all():
                weights, slopes, allowed = _weights_and_slopes(rows, piece, hidden, rule, dtype)
                dk += _weighted(_rounded(slopes.T, digits), rows.q.astype(dtype), allowed.T)
                dv += _weighted(_rounded(weights.T, digits), rows.dout.astype(dtype), allowed.T)
        return np.asarray(dk * dtype(rule.softmax_scale)), dv


def _weights_and_slopes(
    rows: Rows,
    piece: Piece,
    hidden: NDArray[np.bool_],
    rule: Rule,
    dtype: type[np.floating[Any]],
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return p and ds, 0 for pairs that count for nothing, and which pairs count, (rows, tokens) each."""
    _, k, v = piece
    scores = (rows.q.astype(dtype) @ k.astype(dtype).T) * dtype(rule.softmax_scale)
    absent = hidden | np.isneginf(scores)
    lse, delta = rows.lse.astype(dtype)[:, None], rows.delta.astype(dtype)[:, None]
    weights = np.exp(scores - lse)
    weights[absent] = 0
    slopes = weights * (rows.dout.astype(dtype) @ v.astype(dtype).T - delta)
    slopes[absent] = 0
    return weights, slopes, ~absent


def _rounded(weights: Array, digits: int | None) -> Array:
    """Return weights with so many binary digits, rounded to the nearest; as they are for None."""
    if digits is None:
        return weights
    mantissa, exponent = np.frexp(weights)
    return np.asarray(np.ldexp(np.rint(mantissa * 2**digits), exponent - digits), weights.dtype)


def _weighted(weights: Array, v: Array, allowed: NDArray[np.bool_]) -> Array:
    """Return ``weights @ v`` over allowed pairs only, also where other values are NaN or infinite.

    Weights of other pairs are 0, which spares a selection where all values are finite.
    """
    if np.isfinite(v).all():
        return np.asarray(weights @ v)
    return np.stack([w[seen] @ v[seen] for w, seen in zip(weights, allowed, strict=True)])
