"""What the MPI library says of itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

#: Files that are an MPI library, and not a part of one for C++ or Fortran: MPICH, Intel MPI and Open MPI
#: call it libmpi, Debian's MPICH libmpich, Cray's libmpi_gnu_112 and the like, the standard's ABI libmpi_abi.
_LIBRARY = re.compile(r"libmpi(ch|_abi|_gnu\w*|_cray|_intel|_nvidia)?\.so[.\d]*")


def load_mpi() -> Any:
    """Return mpi4py's module without initialising MPI. Local.

    Raises
    ------
    ImportError, RuntimeError
        If no MPI library is found.
    """
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return MPI


def library_name(mpi: Any) -> str:
    """Return the name and version of the MPI library, which need not be initialised. Local."""
    return " ".join(mpi.Get_library_version().splitlines()[0].strip("\0").split())


def thread_level(mpi: Any) -> str:
    """Return how threads may call the MPI library, which must be initialised. Local."""
    levels = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    return levels[mpi.Query_thread()]


def mpi_libraries(maps: str | None = None) -> list[str]:
    r"""Return the files of all MPI libraries that this process has loaded; two do not mix. Local.

    Parameters
    ----------
    maps : str, optional
        What ``/proc/self/maps`` says.

    >>> mpi_libraries("0-1 r-xp 0 00:00 1 /lib/libmpi.so.40\n1-2 r-xp 0 00:00 1 /a b/libmpi_cxx.so.40")
    ['/lib/libmpi.so.40']
    """
    files = loaded_files() if maps is None else _files_in(maps)
    return [file for file in files if _LIBRARY.fullmatch(Path(file).name)]


def is_mpi(path: str) -> bool:
    """Return whether a file looks like a part of an MPI library. Local."""
    return Path(path).name.startswith("libmpi")


def loaded_files(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the files that are mapped into this process. Local."""
    return _files_in(maps.read_text(encoding="utf-8", errors="replace"))


def _files_in(maps: str) -> list[str]:
    return sorted({line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line})
