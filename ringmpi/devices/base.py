"""What the executor asks of a device, and what it hands over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringmpi.softmax import State
from ringmpi.trace import Tally

Array = NDArray[Any]

#: The widest head that every device can take.
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Queries:
    """The query shard of a rank.

    Attributes
    ----------
    q : ndarray, shape (batch, num_heads, tokens, head_dim)
    positions : ndarray of int64, shape (tokens,)
        Global, ascending.
    """

    q: Array
    positions: NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Keys and values in a buffer.

    Attributes
    ----------
    k, v : ndarray, shape (batch, num_kv_heads, tokens, head_dim)
    positions : ndarray of int64, shape (tokens,)
        Global, ascending.
    """

    k: Array
    v: Array
    positions: NDArray[np.int64]


class Work(Protocol):
    """Attending to one block, under way."""

    tally: Tally

    def advance(self) -> bool:
        """Do or await a little more; True once all is done."""


class Device(Protocol):
    """Something that can attend. Every method is local."""

    name: str

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Return a buffer that the device computes on and MPI can read and write."""

    def begin(self, queries: Queries) -> State:
        """Return the state of `queries` before the first block."""

    def attend(self, queries: Queries, block: Block, state: State) -> Work:
        """Start to attend to a block, updating `state` in place."""

    def finish(self, queries: Queries, state: State) -> tuple[Array, Array]:
        """Return out, in the dtype of the queries, and lse, in that of the state."""
