"""How far gradients may be from those of dense attention, for the tests of devices and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from dense import attend_dense_backward
from numpy.typing import NDArray

Array = NDArray[Any]


def assert_gradients_exact(
    found: Sequence[Array],
    tensors: tuple[Array, Array, Array, Array],
    allowed: NDArray[np.bool_],
    scale: float,
    forward: tuple[Array, Array],
) -> None:
    """Hold dq, dk and dv, of q, k, v and dout, against a wider computation from the same out and lse.

    An element may err by twice what one dense pass in the dtype of the state does, plus four of its
    epsilons of the largest terms that are summed, as a floor for inputs on which that pass is exact: the
    weights are at most 1, so the terms of dv are at most `dout`, and those of dq and dk are two products
    of `dout` with a value, of which delta is a mean, times `scale` and a key or query. A weight errs with its
    score, a sum of head_dim products; added one after the other, as not every single pass does it, they
    err by the root of head_dim times half an epsilon, which is more than 4 from a head_dim of 64 on.
    """
    q, k, v, dout = (tensor.astype(np.float64) for tensor in tensors)
    state: Any = np.float64 if tensors[0].dtype == np.float64 else np.float32
    wider: Any = np.longdouble if state is np.float64 else np.float64
    exact = attend_dense_backward(tensors, allowed, scale, wider, forward)
    single = attend_dense_backward(tensors, allowed, scale, state, forward)
    rise = 2 * float((np.abs(dout).sum(axis=-1)).max(initial=0) * np.abs(v).max(initial=0))
    largest = [
        scale * rise * np.abs(k).max(initial=0),
        scale * rise * np.abs(q).max(initial=0),
        np.abs(dout).max(initial=0),
    ]
    floor = max(4.0, q.shape[-1] ** 0.5 / 2) * float(np.finfo(state).eps)
    for name, mine, right, plain, size in zip(
        ("dq", "dk", "dv"), found, exact, single, largest, strict=True
    ):
        error = np.abs(mine.astype(wider) - right)
        bound = 2 * np.abs(plain - right).max(initial=0) + floor * size
        assert mine.dtype == state, name
        assert (error <= bound).all(), f"{name}: {error.max()} > {bound}"
        unseen = ~allowed.any(axis=1 if name == "dq" else 0)
        assert not mine[:, :, unseen].any(), name
