"""The MPI library: what it is, and what it says once it is initialised."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ringmpi.comm.awareness import why_no_device_pointers
from ringmpi.comm.probe import (
    library_name,
    load_mpi,
    mpi_libraries,
    thread_level,
)
from ringmpi.doctor.ask import INITIALISE_LIMIT, answer
from ringmpi.doctor.gpu import awareness
from ringmpi.doctor.page import PROBLEM, Fact, way_to

Environment = Mapping[str, str]

#: Names and versions in what libraries say of themselves. Cray's is an MPICH too, and comes before it.
NAMES = (
    re.compile(r"(CRAY MPICH) version ([\d.]+)"),
    re.compile(r"(Open MPI) v([\w.]+)"),
    re.compile(r"(Intel\(R\) MPI Library) ([\d.]+)"),
    re.compile(r"(MVAPICH\w*) Version\s*: ([\w.]+)"),
    re.compile(r"(MPICH) Version\s*: ([\w.]+)"),
)

#: Asked of a process of its own, which ends if MPI ends it.
QUESTION = (
    "from mpi4py import MPI; from ringmpi.comm.awareness import why_no_device_pointers; "
    "from ringmpi.comm.probe import thread_level; print('told', thread_level(MPI), why_no_device_pointers())"
)


def library(environment: Environment) -> tuple[str, list[Fact]]:
    """Return the name of the library, empty for none, and what is told of it. It is not initialised."""
    try:
        mpi = load_mpi()
    except (ImportError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = way_to("mpich", "pip install mpich", environment)
        return "", [Fact("mpi", f"no MPI library found ({first})", remedy)]
    name = short_name(mpi)
    files = mpi_libraries()
    told = [Fact("mpi", ", ".join([name, *files]))]
    if len({Path(file).resolve() for file in files}) > 1:
        told.append(
            Fact(
                PROBLEM,
                f"two MPI libraries in one process: {', '.join(files)}",
                "pip install --no-binary=h5py,mpi4py --force-reinstall h5py mpi4py",
            )
        )
    return name, told


def netmods() -> list[str]:
    """Return the ways over the network that an MPICH was built with, its default first. Local."""
    try:
        text = str(load_mpi().Get_library_version())
    except (ImportError, RuntimeError):
        return []
    return netmods_in(text)


def netmods_in(text: str) -> list[str]:
    r"""Return them from what the library says of itself. Local.

    >>> netmods_in("MPICH Version: 5.0.2\nMPICH Device:       ch4:ucx ofi\n"), netmods_in("Open MPI v5.0.11")
    (['ucx', 'ofi'], [])
    """
    device = re.search(r"^MPICH Device:\s*ch4:(.*)$", text, re.MULTILINE)
    return re.findall(r"\w+", device[1]) if device else []


def short_name(mpi: Any) -> str:
    """Return the name and version of the library in a few words, such as ``Open MPI 5.0.11``. Local.

    Not all that the library says of itself: Open MPI tells who built it, and where.
    """
    text = library_name(mpi)
    for form in NAMES:
        found = form.search(text)
        if found is not None:
            return " ".join(found.groups())
    return text.partition(",")[0]


def asked_apart(environment: Environment, name: str) -> Iterator[Fact]:
    """Ask in a process of its own what MPI tells only once it is initialised. Starts a process."""
    told = answer([sys.executable, "-c", QUESTION], environment, INITIALISE_LIMIT)
    lines = (line.split(maxsplit=2) for line in told.splitlines() if line.startswith("told "))
    said = next(lines, None)
    if said is None:
        yield Fact(PROBLEM, f"{name} cannot be initialised: {told.splitlines()[-1]}")
        return
    yield from told_by(name, "".join(said[2:]), said[1], environment)


def told_here(mpi: Any, name: str, environment: Environment) -> Iterator[Fact]:
    """Ask the library, which must be initialised."""
    yield from told_by(name, why_no_device_pointers(), thread_level(mpi), environment)


def told_by(name: str, refusal: str, level: str, environment: Environment) -> Iterator[Fact]:
    """Return thread level and GPU-awareness as facts."""
    enough = level == "multiple"
    yield Fact("thread level", f"{level}: {'for' if enough else 'not enough for'} --progress thread")
    yield awareness(name, refusal, environment)
