"""What is measured: one problem, its inputs, and how much work it is. Known to driver and workers alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FORWARD = "forward"
BOTH = "forward+backward"


@dataclass(frozen=True)
class Case:
    """A problem and what is asked of it.

    Attributes
    ----------
    part : str
        ``single``: one process and several threads; ``ring``: several ranks of one thread.
    dtype : str
        Such as ``bfloat16``.
    direction : str
        ``forward`` or ``forward+backward``; column ``pass`` of the table.
    mask : str
        ``full`` or ``causal``.
    seq_len, head_dim, heads : int
        The batch is 1, and there are as many KV heads as heads.
    """

    part: str
    dtype: str
    direction: str
    mask: str
    seq_len: int
    head_dim: int
    heads: int

    @property
    def causal(self) -> bool:
        """Whether a query sees no key after itself."""
        return self.mask == "causal"

    @property
    def backward(self) -> bool:
        """Whether the gradients are asked for too."""
        return self.direction == BOTH

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the results."""
        return ("out", "dq", "dk", "dv") if self.backward else ("out",)

    @property
    def flops(self) -> float:
        """Floating-point operations of the allowed pairs; a backward pass counts 2.5 forward passes."""
        pairs = self.seq_len * (self.seq_len + 1) // 2 if self.causal else self.seq_len**2
        return 4.0 * self.heads * pairs * self.head_dim * (3.5 if self.backward else 1)

    def inputs(self, positions: slice | NDArray[np.int64] = slice(None)) -> dict[str, Array]:
        """Return q, k, v and dout at some positions, [batch, heads, tokens, head_dim] of float32.

        The same for every contender; rounding them to bfloat16, to nearest even, is left to each.
        """
        random = np.random.default_rng((self.seq_len, self.head_dim, self.heads))
        shape = (1, self.heads, self.seq_len, self.head_dim)
        drawn = {name: random.standard_normal(shape, np.float32) for name in ("q", "k", "v", "dout")}
        return {name: np.ascontiguousarray(array[:, :, positions]) for name, array in drawn.items()}


def zigzag(seq_len: int, rank: int, ranks: int) -> NDArray[np.int64]:
    """Return the positions of pieces `rank` and ``2 * ranks - 1 - rank`` of ``2 * ranks``.

    >>> zigzag(8, 0, 2).tolist()
    [0, 1, 6, 7]
    """
    pieces = np.split(np.arange(seq_len), 2 * ranks)
    return np.concatenate((pieces[rank], pieces[2 * ranks - 1 - rank]))


def contiguous(seq_len: int, rank: int, ranks: int) -> NDArray[np.int64]:
    """Return the positions of piece `rank` of `ranks`.

    >>> contiguous(8, 1, 2).tolist()
    [4, 5, 6, 7]
    """
    return np.split(np.arange(seq_len), ranks)[rank]


#: Shards as the peers know them.
LAYOUTS = {"zigzag": zigzag, "contiguous": contiguous}
