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

from ringmpi.devices.base import Array, Block, Queries
from ringmpi.mask import Mask, Tile, TileKind
from ringmpi.softmax import State, finish, finite_shift, state_dtype
from ringmpi.trace import Tally

#: Queries (times heads of a group) and keys of a tile. 128 x 512 float32 scores are 256 KiB, which stays
#: in the second-level cache; at head_dim 64 a tile is 17 MFLOP, about half a millisecond on one core, so
#: polling between tiles is frequent enough to keep a transfer going.
TILE_ROWS = 128
TILE_COLUMNS = 512

#: Buffers start on a cache line.
ALIGNMENT = 64


class NumpyDevice:
    """Attention on host memory with NumPy.

    Parameters
    ----------
    mask : Mask
    softmax_scale : float
        Factor of the scores.
    """

    name = "numpy"

    def __init__(self, mask: Mask, softmax_scale: float) -> None:
        self.mask = mask
        self.softmax_scale = softmax_scale
        self._scratch: dict[str, Array] = {}

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Return an aligned byte buffer in host memory."""
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + nbytes]

    def begin(self, queries: Queries) -> State:
        """Return the state over no keys."""
        batch, heads, tokens, head_dim = queries.q.shape
        return State.identity((batch, heads, tokens, head_dim), state_dtype(queries.q.dtype))

    def attend(self, queries: Queries, block: Block, state: State) -> TileWork:
        """Start to attend to a block; the work does one tile an advance."""
        return TileWork(self, queries, block, state)

    def finish(self, queries: Queries, state: State) -> tuple[Array, Array]:
        """Normalise the state in place, and round out to the dtype of the queries."""
        out, lse = finish(state)
        return out.astype(queries.q.dtype, copy=False), lse

    def scratch(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return contiguous memory of the given shape with whatever was left in it."""
        size = int(np.prod(shape))
        held = self._scratch.get(name)
        if held is None or held.size < size or held.dtype != dtype:
            held = self._scratch[name] = np.empty(size, dtype)
        return held[:size].reshape(shape)


class TileWork:
    """Attending to one block, a tile an advance, always in the same order."""

    def __init__(self, device: NumpyDevice, queries: Queries, block: Block, state: State) -> None:
        self.tally = Tally()
        self._device = device
        self._queries = queries
        self._block = block
        self._state = state
        self._group = queries.q.shape[1] // block.k.shape[1]
        self._tiles = self._attend()

    def advance(self) -> bool:
        """Compute the next tile; True once there is none."""
        # Scores of masked pairs may overflow or be NaN; they are selected away, so not a warning.
        with np.errstate(over="ignore", invalid="ignore"):
            return next(self._tiles, None) is None

    def _attend(self) -> Iterator[Tile]:
        queries, block, group = self._queries, self._block, self._group
        rows = max(1, TILE_ROWS // group)
        tiling = self._device.mask.tiling(queries.positions, block.positions, rows, TILE_COLUMNS)
        batch, kv_heads = block.k.shape[:2]
        self.tally.tiles_skipped += tiling.empty * batch * kv_heads
        for b in range(batch):
            for kv_head in range(kv_heads):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                k, v = self._widened("k", block.k[b, kv_head]), self._widened("v", block.v[b, kv_head])
                for tile in tiling.tiles:
                    self._attend_tile(tile, b, heads, k[tile.columns], v[tile.columns])
                    self._count(tile)
                    yield tile

    def _attend_tile(self, tile: Tile, b: int, heads: slice, k: Array, v: Array) -> None:
        device, dtype = self._device, self._state.acc.dtype
        q = self._queries.q[b, heads, tile.rows]
        group, rows, head_dim = q.shape

        # The scale goes into q: what overflows then is a score that the dtype cannot hold.
        q_tile = device.scratch("q", q.shape, dtype)
        np.multiply(q, dtype.type(device.softmax_scale), out=q_tile, dtype=dtype, casting="unsafe")
        scores = device.scratch("scores", (group * rows, len(k)), dtype)
        np.matmul(q_tile.reshape(group * rows, head_dim), k.T, out=scores)

        allowed = None
        if tile.kind is TileKind.PARTIAL:
            positions = self._queries.positions[tile.rows], self._block.positions[tile.columns]
            allowed = np.tile(device.mask.allowed(*positions), (group, 1))
            np.copyto(scores, -np.inf, where=~allowed)

        row_max = self._state.row_max[b, heads, tile.rows].reshape(-1)
        row_sum = self._state.row_sum[b, heads, tile.rows].reshape(-1)
        new_max = np.maximum(row_max, scores.max(axis=1))
        shift = finite_shift(new_max)
        scores -= shift[:, None]
        weights = np.exp(scores, out=scores)
        rescale = np.exp(row_max - shift)

        weighted = device.scratch("weighted", (group * rows, head_dim), dtype)
        _weighted_sum(weights, v, allowed, out=weighted)
        acc = self._state.acc[b, heads, tile.rows]
        acc *= rescale.reshape(group, rows, 1)
        acc += weighted.reshape(acc.shape)
        row_sum = row_sum * rescale + weights.sum(axis=1)
        self._state.row_max[b, heads, tile.rows] = new_max.reshape(group, rows)
        self._state.row_sum[b, heads, tile.rows] = row_sum.reshape(group, rows)

    def _widened(self, name: str, tensor: Array) -> Array:
        """Return one KV head in the dtype of the state, copied only where the dtypes differ."""
        dtype = self._state.acc.dtype
        if tensor.dtype == dtype:
            return tensor
        wide = self._device.scratch(name, tensor.shape, dtype)
        np.copyto(wide, tensor, casting="unsafe")
        return wide

    def _count(self, tile: Tile) -> None:
        head_dim = self._queries.q.shape[-1]
        self.tally.pairs += tile.pairs * self._group
        self.tally.computed_pairs += tile.area * self._group
        self.tally.flops += 4 * head_dim * tile.pairs * self._group
        self.tally.tiles += 1
        self.tally.tiles_unmasked += tile.kind is TileKind.FULL


def _weighted_sum(weights: Array, v: Array, allowed: NDArray[np.bool_] | None, out: Array) -> None:
    """Write ``weights @ v`` to `out`; a masked pair adds nothing, even where its value is NaN.

    A weight of 0 does not hide a value: 0 * NaN and 0 * inf are NaN. So keys with such values are taken
    out of the product and added only to the rows that may see them.
    """
    wild = ~np.isfinite(v).all(axis=1) if allowed is not None else np.zeros(0, np.bool_)
    if allowed is None or not wild.any():
        np.matmul(weights, v, out=out)
        return
    np.matmul(weights[:, ~wild], v[~wild], out=out)
    for key in np.flatnonzero(wild):
        seen = allowed[:, key]
        out[seen] += weights[seen, key, None] * v[key]
