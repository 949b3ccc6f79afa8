"""One HDF5 file that all ranks write together, where h5py was built for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ringmpi.comm.probe import mpi_libraries
from ringmpi.encoding import along_tokens, encode
from ringmpi.errors import MissingCapabilityError

Array = NDArray[Any]


def versions() -> str:
    """Return the versions of HDF5 and h5py. Local."""
    return f"{h5py.version.hdf5_version}, h5py {h5py.__version__}"


def parallel() -> bool:
    """Return whether this h5py was built with parallel HDF5. Local."""
    return bool(h5py.get_config().mpi)


def parallel_refusal() -> MissingCapabilityError | None:
    """Return why ranks cannot write one file together here, or None. Local."""
    if not parallel():
        return MissingCapabilityError(
            f"io=mpio: HDF5 {versions()} was built without MPI; use --io shards, where every rank writes its "
            f"own file, or an h5py built with MPI, such as your site's module or Debian's python3-h5py-mpi"
        )
    libraries = mpi_libraries()
    if len(libraries) > 1:
        return MissingCapabilityError(
            f"io=mpio: h5py and mpi4py were built for different MPI libraries, {' and '.join(libraries)}; "
            f"install both for one of them, or use --io shards"
        )
    return None


@contextmanager
def opened_together(path: Path, comm: Any) -> Iterator[Any]:
    """Open a file that is there on all ranks of a communicator, for writing. Collective, as is its end."""
    file = h5py.File(path, "r+", driver="mpio", comm=comm)
    yield file
    # Not after an error: closing waits for the other ranks, and they for the end of the job.
    file.close()


def write_together(dataset: Any, positions: range | None, rows: Array) -> None:
    """Write rows at global positions, or with None nothing at all. Collective.

    h5py's own indexing leaves a rank with nothing to write out of the collective call, and the others wait.

    Parameters
    ----------
    dataset : h5py.Dataset
        Of a file that all ranks have open together.
    positions : range or None
    rows : ndarray, shape (batch, heads, len(positions), ...)
    """
    stored = np.ascontiguousarray(encode(np.ascontiguousarray(rows)))
    place = dataset.id.get_space()
    if positions is None or not stored.size:
        memory, stored = h5py.h5s.create_simple((1,)), np.empty(1, dataset.dtype)
        memory.select_none()
        place.select_none()
    else:
        memory = h5py.h5s.create_simple(stored.shape)
        tokens = along_tokens(dataset, positions)
        rest = len(stored.shape) - 3
        place.select_hyperslab(
            (0, 0, tokens.start, *[0] * rest), stored.shape, (1, 1, tokens.step, *[1] * rest)
        )
    transfer = h5py.h5p.create(h5py.h5p.DATASET_XFER)
    transfer.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)
    dataset.id.write(memory, place, stored, dxpl=transfer)
