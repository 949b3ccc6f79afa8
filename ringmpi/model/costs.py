"""FLOPs and bytes of attention by formula, and from which length on the first hide the second.

A rank of a ring attends ``c`` query tokens to blocks of keys, one a step, while the next block travels. In
the words of Liu et al. 2023 (arXiv:2310.01889, section 3), with ``d`` the hidden size, ``F`` FLOP/s and
``B`` bytes a second, a block costs ``4 d c^2`` FLOPs and, in 16 bits, ``4 c d`` bytes; so the hop is hidden
if ``c >= F / B``. Here that is generalised to grouped heads, other dtypes, masks, the backward pass, and
latency:

``flops = k * share * b * H * D * c * n``, with ``k = 4`` forward (two products of 2 FLOPs) and 10 backward
(five products; Dao 2023, arXiv:2307.08691); ``n`` are the keys of a block, and ``share`` is which part of a
block's pairs is allowed, at the busiest rank of each step.

``nbytes = 2 * b * H_kv * D * n * e`` forward, with ``e`` bytes an element, and in the backward pass
``2 * b * H_kv * D * n * (e + g)``, since dk and dv follow k and v, with ``g`` bytes an element: those of the
state, as ringmpi sends them.

So, without latency, ``c >= 2 * H_kv * e / (k * share * H) * F / B``, in which ``n`` has cancelled: with few
queries on many keys it is the queries that must be enough (Yang et al. 2024, arXiv:2411.01783, eq. 2).
"""

from __future__ import annotations

from math import sqrt

from ringmpi.layout import Layout
from ringmpi.schedule import Pass
from ringmpi.softmax import state_dtype
from ringmpi.tensors import Shape

#: FLOPs for each allowed pair and element of head_dim: two products forward, five backward, of 2 each.
FLOPS_PER_PAIR = {Pass.FORWARD: 4, Pass.BACKWARD: 10}


def attention_flops(shape: Shape, pairs: int, direction: Pass) -> int:
    """Return the FLOPs of a pass over some allowed pairs of query and key, all heads and sequences.

    Examples
    --------
    >>> import numpy as np
    >>> attention_flops(Shape(1, 32, 8, 128, np.dtype(np.float16)), 8192 * 8192, Pass.FORWARD)
    1099511627776
    """
    return FLOPS_PER_PAIR[direction] * shape.batch * shape.num_heads * shape.head_dim * pairs


def hop_nbytes(shape: Shape, tokens: int, direction: Pass) -> int:
    """Return the bytes that a rank of a ring sends in one step: k and v, in the backward pass dk and dv too.

    Parameters
    ----------
    shape : Shape
    tokens : int
        Of a block.
    direction : Pass
    """
    of_gradients = state_dtype(shape.dtype).itemsize if direction is Pass.BACKWARD else 0
    wide = 2 * shape.batch * shape.num_kv_heads * shape.head_dim
    return wide * tokens * (shape.dtype.itemsize + of_gradients)


def allowed_share(causal: bool, keys: Layout, queries: Layout) -> float:
    """Return which share of a block's pairs is allowed in each step, at the rank where it is most.

    With contiguous shards the last rank sees all keys of all blocks but its own. Striped and zigzag shards
    give every rank at every step the mean: of ``T`` queries at the end of ``N`` tokens, ``1 - T / 2 N``.
    """
    if not causal or keys.name == "contiguous":
        return 1.0
    return 1.0 - queries.seq_len / (2 * keys.seq_len)


def least_queries(
    shape: Shape,
    direction: Pass,
    flops: float,
    bandwidth: float,
    *,
    share: float = 1.0,
    latency: float = 0.0,
    keys_per_query: float = 1.0,
) -> float:
    """Return from how many query tokens a rank on a ring's compute hides its transfers.

    Parameters
    ----------
    shape : Shape
    direction : Pass
    flops, bandwidth : float
        FLOP/s of a rank, and bytes a second that it sends.
    share : float
        Of a block's pairs that are allowed, see `allowed_share`.
    latency : float
        Seconds a hop.
    keys_per_query : float
        Keys of the whole sequence for each query; matters only beside a latency.

    Notes
    -----
    The positive root of ``flops(c) / F = latency + nbytes(c) / B``, quadratic in c.

    Examples
    --------
    As many KV heads as heads, 16 bits: ``F / B``.

    >>> import numpy as np
    >>> round(least_queries(Shape(1, 32, 32, 128, np.dtype(np.float16)), Pass.FORWARD, 312e12, 300e9))
    1040
    """
    squared = share * attention_flops(shape, 1, direction) * keys_per_query / flops
    linear = hop_nbytes(shape, 1, direction) * keys_per_query / bandwidth
    if not latency:
        return linear / squared
    return (linear + sqrt(linear**2 + 4 * squared * latency)) / (2 * squared)
