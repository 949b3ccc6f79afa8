"""Arrays in the memory of a device: where they lie and what they hold, as far as the host needs to know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np

from ringmpi.errors import ShapeError

#: How arrays of CuPy and others say where they lie (CUDA Array Interface, version 3).
INTERFACE = "__cuda_array_interface__"


@dataclass(frozen=True, eq=False)
class Region:
    """An array in device memory; slices of it are views.

    Attributes
    ----------
    owner : object
        Keeps the memory from being given back.
    address : int
        Of the first item.
    shape : tuple of int
    strides : tuple of int
        Bytes.
    dtype : dtype
    device : int
        Whose memory it is; -1 if nobody said.
    stream : int or None
        The stream in which the caller has written it, by its handle.
    is_callers : bool
        Whether the memory is not ours.
    """

    owner: Any = field(repr=False)
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int = -1
    stream: int | None = None
    is_callers: bool = False

    @classmethod
    def contiguous(
        cls, owner: Any, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int
    ) -> Region:
        """Return an array without gaps."""
        return cls(owner, address, shape, strides_of(shape, dtype.itemsize), dtype, device)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of items."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all items."""
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the items lie one behind the other, the last axis first."""
        full = strides_of(self.shape, self.dtype.itemsize)
        return self.size == 0 or all(
            stride == right or extent == 1
            for extent, stride, right in zip(self.shape, self.strides, full, strict=True)
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Region:
        cuts = index if isinstance(index, tuple) else (index,)
        shape, address = list(self.shape), self.address
        for axis, cut in enumerate(cuts):
            start, stop, step = cut.indices(self.shape[axis])
            if step != 1:
                raise ShapeError(f"slice {cut}: arrays in GPU memory are cut in steps of 1")
            shape[axis] = max(0, stop - start)
            address += start * self.strides[axis]
        return replace(self, address=address, shape=tuple(shape))

    def view(self, dtype: np.dtype[Any]) -> Region:
        """Return the same bytes, one behind the other, as items of another dtype."""
        items = self._gapless().nbytes // dtype.itemsize
        return replace(self, shape=(items,), strides=(dtype.itemsize,), dtype=dtype)

    def reshape(self, shape: tuple[int, ...]) -> Region:
        """Return the same items in another shape."""
        if prod(shape) != self._gapless().size:
            raise ShapeError(f"{self.shape} cannot be seen as {shape}")
        return replace(self, shape=shape, strides=strides_of(shape, self.dtype.itemsize))

    def _gapless(self) -> Region:
        if not self.is_contiguous:
            raise ShapeError(f"an array of {self.shape} with strides {self.strides} has gaps")
        return self


@dataclass(frozen=True)
class Rows:
    """Rows of bytes at a pitch, of a source and of a target."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    count: int


def rows_between(target: Region, source: Region) -> Iterator[Rows]:
    """Yield what to copy so that one array is put into another of the same shape and dtype. Local.

    Raises
    ------
    ShapeError
        If they differ, or if single items lie apart.
    """
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ShapeError(
            f"{source.dtype} {source.shape} cannot be copied to {target.dtype} {target.shape}: must be alike"
        )
    if not target.size:
        return
    itemsize, shape = target.dtype.itemsize, target.shape
    width, outer = itemsize, len(shape)
    # Axes that go on without a gap in both, from the last one on, are one row.
    while outer and all(
        a.strides[outer - 1] == width or shape[outer - 1] == 1 for a in (target, source)
    ):
        outer -= 1
        width *= shape[outer]
    if outer == 0:
        yield Rows(target.address, width, source.address, width, width, 1)
        return
    if width == itemsize and shape[-1] > 1:
        raise ShapeError(
            f"strides {target.strides} and {source.strides}: items of a row must not lie apart"
        )
    for at in product(*map(range, shape[: outer - 1])):
        starts = [
            a.address + sum(i * s for i, s in zip(at, a.strides, strict=False))
            for a in (target, source)
        ]
        yield Rows(
            starts[0],
            target.strides[outer - 1],
            starts[1],
            source.strides[outer - 1],
            width,
            shape[outer - 1],
        )


def strides_of(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides of an array without gaps, bytes. Local.

    >>> strides_of((2, 3, 4), 8)
    (96, 32, 8)
    """
    return tuple(itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))


def is_on_device(array: Any) -> bool:
    """Return whether an array says that it lies in GPU memory. Local."""
    return isinstance(array, Region) or hasattr(array, INTERFACE)


def callers_array(array: Any) -> Region:
    """Return an array of CuPy, or of anything else with the CUDA Array Interface. Local.

    Raises
    ------
    ShapeError
        If it is not said in full, or has a mask.
    """
    if isinstance(array, Region):
        return array
    told = getattr(array, INTERFACE)
    if told.get("mask") is not None:
        raise ShapeError("arrays with masks are not taken; give q, k and v as they are")
    # An interface calls bfloat16 two bytes of anything; the array itself may know better.
    dtype = getattr(array, "dtype", None)
    dtype = dtype if isinstance(dtype, np.dtype) else np.dtype(told["typestr"])
    shape = tuple(told["shape"])
    strides = told.get("strides") or strides_of(shape, dtype.itemsize)
    device = _number_of(getattr(array, "device", None))
    return Region(
        array,
        told["data"][0],
        shape,
        tuple(strides),
        dtype,
        device,
        told.get("stream"),
        is_callers=True,
    )


def _number_of(device: Any) -> int:
    """Return the number of a device as CuPy or torch name it; -1 if they do not."""
    number = getattr(device, "id", getattr(device, "index", None))
    return number if isinstance(number, int) else -1
