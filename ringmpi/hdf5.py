"""h5py, loaded without side effects; everything that reads or writes HDF5 takes it from here.

An h5py with parallel HDF5 loads mpi4py's module, which would initialise MPI: too early in a run, which may
still have to start a compiler, and not at all on a login node that only reads a file.
"""

from __future__ import annotations

from ringmpi.comm.probe import without_initialising

with without_initialising():
    import h5py

__all__ = ["h5py"]


def versions() -> str:
    """Return the versions of HDF5 and h5py. Local."""
    return f"{h5py.version.hdf5_version}, h5py {h5py.__version__}"


def parallel() -> bool:
    """Return whether this h5py was built with parallel HDF5. Local."""
    return bool(h5py.get_config().mpi)
