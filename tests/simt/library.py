"""The kernels as libraries of the SIMT executor, compiled once for all that goes into them."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.devices.build import compiler_command, distrust, node_folder
from ringmpi.devices.launch import Launch, Variant

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"

#: A product and its sum are rounded each. No fortified longjmp, which takes leaving a fiber for a fault.
#: Warnings are left to the compiler that the kernels are written for.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w")

#: Seconds for a compiler on a busy core.
COMPILE_LIMIT = 300

#: A text of a source, and what stands there instead.
Faults = Mapping[str, tuple[str, str]]


class LaunchError(Exception):
    """A kernel did what no kernel may do."""


def _compile(source: Path, folders: list[Path], options: tuple[str, ...], files: list[Path]) -> Path:
    """Return the library of a source, compiled unless the same one was before."""
    command = [*compiler_command(), *FLAGS, *options]
    digest = hashlib.sha256(repr(command).encode())
    for file in sorted(files, key=lambda file: file.name):
        digest.update(file.name.encode() + file.read_bytes())
    folder = node_folder() / "simt"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = distrust(folder.parent) or distrust(folder)
    if reason is not None:
        raise RuntimeError(f"no place for the executor's libraries: {reason}")
    path = folder / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = Path(own, path.name)
        includes = [f"-I{each}" for each in folders]
        subprocess.run(
            [*command, *includes, "-o", str(made), str(source)], check=True, timeout=COMPILE_LIMIT
        )
        made.rename(path)
    return path


class Executor:
    """Runs launches, in memory that ends where it may not be read."""

    def __init__(self) -> None:
        source = HERE / "executor.cpp"
        include = HERE / "include"
        # Visible to the kernels' libraries, which use its functions.
        self._library = ctypes.CDLL(
            str(_compile(source, [include], (), [source, *include.iterdir()])), ctypes.RTLD_GLOBAL
        )
        pointer, number = ctypes.c_void_p, ctypes.c_int
        for name, result, arguments in (
            ("allocate", pointer, (ctypes.c_size_t, number)),
            ("address", pointer, (pointer,)),
            ("protect", None, (pointer, number, number)),
            ("free", None, (pointer,)),
            (
                "run",
                ctypes.c_char_p,
                (pointer, pointer, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64),
            ),
        ):
            function = getattr(self._library, f"simt_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


@cache
def executor() -> Executor:
    return Executor()


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("call", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "columns", "threads", "shared_nbytes")),
    )


@dataclass
class Memory:
    """An array whose memory ends at a page that may not be touched, or begins behind one."""

    array: NDArray[Any]
    handle: int

    @classmethod
    def like(cls, values: NDArray[Any], at_end: bool) -> Memory:
        handle = executor().allocate(values.nbytes, at_end)
        raw = (ctypes.c_ubyte * values.nbytes).from_address(executor().address(handle))
        array = np.frombuffer(raw, values.dtype).reshape(values.shape)
        array[...] = values
        return cls(array, handle)

    @property
    def address(self) -> int:
        return int(executor().address(self.handle))

    def protect(self, readable: bool, writeable: bool) -> None:
        executor().protect(self.handle, readable, writeable)

    def free(self) -> None:
        executor().free(self.handle)


@dataclass(frozen=True)
class Library:
    """The kernels of one variant, perhaps with faults."""

    path: Path
    loaded: ctypes.CDLL = field(repr=False)

    def kernel(self, name: str) -> _Kernel:
        kernel: _Kernel = self.loaded.simt_kernel(name.encode()).contents
        return kernel

    def run(self, launch: Launch, arguments: list[int | np.generic], seed: int) -> None:
        """Run a kernel for arguments that are addresses or scalars."""
        values = [
            np.array(value, np.uint64) if isinstance(value, int) else np.array(value)
            for value in arguments
        ]
        addresses = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        told = executor().run(
            self.kernel(launch.kernel).call,
            addresses,
            launch.grid,
            launch.block,
            launch.shared_nbytes,
            seed,
        )
        if told:
            raise LaunchError(f"{launch.kernel}: {told.decode()}")


@contextmanager
def _sources(faults: Faults) -> Iterator[Path]:
    """Return a folder with the sources; with faults, a copy."""
    if not faults:
        yield KERNELS
        return
    with tempfile.TemporaryDirectory() as folder:
        for source in (*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")):
            text = source.read_text()
            if source.name in faults:
                right, wrong = faults[source.name]
                if text.count(right) != 1:
                    raise ValueError(f"{source.name} has not one {right!r}")
                text = text.replace(right, wrong)
            if source.name != "ptx.cuh":
                Path(folder, source.name).write_text(text)
        yield Path(folder)


def compiled(variant: Variant, faults: Faults | None = None) -> Library:
    """Return the kernels of a variant."""
    executor()
    include, source = HERE / "include", HERE / "kernels.cpp"
    with _sources(faults or {}) as folder:
        files = [source, *include.iterdir(), *folder.glob("*.cu"), *folder.glob("*.cuh")]
        path = _compile(source, [include, folder], variant.options, files)
    loaded = ctypes.CDLL(str(path))
    loaded.simt_kernel.restype = ctypes.POINTER(_Kernel)
    loaded.simt_kernel.argtypes = (ctypes.c_char_p,)
    return Library(path, loaded)
