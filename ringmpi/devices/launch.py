"""How the kernels of ``kernels/attention.cu`` are compiled and launched: arithmetic that needs no GPU.

A *variant* is what the source is compiled for: the inputs' dtype, a class of head sizes, the type of the
indices, and the unit that multiplies. Tile sizes follow from it, and from those the shared memory, which the
sources compute too; tests hold the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmpi.devices.base import MAX_HEAD_DIM, Sizes
from ringmpi.errors import ConfigError
from ringmpi.mask import Mask

#: The dtypes of the inputs, as the sources call them, and their bytes.
_RAW = {
    "float64": ("double", 8),
    "float32": ("float", 4),
    "float16": ("Float16", 2),
    "bfloat16": ("BFloat16", 2),
}

#: Numbers of a head that registers have room for. A head_dim in between is computed in steps of 16, so that a
#: wider class costs registers and shared memory, but no products.
HEAD_SIZES = (64, 128, MAX_HEAD_DIM)

#: The first architecture with ``mma.m16n8k16`` and ``cp.async`` (PTX ISA, their target notes).
TENSOR_CAPABILITY = (8, 0)

#: Where 32 bits end that are signed.
INT32_END = 2**31

#: Blocks of threads in the first dimension (CUDA Programming Guide, technical specifications).
MAX_BLOCKS = INT32_END - 1

#: Rows and columns of most tiles.
TILE = 64

#: Queries of a block of threads that looks for their keys.
BOUNDS_THREADS = 128

#: 16 bytes lie between rows in shared memory, so that neighbours begin in different banks.
_GAP = 16

#: Numbers along head_dim, or along keys, that the plain unit has in shared memory at once.
_STEP = 16

BOUNDS = "ringmpi_bounds"
FORWARD = "ringmpi_forward"
BACKWARD = ("ringmpi_backward_q", "ringmpi_backward_k", "ringmpi_backward_v")

#: What is done between attends, item by item; of the last one a warp does a row.
DELTA = "ringmpi_delta"
CHORES: dict[str, tuple[str, ...]] = {
    "ringmpi_fill": ("total", "items", "value"),
    "ringmpi_add": ("total", "other", "items"),
    "ringmpi_round": ("total", "rounded", "items"),
    "ringmpi_merge_acc": ("acc", "row_max", "other_acc", "other_row_max", "items", "head_dim"),
    "ringmpi_merge_rows": ("row_max", "row_sum", "other_row_max", "other_row_sum", "rows"),
    "ringmpi_out": ("acc", "row_sum", "out", "items", "head_dim"),
    "ringmpi_lse": ("row_max", "row_sum", "lse", "rows"),
    DELTA: ("dout", "out", "delta", "rows", "head_dim"),
}

#: Threads of a block that does them, and the most blocks, which fill any GPU; threads go on to more items.
CHORE_THREADS = 256
CHORE_BLOCKS = 2**16

#: Threads of a warp.
WARP = 32

#: The arguments of each kernel in order: arrays, and the scalars that `Variant.scalars` gives.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    BOUNDS: (
        *("positions", "queries", "key_positions", "keys"),
        *("causal", "window", "documents", "offsets", "begin", "end"),
    ),
    FORWARD: (
        *("q", "k", "v", "acc", "row_max", "row_sum", "begin", "end"),
        *("queries", "keys", "group", "head_dim", "scale"),
    ),
    **{
        name: (
            *("q", "k", "v", "dout", "lse", "delta", gradient, "begin", "end"),
            *("queries", "keys", "group", "head_dim", "scale"),
        )
        for name, gradient in zip(BACKWARD, ("dq", "dk", "dv"), strict=True)
    },
}


@dataclass(frozen=True)
class Launch:
    """How one kernel is started.

    Attributes
    ----------
    kernel : str
    grid, block : int
        Blocks of threads, and threads of one, in one dimension.
    shared_nbytes : int
        Dynamic shared memory, bytes. Above 48 KiB a kernel has to be told so by an attribute.
    """

    kernel: str
    grid: int
    block: int
    shared_nbytes: int


@dataclass(frozen=True)
class Variant:
    """What the kernels are compiled for.

    Attributes
    ----------
    dtype : str
    head_size : int
        One of `HEAD_SIZES`.
    unit : str
        ``Plain`` or ``Tensor``.
    index : str
        ``int`` or ``long long``.
    rounds_weights : bool
        Whether the tensor unit rounds weights to the inputs' dtype, instead of splitting them.
    """

    dtype: str
    head_size: int
    unit: str
    index: str = "int"
    rounds_weights: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """What the compiler is told."""
        defined = {
            "RAW": _RAW[self.dtype][0],
            "INDEX": self.index,
            "UNIT": self.unit,
            "HEAD_SIZE": self.head_size,
            "FORWARD_COLUMNS": self.columns(FORWARD),
            "BACKWARD_COLUMNS": self.columns(BACKWARD[0]),
            "ROUNDS_WEIGHTS": int(self.rounds_weights),
        }
        return tuple(f"-DRINGMPI_{name}={value}" for name, value in defined.items())

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """The dtype of ``begin`` and ``end``."""
        return np.dtype(np.int32 if self.index == "int" else np.int64)

    @property
    def state_dtype(self) -> np.dtype[Any]:
        """The dtype of the state, and of the scale."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    @property
    def threads(self) -> int:
        """Threads of a block of every kernel but the one for bounds."""
        return 128 if self.unit == "Tensor" else 256

    @property
    def rows(self) -> int:
        """Rows of a tile: half as many in float64, which takes twice the registers."""
        return TILE // 2 if self.dtype == "float64" else TILE

    def columns(self, kernel: str) -> int:
        """Return the keys (or queries, where rows are keys) of a tile of a kernel. Local.

        The tensor unit has fewer of them where heads are widest: shared memory holds two tiles of columns,
        and the backward pass two of rows as well, in the 99 KiB that the smallest of sm_80 and newer allow.
        """
        if self.unit == "Plain" or self.head_size <= 128:
            return TILE
        return 32 if kernel == FORWARD else 16

    def shared_nbytes(self, kernel: str) -> int:
        """Return the dynamic shared memory of a kernel, bytes. Local."""
        if kernel == BOUNDS:
            return 0
        columns, itemsize, state = self.columns(kernel), _RAW[self.dtype][1], self.state_dtype.itemsize
        statistics = 2 * columns * (self.index_dtype.itemsize + state) if kernel in BACKWARD[1:] else 0
        if self.unit == "Plain":
            buffers = 2 * (self.rows + columns) * (_STEP * itemsize + _GAP)
            return buffers + self.rows * (columns * state + _GAP) + statistics
        operands = 2 if kernel in BACKWARD[:2] else 1
        return (operands * self.rows + 2 * columns) * (self.head_size * itemsize + _GAP) + statistics

    def launch(self, kernel: str, sizes: Sizes) -> Launch | None:
        """Return how a kernel is started, or None where there is nothing to do. Local.

        Raises
        ------
        ConfigError
            If a GPU could not start so many blocks.
        """
        shared = self.shared_nbytes(kernel)
        if not all(vars(sizes).values()):
            return None
        if kernel == BOUNDS:
            return Launch(kernel, -(-sizes.queries // BOUNDS_THREADS), BOUNDS_THREADS, shared)
        rows, heads = (
            (sizes.keys, sizes.kv_heads) if kernel in BACKWARD[1:] else (sizes.queries, sizes.heads)
        )
        grid = -(-rows // self.rows) * heads * sizes.batch
        if grid > MAX_BLOCKS:
            raise ConfigError(
                f"{rows} tokens of {heads} heads and batch {sizes.batch}: {grid} blocks of threads, and a "
                f"GPU starts {MAX_BLOCKS} at most; use more ranks"
            )
        return Launch(kernel, grid, self.threads, shared)

    def scalars(self, sizes: Sizes, mask: Mask, softmax_scale: float) -> dict[str, np.generic]:
        """Return the arguments that are no arrays by name, each of the kernels' own type. Local."""
        index = self.index_dtype.type
        return {
            "queries": index(sizes.queries),
            "keys": index(sizes.keys),
            "group": np.int32(sizes.heads // sizes.kv_heads),
            "head_dim": np.int32(sizes.head_dim),
            "scale": self.state_dtype.type(softmax_scale),
            "causal": np.int32(mask.causal),
            "window": np.int64(-1 if mask.window is None else mask.window),
            "offsets": np.int32(len(mask.documents or ())),
        }


def chore_launch(kernel: str, items: int) -> Launch | None:
    """Return how a chore over so many items (of `DELTA`: rows) is started; None for none. Local."""
    threads = items * WARP if kernel == DELTA else items
    if not items:
        return None
    return Launch(kernel, min(-(-threads // CHORE_THREADS), CHORE_BLOCKS), CHORE_THREADS, 0)


def head_size(head_dim: int) -> int:
    """Return the class of a head_dim, the least of `HEAD_SIZES` that holds it. Local.

    Raises
    ------
    ConfigError
        If there is none.
    """
    found = next((size for size in HEAD_SIZES if 1 <= head_dim <= size), None)
    if found is None:
        raise ConfigError(f"head_dim={head_dim}: the kernels take 1 to {HEAD_SIZES[-1]}")
    return found


def unit(dtype: str, capability: tuple[int, int]) -> str:
    """Return which unit multiplies numbers of a dtype on an architecture, such as (8, 0). Local."""
    tensor = _RAW[dtype][1] == 2 and capability >= TENSOR_CAPABILITY
    return "Tensor" if tensor else "Plain"


def index_type(sizes: Sizes, dtype: str) -> str:
    """Return the type of the kernels' indices: wide once any size or offset may reach 2**31. Local.

    Counted are the bytes of the largest tensors, which are in the dtype of the state: acc and dq, dk and dv.
    Rows are counted up to the end of a tile behind the last one, since the kernels look there before they see
    that there is nothing.
    """
    widest = max(_RAW[dtype][1], 4)
    rows = max(sizes.heads * sizes.queries, sizes.kv_heads * sizes.keys) + 2 * TILE
    return "int" if sizes.batch * rows * sizes.head_dim * widest < INT32_END else "long long"


def variant(sizes: Sizes, dtype: str, capability: tuple[int, int], weights: str = "exact") -> Variant:
    """Return what to compile for some inputs. Local.

    Raises
    ------
    ConfigError
        If no kernel takes them.
    """
    chosen = unit(dtype, capability)
    return Variant(
        dtype,
        head_size(sizes.head_dim),
        chosen,
        index_type(sizes, dtype),
        rounds_weights=weights == "rounded" and chosen == "Tensor",
    )
