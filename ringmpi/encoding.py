"""How tensors lie in HDF5, which has no bfloat16: as uint16, with the attribute ``dtype = "bfloat16"``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MARK = "dtype"

#: The attribute that says which global token is the first one of a dataset.
FIRST = "first_token"

#: Labels of the axes of a tensor.
_TENSOR_AXES = ("batch", "head", "token", "head_dim")


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


def fill_value(dtype: np.dtype[Any]) -> Any:
    """Return what is stored where nothing was written: NaN. Local."""
    return encode(np.full(1, np.nan).astype(dtype))[0]


def describe_tensor(dataset: Any, dtype: np.dtype[Any], first: int) -> None:
    """Write into a dataset what its values and axes are; `first` is the global token at index 0."""
    if dtype.name == "bfloat16":
        dataset.attrs[MARK] = "bfloat16"
    description = f"index i along tokens is global token {f'{first} + ' if first else ''}i"
    dataset.attrs.update({"unit": "1", "description": description, FIRST: first})
    for axis, label in enumerate(_TENSOR_AXES[: len(dataset.shape)]):
        dataset.dims[axis].label = label


def create_tensor(
    file: Any, name: str, shape: Sequence[int], dtype: np.dtype[Any], first: int = 0
) -> Any:
    """Make a dataset of tokens from `first` on, filled with NaN, and return it.

    Collective for a file that several ranks have open together, else local.
    """
    fill = fill_value(dtype)
    # Not chunked: any slice of tokens is then written in place.
    dataset = file.create_dataset(name, shape, fill.dtype, fillvalue=fill)
    describe_tensor(dataset, dtype, first)
    return dataset


def along_tokens(dataset: Any, positions: range) -> slice:
    """Return where global positions lie along the tokens of a dataset. Local.

    Raises
    ------
    ValueError
        If some lie in front of it or behind, where a slice would leave them out.
    """
    first, tokens = int(dataset.attrs.get(FIRST, 0)), dataset.shape[2]
    if positions and not first <= positions[0] <= positions[-1] < first + tokens:
        raise ValueError(
            f"{dataset.name} has tokens {first} to {first + tokens - 1}, and not {positions[0]} to "
            f"{positions[-1]}"
        )
    return slice(positions.start - first, positions.stop - first, positions.step)
