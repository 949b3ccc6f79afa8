"""How tensors lie in HDF5, which has no bfloat16: as uint16, with the attribute ``dtype = "bfloat16"``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MARK = "dtype"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name; bfloat16 comes from ml_dtypes, which is loaded only for it. Local.

    >>> numpy_dtype("bfloat16").itemsize
    2
    """
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def stored_dtype(dataset: Any) -> str:
    """Return the name of the dtype that a dataset stands for. Local.

    A mark on anything but 16-bit unsigned integers means nothing, and is named so that it gets refused.
    """
    marked, held = dataset.attrs.get(MARK), str(dataset.dtype.name)
    if marked is None:
        return held
    # C and Fortran write texts of fixed length, which come as bytes.
    name = marked.decode(errors="replace") if isinstance(marked, bytes) else str(marked)
    return name if (name, held) == ("bfloat16", "uint16") else f"{name} stored as {held}"


def encode(array: Array) -> Array:
    """Return what is stored for an array: the array itself, or its bits. Local."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def decode(dataset: Any, stored: Array) -> Array:
    """Return the array that was read from a dataset, as what it stands for, in native byte order. Local."""
    native = stored.astype(stored.dtype.newbyteorder("="), copy=False)
    return native.view(numpy_dtype("bfloat16")) if stored_dtype(dataset) == "bfloat16" else native
