"""HDF5 files that are not what they should be: sound ones, and what is done to them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

#: Dimensions that no memory holds; nothing is allocated for them in the file.
HUGE = ((2**40,), (1, 2, 2**40, 4), (2**20, 2**20, 1, 1), (2**62,), (10**6, 10**6))


def write_input(path: Path, of: random.Random) -> None:
    """Write q, k and v as a run takes them."""
    numbers = np.random.default_rng(of.randrange(100))
    dtype = of.choice((np.float32, np.float64, np.float16))
    with h5py.File(path, "w") as file:
        for name in (*"qkv", *of.choice(((), ("dout",)))):
            file[name] = numbers.standard_normal((1, 2, 9, 4)).astype(dtype)
        if of.random() < 0.4:
            file["documents"] = np.array([0, 4, 9])


def damage(path: Path, of: random.Random) -> None:
    """Do one thing to one object or attribute of a file, if it can still be opened."""
    # What has been damaged before may not let itself be damaged again.
    again = suppress(
        OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError, MemoryError
    )
    with again, h5py.File(path, "r+") as file:
        objects: list[str] = []
        file.visit(objects.append)
        if not objects or of.random() < 0.25:
            _damage_attribute(file[of.choice(["/", *objects])], of)
            return
        of.choice(DAMAGES)(file, of.choice(objects), of)


def _damage_attribute(owner: Any, of: random.Random) -> None:
    names = list(owner.attrs)
    if not names:
        return
    name = of.choice(names)
    before = owner.attrs[name]
    del owner.attrs[name]
    if name == "config" and of.random() < 0.8:
        owner.attrs[name] = _damaged_record(str(before), of)
    elif of.random() < 0.8:
        owner.attrs[name] = _odd_attribute(of)


def _odd_attribute(of: random.Random) -> Any:
    return of.choice(
        (
            *(
                0,
                1,
                -1,
                2**63,
                1.5,
                float("nan"),
                float("inf"),
                True,
                "",
                "measured",
                "x" * 5000,
                b"\xff\xfe",
            ),
            *(
                "[1, 2]",
                "{}",
                "null",
                "[" * 5000,
                '{"a": NaN}',
                np.zeros(3),
                np.zeros((0,)),
                h5py.Empty("f8"),
            ),
            np.array(["a", "b"], dtype=h5py.string_dtype()),
            np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
        )
    )


def _damaged_record(text: str, of: random.Random) -> str:
    """Return a run's record with something else in it."""
    record = json.loads(text)
    values: tuple[Any, ...] = (
        None,
        -1,
        0,
        1,
        2**70,
        1.5,
        "",
        "x",
        "sample:2",
        [],
        [0, 3],
        {},
        True,
        float("nan"),
        1e300,
        "numpy",
    )
    for _ in range(of.choice((1, 1, 2))):
        key = of.choice(sorted(record))
        action = of.randrange(4)
        if action == 0:
            del record[key]
        elif action == 1:
            record[key + "s"] = record[key]
        else:
            record[key] = of.choice(values)
    whole = (record, record, record, [record], "x", 3, None)
    return json.dumps(of.choice(whole))


def _delete(file: Any, name: str, of: random.Random) -> None:
    del of
    del file[name]


def _replace(file: Any, name: str, of: random.Random) -> None:
    shape = getattr(file[name], "shape", (2,)) or ()
    del file[name]
    kind = of.randrange(9)
    if kind == 0:
        file[name] = np.zeros(shape, of.choice(("i1", "u2", "i8", "f2", "f4", "f8", "c8", "S3", "?")))
    elif kind == 1:
        file[name] = np.zeros(tuple(of.randrange(4) for _ in range(of.randrange(6))))
    elif kind == 2:
        file[name] = h5py.Empty("f8")
    elif kind == 3:
        file.create_dataset(name, (2,), h5py.vlen_dtype(np.int32))
    elif kind == 4:
        file.create_dataset(name, shape, h5py.enum_dtype({"a": 0, "b": 1}))
    elif kind == 5:
        file.create_dataset(name, shape, np.dtype([("x", "f4"), ("y", "f4")]))
    elif kind == 6:
        file.create_dataset(name, shape or (1,), h5py.ref_dtype)
    elif kind == 7:
        file.create_dataset(name, data=["a", "b"], dtype=h5py.string_dtype())
    else:
        file.create_group(name)


def _reshape(file: Any, name: str, of: random.Random) -> None:
    """Give a dataset one more or one less along an axis, or an axis more or less."""
    values: Any = file[name][...]
    del file[name]
    axis = of.randrange(max(1, values.ndim))
    action = of.randrange(4)
    if action == 0 and values.ndim:
        values = np.repeat(values, 2, axis=axis)
    elif action == 1 and values.ndim:
        values = np.delete(values, 0, axis=axis)
    elif action == 2:
        values = values[None]
    elif values.ndim:
        values = values[0]
    file[name] = values


def _link(file: Any, name: str, of: random.Random) -> None:
    """Put a link in the place of something: to itself, round in a circle, to nowhere, out of the file."""
    del file[name]
    file[name] = of.choice(
        (
            h5py.SoftLink("/" + name),
            h5py.SoftLink("/nowhere"),
            h5py.SoftLink("/"),
            h5py.ExternalLink("nowhere.h5", "/q"),
            h5py.ExternalLink(file.filename, "/" + name),
            h5py.ExternalLink("/dev/zero", "/q"),
        )
    )


def _hard_cycle(file: Any, name: str, of: random.Random) -> None:
    """Put a group into itself."""
    del of
    parent = file[name].parent
    del file[name]
    parent[name.rpartition("/")[2]] = parent


def _grow(file: Any, name: str, of: random.Random) -> None:
    """Say that there is more than any memory holds; nothing of it is in the file."""
    dtype = getattr(file[name], "dtype", np.float64)
    shape = of.choice(HUGE)
    del file[name]
    chunks = of.choice((None, tuple(min(size, 64) for size in shape)))
    file.create_dataset(name, shape, dtype, chunks=chunks)


def _virtual(file: Any, name: str, of: random.Random) -> None:
    """Take the values from a file that is not there."""
    shape, dtype = file[name].shape, file[name].dtype
    del file[name]
    layout = h5py.VirtualLayout(shape, dtype)
    layout[...] = h5py.VirtualSource(of.choice(("gone.h5", ".", "/dev/zero")), "data", shape)
    file.create_virtual_dataset(name, layout)


def _spoil(file: Any, name: str, of: random.Random) -> None:
    """Put an odd number into a dataset."""
    values: Any = np.asarray(file[name][...])
    if values.dtype.kind not in "fiu" or not values.size:
        return
    flat = values.reshape(-1)
    odd = (
        (np.nan, np.inf, -np.inf, -1.0, 0.0, 1e300) if values.dtype.kind == "f" else (0, 1, 255, 2**15)
    )
    where = slice(None) if of.random() < 0.3 else slice(0, 1)
    with np.errstate(over="ignore"):
        flat[where] = np.array(of.choice(odd)).astype(values.dtype)
    file[name][...] = values


DAMAGES: tuple[Callable[[Any, str, random.Random], None], ...] = (
    *(_delete, _replace, _replace, _reshape, _link, _hard_cycle, _grow, _virtual, _spoil, _spoil),
)
