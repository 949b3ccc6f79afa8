"""NVRTC from a PyPI wheel, called through ctypes: it compiles for any architecture without a GPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import files, version

#: The wheel of each CUDA that CuPy supports, and the version that the figures are for.
WHEELS = {
    "12": ("nvidia-cuda-nvrtc-cu12", "12.9.86"),
    "13": ("nvidia-cuda-nvrtc", "13.5.37"),
}


@dataclass(frozen=True)
class Figures:
    """What the compiler says of one kernel.

    Attributes
    ----------
    registers : int
        Of a thread.
    stack, spill_stores, spill_loads : int
        Bytes of a thread.
    static_shared : int
        Bytes of a block.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int


@cache
def _library(cuda: str) -> ctypes.CDLL:
    wheel, expected = WHEELS[cuda]
    found = version(wheel)
    if found != expected:
        raise SystemExit(f"{wheel} {found}: the figures are for {expected}; use jobs/kernels.sh")
    paths = [file for file in files(wheel) or () if re.fullmatch(r"libnvrtc\.so\.\d+", file.name)]
    return ctypes.CDLL(str(paths[0].locate()))


def compile_source(cuda: str, source: str, name: str, options: Sequence[str]) -> dict[str, Figures]:
    """Compile a source, and return what the compiler says of its kernels, by name.

    Raises
    ------
    SystemExit
        If it does not compile, with the compiler's words.
    """
    nvrtc, program = _library(cuda), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    words = [option.encode() for option in (*options, "--ptxas-options=-v")]
    failed = nvrtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    told = log.value.decode()
    if failed:
        raise SystemExit(f"NVRTC {cuda} {' '.join(options)}:\n{told}")
    return read_log(told)


#: How ptxas tells each of the figures with -v; what it leaves out is 0, but for registers.
_PATTERNS = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "static_shared": r"(\d+) bytes smem",
}


def read_log(log: str) -> dict[str, Figures]:
    """Return the figures of each kernel from what ptxas prints with -v.

    Raises
    ------
    SystemExit
        If it does not tell them as it used to.
    """
    found = {}
    for part in log.split("Function properties for ")[1:]:
        name = part.split(maxsplit=1)[0]
        numbers = {key: re.search(pattern, part) for key, pattern in _PATTERNS.items()}
        if any(numbers[key] is None for key in ("registers", "stack", "spill_stores", "spill_loads")):
            raise SystemExit(f"ptxas does not tell what was expected of {name}:\n{part}")
        found[name] = Figures(
            **{key: int(number[1]) if number else 0 for key, number in numbers.items()}
        )
    return found
