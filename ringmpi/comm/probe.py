"""What the MPI library says of itself."""

from __future__ import annotations

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
