"""What this machine offers, on one page that a person can paste into a ticket."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import util

from ringmpi.comm.launcher import available_cores, default_threads, find_launcher
from ringmpi.comm.probe import library_name, load_mpi
from ringmpi.devices import PREFERENCE, cuda_facts, native_facts, prepare, why_missing
from ringmpi.errors import ConfigError
from ringmpi.provenance import package_versions, processor, system
from ringmpi.report.text import make_console
from ringmpi.store import hdf5_facts

Fact = tuple[str, str]


def examine() -> None:
    """Print the page. Local; starts processes, so not in an MPI job."""
    console = make_console()
    for check in CHECKS:
        for name, value in check():
            console.print(f"{name:<14} {value}", soft_wrap=True)


def _software() -> Iterator[Fact]:
    versions = package_versions()
    yield "python", f"{platform.python_version()} on {system()}"
    yield "packages", ", ".join(f"{name} {version}" for name, version in versions.items())
    prepare()
    yield "devices", ", ".join(name for name in PREFERENCE if why_missing(name) is None)
    yield from cuda_facts()
    yield from native_facts()


def _cores() -> Iterator[Fact]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield (
        "processor",
        f"{processor()}; {available_cores()} core(s) usable, {memory / 1e9:.1f} GB memory",
    )
    yield "threads", f"{default_threads()} BLAS thread(s) a rank unless OMP_NUM_THREADS says otherwise"


def _mpi() -> Iterator[Fact]:
    """Ask the library, without initialising it."""
    try:
        mpi = load_mpi()
    except (ImportError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        yield "mpi", f"no MPI library found ({first}); pip install mpich, or load your site's module"
        return
    library = mpi.get_vendor()[0]
    yield "mpi", library_name(mpi)
    yield from _initialised()
    try:
        launcher = find_launcher()
    except ConfigError as error:
        yield "launcher", str(error)
        return
    yield "launcher", f"{launcher.path} ({launcher.family})"
    families = {"Open MPI": "openmpi"}
    if launcher.family not in ("slurm", families.get(library, "hydra")):
        yield "problem", f"the launcher does not belong to {library}: each rank would be alone"


def _initialised() -> Iterator[Fact]:
    """Ask in a process of its own what MPI tells only once it is initialised."""
    question = (
        "from mpi4py import MPI; from ringmpi.comm.awareness import takes_device_pointers; "
        "from ringmpi.comm.probe import thread_level; "
        "print(takes_device_pointers(), thread_level(MPI))"
    )
    said = _first_line([sys.executable, "-c", question])
    aware = {"True": "yes", "False": "no: the library reads host memory only"}
    reads, _, level = said.partition(" ")
    if reads not in aware:
        reads, level = said, "unknown"
    threads = "for" if level == "multiple" else "not enough for"
    yield "gpu-aware", aware.get(reads, f"could not be asked: {reads}")
    yield "thread level", f"{level}: {threads} --progress thread"


def _hdf5() -> Iterator[Fact]:
    yield "hdf5", hdf5_facts()
    drawn = util.find_spec("matplotlib") is not None
    yield "plots", "matplotlib" if drawn else "no matplotlib; pip install 'ringmpi[plot]'"


def _compilers() -> Iterator[Fact]:
    for name in (os.environ.get("CXX", "c++"), "nvcc"):
        path = shutil.which(name)
        yield name, f"{path}: {_first_line([path, '--version'])}" if path else "not found"


def _slurm() -> Iterator[Fact]:
    path = shutil.which("srun")
    if path is None:
        yield "slurm", "not found; jobs start with mpiexec"
        return
    job = os.environ.get("SLURM_JOB_ID")
    yield (
        "slurm",
        f"{_first_line([path, '--version'])}; " + (f"in job {job}" if job else "outside a job"),
    )


def _first_line(command: list[str]) -> str:
    """Return the first line that a command prints, or why there is none."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = (answer.stdout or answer.stderr).splitlines()
    return lines[0] if lines else f"exit code {answer.returncode}"


CHECKS: tuple[Callable[[], Iterator[Fact]], ...] = (_software, _cores, _mpi, _hdf5, _compilers, _slurm)
