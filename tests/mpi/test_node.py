"""What the launcher says of a rank on its node, before MPI is up, is what MPI says of it after."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from mpi4py import MPI

from ringmpi.comm.launcher import launch_from_environment
from ringmpi.comm.node import local_from_environment, ranks_here

pytestmark = pytest.mark.mpi


def test_launcher_and_mpi_agree_on_the_ranks_of_a_node(
    comm: MPI.Comm, collective_assert: Callable[..., None]
) -> None:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    rank, size = node.rank, node.size
    told = local_from_environment()
    everybodys = node.allgather(-1 if told is None else told.rank)
    node.Free()

    collective_assert(told is not None, f"nothing is told by {sorted(os.environ)}")
    assert told is not None  # On all ranks, after the line above.
    collective_assert(told.size == ranks_here() == size, f"{told}, and {size} by MPI")
    # Each rank has one of its own, which is what the choice of a GPU needs.
    collective_assert(sorted(everybodys) == list(range(size)), f"{told.variable}: {everybodys}")
    # Open MPI 5.0 changes the order where there are more ranks than cores.
    ordered = "OMPI_COMM_WORLD_SIZE" not in os.environ or size <= (os.cpu_count() or 1)
    collective_assert(told.rank == rank or not ordered, f"{told}, and {rank} by MPI")


def test_launcher_and_mpi_agree_on_rank_and_size(
    comm: MPI.Comm, collective_assert: Callable[..., None]
) -> None:
    launch = launch_from_environment()

    collective_assert((launch.rank, launch.size) == (comm.rank, comm.size), str(launch))
