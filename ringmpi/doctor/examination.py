"""The page from its first line to its last.

All that starts processes comes before MPI is initialised. What rank 0 has found by then is printed at once,
since a library under a launcher that does not belong to it may end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import ringmpi
from ringmpi.comm.job import start_mpi
from ringmpi.comm.launcher import Launch, launch_from_environment
from ringmpi.comm.node import local_from_environment
from ringmpi.comm.threads import inherited_environment
from ringmpi.doctor import gpu, launching, mpi, node, ranks, software
from ringmpi.doctor.page import PROBLEM, Fact, Page
from ringmpi.errors import LaunchError
from ringmpi.report.text import make_console

Check = Callable[[Mapping[str, str]], Iterable[Fact]]

#: Alike for all ranks of a node, and so found by the first of them alone: these start processes.
OF_NODE: tuple[Check, ...] = (
    software.packages,
    software.devices,
    software.compilers,
    software.files,
    software.plots,
    gpu.gpus,
    gpu.cuda,
    node.machine,
)

#: Perhaps different on each rank.
OF_RANK: tuple[Check, ...] = (node.binding, node.settings)


def examine() -> None:
    """Print the page. Collective under a launcher; starts processes, so not once MPI is initialised."""
    environment = inherited_environment()
    launch = launch_from_environment(environment)
    page = Page(make_console() if launch.rank == 0 else None, environment)
    facts: list[Fact] = []

    def tell(found: Iterable[Fact]) -> None:
        for fact in found:
            facts.append(fact)
            page.show([fact])

    tell([Fact("ringmpi", ringmpi.__version__)])
    local = local_from_environment(environment)
    first_of_node = local is None or local.rank == 0
    for check in (*OF_NODE, *OF_RANK) if first_of_node else OF_RANK:
        tell(_told(check, environment))
    library, about = mpi.library(environment)
    tell(about)
    if first_of_node:
        tell(_told(lambda env: launching.launchers(env, library), environment))
        tell(_told(lambda env: launching.slurm(env, library, mpi.netmods()), environment))
    if library and launch.variable:
        page.show(_as_job(launch, library, facts, environment))
    elif library:
        tell(mpi.asked_apart(environment, library))
    page.conclude()


def _told(check: Check, environment: Mapping[str, str]) -> Iterator[Fact]:
    """Return what a check finds; what goes wrong in one must not keep the others from the page."""
    try:
        yield from check(environment)
    except Exception as error:
        yield Fact(PROBLEM, f"{type(error).__name__} in the doctor: {error}")


def _as_job(
    launch: Launch, library: str, facts: list[Fact], environment: Mapping[str, str]
) -> Iterator[Fact]:
    """Initialise MPI, and return what the ranks say together. Collective."""
    try:
        world = start_mpi(launch)
    except LaunchError:
        yield ranks.alone(launch, library)
        return
    yield from mpi.told_here(world, library, environment)
    seen = ranks.gathered(world, facts, environment)
    yield from ranks.of_job(seen, launch)
    world.Finalize()
