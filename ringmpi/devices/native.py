"""The native device: C++ of `kernels/`, compiled on this machine, called without the GIL.

Here arrays become addresses, so everything that the C++ takes for granted is checked before. The structures
mirror ``kernels/task.h``.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ringmpi.devices.base import Array, Block, Gradients, Outcome, Queries
from ringmpi.devices.build import Stopped, build, find, recipe_here
from ringmpi.devices.host import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, HostDevice
from ringmpi.errors import MissingCapabilityError, RingMPIError, ShapeError
from ringmpi.mask import Mask
from ringmpi.softmax import DTYPES, State, state_dtype
from ringmpi.trace import Tally

#: Seconds of compute between two looks at the transfers: MPI moves some 100 KiB in that time, and a look
#: costs microseconds.
SLICE_S = 1e-3

#: What is said of the matrix unit: used where there is one; used, or refused where there is none; not used.
MATRIX_UNIT = ("auto", "on", "off")

#: What the matrix unit multiplies, as ``kernels/matrix_unit.h`` uses it.
MATRIX_UNIT_DTYPES = ("bfloat16",)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
    )


class _Counts(ctypes.Structure):
    _fields_ = (
        ("computed_pairs", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
        ("tiles_unmasked", ctypes.c_int64),
        ("tiles_skipped", ctypes.c_int64),
    )


class _Task(ctypes.Structure):
    _fields_ = (
        *((name, _Tensor) for name in ("q", "k", "v")),
        *((name, _Tensor) for name in ("acc", "row_max", "row_sum")),
        *((name, _Tensor) for name in ("dout", "lse", "delta")),
        *((name, _Tensor) for name in ("dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("begin", "end")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys")),
        ("head_dim", ctypes.c_int64),
        ("softmax_scale", ctypes.c_double),
        ("dtype", ctypes.c_int32),
        ("backward", ctypes.c_int32),
        ("rounds_weights", ctypes.c_int32),
    )


#: Result and arguments of every function.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "task_nbytes": (ctypes.c_int64, ()),
    "instruction_set": (ctypes.c_char_p, ()),
    "has_matrix_unit": (ctypes.c_int32, ()),
    "has_dot_products": (ctypes.c_int32, ()),
    "open": (ctypes.c_void_p, (ctypes.c_int32, ctypes.c_int32)),
    "close": (None, (ctypes.c_void_p,)),
    "start": (ctypes.c_void_p, (ctypes.c_void_p, ctypes.POINTER(_Task))),
    "advance": (ctypes.c_int32, (ctypes.c_void_p, ctypes.c_double)),
    "counts": (None, (ctypes.c_void_p, ctypes.POINTER(_Counts))),
    "end": (None, (ctypes.c_void_p,)),
    "poison": (None, (ctypes.c_void_p,)),
}


class Library:
    """The compiled C++, loaded.

    Parameters
    ----------
    path : Path

    Raises
    ------
    MissingCapabilityError
        If it cannot be loaded, or belongs to another ringmpi.

    Attributes
    ----------
    instruction_set : str
        What its vector code was compiled for.
    has_matrix_unit : bool
        Whether it can use one, and this CPU and kernel let it.
    has_dot_products : bool
        Whether its vector code multiplies pairs of bfloat16 numbers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._call: dict[str, Callable[..., Any]] = {}
        try:
            loaded = ctypes.CDLL(str(path))  # CDLL, and not PyDLL: its calls release the GIL.
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(loaded, f"ringmpi_{name}")
                function.restype, function.argtypes = result, arguments
                self._call[name] = function
        except (OSError, AttributeError) as error:
            raise MissingCapabilityError(
                f"its library cannot be loaded: {error}; remove it, or set RINGMPI_CACHE to a folder from "
                f"which programs may run"
            ) from error
        nbytes = self("task_nbytes")
        if nbytes != ctypes.sizeof(_Task):
            raise MissingCapabilityError(
                f"{path} takes tasks of {nbytes} bytes and this ringmpi makes {ctypes.sizeof(_Task)}: "
                f"install ringmpi again"
            )
        self.instruction_set: str = self("instruction_set").decode()
        self.has_matrix_unit = bool(self("has_matrix_unit"))
        self.has_dot_products = bool(self("has_dot_products"))

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call a function by its name without ``ringmpi_``."""
        return self._call[name](*arguments)


class _Here:
    """What this process has found out about its library."""

    library: Library | None = None
    missing: str | None = None
    seconds = 0.0


def prepare(stopped: Stopped = lambda: False) -> str | None:
    """Compile the native device unless that was done before, on this machine, by anybody. Local.

    To be called before MPI is initialised, which ``from mpi4py import MPI`` does, because it starts a
    compiler. The command line does it by itself.

    Parameters
    ----------
    stopped : callable
        Says whether there is no use in going on.

    Returns
    -------
    str or None
        Why there is no native device; None if there is.

    Raises
    ------
    RingMPIError
        If MPI is initialised already, and nothing was compiled before.
    """
    if not is_missing():
        return None
    if _mpi_is_up():
        raise RingMPIError(
            "prepare: MPI is initialised already, and no process may be started after that; call it before "
            "mpi4py.MPI is imported, or run `ringmpi doctor` once on this kind of node"
        )
    try:
        built = build(recipe_here(), stopped=stopped)
        _Here.seconds += built.seconds
        _Here.library = Library(built.path)
    except MissingCapabilityError as error:
        _Here.missing = str(error)
    return _Here.missing


def library() -> Library:
    """Return this process's library, loaded. Local; starts no process.

    Raises
    ------
    MissingCapabilityError
        If it cannot be had, with the reason.
    """
    if _Here.library is None and _Here.missing is None:
        path = find(recipe_here())
        if path is None:
            raise MissingCapabilityError(
                "it was not compiled yet; call ringmpi.prepare() before MPI is initialised, or run "
                "`ringmpi doctor` once on this kind of node"
            )
        _Here.library = Library(path)
    if _Here.library is None:
        raise MissingCapabilityError(_Here.missing or "")
    return _Here.library


def is_missing() -> str | None:
    """Return why there is no native device in this process, or None. Local; starts no process."""
    try:
        library()
    except MissingCapabilityError as error:
        return str(error)
    return None


def compile_seconds() -> float:
    """Return what this process has spent on compiling, or on waiting for another one that did. Local."""
    return _Here.seconds


def _mpi_is_up() -> bool:
    # Not imported, which would initialise it: whoever has done so has it in here.
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


class Pool:
    """Threads and their scratch memory, given back with the last reference.

    Parameters
    ----------
    loaded : Library
    threads : int
        The one that calls is among them.
    matrix_unit : bool

    Raises
    ------
    MemoryError
    """

    def __init__(self, loaded: Library, threads: int, matrix_unit: bool) -> None:
        self.library = loaded
        self.address: int | None = loaded("open", threads, matrix_unit)
        if self.address is None:
            raise MemoryError(f"no memory for {threads} thread(s) of the native device")
        weakref.finalize(self, loaded, "close", self.address)

    def poison(self) -> None:
        """Fill all memory that no work uses with NaN, so that a test sees what is read unwritten."""
        self.library("poison", self.address)


class NativeDevice(HostDevice):
    """Attention on host memory in C++.

    Parameters
    ----------
    mask : Mask
    softmax_scale : float
        Factor of the scores.
    threads : int
    matrix_unit : str
        One of `MATRIX_UNIT`.
    weights : str
        One of `softmax.WEIGHTS`.

    Raises
    ------
    MissingCapabilityError
        If this machine lacks the library, or a matrix unit that is asked for.
    """

    name = "native"

    def __init__(
        self,
        mask: Mask,
        softmax_scale: float,
        threads: int = 1,
        matrix_unit: str = "auto",
        weights: str = "exact",
    ) -> None:
        super().__init__(mask, softmax_scale)
        self.rounds_weights = weights == "rounded"
        self.pool = Pool(library(), threads, uses_matrix_unit(matrix_unit))

    def attend(self, queries: Queries, block: Block, state: State) -> NativeWork:
        """Start to attend to a block; an advance computes for a millisecond."""
        outputs = {name: getattr(state, name) for name in ("acc", "row_max", "row_sum")}
        return NativeWork(self, queries, block, {}, outputs)

    def attend_backward(
        self, queries: Queries, outcome: Outcome, block: Block, gradients: Gradients
    ) -> NativeWork:
        """Start to add to the gradients; an advance computes for a millisecond."""
        outputs = {name: getattr(gradients, name) for name in ("dq", "dk", "dv")}
        return NativeWork(self, queries, block, vars(outcome), outputs)


def uses_matrix_unit(asked: str) -> bool:
    """Return whether the matrix unit is used here, for one of `MATRIX_UNIT`. Local.

    Raises
    ------
    MissingCapabilityError
        If there is none and it is asked for, or there is no library.
    """
    here = library()
    if asked == "on" and not here.has_matrix_unit:
        raise MissingCapabilityError(
            f"matrix_unit=on: this CPU, its kernel or the compiler has none ({here.instruction_set} only); "
            f"use auto"
        )
    return asked != "off" and here.has_matrix_unit


def rounds_weights(matrix_unit: str, dtype: str) -> bool:
    """Return whether weights that may be rounded are: where products of the dtype are fast then. Local."""
    here = library()
    return dtype in MATRIX_UNIT_DTYPES and (here.has_dot_products or uses_matrix_unit(matrix_unit))


class NativeWork:
    """Attending to one block in C++, forward or backward.

    Parameters
    ----------
    device : NativeDevice
    queries : Queries
    block : Block
    outcome : dict of str to ndarray
        What the backward pass reads beside them; empty in the forward pass.
    outputs : dict of str to ndarray
        What is updated.

    Raises
    ------
    ShapeError
        If an array is not as the C++ takes it.
    """

    def __init__(
        self,
        device: NativeDevice,
        queries: Queries,
        block: Block,
        outcome: dict[str, Array],
        outputs: dict[str, Array],
    ) -> None:
        self.tally = Tally()
        self._pool = device.pool
        begin, end = device.mask.bounds(queries.positions, block.positions)
        given = {"q": queries.q, "k": block.k, "v": block.v, **outcome}
        _check(given, outputs, len(begin), len(block.positions))
        self._kept = (given, outputs, begin, end)  # The C++ has nothing but their addresses.
        self._done = len(begin) == 0 or len(block.positions) == 0
        self._pairs = 0
        if self._done:
            return
        batch, heads, _, head_dim = queries.q.shape
        products = BACKWARD_PRODUCTS if outcome else FORWARD_PRODUCTS
        self._pairs = int((end - begin).sum()) * batch * heads
        self._flops = 2 * products * head_dim * self._pairs
        task = _Task(
            **{name: _tensor(array) for name, array in (given | outputs).items()},
            begin=begin.ctypes.data,
            end=end.ctypes.data,
            batch=batch,
            heads=heads,
            kv_heads=block.k.shape[1],
            queries=len(begin),
            keys=len(block.positions),
            head_dim=head_dim,
            softmax_scale=device.softmax_scale,
            dtype=DTYPES.index(queries.q.dtype.name),
            backward=bool(outcome),
            rounds_weights=device.rounds_weights,
        )
        self._address: int | None = self._pool.library("start", self._pool.address, task)
        if self._address is None:
            raise MemoryError("no memory to attend to a block")
        # Also of a work that nobody finishes. It lives no longer than the pool, which `self` holds.
        self._end = weakref.finalize(self, self._pool.library, "end", self._address)

    def advance(self) -> bool:
        """Compute for a millisecond; True once all is done."""
        if not self._done and self._pool.library("advance", self._address, SLICE_S):
            self._count()
            self._end()
            self._done = True
        return self._done

    def _count(self) -> None:
        counts = _Counts()
        self._pool.library("counts", self._address, counts)
        told = {name: getattr(counts, name) for name, _ in _Counts._fields_}
        self.tally = Tally(pairs=self._pairs, flops=self._flops, **told)


def _tensor(array: Array) -> _Tensor:
    return _Tensor(array.ctypes.data, *array.strides[:3])


def _check(given: dict[str, Array], outputs: dict[str, Array], queries: int, keys: int) -> None:
    """Refuse arrays whose addresses must not be handed over."""
    q, k = given["q"], given["k"]
    if q.ndim != 4 or k.ndim != 4 or k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"q {q.shape}, k {k.shape}: must be [batch, heads, tokens, head_dim], and num_kv_heads must "
            f"divide num_heads"
        )
    if q.dtype.name not in DTYPES:
        raise ShapeError(f"q of dtype {q.dtype}: use one of {', '.join(DTYPES)}")
    batch, heads, _, head_dim = q.shape
    wide, tall = (batch, heads, queries, head_dim), (batch, k.shape[1], keys, head_dim)
    state = state_dtype(q.dtype)
    shapes = dict.fromkeys(("q", "dout", "acc", "dq"), wide)
    shapes |= dict.fromkeys(("k", "v", "dk", "dv"), tall)
    for name, array in (given | outputs).items():
        dtype = q.dtype if name in ("q", "k", "v", "dout") else state
        _check_one(name, array, shapes.get(name, wide[:3]), dtype, name in outputs)


def _check_one(
    name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any], is_output: bool
) -> None:
    if array.shape != shape or array.dtype.name != dtype.name:
        raise ShapeError(
            f"{name} is {array.dtype} {array.shape}: must be {dtype.name} {shape} beside q"
        )
    if not array.dtype.isnative or not array.flags.aligned:
        raise ShapeError(f"{name}: must be of native byte order and aligned; use np.ascontiguousarray")
    if array.size > 0 and shape[-1] > 1 and array.strides[-1] != array.itemsize:
        raise ShapeError(f"{name}: its last axis must be contiguous; use np.ascontiguousarray")
    if is_output and not array.flags.writeable:
        raise ShapeError(f"{name}: is read-only, and is updated")
