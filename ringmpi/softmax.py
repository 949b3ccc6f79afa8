r"""The running state of an online softmax, in its plainest form.

Over the keys seen so far, with scores :math:`s_j`, a row keeps

* ``row_max`` :math:`m = \max_j s_j`,
* ``row_sum`` :math:`\ell = \sum_j e^{s_j - m}`,
* ``acc`` :math:`a = \sum_j e^{s_j - m} v_j`,

so that :math:`out = a / \ell` and :math:`lse = m + \ln \ell` (Milakov and Gimelshein 2018; Dao 2023).
The state is left unnormalised until the end: to merge normalised results would round once a step, and
the error would grow with the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.errors import ConfigError, ShapeError, check_choice

Array = NDArray[Any]

#: What a state over no key holds. Every other result begins with zeros.
IDENTITY = {"acc": 0.0, "row_max": -np.inf, "row_sum": 0.0}

#: Names of the dtypes that q, k and v may have.
DTYPES = ("float64", "float32", "float16", "bfloat16")

#: Those of them that are narrower than the state, and the binary digits of their numbers (the first one is
#: always 1, and not stored).
SIGNIFICANT_DIGITS = {"float16": 11, "bfloat16": 8}

#: What becomes of a weight before it multiplies a value: it stays as it is in the state's dtype, or it may
#: be rounded to the dtype of the inputs, where a device is faster so.
WEIGHTS = ("exact", "rounded")


def state_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the state: float64 for float64, float32 for everything narrower.

    >>> state_dtype(np.dtype("float16"))
    dtype('float32')
    """
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def check_scale(softmax_scale: float | None, dtype: np.dtype[Any]) -> None:
    """Refuse a factor of the scores that the state cannot hold. Local.

    Raises
    ------
    ConfigError
        If it is not finite in the dtype of the state.
    """
    with np.errstate(over="ignore"):
        held = state_dtype(dtype).type(0.0 if softmax_scale is None else softmax_scale)
    if not np.isfinite(held):
        raise ConfigError(
            f"softmax_scale={softmax_scale}: must be finite in {held.dtype}, the dtype of the scores"
        )


def check_weights(weights: str, dtype: str) -> None:
    """Refuse weights that could not be rounded to anything narrower than the state. Local.

    Raises
    ------
    ConfigError
        If the word is unknown, or the dtype is that of the state.
    """
    check_choice("weights", weights, WEIGHTS)
    if weights == "rounded" and dtype not in SIGNIFICANT_DIGITS:
        raise ConfigError(
            f"weights=rounded with dtype={dtype}: only {' and '.join(SIGNIFICANT_DIGITS)} are narrower than "
            f"their state; use exact"
        )


@dataclass
class State:
    """A partial result over some of the keys.

    Attributes
    ----------
    acc : ndarray, shape (batch, num_heads, rows, head_dim)
    row_max, row_sum : ndarray, shape (batch, num_heads, rows)
        All of one dtype. A row that has seen no key has ``row_max = -inf`` and zeros elsewhere.
    """

    acc: Array
    row_max: Array
    row_sum: Array

    @classmethod
    def identity(cls, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> State:
        """Return the state over no key at all, for `acc` of the given shape. Local."""
        return cls(
            acc=np.full(shape, IDENTITY["acc"], dtype),
            row_max=np.full(shape[:-1], IDENTITY["row_max"], dtype),
            row_sum=np.full(shape[:-1], IDENTITY["row_sum"], dtype),
        )


def finite_shift(row_max: Array) -> Array:
    """Return what to subtract from scores: the maximum, or 0 where no key was seen.

    ``-inf - -inf`` would be NaN; with 0 the weights of such a row are ``exp(-inf) = 0``.
    """
    shift: Array = np.where(row_max == -np.inf, row_max.dtype.type(0), row_max)
    return shift


def merge(state: State, other: State) -> None:
    r"""Add to a state what another one has seen of other keys, in place. Local.

    Merging with an identity leaves a state as it is; an identity becomes the other one.

    Raises
    ------
    ShapeError
        If shapes or dtypes differ.

    Notes
    -----
    With :math:`m = \max(m_a, m_b)`, :math:`\ell = e^{m_a-m}\ell_a + e^{m_b-m}\ell_b`, and ``acc``
    alike (Dao 2023, algorithm 1). Associative up to rounding only.
    """
    if state.acc.shape != other.acc.shape or state.acc.dtype != other.acc.dtype:
        raise ShapeError(
            f"states of {state.acc.shape} {state.acc.dtype} and {other.acc.shape} {other.acc.dtype}: "
            f"only states of one shape and dtype can be merged"
        )
    row_max = np.maximum(state.row_max, other.row_max)
    shift = finite_shift(row_max)
    with np.errstate(over="ignore"):  # A maximum that is far below weighs exp(-inf) = 0.
        mine, others = np.exp(state.row_max - shift), np.exp(other.row_max - shift)
    state.acc *= mine[..., None]
    state.acc += others[..., None] * other.acc
    state.row_sum *= mine
    state.row_sum += others * other.row_sum
    state.row_max[...] = row_max


def finish(state: State) -> tuple[Array, Array]:
    """Turn a state into the attention output and its log-sum-exp, in place. Local.

    Returns
    -------
    out : ndarray, shape (batch, num_heads, rows, head_dim)
        The memory of ``state.acc``; 0 in rows that saw no key.
    lse : ndarray, shape (batch, num_heads, rows)
        Natural logarithm; ``-inf`` in rows that saw no key.
    """
    # The largest score adds exp(0) = 1, so a sum of 0 means that no key was seen.
    seen = state.row_sum != 0
    out = np.divide(state.acc, state.row_sum[..., None], out=state.acc, where=seen[..., None])
    lse = np.log(state.row_sum, out=state.row_sum, where=seen)
    lse += state.row_max
    return out, lse
