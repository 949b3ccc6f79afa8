"""What the GPU's kernels compute, in NumPy, for the arguments that they are launched with."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from dense import DTYPES
from numpy.typing import NDArray

from ringmpi.devices.launch import ARGUMENTS, BACKWARD, BOUNDS, CHORES, FORWARD, Launch, Variant
from ringmpi.mask import Mask
from ringmpi.softmax import State, finish, merge

KERNELS = Path(__file__).parents[2] / "kernels"

Array = NDArray[Any]
Values = dict[str, Any]


def memory_at(address: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the items that lie at an address."""
    raw = (ctypes.c_ubyte * int(np.prod(shape, initial=np.dtype(dtype).itemsize))).from_address(address)
    return np.frombuffer(raw, dtype).reshape(shape)


@cache
def declared(kernel: str) -> tuple[tuple[str, str], ...]:
    """Return type and name of each parameter, as the source has them."""
    text = "".join((KERNELS / name).read_text() for name in ("attention.cu", "chores.cuh"))
    name = "name" if kernel in BACKWARD else kernel
    found = re.search(rf"\b{name}\(([^()]*)\)", text.replace("\\\n", " "), re.DOTALL)
    assert found is not None, kernel
    words = (re.fullmatch(r"\s*(?:const )?(\w+) (\*?)(\w+)\s*", word) for word in found[1].split(","))
    return tuple((f"{word[1]}{word[2]}", word[3]) for word in words if word is not None)


def check_types(variant: Variant, kernel: str, arguments: Sequence[np.generic]) -> None:
    """Refuse an argument that is not of the kernel's own type: a GPU would read it as if it were."""
    types = {
        "Index": variant.index_dtype,
        "Int64": np.dtype(np.int64),
        "int": np.dtype(np.int32),
        "State": variant.state_dtype,
    }
    parameters = declared(kernel)
    assert len(parameters) == len(arguments), (kernel, parameters, arguments)
    for (kind, name), value in zip(parameters, arguments, strict=True):
        expected = np.dtype(np.uint64) if kind.endswith("*") else types[kind]
        assert np.asarray(value).dtype == expected, (
            f"{kernel}: {name} is {value!r} and must be {expected}"
        )


def run(variant: Variant, launch: Launch, arguments: Sequence[np.generic]) -> None:
    """Do what a kernel does."""
    kernel = launch.kernel
    names = (ARGUMENTS | CHORES)[kernel]
    values: Values = dict(zip(names, (argument.item() for argument in arguments), strict=True))
    with np.errstate(all="ignore"):
        if kernel == BOUNDS:
            _bounds(variant, values)
        elif kernel in CHORES:
            _chore(kernel, variant, values)
        else:
            _attend(variant, launch, values)


def _bounds(variant: Variant, values: Values) -> None:
    positions = memory_at(values["positions"], (values["queries"],), np.int64)
    keys = memory_at(values["key_positions"], (values["keys"],), np.int64)
    offsets = memory_at(values["documents"], (values["offsets"],), np.int64)
    window = None if values["window"] < 0 else values["window"]
    mask = Mask(bool(values["causal"]), window, tuple(offsets.tolist()) or None)
    for name, found in zip(("begin", "end"), mask.bounds(positions, keys), strict=True):
        memory_at(values[name], found.shape, variant.index_dtype)[...] = found


def _attend(variant: Variant, launch: Launch, values: Values) -> None:
    kernel, queries, keys = launch.kernel, values["queries"], values["keys"]
    group, head_dim = values["group"], values["head_dim"]
    rows = keys if kernel in BACKWARD[1:] else queries
    heads = launch.grid // -(-rows // variant.rows) * (group if kernel in BACKWARD[1:] else 1)
    raw, state = np.dtype(DTYPES[variant.dtype]), variant.state_dtype

    def view(name: str) -> Array:
        of_keys = name in ("k", "v", "dk", "dv")
        shape: tuple[int, ...] = (heads // group if of_keys else heads, keys if of_keys else queries)
        narrow = name in ("lse", "delta", "row_max", "row_sum")
        dtype = raw if name in ("q", "k", "v", "dout") else state
        return memory_at(values[name], shape if narrow else (*shape, head_dim), dtype)

    begin, end = (memory_at(values[name], (queries,), variant.index_dtype) for name in ("begin", "end"))
    columns = np.arange(keys)
    allowed = (begin[:, None] <= columns) & (columns < end[:, None])
    scale = state.type(values["scale"])
    for head in range(heads):
        q = view("q")[head].astype(state)
        k, v = (view(name)[head // group].astype(state) for name in ("k", "v"))
        scores = np.where(allowed, q @ k.T * scale, -np.inf)
        if kernel == FORWARD:
            acc, row_max, row_sum = (view(name)[head] for name in ("acc", "row_max", "row_sum"))
            top = scores.max(axis=1, initial=-np.inf)
            weights = np.exp(scores - np.where(np.isneginf(top), 0, top)[:, None])
            mine = State(acc[None, None], row_max[None, None], row_sum[None, None])
            seen = (np.where(allowed, weights, 0) @ v, top, weights.sum(axis=1))
            merge(mine, State(*(array[None, None].astype(state) for array in seen)))
            continue
        dout = view("dout")[head].astype(state)
        weights = np.where(allowed, np.exp(scores - view("lse")[head][:, None]), 0)
        change = np.where(allowed, weights * (dout @ v.T - view("delta")[head][:, None]), 0) * scale
        if kernel == BACKWARD[0]:
            view("dq")[head] += change @ k
        elif kernel == BACKWARD[1]:
            view("dk")[head // group] += change.T @ q
        else:
            view("dv")[head // group] += weights.T @ dout


def _chore(kernel: str, variant: Variant, values: Values) -> None:
    raw, state = np.dtype(DTYPES[variant.dtype]), variant.state_dtype
    items = values.get("items", values.get("rows"))
    head_dim = values.get("head_dim", 1)

    def flat(name: str, count: int = items, dtype: Any = state) -> Array:
        return memory_at(values[name], (count,), dtype)

    def wide(name: str, rows: int, dtype: Any = state) -> Array:
        return memory_at(values[name], (1, 1, rows, head_dim), dtype)

    def merge_acc() -> None:
        rows = items // head_dim
        states = [
            State(wide(f"{of}acc", rows), top.copy(), np.zeros_like(top))
            for of in ("", "other_")
            for top in [flat(f"{of}row_max", rows).reshape(1, 1, rows)]
        ]
        merge(*states)

    def merge_rows() -> None:
        states = [
            State(
                np.zeros((1, 1, items, 1), state),
                *(flat(of + n)[None, None] for n in ("row_max", "row_sum")),
            )
            for of in ("", "other_")
        ]
        merge(*states)

    def out() -> None:
        rows = items // head_dim
        sums = flat("row_sum", rows).reshape(1, 1, rows).copy()
        found, _ = finish(State(wide("acc", rows).copy(), np.zeros_like(sums), sums))
        wide("out", rows, raw)[...] = found.astype(raw)

    def lse() -> None:
        tops, sums = (flat(name).reshape(1, 1, items).copy() for name in ("row_max", "row_sum"))
        _, found = finish(State(np.zeros((1, 1, items, 1), state), tops, sums))
        flat("lse")[...] = found.reshape(-1)

    def delta() -> None:
        pair = (wide(name, items, raw).astype(state) for name in ("dout", "out"))
        flat("delta")[...] = np.multiply(*pair).sum(axis=-1).reshape(-1)

    doing: dict[str, Callable[[], None]] = {
        "ringmpi_fill": lambda: flat("total").fill(values["value"]),
        "ringmpi_add": lambda: np.copyto(flat("total"), flat("total") + flat("other")),
        "ringmpi_round": lambda: np.copyto(flat("rounded", items, raw), flat("total").astype(raw)),
        "ringmpi_merge_acc": merge_acc,
        "ringmpi_merge_rows": merge_rows,
        "ringmpi_out": out,
        "ringmpi_lse": lse,
        "ringmpi_delta": delta,
    }
    doing[kernel]()
