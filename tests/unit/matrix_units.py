"""Native libraries that have a matrix unit, which most CPUs that run tests lack: then it is emulated."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ringmpi.devices.build import build, cpu_kind, recipe_here
from ringmpi.devices.native import Library, library

HEADER = Path(__file__).with_name("emulated_matrix_unit.h")

#: What the vector code beside the unit needs, by the kernel's name of it.
NEEDED = "avx512_bf16"


def emulation_flags() -> tuple[str, ...]:
    """Return what the compiler is told so that a library has a unit; nothing where it has one, or cannot."""
    if library().has_matrix_unit or NEEDED not in cpu_kind().split():
        return ()
    # The header's age is told for the library's name in the cache, which says what the flags are.
    age = f"-DRINGMPI_EMULATION_NS={HEADER.stat().st_mtime_ns}"
    return ("-mamx-tile", "-mamx-bf16", "-include", str(HEADER), age)


@cache
def matrix_library() -> Library | None:
    """Return a library with a matrix unit, real or emulated; None where the CPU's vectors are too narrow."""
    flags = emulation_flags()
    if flags:
        return Library(build(recipe_here(flags)).path)
    return library() if library().has_matrix_unit else None
