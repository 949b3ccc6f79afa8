"""What devices that compute in host memory have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.devices.base import Array, Sizes
from ringmpi.mask import Mask
from ringmpi.softmax import State, finish, merge, state_dtype

#: Buffers start on a cache line.
ALIGNMENT = 64

#: Products of a pair's head_dim values: q k and p v in the forward pass; q k, p dout, dout v, ds k and ds q
#: in the backward pass. Each is a multiplication and an addition (Dao 2023).
FORWARD_PRODUCTS = 2
BACKWARD_PRODUCTS = 5


class HostDevice:
    """Host memory, and all but attending.

    Parameters
    ----------
    mask : Mask
    softmax_scale : float
        Factor of the scores.
    """

    def __init__(self, mask: Mask, softmax_scale: float) -> None:
        self.mask = mask
        self.softmax_scale = softmax_scale

    def prepare(self, sizes: Iterable[Sizes], dtype: np.dtype[Any]) -> None:
        """Do nothing: what these devices need was compiled before MPI was initialised."""

    def place(self, array: Any, dtype: np.dtype[Any]) -> Array:
        """Return the array itself, or a copy where its dtype, byte order or strides do not fit."""
        return np.ascontiguousarray(array, dtype)

    def give(self, array: Array, like: Any) -> Array:
        """Return the array itself."""
        del like
        return array

    def settle(self) -> None:
        """Do nothing: nothing is begun that is not done."""

    def full(self, shape: tuple[int, ...], value: float, dtype: np.dtype[Any]) -> Array:
        """Return an array of one value; zeros need no memory before somebody writes to them."""
        return np.full(shape, value, dtype) if value else np.zeros(shape, dtype)

    def fill(self, array: Array, value: float) -> None:
        """Set all items."""
        array[...] = value

    def copy(self, source: Array, into: Array) -> None:
        """Copy."""
        into[...] = source

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Return an aligned byte buffer in host memory."""
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + nbytes]

    def finish(self, state: State, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        """Normalise the state in place, and round out to the given dtype."""
        out, lse = finish(state)
        return out.astype(dtype, copy=False), lse

    def delta(self, dout: Array, out: Array) -> Array:
        """Return the sum over head_dim of ``dout * out``, head by head to save memory."""
        dtype = state_dtype(dout.dtype)
        total = np.empty(dout.shape[:-1], dtype)
        # Of rows that are not finite it is not either.
        with np.errstate(invalid="ignore", over="ignore"):
            for at in np.ndindex(dout.shape[:2]):
                np.sum(np.multiply(dout[at], out[at], dtype=dtype), axis=-1, out=total[at])
        return total

    def merge(self, state: State, other: State) -> None:
        """Merge states in place."""
        merge(state, other)

    def add(self, total: Array, other: Array) -> None:
        """Add in place."""
        total += other

    def rounded(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """Round, unless the dtype is that already."""
        return array.astype(dtype, copy=False)
