"""How much results may change where weights are rounded to 16 bits, for the tests of devices."""

from __future__ import annotations

from typing import Any

import numpy as np
from dense import DTYPES, attend_dense, attend_dense_backward, half_a_unit
from numpy.typing import NDArray

from ringmpi.softmax import SIGNIFICANT_DIGITS

from .attending import Backward, Case, attend


def assert_weights_rounded_at_most(case: Case, blocks: list[NDArray[np.int64]], device: Any) -> None:
    """Hold both passes against dense attention in float64.

    A weight changes by half a unit in its last place at most, and a sum of products by that part of the sum
    of their sizes. What float32 arithmetic adds is left room for, and is up to other tests: a few hundred
    terms, scores of up to 255 products, and the cancellation in delta.
    """
    tensors, backward = case.tensors(), Backward.of(case)
    q, k, v = tensors
    settings = (case.allowed, case.scale, np.float64)
    exact_out, exact_lse = attend_dense(*tensors, *settings)
    size, _ = attend_dense(q, k, np.abs(v), *settings)
    given = (*tensors, backward.dout), *settings, (backward.out, backward.lse)
    slopes, slope_sizes = attend_dense_backward(*given), attend_dense_backward(*given, sizes=True)

    out, lse, _ = attend(device, case, tensors, blocks)
    gradients, _ = backward.run(device, blocks)

    unit = 2.0 ** -SIGNIFICANT_DIGITS[case.dtype]
    eps = 1000 * float(np.finfo(np.float32).eps)
    seen = np.isfinite(exact_lse)
    assert (np.abs(lse - exact_lse)[seen] <= eps).all()  # the sum of the weights is not rounded
    error = np.abs(out.astype(np.float64) - exact_out)
    assert (error <= (unit + eps) * size + half_a_unit(exact_out, DTYPES[case.dtype])).all()
    for found, right, most in zip(gradients, slopes, slope_sizes, strict=True):
        assert (np.abs(found - right) <= (unit + eps) * most + eps).all()
