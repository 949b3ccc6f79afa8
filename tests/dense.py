"""Answers known without the package: dense attention in one line each, and inputs with a closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def allowed_pairs(
    seq_len: int,
    causal: bool = False,
    window: int | None = None,
    documents: tuple[int, ...] | None = None,
) -> Array:
    """Return which of all pairs are allowed, shape (seq_len, seq_len)."""
    query, key = np.mgrid[:seq_len, :seq_len]
    allowed = np.ones((seq_len, seq_len), bool)
    if causal:
        allowed &= key <= query
    if window is not None:
        allowed &= key >= query - window
    if documents is not None:
        document = np.repeat(np.arange(len(documents) - 1), np.diff(documents))
        allowed &= document[query] == document[key]
    return allowed


def dense_attention(q: Array, k: Array, v: Array, allowed: Array, scale: float | None = None) -> Any:
    """Return out and lse in float64; values behind the mask play no part."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    with np.errstate(all="ignore"):
        scores = np.where(allowed, q @ k.swapaxes(-1, -2) * scale, -np.inf)
        largest = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - np.where(np.isinf(largest), 0, largest))
        total = weights.sum(axis=-1)
        if np.isfinite(v).all():
            out = weights @ v
        else:
            out = np.stack(
                [weights[:, :, i, seen] @ v[:, :, seen] for i, seen in enumerate(allowed)], axis=2
            )
        out = np.where(total[..., None] == 0, 0, out / total[..., None])
        return out, largest[..., 0] + np.log(total)


def uniform_inputs(batch: int, heads: int, kv_heads: int, seq_len: int, head_dim: int) -> Any:
    """Return family U: every allowed key weighs the same, so out is a mean of positions.

    ``out[b, h, i] = mean(allowed positions) + 100 * kv_head + 10000 * b`` and ``lse = ln(#allowed)``.
    """
    q = np.zeros((batch, heads, seq_len, head_dim))
    k = np.full((batch, kv_heads, seq_len, head_dim), 7.0)
    v = np.empty_like(k)
    v[:] = np.arange(seq_len)[:, None]
    v += 100 * np.arange(kv_heads)[:, None, None] + 10000 * np.arange(batch)[:, None, None, None]
    return q, k, v


def uniform_answer(allowed: Array, batch: int, heads: int, kv_heads: int) -> Any:
    """Return the closed form of family U, shapes (batch, heads, seq_len); rows without a key are 0, -inf."""
    count = allowed.sum(axis=1)
    with np.errstate(all="ignore"):
        mean = allowed @ np.arange(len(allowed)) / count
        lse = np.log(count)
    kv_head = np.arange(heads) // (heads // kv_heads)
    out = mean + 100 * kv_head[:, None] + 10000 * np.arange(batch)[:, None, None]
    out = np.where(count > 0, out, 0)
    return out, np.broadcast_to(lse, out.shape)
