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
    """Queries that attend.

    Attributes
    ----------
    q : ndarray, shape (batch, num_heads, tokens, head_dim)
    positions : ndarray of int64, shape (tokens,)
        Global, ascending.
    """

    q: Array
    positions: NDArray[np.int64]


@dataclass(frozen=True)
class Outcome:
    """What the forward pass gave queries, and what comes back to them; both over all keys.

    Attributes
    ----------
    dout : ndarray, shape and dtype of q
        Gradient of the loss with respect to out.
    lse, delta : ndarray, shape (batch, num_heads, tokens)
        Log-sum-exp, and the sum over head_dim of ``dout * out``, in the dtype of the state.
    """

    dout: Array
    lse: Array
    delta: Array


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


@dataclass(frozen=True)
class Gradients:
    """What the backward pass adds to, in the dtype of the state.

    Attributes
    ----------
    dq : ndarray, shape (batch, num_heads, query tokens, head_dim)
    dk, dv : ndarray, shape (batch, num_kv_heads, tokens of the block, head_dim)
    """

    dq: Array
    dk: Array
    dv: Array


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

    def attend(self, queries: Queries, block: Block, state: State) -> Work:
        """Start to attend to a block, updating `state` in place."""

    def attend_backward(
        self, queries: Queries, outcome: Outcome, block: Block, gradients: Gradients
    ) -> Work:
        """Start to add to `gradients` what the pairs of some queries and a block give."""

    def finish(self, state: State, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        """Return out, in the given dtype, and lse, in that of the state, which is used up."""

    def delta(self, dout: Array, out: Array) -> Array:
        """Return the sum over head_dim of ``dout * out``, in the dtype of the state."""

    def merge(self, state: State, other: State) -> None:
        """Add to a state what another one has seen of other keys."""

    def add(self, total: Array, other: Array) -> None:
        """Add an array to another one."""
