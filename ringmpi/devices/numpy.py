"""The readable device: NumPy, one tile at a time.

A tile is a few queries of all heads of a group against some keys of their KV head, so that one matrix
product serves the group. Scores, weights and the tile of q live in scratch memory that is
allocated once; nothing that a tile reads from it was not written by the same tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.devices.base import Array, Block, Gradients, Outcome, Queries
from ringmpi.devices.host import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, HostDevice
from ringmpi.mask import Mask, Tile, TileKind
from ringmpi.softmax import SIGNIFICANT_DIGITS, State, finite_shift, state_dtype
from ringmpi.trace import Tally

#: Queries (times heads of a group) and keys of a tile. 128 x 512 float32 scores are 256 KiB, which stays
#: in the second-level cache; at head_dim 64 a tile is 17 MFLOP, about half a millisecond on one core, so
#: polling between tiles is frequent enough to keep a transfer going.
TILE_ROWS = 128
TILE_COLUMNS = 512


class NumpyDevice(HostDevice):
    """Attention on host memory with NumPy.

    Parameters
    ----------
    mask : Mask
    softmax_scale : float
        Factor of the scores.
    weights : str
        One of `softmax.WEIGHTS`. Those that may be rounded are: that is not faster here, but can be read.
    """

    name = "numpy"

    def __init__(self, mask: Mask, softmax_scale: float, weights: str = "exact") -> None:
        super().__init__(mask, softmax_scale)
        self.rounds_weights = weights == "rounded"
        self._scratch: dict[str, Array] = {}

    def attend(self, queries: Queries, block: Block, state: State) -> ForwardWork:
        """Start to attend to a block; the work does one tile an advance."""
        return ForwardWork(self, queries, block, state)

    def attend_backward(
        self, queries: Queries, outcome: Outcome, block: Block, gradients: Gradients
    ) -> BackwardWork:
        """Start to add to the gradients; the work does one tile an advance."""
        return BackwardWork(self, queries, outcome, block, gradients)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return contiguous memory of the given shape with whatever was left in it."""
        size = int(np.prod(shape))
        held = self._scratch.get(name)
        if held is None or held.size < size or held.dtype != dtype:
            held = self._scratch[name] = np.empty(size, dtype)
        return held[:size].reshape(shape)


class TileWork:
    """Going over the tiles of one block, a tile an advance, always in the same order."""

    products: int

    def __init__(self, device: NumpyDevice, queries: Queries, block: Block) -> None:
        self.tally = Tally()
        self._device = device
        self._queries = queries
        self._block = block
        self._dtype = state_dtype(queries.q.dtype)
        self._group = queries.q.shape[1] // block.k.shape[1]
        self._tiles = self._go_over()

    def advance(self) -> bool:
        """Compute the next tile; True once there is none."""
        # Scores of masked pairs may overflow or be NaN; they are selected away, so not a warning.
        with np.errstate(over="ignore", invalid="ignore"):
            return next(self._tiles, None) is None

    def _compute(self, tile: Tile, b: int, kv_head: int, k: Array, v: Array) -> None:
        """Compute one tile, for the keys and values of its columns."""
        raise NotImplementedError

    def _go_over(self) -> Iterator[Tile]:
        queries, block = self._queries, self._block
        rows = max(1, TILE_ROWS // self._group)
        tiling = self._device.mask.tiling(queries.positions, block.positions, rows, TILE_COLUMNS)
        batch, kv_heads = block.k.shape[:2]
        self.tally.tiles_skipped += tiling.empty * batch * kv_heads
        for b in range(batch):
            for kv_head in range(kv_heads):
                k, v = self._widened("k", block.k[b, kv_head]), self._widened("v", block.v[b, kv_head])
                for tile in tiling.tiles:
                    self._compute(tile, b, kv_head, k[tile.columns], v[tile.columns])
                    self._count(tile)
                    yield tile

    def _heads(self, kv_head: int) -> slice:
        """Return the query heads that read a KV head."""
        return slice(kv_head * self._group, (kv_head + 1) * self._group)

    def _scaled_queries(self, tile: Tile, b: int, heads: slice) -> Array:
        """Return the tile of q times the scale, shape (group * rows, head_dim)."""
        q = self._queries.q[b, heads, tile.rows]
        # The scale goes into q: what overflows then is a score that the dtype cannot hold.
        scaled = self._device.scratch("q", q.shape, self._dtype)
        scale = self._dtype.type(self._device.softmax_scale)
        np.multiply(q, scale, out=scaled, dtype=self._dtype, casting="unsafe")
        return scaled.reshape(-1, q.shape[-1])

    def _scores(self, tile: Tile, q: Array, k: Array) -> tuple[Array, NDArray[np.bool_] | None]:
        """Return the scores, ``-inf`` where masked, and which pairs are allowed if not all are."""
        scores = self._device.scratch("scores", (len(q), len(k)), self._dtype)
        np.matmul(q, k.T, out=scores)
        if tile.kind is TileKind.FULL:
            return scores, None
        positions = self._queries.positions[tile.rows], self._block.positions[tile.columns]
        allowed = np.tile(self._device.mask.allowed(*positions), (self._group, 1))
        np.copyto(scores, -np.inf, where=~allowed)
        return scores, allowed

    def _widened(self, name: str, tensor: Array) -> Array:
        """Return an array in the dtype of the state, copied only where the dtypes differ."""
        if tensor.dtype == self._dtype:
            return tensor
        wide = self._device.scratch(name, tensor.shape, self._dtype)
        np.copyto(wide, tensor, casting="unsafe")
        return wide

    def _multiplied(self, weights: Array) -> Array:
        """Return weights as they are multiplied: a copy, where they are rounded for that."""
        digits = SIGNIFICANT_DIGITS.get(self._queries.q.dtype.name)
        if digits is None or not self._device.rounds_weights:
            return weights
        rounded: Array = self._device.scratch("rounded", weights.shape, self._dtype)
        # By digits and not by dtype: the few exponents of float16 would not hold every gradient of a score.
        mantissa, exponent = np.frexp(weights)
        np.ldexp(np.rint(mantissa * 2**digits), exponent - digits, out=rounded)
        return rounded

    def _count(self, tile: Tile) -> None:
        head_dim = self._queries.q.shape[-1]
        self.tally.pairs += tile.pairs * self._group
        self.tally.computed_pairs += tile.area * self._group
        self.tally.flops += 2 * self.products * head_dim * tile.pairs * self._group
        self.tally.tiles += 1
        self.tally.tiles_unmasked += tile.kind is TileKind.FULL


class ForwardWork(TileWork):
    """Attending to one block."""

    products = FORWARD_PRODUCTS

    def __init__(self, device: NumpyDevice, queries: Queries, block: Block, state: State) -> None:
        super().__init__(device, queries, block)
        self._state = state

    def _compute(self, tile: Tile, b: int, kv_head: int, k: Array, v: Array) -> None:
        heads, state = self._heads(kv_head), self._state
        q = self._scaled_queries(tile, b, heads)
        scores, allowed = self._scores(tile, q, k)

        row_max = state.row_max[b, heads, tile.rows].reshape(-1)
        row_sum = state.row_sum[b, heads, tile.rows].reshape(-1)
        new_max = np.maximum(row_max, scores.max(axis=1))
        shift = finite_shift(new_max)
        scores -= shift[:, None]
        weights = np.exp(scores, out=scores)
        rescale = np.exp(row_max - shift)

        weighted = self._device.scratch("weighted", q.shape, self._dtype)
        _weighted_sum(self._multiplied(weights), v, allowed, out=weighted)
        acc = state.acc[b, heads, tile.rows]
        acc *= rescale.reshape(*acc.shape[:2], 1)
        acc += weighted.reshape(acc.shape)
        row_sum = row_sum * rescale + weights.sum(axis=1)
        state.row_max[b, heads, tile.rows] = new_max.reshape(acc.shape[:2])
        state.row_sum[b, heads, tile.rows] = row_sum.reshape(acc.shape[:2])


class BackwardWork(TileWork):
    r"""Adding to the gradients what the pairs with one block give.

    With :math:`p = e^{s - lse}`, :math:`\delta = \sum_d dout \cdot out` and
    :math:`ds = p (dout \cdot v - \delta)`: :math:`dv = p^T dout`, :math:`dq = scale \cdot ds\, k` and
    :math:`dk = scale \cdot ds^T q` (Dao et al. 2022, appendix B.2). lse and delta are over all keys, so
    blocks add up in any order.
    """

    products = BACKWARD_PRODUCTS

    def __init__(
        self,
        device: NumpyDevice,
        queries: Queries,
        outcome: Outcome,
        block: Block,
        gradients: Gradients,
    ) -> None:
        super().__init__(device, queries, block)
        self._outcome = outcome
        self._gradients = gradients

    def _compute(self, tile: Tile, b: int, kv_head: int, k: Array, v: Array) -> None:
        heads, device, gradients = self._heads(kv_head), self._device, self._gradients
        q = self._scaled_queries(tile, b, heads)
        dout = self._widened("dout", self._outcome.dout[b, heads, tile.rows]).reshape(q.shape)
        lse = finite_shift(self._outcome.lse[b, heads, tile.rows].reshape(-1))
        delta = self._outcome.delta[b, heads, tile.rows].reshape(-1)

        scores, allowed = self._scores(tile, q, k)
        scores -= lse[:, None]
        weights = np.exp(scores, out=scores)
        hidden = None
        if allowed is not None:
            hidden = allowed.T
            np.copyto(weights, 0, where=~allowed)  # An lse of NaN would make it NaN.
        change = device.scratch("change", weights.shape, self._dtype)
        np.matmul(dout, v.T, out=change)
        change -= delta[:, None]
        change *= weights
        if allowed is not None:
            np.copyto(change, 0, where=~allowed)  # 0 * NaN of a masked pair would be NaN.

        of_queries = device.scratch("weighted", q.shape, self._dtype)
        change = self._multiplied(change)
        _weighted_sum(change, k, allowed, out=of_queries)
        dq = gradients.dq[b, heads, tile.rows]
        of_queries *= self._dtype.type(device.softmax_scale)
        dq += of_queries.reshape(dq.shape)

        of_keys = device.scratch("of keys", k.shape, self._dtype)
        _weighted_sum(change.T, q, hidden, out=of_keys)  # q has the scale already.
        gradients.dk[b, kv_head, tile.columns] += of_keys
        _weighted_sum(self._multiplied(weights).T, dout, hidden, out=of_keys)
        gradients.dv[b, kv_head, tile.columns] += of_keys


def _weighted_sum(weights: Array, v: Array, allowed: NDArray[np.bool_] | None, out: Array) -> None:
    """Write ``weights @ v`` to `out`; a masked pair adds nothing, even where its value is NaN.

    A weight of 0 does not hide a value: 0 * NaN and 0 * inf are NaN. So rows of `v` with such values are
    taken out of the product and added only where they may be seen.
    """
    wild = ~np.isfinite(v).all(axis=1) if allowed is not None else np.zeros(0, np.bool_)
    if allowed is None or not wild.any():
        np.matmul(weights, v, out=out)
        return
    np.matmul(weights[:, ~wild], v[~wild], out=out)
    for key in np.flatnonzero(wild):
        seen = allowed[:, key]
        out[seen] += weights[seen, key, None] * v[key]
