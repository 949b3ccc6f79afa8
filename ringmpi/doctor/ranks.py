"""The ranks that a launcher started: are they one job, and where do they differ? Starts no process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringmpi.comm.cores import ranges
from ringmpi.comm.launcher import Launch
from ringmpi.comm.node import local_from_environment
from ringmpi.doctor.page import PROBLEM, Fact
from ringmpi.provenance import rank_facts
from ringmpi.recording import oversubscribed

#: Lines that one fact may take where it differs.
MOST_LINES = 8


@dataclass(frozen=True)
class Seen:
    """What one rank has seen.

    Attributes
    ----------
    facts : tuple of Fact
        As on the page; some are of the first rank of a node only.
    where : dict
        As in ``/ranks`` of a result file.
    node : int
        The first rank of its node.
    local_rank : int
        By MPI.
    told_local_rank : int or None
        By the launcher.
    """

    facts: tuple[Fact, ...]
    where: dict[str, Any]
    node: int
    local_rank: int
    told_local_rank: int | None


def alone(launch: Launch, library: str) -> Fact:
    """Return the problem of processes that each believe to be alone."""
    remedy = "mpiexec of the same environment as Python, as the line launcher has it"
    if launch.variable.startswith("SLURM"):
        remedy = "srun --mpi=..., as the line srun has it"
    return Fact(
        PROBLEM,
        f"{launch.size} processes were started ({launch.variable}={launch.size}), but to {library} each is "
        f"1 process of its own: the launcher does not belong to the library",
        remedy,
    )


def gathered(mpi: Any, facts: Sequence[Fact], environment: Mapping[str, str]) -> list[Seen]:
    """Return what every rank has seen, by rank. Collective."""
    world = mpi.COMM_WORLD
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    told = local_from_environment(environment)
    seen = Seen(
        facts=tuple(facts),
        where=rank_facts(),
        node=node.allreduce(world.rank, mpi.MIN),
        local_rank=node.rank,
        told_local_rank=None if told is None else told.rank,
    )
    node.Free()
    everything: list[Seen] = world.allgather(seen)
    return everything


def of_job(seen: Sequence[Seen], launch: Launch) -> Iterator[Fact]:
    """Return what the ranks say together."""
    hosts = list(dict.fromkeys(rank.where["hostname"] for rank in seen))
    yield Fact("ranks", f"{len(seen)} on {len(hosts)} node(s), started with {launch.variable}")
    yield from _local_ranks(seen)
    per_rank = [rank.where for rank in seen]
    yield from _by_value(
        "rank cores", [ranges(map(int, fact["affinity"].split(","))) for fact in per_rank]
    )
    yield from _by_value("rank threads", [str(fact["threads"]) for fact in per_rank])
    if oversubscribed(per_rank):
        yield Fact(
            PROBLEM,
            "more threads of all ranks than cores that they may run on: times would mean little",
            "export OMP_NUM_THREADS=1, fewer ranks, or a binding of each rank to cores of its own",
        )
    yield from differences(seen)


def differences(seen: Sequence[Seen]) -> Iterator[Fact]:
    """Return the facts of other ranks that are not rank 0's."""
    first = {fact.name: fact.value for fact in seen[0].facts}
    others: dict[tuple[str, str], list[int]] = {}
    for number, rank in enumerate(seen):
        mine = {fact.name: fact.value for fact in rank.facts}
        for name, value in mine.items():
            # Of cores and threads every rank is told already.
            if name not in ("cores", "threads") and first.get(name) != value:
                others.setdefault((name, value), []).append(number)
    for (name, value), numbers in list(others.items())[:MOST_LINES]:
        yield Fact("differs", f"{name}, on rank {ranges(numbers)}: {value}")
    if len(others) > MOST_LINES:
        yield Fact("differs", f"and {len(others) - MOST_LINES} more")


def _local_ranks(seen: Sequence[Seen]) -> Iterator[Fact]:
    """Compare the two numbers of each rank on its node.

    That each rank of a node has one of its own is what matters to the choice of a GPU. Open MPI 5.0 numbers
    ranks in another order than MPI does where there are more of them than cores.
    """
    told = [(rank.node, rank.told_local_rank) for rank in seen if rank.told_local_rank is not None]
    untold = [number for number, rank in enumerate(seen) if rank.told_local_rank is None]
    other = [number for number, rank in enumerate(seen) if rank.told_local_rank != rank.local_rank]
    if len(set(told)) < len(told):
        yield Fact(
            PROBLEM,
            "the launcher gives ranks of a node the same local rank: they would share a GPU",
            "a launcher that belongs to the MPI library",
        )
    elif untold:
        yield Fact("local ranks", f"by MPI alone on rank {ranges(untold)}: the launcher tells none")
    elif other:
        yield Fact("local ranks", f"in another order by MPI than by the launcher: rank {ranges(other)}")
    else:
        yield Fact("local ranks", "MPI and the launcher agree")


def _by_value(name: str, values: Sequence[str]) -> Iterator[Fact]:
    """Return which ranks have which value, in a line for each."""
    groups: dict[str, list[int]] = {}
    for number, value in enumerate(values):
        groups.setdefault(value, []).append(number)
    if len(groups) == 1:
        yield Fact(name, f"{values[0]} on all")
        return
    for value, numbers in list(groups.items())[:MOST_LINES]:
        yield Fact(name, f"{value} on rank {ranges(numbers)}")
    if len(groups) > MOST_LINES:
        yield Fact(name, f"and {len(groups) - MOST_LINES} other values")
