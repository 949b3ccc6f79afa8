"""What the launcher's environment says, and the command that starts a job. Imports no MPI.

The MPI launcher's own variables outrank Slurm's: under ``salloc`` both are set, and only the former
describe the processes that ``mpiexec`` started.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringmpi.comm.cores import available_cores
from ringmpi.errors import ConfigError, LaunchError

#: Slurm's number of processes of a step. SLURM_NTASKS is also set in the batch script itself, which is one
#: process, so only the variables of a step count.
SLURM_STEP = "SLURM_STEP_NUM_TASKS"

#: (number of processes, own rank) as set by each launcher, the most specific first: Open MPI's mpiexec;
#: mpirun_rsh of MVAPICH2; Hydra (MPICH, Intel MPI, MVAPICH) and PALS; Slurm's srun.
VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    (SLURM_STEP, "SLURM_PROCID"),
)


#: Seconds for a launcher to tell its version, which may have to come over a network first.
VERSION_LIMIT = 30


@dataclass(frozen=True)
class Launch:
    """One process among those that a launcher started.

    Attributes
    ----------
    size, rank : int
    variable : str
        The environment variable that told the size; empty where none did.
    """

    size: int
    rank: int
    variable: str


def launch_from_environment(environment: Mapping[str, str] = os.environ) -> Launch:
    """Return what the launcher said; a single process where there is none. Local.

    >>> launch_from_environment({"SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "4", "PMI_RANK": "3"})
    Launch(size=4, rank=3, variable='PMI_SIZE')
    """
    for size, rank in VARIABLES:
        if environment.get(size, "").isdigit():
            told = environment.get(rank, "")
            return Launch(int(environment[size]), int(told) if told.isdigit() else 0, size)
    return Launch(size=1, rank=0, variable="")


def check_library(launch: Launch, library: str) -> None:
    """Refuse, before MPI is initialised, a library that another MPI's launcher started. Local.

    Parameters
    ----------
    launch : Launch
    library : str
        The MPI library's own name, such as ``Open MPI`` or ``MPICH``.

    Raises
    ------
    LaunchError
        Where Open MPI's mpiexec started something else: such a library dies in its initialisation.
    """
    if launch.variable == "OMPI_COMM_WORLD_SIZE" and library != "Open MPI":
        raise LaunchError(
            f"{launch.size} processes were started by Open MPI's launcher ({launch.variable}="
            f"{launch.size}), but mpi4py is linked to {library}: each would be 1 process of its "
            f"own; start with {library}'s mpiexec"
        )


def check_size(launch: Launch, library: str, size: int) -> None:
    """Refuse processes that each believe they are alone. Local.

    Raises
    ------
    LaunchError
        Where MPI sees one process and the launcher started more.
    """
    if size == 1 and launch.size > 1:
        raise LaunchError(
            f"{launch.size} processes were started ({launch.variable}={launch.size}), but {library} "
            f"sees 1: this launcher does not belong to the MPI library of mpi4py; start with "
            f"{library}'s mpiexec, or srun with the --mpi plugin that {library} was built for"
        )


def cpus_per_task(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the cores that Slurm gives each task, where it was asked for a number of them. Local."""
    given = environment.get("SLURM_CPUS_PER_TASK", "")
    return int(given) if given.isdigit() and int(given) else None


@dataclass(frozen=True)
class Launcher:
    """A command that starts MPI jobs.

    Attributes
    ----------
    path : str
    family : str
        ``openmpi``, ``hydra`` (MPICH, Intel MPI and kin) or ``slurm``.
    """

    path: str
    family: str

    def command(self, ranks: int, program: list[str]) -> list[str]:
        """Return the command that starts `program` on `ranks` ranks. Local.

        Open MPI refuses to run as root, and more ranks than cores, unless told that it may; the
        flags are added only there and only then, since other launchers reject them.
        """
        if self.family == "slurm":
            cores = ["--cpus-per-task", str(cpus_per_task() or 1)]
            return [self.path, "--ntasks", str(ranks), *cores, *program]
        flags = []
        if self.family == "openmpi":
            if os.geteuid() == 0:
                flags.append("--allow-run-as-root")
            if ranks > available_cores():
                flags.append("--oversubscribe")
        return [self.path, *flags, "-n", str(ranks), *program]


def find_launcher(name: str = "auto") -> Launcher:
    """Find the command that starts MPI jobs. Local; starts a process, so not after MPI is initialised.

    Parameters
    ----------
    name : str
        ``auto``, ``mpiexec``, ``srun``, or a path. ``auto`` prefers the mpiexec beside the running Python
        (the one that came with the MPI library in the same environment), then ``srun`` inside a
        Slurm allocation, then the mpiexec on the PATH.

    Raises
    ------
    ConfigError
        If there is no such command.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    candidates = [name]
    if name in ("auto", "mpiexec"):
        candidates = [str(beside)] if beside.exists() else []
        if name == "auto" and "SLURM_JOB_ID" in os.environ:
            candidates.append("srun")
        candidates += ["mpiexec", "mpirun"]
    for candidate in candidates:
        path = shutil.which(candidate)
        if path:
            return Launcher(path, family_of(path))
    raise ConfigError(
        f"launcher={name}: no such command on this machine; install an MPI library "
        f"(pip install mpich) or name its mpiexec"
    )


def family_of(path: str) -> str:
    """Return the family of a command that starts MPI jobs, as `Launcher` has it. Local; starts a process."""
    text = version_of(path).lower()
    if "open mpi" in text or "openrte" in text or "prrte" in text:
        return "openmpi"
    return "slurm" if text.startswith("slurm") or Path(path).name == "srun" else "hydra"


def version_of(path: str) -> str:
    """Return what a launcher says of itself; nothing if it fails. Local; starts a process."""
    try:
        answer = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=VERSION_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + answer.stderr


def shown(command: list[str]) -> str:
    """Return a command as one would type it. Local."""
    return shlex.join(command)
