"""Python, packages, devices, compilers, files and plots. Starts processes."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import util

from ringmpi.devices import PREFERENCE, cuda_facts, native_facts, prepare, why_missing
from ringmpi.devices.build import compiler_command
from ringmpi.doctor.ask import INITIALISE_LIMIT, answer, first_line
from ringmpi.doctor.page import Fact, way_to
from ringmpi.errors import MissingCapabilityError
from ringmpi.provenance import package_versions, system

Environment = Mapping[str, str]

#: Asked of a process of its own, as with MPI loaded another h5py may be found.
HDF5_QUESTION = (
    "from contextlib import suppress; from ringmpi.comm.probe import load_mpi\n"
    "with suppress(ImportError, RuntimeError): load_mpi()\n"
    "from ringmpi.store import hdf5_facts; print(hdf5_facts())"
)


def packages(environment: Environment) -> Iterator[Fact]:
    """Tell of Python and the packages that matter."""
    del environment
    versions = package_versions()
    yield Fact("python", f"{platform.python_version()} on {system()}")
    yield Fact("packages", ", ".join(f"{name} {version}" for name, version in versions.items()))


def devices(environment: Environment) -> Iterator[Fact]:
    """Tell what can compute; the native device is compiled here if it is not yet."""
    prepare()
    yield Fact("devices", ", ".join(name for name in PREFERENCE if why_missing(name) is None))
    yield from (Fact(name, value) for name, value in cuda_facts())
    for name, value in native_facts():
        remedy = _compiler_remedy(environment) if "no C++ compiler" in value else ""
        yield Fact(name, value, remedy)


def compilers(environment: Environment) -> Iterator[Fact]:
    """Tell of the C++ compiler of the native device."""
    named = (environment.get("CXX") or "c++").split()[0]
    try:
        command = compiler_command(environment)
    except MissingCapabilityError:
        yield Fact(named, "not found", _compiler_remedy(environment))
        return
    version = first_line(answer([*command, "--version"], environment))
    yield Fact(named, f"{command[0]}: {version}")


def _compiler_remedy(environment: Environment) -> str:
    return way_to("gcc", "apt-get install g++, or set CXX to a C++ compiler", environment)


def hdf5_of_ranks(environment: Environment) -> str:
    """Return what the h5py that ranks get says of itself.

    Debian has two builds of h5py, and gives ranks the parallel one. The variable asks for what they get.
    """
    asked = dict(environment) | {"H5PY_ALWAYS_USE_MPI": "1"}
    return first_line(answer([sys.executable, "-c", HDF5_QUESTION], asked, INITIALISE_LIMIT))


def files(environment: Environment) -> Iterator[Fact]:
    """Tell of HDF5, and whether ranks can write one file together."""
    told = hdf5_of_ranks(environment)
    remedy = ""
    if "parallel: yes" not in told:
        remedy = "for --io mpio: " + way_to(
            "h5py-parallel",
            "CC=mpicc HDF5_MPI=ON pip install --no-binary=h5py h5py",
            environment,
        )
    yield Fact("hdf5", told, remedy)


def plots(environment: Environment) -> Iterator[Fact]:
    """Tell what draws pictures."""
    del environment
    if util.find_spec("matplotlib") is not None:
        yield Fact("plots", "matplotlib")
    else:
        yield Fact("plots", "no matplotlib", "pip install 'ringmpi[plot]'")


def found(name: str, environment: Environment) -> str | None:
    """Return the path of a program, or None."""
    return shutil.which(name, path=environment.get("PATH", ""))
