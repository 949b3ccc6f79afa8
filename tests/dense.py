"""Answers known without the package: dense attention, and inputs with a closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


def pairs_between(
    queries: Array,
    keys: Array,
    causal: bool = False,
    window: int | None = None,
    documents: Sequence[int] | None = None,
) -> NDArray[np.bool_]:
    """Return which pairs are allowed, from differences and from a label for every token."""
    back = queries[:, None] - keys[None, :]
    allowed = np.ones(back.shape, np.bool_)
    if causal:
        allowed &= back >= 0
    if window is not None:
        allowed &= back <= window
    if documents is not None:
        lengths = np.diff(documents)
        label = np.repeat(np.arange(len(lengths)), lengths)
        allowed &= label[queries][:, None] == label[keys][None, :]
    return allowed


def attend_dense(
    q: Array, k: Array, v: Array, allowed: NDArray[np.bool_], scale: float, dtype: Any
) -> tuple[Array, Array]:
    """Return out and lse of whole tensors, everything computed in `dtype` and in one pass."""
    batch, heads, tokens, head_dim = q.shape
    group = heads // k.shape[1]
    out = np.zeros((batch, heads, tokens, head_dim), dtype)
    lse = np.full((batch, heads, tokens), -np.inf, dtype)
    seen = allowed.any(axis=1)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // group].astype(dtype), v[b, h // group].astype(dtype)
            with np.errstate(invalid="ignore", over="ignore"):
                scores = np.where(allowed, q[b, h].astype(dtype) @ keys.T * dtype(scale), -np.inf)
                top = np.where(seen, scores.max(axis=1), 0)
                weights = np.exp(scores - top[:, None])
            total = weights.sum(axis=1)
            if np.isfinite(values).all():
                mixed = weights @ values
            else:
                rows = zip(weights, allowed, strict=True)
                mixed = np.stack([weight[at] @ values[at] for weight, at in rows])
            out[b, h][seen] = mixed[seen] / total[seen, None]
            lse[b, h][seen] = np.log(total[seen]) + top[seen]
    return out, lse


def attend_dense_backward(
    tensors: tuple[Array, Array, Array, Array],
    allowed: NDArray[np.bool_],
    scale: float,
    dtype: Any,
    forward: tuple[Array, Array] | None = None,
    sizes: bool = False,
) -> tuple[Array, Array, Array]:
    """Return dq, dk and dv of ``sum(out * dout)``, for q, k, v and dout, everything computed in `dtype`.

    Written with the derivative of a softmax as a matrix, ``p * (dp - (p * dp).sum())``, so that it needs
    neither out nor lse. With `forward`, which is (out, lse) as they were handed over, it takes its statistics
    from those, as a backward pass does. With `sizes` it returns the sums of what is summed without its sign.
    """
    q, k, v, dout = (tensor.astype(dtype) for tensor in tensors)
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(tensor, group, axis=1) for tensor in (k, v))
    with np.errstate(invalid="ignore", over="ignore"):
        scores = np.where(allowed, (q @ k.swapaxes(2, 3)) * dtype(scale), -np.inf)
        seen = ~np.isneginf(scores)
        if forward is None:
            top = scores.max(axis=-1, keepdims=True)
            weights = np.where(seen, np.exp(scores - np.where(np.isneginf(top), 0, top)), 0)
            total = weights.sum(axis=-1, keepdims=True)
            weights = np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)
        else:
            weights = np.where(seen, np.exp(scores - forward[1].astype(dtype)[..., None]), 0)
        rise = np.where(seen, dout @ v.swapaxes(2, 3), 0)
        if forward is None:
            mean = (weights * rise).sum(axis=-1, keepdims=True)
        else:
            mean = (dout * forward[0].astype(dtype)).sum(axis=-1, keepdims=True)
        slopes = np.where(seen, weights * (rise - mean), 0) * dtype(scale)
    if sizes:
        slopes, q, k, dout = map(np.abs, (slopes, q, k, dout))
    dq = _mixed(slopes, k, seen)
    dk = _mixed(slopes.swapaxes(2, 3), q, seen.swapaxes(2, 3))
    dv = _mixed(weights.swapaxes(2, 3), dout, seen.swapaxes(2, 3))
    return dq, _summed(dk, group), _summed(dv, group)


def _summed(array: Array, group: int) -> Array:
    """Return the sums over the query heads that share a KV head."""
    batch, heads, *rest = array.shape
    return np.asarray(array.reshape(batch, heads // group, group, *rest).sum(axis=2))


def _mixed(weights: Array, rows: Array, seen: NDArray[np.bool_]) -> Array:
    """Return ``weights @ rows``, from rows that are seen only."""
    if np.isfinite(rows).all():
        return np.asarray(weights @ rows)
    mixed = np.zeros((*weights.shape[:3], rows.shape[3]), rows.dtype)
    for at in np.ndindex(weights.shape[:3]):
        which = seen[at]
        mixed[at] = weights[at][which] @ rows[at[:2]][which]
    return mixed


def differences(
    tensors: tuple[Array, Array, Array, Array], allowed: NDArray[np.bool_], scale: float, step: float
) -> tuple[Array, Array, Array]:
    """Return dq, dk and dv as central differences of ``sum(out * dout)`` in float64; for small sizes.

    The third derivatives make an error of ``step ** 2`` times their size, rounding one of ``eps / step``.
    """
    *inputs, dout = (tensor.astype(np.float64) for tensor in tensors)

    def loss() -> float:
        return float((attend_dense(*inputs, allowed, scale, np.float64)[0] * dout).sum())

    gradients = tuple(np.zeros_like(tensor) for tensor in inputs)
    for tensor, gradient in zip(inputs, gradients, strict=True):
        for at in np.ndindex(tensor.shape):
            value = tensor[at]
            tensor[at] = value + step
            above = loss()
            tensor[at] = value - step
            gradient[at] = (above - loss()) / (2 * step)
            tensor[at] = value
    return gradients


def half_a_unit(values: Array, dtype: Any) -> Array:
    """Return half a unit in the last place of a 16-bit `dtype` at each value; 0 for wider ones."""
    if np.dtype(dtype).itemsize > 2:
        return np.zeros(values.shape)
    info = ml_dtypes.finfo(dtype)
    size = np.maximum(np.abs(values.astype(np.float64)), float(info.smallest_normal))
    # A value just under a power of two may be pushed over it by an error of float32.
    exponent = np.floor(np.log2(size * (1 + 2.0**-23)))
    return np.asarray(2.0 ** (exponent - int(info.nmant) - 1))


def assert_exact_up_to_rounding(
    found: tuple[Array, Array],
    tensors: tuple[Array, Array, Array],
    allowed: NDArray[np.bool_],
    scale: float,
) -> None:
    """Hold out and lse against a wider computation.

    An element may err by twice what one dense pass in the dtype of the state does, plus four of its
    epsilons of the largest value as a floor for inputs on which that pass is exact (the rule of
    flash-attention's tests; the factor holds since the state is not normalised between blocks), plus
    half a unit in the last place where the output is rounded to 16 bits.
    """
    q, k, v = tensors
    state: Any = np.float64 if q.dtype == np.float64 else np.float32
    wider: Any = np.longdouble if state is np.float64 else np.float64
    exact = attend_dense(q, k, v, allowed, scale, wider)
    single = attend_dense(q, k, v, allowed, scale, state)
    eps = float(np.finfo(state).eps)
    some = np.isfinite(exact[1])
    largest = float(np.abs(v[np.isfinite(v)].astype(np.float64)).max(initial=0))
    largest_lse = float(np.abs(exact[1][some]).max(initial=1))
    bounds = (
        2 * float(np.abs(single[0] - exact[0]).max(initial=0))
        + 4 * eps * largest
        + half_a_unit(exact[0], q.dtype),
        2 * float(np.abs(single[1][some] - exact[1][some]).max(initial=0)) + 4 * eps * largest_lse,
    )
    out, lse = found
    assert out.dtype == q.dtype
    assert lse.dtype == state
    assert np.isfinite(out.astype(np.float64)).all()
    assert (np.abs(out.astype(wider) - exact[0]) <= bounds[0]).all()
    assert np.array_equal(np.isneginf(lse), ~some)
    assert (np.abs(lse[some].astype(wider) - exact[1][some]) <= bounds[1]).all()
    assert (out[~some].astype(np.float64) == 0).all()


def allowed_pairs(seq_len: int, **mask: Any) -> NDArray[np.bool_]:
    """Return which of all pairs of a sequence are allowed, shape (seq_len, seq_len)."""
    positions = np.arange(seq_len)
    return pairs_between(positions, positions, **mask)


def dense_attention(q: Array, k: Array, v: Array, allowed: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return out and lse of whole tensors in float64, with the default scale."""
    return attend_dense(q, k, v, allowed, q.shape[-1] ** -0.5, np.float64)


def uniform_inputs(batch: int, heads: int, kv_heads: int, seq_len: int, head_dim: int) -> Any:
    """Return q, k, v for which every allowed key weighs the same, so that out is a mean of positions.

    ``out[b, h, i] = mean(allowed positions) + 100 * kv_head + 10000 * b`` and ``lse = ln(#allowed)``.
    """
    q = np.zeros((batch, heads, seq_len, head_dim))
    k = np.full((batch, kv_heads, seq_len, head_dim), 7.0)
    v = np.empty_like(k)
    v[:] = np.arange(seq_len)[:, None]
    v += 100 * np.arange(kv_heads)[:, None, None] + 10000 * np.arange(batch)[:, None, None, None]
    return q, k, v


def uniform_answer(allowed: Array, batch: int, heads: int, kv_heads: int) -> Any:
    """Return out and lse for `uniform_inputs`, shape (batch, heads, seq_len); 0 and -inf without a key."""
    count = allowed.sum(axis=1)
    with np.errstate(all="ignore"):
        mean = allowed @ np.arange(len(allowed)) / count
        lse = np.log(count)
    kv_head = np.arange(heads) // (heads // kv_heads)
    out = mean + 100 * kv_head[:, None] + 10000 * np.arange(batch)[:, None, None]
    out = np.where(count > 0, out, 0)
    return out, np.broadcast_to(lse, out.shape)
