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
            f"{library}'s mpiexec, or with {srun_for(library)}"
        )


#: Slurm's plugins by which an MPI library's processes find each other, the best first; what its name begins
#: with. Open MPI 5 knows PMIx only.
PLUGINS = (
    ("Open MPI 4", ("pmix", "pmi2")),
    ("Open MPI 3", ("pmix", "pmi2")),
    ("Open MPI", ("pmix",)),
    ("CRAY MPICH", ("cray_shasta", "pmi2")),
    ("MPICH", ("pmi2", "pmix")),
    ("MVAPICH", ("pmi2", "pmix")),
    ("Intel", ("pmi2", "pmix")),
)


def plugins_of(library: str) -> tuple[str, ...]:
    """Return Slurm's plugins that an MPI library understands, the best first; empty if not known. Local.

    >>> plugins_of("Open MPI 5.0.8"), plugins_of("MPICH")
    (('pmix',), ('pmi2', 'pmix'))
    """
    return next((plugins for start, plugins in PLUGINS if library.startswith(start)), ())


def srun_for(library: str) -> str:
    """Return, in words, how srun starts ranks of an MPI library. Local.

    >>> srun_for("MPICH")
    'srun --mpi=pmi2 (srun --mpi=list names what this Slurm has)'
    """
    known = plugins_of(library)
    plugin = f"--mpi={known[0]}" if known else f"with the --mpi plugin that {library} was built for"
    if library.startswith("Intel"):
        plugin += " and I_MPI_PMI_LIBRARY naming Slurm's libpmi2.so"
    return f"srun {plugin} (srun --mpi=list names what this Slurm has)"


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
    options : tuple of str
        What it is always given, before what the number of ranks asks for.
    """

    path: str
    family: str
    options: tuple[str, ...] = ()

    def command(self, ranks: int, program: list[str]) -> list[str]:
        """Return the command that starts `program` on `ranks` ranks. Local.

        Open MPI refuses to run as root, and more ranks than cores, unless told that it may; the
        flags are added only there and only then, since other launchers reject them.
        """
        if self.family == "slurm":
            nodes = step_nodes(ranks)
            flags = ["--nodes", str(nodes)] if nodes else []
            flags += ["--ntasks", str(ranks), "--cpus-per-task", str(cpus_per_task() or 1)]
            return [self.path, *self.options, *flags, *program]
        flags = []
        if self.family == "openmpi":
            if os.geteuid() == 0:
                flags.append("--allow-run-as-root")
            if ranks > available_cores():
                flags.append("--oversubscribe")
        return [self.path, *self.options, *flags, "-n", str(ranks), *program]


def step_nodes(ranks: int, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many nodes of its allocation a step of so many ranks takes. Local.

    Nodes are filled one after the other where the job says how many tasks a node has; else srun, which
    takes all of them, is only kept from taking more nodes than there are ranks.

    Returns
    -------
    int or None
        None outside an allocation.

    Examples
    --------
    >>> step_nodes(5, {"SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS_PER_NODE": "2"})
    3
    """
    had, filled = (
        environment.get(name, "") for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE")
    )
    if not had.isdigit():
        return None
    each = int(filled) if filled.isdigit() else 1
    return min(int(had), -(-ranks // max(each, 1)))


def find_launcher(name: str = "auto") -> Launcher:
    """Find the command that starts MPI jobs. Local; starts a process, so not after MPI is initialised.

    Parameters
    ----------
    name : str
        ``auto``, ``mpiexec``, ``srun``, or a path; options for it may follow, such as
        ``srun --mpi=pmi2 --cpu-bind=cores``. ``auto`` prefers the mpiexec beside the running Python
        (the one that came with the MPI library in the same environment), then ``srun`` inside a
        Slurm allocation, then the mpiexec on the PATH.

    Raises
    ------
    ConfigError
        If there is no such command.
    """
    given = name
    # What is a command as it stands is a path, whatever characters are in it.
    name, options = (name, ()) if shutil.which(name) else _with_options(name)
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
            return Launcher(path, family_of(path), options)
    raise ConfigError(
        f"launcher={given}: no such command on this machine; install an MPI library "
        f"(pip install mpich) or name its mpiexec"
    )


def _with_options(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the command and the options that a text of words is made of."""
    try:
        name, *options = shlex.split(text) or [text]
    except ValueError as error:
        raise ConfigError(
            f"launcher={text}: {error}; quote it as for a shell, such as 'srun --mpi=pmi2'"
        ) from None
    return name, tuple(options)


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
