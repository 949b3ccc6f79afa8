"""What a part of a schedule is made of: which tensors, how large, and where they lie in a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.layout import piece_of
from ringmpi.schedule.steps import OF_KEYS, Part, Payload, Shards
from ringmpi.softmax import state_dtype

Array = NDArray[Any]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a payload.

    Attributes
    ----------
    name : str
    of_state : bool
        Whether it has the dtype of the state, else that of the inputs.
    wide : bool
        Whether it has an axis of head_dim.
    """

    name: str
    of_state: bool
    wide: bool


#: The tensors of a payload, in the order in which they lie in a buffer: those of the wider dtype come
#: first, so that each begins at a multiple of its own item size.
TENSORS_OF: dict[Payload, tuple[Tensor, ...]] = {
    Payload.KV: (Tensor("k", False, True), Tensor("v", False, True)),
    Payload.Q: (Tensor("q", False, True),),
    Payload.QDOUT: (
        Tensor("lse", True, False),
        Tensor("delta", True, False),
        Tensor("q", False, True),
        Tensor("dout", False, True),
    ),
    Payload.STATE: (
        Tensor("acc", True, True),
        Tensor("row_max", True, False),
        Tensor("row_sum", True, False),
    ),
    Payload.OUT: (Tensor("lse", True, False), Tensor("out", False, True)),
    Payload.DQ: (Tensor("dq", True, True),),
    Payload.DKV: (Tensor("dk", True, True), Tensor("dv", True, True)),
}


@dataclass(frozen=True)
class Shape:
    """What the shards of all ranks have in common."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype[Any]

    def heads(self, part: Part) -> range:
        """Return the heads of a part: query heads, or the KV heads that these read. Local."""
        share = piece_of(self.num_heads, part.heads.pieces, part.heads.index)
        if part.payload not in OF_KEYS:
            return share
        group = self.num_heads // self.num_kv_heads
        return range(share.start // group, -(-share.stop // group))

    def groups(self, part: Part) -> Iterator[tuple[slice, slice]]:
        """Yield query heads and the KV heads that they read, counted within a part of each. Local.

        In each yielded pair every KV head is read by as many query heads. One pair is enough unless the
        share begins or ends amid the query heads of a KV head.
        """
        share = piece_of(self.num_heads, part.heads.pieces, part.heads.index)
        group = self.num_heads // self.num_kv_heads
        first = share.start // group
        if share.start % group == 0 and share.stop % group == 0:
            yield slice(0, len(share)), slice(0, len(share) // group)
            return
        for kv_head in range(first, -(-share.stop // group)):
            low, high = max(share.start, kv_head * group), min(share.stop, (kv_head + 1) * group)
            at = kv_head - first
            yield slice(low - share.start, high - share.start), slice(at, at + 1)

    def tensors(self, part: Part, tokens: int) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
        """Yield name, shape and dtype of each tensor of a part with so many tokens. Local."""
        heads = len(self.heads(part))
        for tensor in TENSORS_OF[part.payload]:
            shape = (self.batch, heads, tokens)
            dtype = state_dtype(self.dtype) if tensor.of_state else self.dtype
            yield tensor.name, (*shape, self.head_dim) if tensor.wide else shape, dtype

    def nbytes(self, part: Part, shards: Shards) -> int:
        """Return the size of a part in a buffer, bytes. Local."""
        tensors = self.tensors(part, len(shards.tokens(part)))
        return sum(prod(shape) * dtype.itemsize for _, shape, dtype in tensors)

    def views(self, part: Part, shards: Shards, buffer: NDArray[np.uint8]) -> dict[str, Array]:
        """Return the tensors of a part that lie in a buffer, by name. Local."""
        found, at = {}, 0
        for name, shape, dtype in self.tensors(part, len(shards.tokens(part))):
            nbytes = prod(shape) * dtype.itemsize
            found[name] = buffer[at : at + nbytes].view(dtype).reshape(shape)
            at += nbytes
        return found
