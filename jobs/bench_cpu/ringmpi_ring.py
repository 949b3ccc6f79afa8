"""Contenders `ring` and `one-rank`: RingAttention, under mpiexec.

Usage: mpiexec -n RANKS python ringmpi_ring.py ADDRESS DEVICE WEIGHTS
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

import ringmpi
from case import Array, Case
from ringmpi.encoding import numpy_dtype
from worker import Job, serve

if TYPE_CHECKING:
    from mpi4py import MPI


class RingJob(Job):
    """Attention over the shards of all ranks."""

    def __init__(self, case: Case, layout: str, comm: MPI.Comm, device: str, weights: str) -> None:
        self.case = case
        self.attention = ringmpi.RingAttention(
            comm,
            seq_len=case.seq_len,
            layout=layout,
            causal=case.causal,
            device=device,
            weights="exact" if case.dtype == "float32" else weights,
        )
        self.positions = self.attention.layout.positions(comm.rank)
        dtype = numpy_dtype(case.dtype)
        self.tensors = {name: a.astype(dtype) for name, a in case.inputs(self.positions).items()}

    def run(self) -> tuple[Array, ...]:
        """Attend, and go back if asked to."""
        q, k, v, dout = self.tensors.values()
        out, lse = self.attention.forward(q, k, v)
        if not self.case.backward:
            return (out,)
        return out, *self.attention.backward(dout, q, k, v, out, lse)

    def outputs(self, result: tuple[Array, ...]) -> dict[str, Array]:
        """Return the results by name."""
        return {
            name: array.astype(np.float32)
            for name, array in zip(self.case.tensors, result, strict=True)
        }

    def close(self) -> None:
        """Give the communicators back."""
        self.attention.close()


def main() -> None:
    """Obey the driver."""
    address, device, weights = sys.argv[1:]
    if device == "native":
        ringmpi.prepare()  # May start a compiler, so it comes before MPI.
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    library = MPI.Get_library_version().splitlines()[0].strip(" \t\0")
    serve(
        address,
        lambda case, layout: RingJob(case, layout, comm, device, weights),
        {"mpi": " ".join(library.replace(",", " ").split())},
        comm.rank,
        comm.Barrier,
    )


if __name__ == "__main__":
    main()
