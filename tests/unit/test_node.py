"""The node-local rank by the variables of launchers, as their manuals or they themselves have them."""

from __future__ import annotations

import pytest

from ringmpi.comm.node import Local, local_from_environment, ranks_here

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH2 = {
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
MVAPICH = {"PMI_SIZE": "4", "PMI_RANK": "3", "MVP_COMM_WORLD_LOCAL_RANK": "1"}
PALS = {
    "PMI_SIZE": "4",
    "PMI_RANK": "3",
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
}
CRAY = {"PMI_SIZE": "4", "PMI_RANK": "3", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
#: What srun sets with --mpi=pmi2.
SLURM_PMI2 = SLURM | {"PMI_SIZE": "4", "PMI_RANK": "3"}
#: A batch script is a process on the first node, and no task of a step.
BATCH = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}

LAUNCHERS = {
    "Open MPI": (OPEN_MPI, Local(1, 2, "OMPI_COMM_WORLD_LOCAL_RANK")),
    "MPICH or Intel MPI": (HYDRA, Local(1, 2, "MPI_LOCALRANKID")),
    "MVAPICH2": (MVAPICH2, Local(1, 2, "MV2_COMM_WORLD_LOCAL_RANK")),
    "MVAPICH": (MVAPICH, Local(1, 0, "MVP_COMM_WORLD_LOCAL_RANK")),
    "PALS": (PALS, Local(1, 2, "PALS_LOCAL_RANKID")),
    "Cray's PMI": (CRAY, Local(1, 2, "PMI_LOCAL_RANK")),
    "srun": (SLURM, Local(1, 2, "SLURM_LOCALID")),
    "srun with PMI-2": (SLURM_PMI2, Local(1, 2, "SLURM_LOCALID")),
    "Open MPI in a batch script": (BATCH | OPEN_MPI, Local(1, 2, "OMPI_COMM_WORLD_LOCAL_RANK")),
    "Hydra in a Slurm step": (
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"} | HYDRA,
        Local(1, 2, "MPI_LOCALRANKID"),
    ),
}


@pytest.mark.parametrize(("environment", "local"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_every_launcher_tells_the_local_rank(environment: dict[str, str], local: Local) -> None:
    assert local_from_environment(environment) == local


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,
        # An mpiexec that tells nothing of the node, in a batch script whose own local rank is not ours.
        BATCH | {"PMI_SIZE": "4", "PMI_RANK": "3"},
        SLURM | {"SLURM_LOCALID": "first"},
        {"MPI_LOCALRANKID": "-1"},
        {"MPI_LOCALRANKID": ""},
    ],
    ids=["alone", "batch script", "mpiexec in one", "no number", "negative", "empty"],
)
def test_where_nothing_is_told_nothing_is_made_up(environment: dict[str, str]) -> None:
    assert local_from_environment(environment) is None


@pytest.mark.parametrize(
    ("told", "node", "size"),
    [
        ("2(x2)", "1", 2),
        ("4(x2),3", "2", 3),
        ("4(x2),3", "0", 4),
        ("5", "0", 5),
        ("5", "1", 0),
        ("", "0", 0),
        ("5(x)", "0", 0),
        ("5", "", 0),
    ],
)
def test_slurms_counts_of_tasks_a_node(told: str, node: str, size: int) -> None:
    environment = SLURM | {"SLURM_STEP_TASKS_PER_NODE": told, "SLURM_NODEID": node}

    assert local_from_environment(environment) == Local(1, size, "SLURM_LOCALID")


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [({}, 1), (HYDRA, 2), (MVAPICH, 4), ({"PMI_SIZE": "3", "PMI_RANK": "0"}, 3), (SLURM, 2)],
    ids=["alone", "told", "all of the job's", "no local rank either", "srun"],
)
def test_ranks_of_the_node(environment: dict[str, str], ranks: int) -> None:
    assert ranks_here(environment) == ranks
