"""The judge: dense attention, one row after the other against every key.

It shares nothing with what it judges: no schedule, no device, no softmax state, no tiles, and its own
reading of the mask. A row is computed in two plain passes over the keys: its largest score first, then
the sums, with that maximum fixed. Keys come in pieces only to bound memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: A piece of the keys: their positions, k and v of shape (tokens, head_dim).
Piece = tuple[NDArray[np.int64], Array, Array]


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
            out += _weighted(weights, v, ~hidden)
        out = np.where(total[:, None] == 0, 0, out / total[:, None])
        return out, largest + np.log(total)


def _weighted(weights: Array, v: Array, allowed: NDArray[np.bool_]) -> Array:
    """Return ``weights @ v`` over allowed pairs only, also where other values are NaN or infinite."""
    if np.isfinite(v).all():
        return np.asarray(weights @ v)
    return np.stack([w[seen] @ v[seen] for w, seen in zip(weights, allowed, strict=True)])
