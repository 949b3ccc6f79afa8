"""The device for GPUs: the kernels of ``kernels/attention.cu``, one after the other in one stream.

The host runs ahead of it. What the host, MPI or another stream needs from it is waited for by name
(`streams.Sync`); within the stream nothing has to be waited for. Which GPU, and through which library, is
the driver's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ringmpi.devices.base import Block, Gradients, Outcome, Queries, Sizes
from ringmpi.devices.counting import tile_counts
from ringmpi.devices.cupy import CupyPlatform
from ringmpi.devices.host import BACKWARD_PRODUCTS, FORWARD_PRODUCTS
from ringmpi.devices.launch import (
    ARGUMENTS,
    BACKWARD,
    BOUNDS,
    CHORES,
    FORWARD,
    Variant,
    chore_launch,
    variant,
)
from ringmpi.devices.placement import Gpu, chosen_index
from ringmpi.devices.region import Region, rows_between
from ringmpi.devices.streams import Argument, Driver, Event, Platform, Sync
from ringmpi.errors import MissingCapabilityError, ShapeError
from ringmpi.mask import Mask
from ringmpi.softmax import State, state_dtype
from ringmpi.trace import Tally

CUDA = "cuda"

#: A `Region`, where devices of the host have an array of NumPy.
Tensor: TypeAlias = Any


class _Here:
    """What this process has found out: through which library it uses GPUs, and what compiling took."""

    platform: Platform = CupyPlatform()
    seconds = 0.0


def platform() -> Platform:
    """Return the way to the GPUs of this process."""
    return _Here.platform


def compile_seconds() -> float:
    """Return what this process has spent on compiling kernels, or on waiting for another that did. Local."""
    return _Here.seconds


def gpu_for(local_rank: int) -> Gpu:
    """Return the GPU of the rank at a place of its node. Local.

    Raises
    ------
    MissingCapabilityError
        If there is none.
    """
    missing = platform().why_missing()
    if missing is not None:
        raise MissingCapabilityError(f"device=cuda: {missing}; or use --device native")
    return platform().gpu(chosen_index(local_rank, platform().visible()))


class CudaDevice:
    """Attention on a GPU.

    Parameters
    ----------
    mask : Mask
    softmax_scale : float
    gpu : Gpu, optional
        The first visible one by default.
    weights : str
        One of `softmax.WEIGHTS`.

    Raises
    ------
    MissingCapabilityError
        If there is none.
    """

    name = CUDA

    def __init__(
        self, mask: Mask, softmax_scale: float, gpu: Gpu | None = None, weights: str = "exact"
    ) -> None:
        self.mask = mask
        self.weights = weights
        self.softmax_scale = softmax_scale
        self.driver: Driver = platform().open(gpu or gpu_for(0))
        self.stream = self.driver.new_stream()
        self._documents = self._uploaded(np.asarray(mask.documents or (), np.int64))
        self._scratch: dict[str, Region] = {}
        self._variants: dict[str, Variant] = {}

    def prepare(self, sizes: Iterable[Sizes], dtype: np.dtype[Any]) -> None:
        """Compile what attends of some sizes need, unless it is kept from before."""
        for each in sizes:
            chosen = variant(each, dtype.name, self.driver.capability, self.weights)
            self._variants[dtype.name] = chosen
            _Here.seconds += self.driver.load(chosen)

    def allocate(self, nbytes: int) -> Tensor:
        """Return bytes of the device that MPI can be given."""
        return self._empty((nbytes,), np.dtype(np.uint8))

    def place(self, array: Any, dtype: np.dtype[Any]) -> Tensor:
        """Return an array of the caller's as the kernels take it: here, without gaps, of a dtype.

        An array that is here already is used where it is, and not written to.

        Raises
        ------
        ShapeError
            If an array of the device is of another dtype.
        """
        if not isinstance(array, Region):
            return self._uploaded(np.ascontiguousarray(array, dtype))
        if array.dtype != dtype:
            raise ShapeError(
                f"an array in GPU memory is {array.dtype} and must be {dtype}; convert it there"
            )
        if array.is_callers:
            caller = self.driver.callers_stream(array.stream)
            # The caller's own kernels may still be writing it.
            self.driver.hold(self.stream, self.driver.record(caller), Sync.CALLER_WROTE)
        here = replace(array, device=self.driver.index)
        return self._without_gaps("placed", here, lasting=True)

    def fetch(self, array: Tensor) -> NDArray[Any]:
        """Return a copy in host memory, once everything that is under way is done."""
        flat = self._without_gaps("fetched", array)
        host = np.empty(flat.shape, flat.dtype)
        if flat.nbytes:
            self.driver.copy_out(host.reshape(-1).view(np.uint8), flat.address, self.stream)
        self.driver.wait(self.driver.record(self.stream), Sync.HOST_READS)
        return host

    def give(self, array: Tensor, like: Any) -> Any:
        """Return a result in the form in which the caller gave an input: on the host, or where it is."""
        if not isinstance(like, Region):
            return self.fetch(array)
        # Whatever the caller does with it comes later in the caller's stream.
        caller = self.driver.callers_stream(like.stream)
        self.driver.hold(caller, self.driver.record(self.stream), Sync.CALLER_READS)
        return self.driver.export(array)

    def settle(self) -> None:
        """Let the host wait, for the sake of moments that it takes: nothing that is read depends on it."""
        self.driver.wait(self.driver.record(self.stream), Sync.ATTENDED)

    def full(self, shape: tuple[int, ...], value: float, dtype: np.dtype[Any]) -> Tensor:
        """Return an array of one value."""
        array = self._empty(shape, dtype)
        self.fill(array, value)
        return array

    def fill(self, array: Tensor, value: float) -> None:
        """Set all items to a value; other ones than 0 in the dtypes of states only."""
        flat = self._without_gaps("filled", array, read=False)
        if value == 0:
            self.driver.clear(flat.address, flat.nbytes, self.stream)
        else:
            self._chore("ringmpi_fill", flat.dtype, flat.size, total=flat, value=flat.dtype.type(value))
        self._back(flat, array)

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Put an array into the place of another one of its shape and dtype."""
        for rows in rows_between(into, source):
            self.driver.copy_rows(
                rows.target,
                rows.target_pitch,
                rows.source,
                rows.source_pitch,
                rows.width,
                rows.count,
                self.stream,
            )

    def attend(self, queries: Queries, block: Block, state: State) -> CudaWork:
        """Start the kernels that attend to a block."""
        outputs = {name: getattr(state, name) for name in ("acc", "row_max", "row_sum")}
        return self._attend((FORWARD,), queries, block, {}, outputs)

    def attend_backward(
        self, queries: Queries, outcome: Outcome, block: Block, gradients: Gradients
    ) -> CudaWork:
        """Start the kernels that add to the gradients."""
        outputs = {name: getattr(gradients, name) for name in ("dq", "dk", "dv")}
        return self._attend(BACKWARD, queries, block, dict(vars(outcome)), outputs)

    def finish(self, state: State, dtype: np.dtype[Any]) -> tuple[Tensor, Tensor]:
        """Return out, rounded, and lse."""
        acc, row_max, row_sum = (
            self._without_gaps(name, getattr(state, name)) for name in ("acc", "row_max", "row_sum")
        )
        out, lse = self._empty(acc.shape, dtype), self._empty(row_sum.shape, row_sum.dtype)
        head_dim = np.int32(acc.shape[-1])
        self._chore(
            "ringmpi_out", dtype, acc.size, acc=acc, row_sum=row_sum, out=out, head_dim=head_dim
        )
        self._chore("ringmpi_lse", dtype, lse.size, row_max=row_max, row_sum=row_sum, lse=lse)
        return out, lse

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """Return the sum over head_dim of ``dout * out``."""
        total = self._empty(dout.shape[:-1], state_dtype(dout.dtype))
        flat = {name: self._without_gaps(name, array) for name, array in (("dout", dout), ("out", out))}
        head_dim = np.int32(dout.shape[-1])
        self._chore("ringmpi_delta", dout.dtype, total.size, **flat, delta=total, head_dim=head_dim)
        return total

    def merge(self, state: State, other: State) -> None:
        """Add to a state what another one has seen."""
        names = ("acc", "row_max", "row_sum")
        mine = {name: self._without_gaps(name, getattr(state, name)) for name in names}
        others = {
            f"other_{name}": self._without_gaps(f"other {name}", getattr(other, name)) for name in names
        }
        arrays = mine | others
        acc, rows = arrays["acc"], arrays["row_sum"].size
        for kernel, items in (("ringmpi_merge_acc", acc.size), ("ringmpi_merge_rows", rows)):
            self._chore(kernel, acc.dtype, items, **arrays, head_dim=np.int32(acc.shape[-1]))
        for name, flat in mine.items():
            self._back(flat, getattr(state, name))

    def add(self, total: Tensor, other: Tensor) -> None:
        """Add an array to another one."""
        flat = self._without_gaps("total", total)
        self._chore(
            "ringmpi_add", flat.dtype, flat.size, total=flat, other=self._without_gaps("other", other)
        )
        self._back(flat, total)

    def rounded(self, array: Tensor, dtype: np.dtype[Any]) -> Tensor:
        """Return an array of the state's dtype in that of the inputs."""
        if array.dtype == dtype:
            return array
        narrow = self._empty(array.shape, dtype)
        flat = self._without_gaps("total", array)
        self._chore("ringmpi_round", dtype, flat.size, total=flat, rounded=narrow)
        return narrow

    def _attend(
        self,
        kernels: tuple[str, ...],
        queries: Queries,
        block: Block,
        given: dict[str, Any],
        outputs: dict[str, Any],
    ) -> CudaWork:
        inputs = {"q": queries.q, "k": block.k, "v": block.v, **given}
        sizes = _sizes(inputs, outputs, len(queries.positions), len(block.positions), self.driver.index)
        chosen = variant(sizes, queries.q.dtype.name, self.driver.capability, self.weights)
        begun = self.driver.record(self.stream)
        if all(vars(sizes).values()):
            arrays = {
                name: self._without_gaps(name, array) for name, array in (inputs | outputs).items()
            }
            arrays |= self._positions(queries, block, chosen)
            self._launch(chosen, sizes, (BOUNDS, *kernels), arrays)
            for name, array in outputs.items():
                self._back(arrays[name], array)
        ended = self.driver.record(self.stream)
        products = BACKWARD_PRODUCTS if given else FORWARD_PRODUCTS
        return CudaWork(
            self.driver,
            (begun, ended),
            lambda: _tally(self.mask, queries, block, sizes, chosen, products),
        )

    def _launch(
        self, chosen: Variant, sizes: Sizes, kernels: tuple[str, ...], arrays: Mapping[str, Region]
    ) -> None:
        scalars = chosen.scalars(sizes, self.mask, self.softmax_scale)
        for name in kernels:
            launch = chosen.launch(name, sizes)
            if launch is not None:
                arguments = [
                    _argument(arrays[a]) if a in arrays else scalars[a] for a in ARGUMENTS[name]
                ]
                self.driver.launch(chosen, launch, arguments, self.stream)

    def _positions(self, queries: Queries, block: Block, chosen: Variant) -> dict[str, Region]:
        """Return what `BOUNDS` reads and writes, in memory that the next attend uses again.

        That one comes later in the same stream.
        """
        found = {}
        for name, positions in (("positions", queries.positions), ("key_positions", block.positions)):
            found[name] = self._scratch_array(name, positions.shape, np.dtype(np.int64))
            host = np.ascontiguousarray(positions, np.int64).view(np.uint8)
            self.driver.copy_in(found[name].address, host, self.stream)
        for name in ("begin", "end"):
            found[name] = self._scratch_array(name, queries.positions.shape, chosen.index_dtype)
        return found | {"documents": self._documents}

    def _chore(
        self, kernel: str, dtype: np.dtype[Any], items: int, **values: Region | np.generic
    ) -> None:
        launch = chore_launch(kernel, items)
        if launch is None:
            return
        # Chores do not depend on sizes: any variant of the dtype has them, such as one that is loaded.
        any_variant = variant(Sizes(1, 1, 1, 1, 1, 1), dtype.name, self.driver.capability, self.weights)
        loaded = self._variants.setdefault(dtype.name, any_variant)
        counted = dict.fromkeys(("items", "rows"), np.int64(items))
        arguments = [_argument((values | counted)[name]) for name in CHORES[kernel]]
        self.driver.launch(loaded, launch, arguments, self.stream)

    def _uploaded(self, array: NDArray[Any]) -> Region:
        region = self._empty(array.shape, array.dtype)
        if array.nbytes:
            self.driver.copy_in(region.address, array.reshape(-1).view(np.uint8), self.stream)
        return region

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Region:
        memory = self.driver.allocate(prod(shape) * dtype.itemsize)
        return Region.contiguous(memory, memory.address, shape, dtype, self.driver.index)

    def _scratch_array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Region:
        """Return memory with whatever was left in it, for what is used in this stream only."""
        nbytes = prod(shape) * dtype.itemsize
        held = self._scratch.get(name)
        if held is None or held.nbytes < nbytes:
            # What used the smaller one may not be done; cudaFree waits for it.
            held = self._scratch[name] = self.allocate(nbytes)
        return held[:nbytes].view(dtype).reshape(shape)

    def _without_gaps(
        self, name: str, array: Region, read: bool = True, lasting: bool = False
    ) -> Region:
        """Return an array as it is, or a copy if it has gaps."""
        if array.is_contiguous:
            return array
        if lasting:
            flat = self._empty(array.shape, array.dtype)
        else:
            flat = self._scratch_array(f"{name} without gaps", array.shape, array.dtype)
        if read:
            self.copy(array, flat)
        return flat

    def _back(self, flat: Region, array: Region) -> None:
        """Put what was computed without gaps where it belongs."""
        if flat is not array:
            self.copy(flat, array)


class CudaWork:
    """Attending to one block: kernels under way."""

    def __init__(self, driver: Driver, events: tuple[Event, Event], count: Callable[[], Tally]) -> None:
        self.tally = Tally()
        self._driver = driver
        self._begun, self._ended = events
        self._count: Callable[[], Tally] | None = count

    def advance(self) -> bool:
        """Ask whether the kernels are done; the first time, count what they do meanwhile."""
        if self._count is not None:
            self.tally = self._count()
            self._count = None
        # Else the step would go on to wait for its transfers, and call the rest of its compute a stall.
        if not self._driver.has_happened(self._ended, Sync.ATTENDED):
            return False
        self.tally.device_time = self._driver.seconds_between(self._begun, self._ended)
        return True


def _argument(value: Region | np.generic) -> Argument:
    return np.uint64(value.address) if isinstance(value, Region) else value


def _sizes(
    inputs: Mapping[str, Any], outputs: Mapping[str, Any], queries: int, keys: int, device: int
) -> Sizes:
    """Return the sizes of an attend, after checking everything that a kernel would not notice.

    Raises
    ------
    ShapeError
        If an array is not here, or not of the dtype or shape that go with the others.
    """
    q, k = inputs["q"], inputs["k"]
    for name, array in (*inputs.items(), *outputs.items()):
        if not isinstance(array, Region):
            raise ShapeError(
                f"{name} is a {type(array).__name__} in host memory: kernels read a GPU's own"
            )
        if array.device != device:
            raise ShapeError(f"{name} is on GPU {array.device}, and the kernels run on GPU {device}")
    if q.ndim != 4 or k.ndim != 4 or k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"q {q.shape}, k {k.shape}: must be [batch, heads, tokens, head_dim], and num_kv_heads must "
            f"divide num_heads"
        )
    batch, heads, _, head_dim = q.shape
    wide, tall = (batch, heads, queries, head_dim), (batch, k.shape[1], keys, head_dim)
    shapes = dict.fromkeys(("q", "dout", "acc", "dq"), wide) | dict.fromkeys(
        ("k", "v", "dk", "dv"), tall
    )
    state = state_dtype(q.dtype)
    for name, array in (*inputs.items(), *outputs.items()):
        shape = shapes.get(name, wide[:3])
        dtype = q.dtype if name in ("q", "k", "v", "dout") else state
        if array.shape != shape or array.dtype != dtype:
            raise ShapeError(f"{name} is {array.dtype} {array.shape}: must be {dtype} {shape} beside q")
        if array.address % array.dtype.itemsize:
            raise ShapeError(f"{name}: its address is no multiple of {array.dtype.itemsize} bytes")
    return Sizes(batch, heads, k.shape[1], queries, keys, head_dim)


def _tally(
    mask: Mask, queries: Queries, block: Block, sizes: Sizes, chosen: Variant, products: int
) -> Tally:
    """Return what the kernels do; tiles as the one that owns queries cuts them."""
    begin, end = mask.bounds(queries.positions, block.positions)
    counts = tile_counts(begin, end, sizes.keys, chosen.rows, chosen.columns(FORWARD))
    pairs = int(np.maximum(end - begin, 0).sum()) * sizes.batch * sizes.heads
    tiles = sizes.batch * sizes.heads
    return Tally(
        pairs=pairs,
        computed_pairs=counts.pairs * tiles,
        flops=2 * products * sizes.head_dim * pairs,
        tiles=counts.tiles * tiles,
        tiles_unmasked=counts.full * tiles,
        tiles_skipped=counts.empty * tiles,
    )
