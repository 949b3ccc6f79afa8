"""Which of its node's ranks a process is, as its launcher says. Imports no MPI.

Of use where MPI cannot tell: while it is not up yet, and in a communicator that holds some of a node's ranks
only, which choose GPUs among all. Else MPI's own split of the ranks by shared memory, `Job.local_rank`, is
right whatever this says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ringmpi.comm.launcher import SLURM_STEP, launch_from_environment

#: (own rank among those of the node, number of them) as each launcher sets them, the most specific first:
#: Open MPI's mpiexec; Hydra (MPICH, Intel MPI); mpirun_rsh of MVAPICH2 and of later MVAPICH, which does not
#: tell the number; Cray PALS, and Cray's PMI under it or under srun.
LOCAL_VARIABLES = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MVP_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)


@dataclass(frozen=True)
class Local:
    """One rank among those of its node.

    Attributes
    ----------
    rank : int
    size : int
        How many there are; 0 where nothing says it.
    variable : str
        The environment variable that told the rank.
    """

    rank: int
    size: int
    variable: str


def local_from_environment(environment: Mapping[str, str] | None = None) -> Local | None:
    """Return what the launcher said of this process on its node; None where it said nothing. Local.

    Slurm's variables count only in a task of its step: a batch script has them too, and what
    ``mpiexec`` starts in it inherits them.

    >>> local_from_environment({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "SLURM_LOCALID": "0"})
    Local(rank=1, size=4, variable='MPI_LOCALRANKID')
    """
    environment = os.environ if environment is None else environment
    for rank, size in LOCAL_VARIABLES:
        if environment.get(rank, "").isdigit():
            return Local(int(environment[rank]), _number(environment.get(size, "")), rank)
    launch = launch_from_environment(environment)
    own = environment.get("SLURM_LOCALID", "")
    if own.isdigit() and environment.get(SLURM_STEP, "") == str(launch.size):
        return Local(int(own), _slurm_tasks_here(environment), "SLURM_LOCALID")
    return None


def ranks_here(environment: Mapping[str, str] | None = None) -> int:
    """Return how many ranks this node has; all of the job's where nothing says it. Local."""
    environment = os.environ if environment is None else environment
    local = local_from_environment(environment)
    if local is not None and local.size:
        return local.size
    return max(1, launch_from_environment(environment).size)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """Return the tasks of a step on this node, of which Slurm tells as ``4(x2),3``; 0 for unknown."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return 0
        counts += [int(found[1])] * int(found[2] or 1)
    node = environment.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else 0
