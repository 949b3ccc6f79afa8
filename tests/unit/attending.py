"""Problems for tests of devices, and the ways to have a device solve them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from dense import DTYPES, attend_dense, pairs_between
from numpy.typing import NDArray

from ringmpi.devices import (
    Block,
    Gradients,
    NativeDevice,
    NumpyDevice,
    Outcome,
    Queries,
    native,
)
from ringmpi.devices.build import compiler_command
from ringmpi.devices.native import library
from ringmpi.errors import MissingCapabilityError
from ringmpi.mask import Mask
from ringmpi.softmax import State, state_dtype
from ringmpi.trace import Tally

from .gradients import assert_gradients_exact
from .matrix_units import matrix_library

Array = NDArray[Any]
HostDevice = NumpyDevice | NativeDevice


#: Scratch memory that each tile writes before it reads it; k and v live longer, in narrow dtypes.
TILE_SCRATCH = ("q", "scores", "rounded", "weighted", "change", "of keys", "dout")


@dataclass(frozen=True)
class Case:
    """A problem: the queries at the end of a sequence, or the whole of it, against all of its keys."""

    tokens: int = 17
    queries: int | None = None
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 5
    dtype: str = "float32"
    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] | None = None

    @property
    def mask(self) -> Mask:
        return Mask(self.causal, self.window, self.documents)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def positions(self) -> NDArray[np.int64]:
        first = 0 if self.queries is None else self.tokens - self.queries
        return np.arange(first, self.tokens)

    @property
    def allowed(self) -> NDArray[np.bool_]:
        keys = np.arange(self.tokens)
        return pairs_between(self.positions, keys, self.causal, self.window, self.documents)

    def tensors(self) -> tuple[Array, Array, Array]:
        rng = np.random.default_rng(self.tokens)
        kv_shape = (self.batch, self.kv_heads, self.tokens, self.head_dim)
        q = rng.normal(size=(self.batch, self.heads, len(self.positions), self.head_dim))
        k, v = rng.normal(size=kv_shape), rng.normal(size=kv_shape)
        dtype = DTYPES[self.dtype]
        return q.astype(dtype), k.astype(dtype), v.astype(dtype)


TALLIES = {
    "full": Case(tokens=700, queries=300),
    "causal": Case(tokens=700, queries=300, causal=True),
    "grouped": Case(tokens=300, batch=2, heads=6, kv_heads=2, causal=True, window=99),
    "documents": Case(tokens=300, documents=(0, 10, 10, 300), head_dim=12),
}


def state_of(q: Array) -> State:
    return State.identity(q.shape, state_dtype(q.dtype))


def _numpy(mask: Mask, scale: float, weights: str = "exact") -> HostDevice:
    return NumpyDevice(mask, scale, weights)


def native_device(
    case: Case, threads: int = 1, matrix_unit: str = "off", weights: str = "exact"
) -> NativeDevice:
    """Return a native device for a problem; a matrix unit that this CPU lacks is emulated."""
    return _native(case.mask, case.scale, weights, threads, matrix_unit)


def _native(
    mask: Mask, scale: float, weights: str = "exact", threads: int = 1, matrix_unit: str = "off"
) -> NativeDevice:
    found = library() if matrix_unit == "off" else matrix_library()
    with patch.object(native._Here, "library", found):
        return NativeDevice(mask, scale, threads, matrix_unit, weights)


def _native_with_matrix_unit(mask: Mask, scale: float, weights: str = "exact") -> HostDevice:
    return _native(mask, scale, weights, matrix_unit="on")


def natives() -> dict[str, Callable[..., HostDevice]]:
    """Return the ways to make a native device here, by name: none where there is no compiler.

    A library that does not compile or load is an error: its tests must not vanish.
    """
    try:
        compiler_command()
    except MissingCapabilityError:
        return {}
    found: dict[str, Callable[..., HostDevice]] = {"native": _native}
    return found | ({"native, matrix unit": _native_with_matrix_unit} if matrix_library() else {})


#: The devices that compute in host memory, by name.
KINDS: dict[str, Callable[..., HostDevice]] = {"numpy": _numpy, **natives()}


@dataclass(frozen=True)
class Maker:
    """Makes devices of one kind."""

    kind: str

    def device(self, mask: Mask, scale: float = 1.0) -> HostDevice:
        return KINDS[self.kind](mask, scale)

    def of(self, case: Case) -> HostDevice:
        return self.device(case.mask, case.scale)


def poison(device: HostDevice) -> None:
    """Fill what a work must not read before it has written it."""
    if isinstance(device, NativeDevice):
        device.pool.poison()
        return
    for array in device._scratch.values():
        array[:] = np.nan


def poison_between_tiles(device: HostDevice) -> None:
    """Fill what a tile must not read before it has written it."""
    if isinstance(device, NumpyDevice):
        for name in {*TILE_SCRATCH} & {*device._scratch}:
            device._scratch[name][:] = np.nan


def attend(
    device: HostDevice,
    case: Case,
    tensors: tuple[Array, Array, Array],
    blocks: Sequence[NDArray[np.int64]],
) -> tuple[Array, Array, list[Tally]]:
    """Attend to blocks, given as positions of their keys, one after the other."""
    q, k, v = tensors
    queries = Queries(q, case.positions)
    state = state_of(q)
    tallies = []
    for at in blocks:
        poison(device)
        work = device.attend(queries, Block(k[:, :, at], v[:, :, at], at), state)
        while not work.advance():
            poison_between_tiles(device)
        tallies.append(work.tally)
    return *device.finish(state, q.dtype), tallies


def cut(tokens: int, *lengths: int) -> list[NDArray[np.int64]]:
    """Cut the keys into blocks of the given lengths and what is left."""
    return np.split(np.arange(tokens), np.cumsum(lengths))


def striped(tokens: int, size: int) -> list[NDArray[np.int64]]:
    return [np.arange(first, tokens, size) for first in range(size)]


@dataclass
class Backward:
    """What goes into the backward pass, of which parts may be replaced; out, lse and delta are right."""

    case: Case
    q: Array
    k: Array
    v: Array
    dout: Array
    out: Array
    lse: Array
    delta: Array

    @classmethod
    def of(cls, case: Case, tensors: tuple[Array, Array, Array] | None = None) -> Backward:
        q, k, v = tensors or case.tensors()
        dout = np.random.default_rng(case.tokens + 1).normal(size=q.shape).astype(q.dtype)
        out, lse = attend_dense(q, k, v, case.allowed, case.scale, np.float64)
        state = state_dtype(q.dtype)
        out = out.astype(q.dtype)
        delta = (dout.astype(np.float64) * out.astype(np.float64)).sum(axis=-1)
        return cls(case, q, k, v, dout, out, lse.astype(state), delta.astype(state))

    def inputs(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in ("q", "k", "v", "dout", "lse", "delta")}

    def gradients(self) -> Gradients:
        """Return gradients over nothing."""
        dtype = state_dtype(self.q.dtype)
        return Gradients(*(np.zeros(a.shape, dtype) for a in (self.q, self.k, self.v)))

    def run(
        self, device: HostDevice, blocks: Sequence[NDArray[np.int64]]
    ) -> tuple[tuple[Array, Array, Array], list[Tally]]:
        """Add up the gradients of blocks, given as positions of their keys, one after the other."""
        queries = Queries(self.q, self.case.positions)
        outcome = Outcome(self.dout, self.lse, self.delta)
        total, tallies = self.gradients(), []
        for at in blocks:
            poison(device)
            block = Block(self.k[:, :, at], self.v[:, :, at], at)
            part = Gradients(total.dq, total.dk[:, :, at], total.dv[:, :, at])
            work = device.attend_backward(queries, outcome, block, part)
            while not work.advance():
                poison_between_tiles(device)
            tallies.append(work.tally)
            total.dk[:, :, at], total.dv[:, :, at] = part.dk, part.dv
        return (total.dq, total.dk, total.dv), tallies

    def assert_exact(self, found: Sequence[Array]) -> None:
        tensors = self.q, self.k, self.v, self.dout
        assert_gradients_exact(found, tensors, self.case.allowed, self.case.scale, (self.out, self.lse))
