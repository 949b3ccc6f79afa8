"""Processor, cores, threads, memory, and the settings that decide. Starts no process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ringmpi.comm.cores import Cores, cores_here, ranges
from ringmpi.comm.threads import THREAD_VARIABLES, threads_of_rank
from ringmpi.doctor.page import PROBLEM, Fact
from ringmpi.provenance import SCHEDULER_VARIABLES, TRANSPORT_VARIABLES, processor, told

Environment = Mapping[str, str]

#: Where MPI libraries put messages between ranks of a node, and bytes below which they run out of room: the
#: 64 MiB that containers have by default.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to
LEAST_SHARED_NBYTES = 64 * 2**20


def machine(environment: Environment) -> Iterator[Fact]:
    """Tell of the node as all of its ranks see it."""
    del environment
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Fact("processor", f"{processor()}, {os.cpu_count()} core(s), {memory / 1e9:.1f} GB memory")
    yield from shared_memory()


def shared_memory(place: Path = SHARED_MEMORY) -> Iterator[Fact]:
    """Tell how much room there is for messages between ranks of a node."""
    try:
        status = os.statvfs(place)
    except OSError as error:
        yield Fact(PROBLEM, f"{place}: {error.strerror}; MPI needs it between ranks of a node")
        return
    size, free = (status.f_frsize * blocks for blocks in (status.f_blocks, status.f_bavail))
    # Not what is free, which changes while ranks are asked: they would seem to differ.
    yield Fact("shared memory", f"{place}, {size / 1e9:.2f} GB")
    if free <= LEAST_SHARED_NBYTES:
        yield Fact(
            PROBLEM,
            f"{place} has only {free / 1e6:.0f} MB free: ranks of a node may end with a bus error",
            f"mount -o remount,size=1g {place}, or docker run --shm-size=1g",
        )


def binding(environment: Environment, cores: Cores | None = None) -> Iterator[Fact]:
    """Tell what this process may run on, and the threads that follow from it."""
    cores = cores_here() if cores is None else cores
    quota = f"; time of {cores.quota:g} core(s) by its control group" if cores.quota else ""
    unbound = len(cores.own) >= len(cores.given)
    bound = "" if unbound else f"; bound, out of {ranges(cores.given)}"
    yield Fact("cores", f"{len(cores.own)} usable: {ranges(cores.own)}{bound}{quota}")
    given = {name: environment[name] for name in THREAD_VARIABLES if environment.get(name)}
    advised = threads_of_rank(environment, cores)
    if given:
        values = ", ".join(f"{name}={value}" for name, value in given.items())
        yield Fact("threads", f"{values}, as it was set")
    else:
        yield Fact("threads", f"{advised.count} a rank: {advised.source}")


def settings(environment: Environment) -> Iterator[Fact]:
    """Tell the variables of scheduler, threads and transports."""
    set_here = told((*SCHEDULER_VARIABLES, *TRANSPORT_VARIABLES), environment)
    values = " ".join(f"{name}={value}" for name, value in set_here.items())
    yield Fact("settings", values or "none of scheduler, threads and transports")
