"""How many threads a rank takes: what scheduler and node give it, where nobody has said it. Imports no MPI.

Libraries read these variables as they are loaded, so they are set before NumPy is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringmpi.comm.cores import Cores, cores_here
from ringmpi.comm.launcher import cpus_per_task
from ringmpi.comm.node import ranks_here

#: What OpenMP and BLAS libraries read. OpenMP's comes first, as the others follow it where it is set.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")

#: Functions that tell the threads of a BLAS library, by what its file name holds; those of NumPy's wheels
#: have a prefix, a suffix, or both.
THREAD_QUERIES = {
    "openblas": tuple(
        f"{prefix}openblas_get_num_threads{suffix}"
        for prefix in ("scipy_", "")
        for suffix in ("64_", "", "_64")
    ),
    "libmkl_rt": ("MKL_Get_Max_Threads",),
    "libblis": ("bli_thread_get_num_threads",),
}

#: What `limit_blas_threads` has set in this process, for those that are started from it.
_set_here: dict[str, str] = {}


@dataclass(frozen=True)
class Threads:
    """Threads for a rank.

    Attributes
    ----------
    count : int
    source : str
        What says so.
    """

    count: int
    source: str


def threads_of_rank(
    environment: Mapping[str, str] | None = None, cores: Cores | None = None
) -> Threads:
    """Return the threads that a rank should take. Local.

    A scheduler that counts cores by task is believed (Slurm). One that counts them by node (PBS, Torque,
    LSF, Slurm without ``--cpus-per-task``) or none: its cores, or those that the launcher has, over the
    ranks of the node. Never more than this process may run on.

    Parameters
    ----------
    environment : mapping, optional
    cores : Cores, optional
        Those of this process by default.
    """
    environment = os.environ if environment is None else environment
    cores = cores_here() if cores is None else cores
    told = cpus_per_task(environment)
    if told is not None:
        return Threads(min(told, cores.usable), f"SLURM_CPUS_PER_TASK={told}")
    ranks = ranks_here(environment)
    found = _cores_of_job(environment)
    if found is None:
        of_job, source = cores.of_job, f"{cores.of_job} core(s)"
    else:
        of_job, source = min(found[0], cores.of_job), f"{found[1]}={found[0]}"
    count = max(1, min(of_job // ranks, cores.usable))
    return Threads(count, f"{source} for {ranks} rank(s) of the node")


def limit_blas_threads() -> None:
    """Set the thread counts of BLAS libraries where nobody has; they are read when NumPy loads. Local.

    Where OpenMP's is set, the others follow it: some libraries read their own one first.
    """
    told = _first_number(os.environ.get(THREAD_VARIABLES[0], ""))
    count = str(told or threads_of_rank().count)
    for variable in THREAD_VARIABLES:
        if variable not in os.environ:
            os.environ[variable] = _set_here[variable] = count


def inherited_environment() -> dict[str, str]:
    """Return the environment that this process was given, for jobs that it starts. Local.

    Without the thread counts that were set here: a rank of another job has a share of its own.
    """
    return {name: value for name, value in os.environ.items() if _set_here.get(name) != value}


def blas_threads(environment: Mapping[str, str] | None = None) -> int:
    """Return the threads that BLAS takes; 0 where nothing says it in numbers. Local.

    As the loaded library says; without one that can be asked, as the environment does.

    >>> blas_threads({"OMP_NUM_THREADS": "4,2"})
    4
    """
    asked = _ask_library() if environment is None else 0
    environment = os.environ if environment is None else environment
    return asked or _first_number(environment.get(THREAD_VARIABLES[0], ""))


def _first_number(text: str) -> int:
    """Return the first of the numbers that OpenMP takes, one a level of nesting; 0 if it is none."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def _cores_of_job(environment: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the cores that a scheduler gives a job on this node, and the variable that says so."""
    names = []
    if "SLURM_JOB_ID" in environment:
        names.append("SLURM_CPUS_ON_NODE")
    if "PBS_JOBID" in environment:
        names += ["NCPUS", "PBS_NUM_PPN"]  # PBS Professional and OpenPBS; Torque.
    for name in names:
        if _first_number(environment.get(name, "")):
            return _first_number(environment[name]), name
    slots = _lsf_slots(environment)
    return (slots, "LSB_MCPU_HOSTS") if slots else None


def _lsf_slots(environment: Mapping[str, str]) -> int:
    """Return the slots of an LSF job on this node, told as ``hostA 4 hostB 2``; 0 for unknown."""
    words = environment.get("LSB_MCPU_HOSTS", "").split() if "LSB_JOBID" in environment else []
    slots = dict(zip(words[::2], words[1::2], strict=False))
    here = os.uname().nodename
    for host, count in slots.items():
        if host.partition(".")[0] == here.partition(".")[0] and count.isdigit():
            return int(count)
    return 0


def _ask_library() -> int:
    """Return what the loaded BLAS says; the least of several, 0 for none that can be asked."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    files = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line}
    found = []
    for file in sorted(files):
        for part, queries in THREAD_QUERIES.items():
            if part in Path(file).name:
                found += _answers(file, queries)
    return min(found, default=0)


def _answers(file: str, queries: tuple[str, ...]) -> list[int]:
    try:
        library = ctypes.CDLL(file)
    except OSError:  # Replaced or deleted since it was loaded.
        return []
    functions = (getattr(library, query, None) for query in queries)
    return [int(function()) for function in functions if function is not None][:1]
