"""What the MPI library says of itself."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any


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


def takes_device_pointers() -> bool:
    """Return whether the loaded MPI library says that it reads GPU memory. Local.

    Asked by the function that Open MPI and MPICH have for it; a library without it does not say so. MPI
    must be initialised: MPICH ends the process otherwise.
    """
    for path in loaded_libraries():
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False


def loaded_libraries() -> list[str]:
    """Return the files that are mapped into this process and look like an MPI library."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    files = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line}
    return sorted(file for file in files if Path(file).name.startswith("libmpi"))
