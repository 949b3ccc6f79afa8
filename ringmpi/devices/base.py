"""What the executor asks of a device, and what it hands over."""

from __future__ import annotations

from collections.abc import Iterable
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


@dataclass(frozen=True)
class Sizes:
    """The shape of one attend.

    Attributes
    ----------
    batch, heads, kv_heads, queries, keys, head_dim : int
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int


class Work(Protocol):
    """Attending to one block, under way."""

    tally: Tally

    def advance(self) -> bool:
        """Do or await a little more; True once all is done."""


class Device(Protocol):
    """Something that can attend. Every method is local."""

    name: str

    def prepare(self, sizes: Iterable[Sizes], dtype: np.dtype[Any]) -> None:
        """Get ready for attends of some sizes, so that nothing is compiled in the first of them."""

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Return a buffer that the device computes on and MPI, or a transport, can read and write."""

    def place(self, array: Any, dtype: np.dtype[Any]) -> Array:
        """Return an array of the caller's as the device takes it, of a dtype and without gaps."""

    def give(self, array: Array, like: Any) -> Any:
        """Return a result in the form in which the caller gave an input."""

    def settle(self) -> None:
        """Wait until all that was begun is done, for the sake of moments."""

    def full(self, shape: tuple[int, ...], value: float, dtype: np.dtype[Any]) -> Array:
        """Return an array of one value."""

    def fill(self, array: Array, value: float) -> None:
        """Set all items to a value."""

    def copy(self, source: Array, into: Array) -> None:
        """Put an array into the place of another one."""

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

    def rounded(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """Return an array of the state's dtype in that of the inputs."""
