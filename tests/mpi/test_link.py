"""An emulated link: never faster than its latency and bandwidth, and nothing but slower.

Only lower bounds are asserted, since a busy machine may take any time. All ranks are on one machine and share
its monotonic clock, so the times of different ranks can be compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from sharded import (
    OTHER_WAYS,
    SOME_WAYS,
    Check,
    Problem,
    Way,
    attend,
    both_passes,
    gradients_of,
    make,
    random_tensors,
)

from ringmpi import RingAttention
from ringmpi.comm.link import Network, network_of, parse_link
from ringmpi.errors import ConfigError
from ringmpi.schedule import Pass
from ringmpi.schedule.steps import Direction

pytestmark = pytest.mark.mpi

#: Clocks are read to less than this; sums of seconds since start-up are rounded to less.
SLACK = 1e-6

LINK = "100Mbit/s,2ms"
LATENCY, BANDWIDTH = 2e-3, 12.5e6

#: Nodes of two ranks, each rank with a network card; and a way that is worse than all others.
LINK_MAP = "2:400Mbit/s,200us:100Mbit/s,2ms,shared"
if MPI.COMM_WORLD.size > 1:
    LINK_MAP += ":0-1=50Mbit/s,3ms"

PROBLEM = Problem(48, 0, "zigzag", "causal", heads=8, kv_heads=8, head_dim=16, dtype="float32")


def clock_errors(attention: RingAttention, comm: MPI.Comm) -> Any:
    """Return how far each rank's clock seems to be ahead of this one's: in truth it is not at all."""
    offsets = np.asarray(attention._exchange_options["offsets"])
    return offsets - offsets[comm.rank]


def sent_in(attention: RingAttention, comm: MPI.Comm, direction: Pass) -> list[list[tuple[int, int]]]:
    """Return for each step the peer and the bytes of each send of this rank, in the order of posting."""
    engine = attention._engine
    assert engine is not None
    return [
        [
            (transfer.peer, engine.shape.nbytes(transfer.part, attention._shards))
            for transfer in step.transfers
            if transfer.direction is Direction.SEND
        ]
        for step in attention.schedules[direction]
    ]


def earliest_arrivals(
    comm: MPI.Comm, attention: RingAttention, direction: Pass, network: Network
) -> dict[int, float]:
    """Return for each step when the last part for this rank can be here: links carry one part at a time."""
    records = attention.trace.records
    mine = list(zip(records["started"], sent_in(attention, comm, direction), strict=True))
    earliest: dict[int, float] = {}
    due = [
        [t.steps for t in step.transfers if t.direction is Direction.SEND]
        for step in attention.schedules[direction]
    ]
    errors = clock_errors(attention, comm)
    for sender, (steps, lasting) in enumerate(comm.allgather((mine, due))):
        free: dict[Any, float] = {}
        for number, (started, sends) in enumerate(steps):
            for (peer, nbytes), length in zip(sends, lasting[number], strict=True):
                link, way = network.link(sender, peer), network.way(sender, peer)
                free[way] = max(free.get(way, -np.inf), started) + nbytes / link.bandwidth
                if peer == comm.rank:
                    last = number + length - 1
                    arrival = free[way] + link.latency - errors[sender]
                    earliest[last] = max(earliest.get(last, -np.inf), arrival)
    return earliest


@pytest.mark.parametrize(
    ("way", "links"),
    [(way, {"link": LINK}) for way in SOME_WAYS]
    + [(way, {"link": f"{LINK},shared"}) for way in OTHER_WAYS]
    + [(way, {"link_map": LINK_MAP}) for way in OTHER_WAYS],
    ids=lambda value: str(value) if isinstance(value, Way) else "-".join(value.values()),
)
def test_nothing_is_received_before_the_link_could_deliver_it(
    comm: MPI.Comm, collective_assert: Check, way: Way, links: dict[str, str]
) -> None:
    """Parts on one link follow each other; with a shared one, so do those to different peers."""
    early: list[str] = []
    network = network_of(links.get("link"), links.get("link_map"))
    assert network is not None
    with make(comm, way, PROBLEM, **links) as attention:
        mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
        out, lse = attention.forward(mine["q"], mine["k"], mine["v"])
        for direction in Pass:
            if direction is Pass.BACKWARD:
                gradients_of(attention, mine, out, lse)
            received = attention.trace.records["received"]
            earliest = earliest_arrivals(comm, attention, direction, network)
            early += [
                f"{direction.value}, step {step}: {received[step] - moment}"
                for step, moment in earliest.items()
                if not received[step] >= moment - SLACK
            ]
            if np.flatnonzero(~np.isnan(received)).tolist() != sorted(earliest):
                early.append(f"{direction.value}: received in other steps than sent")
    collective_assert(not early, early)


def longest_ways(
    comm: MPI.Comm, attention: RingAttention, direction: Pass, network: Network
) -> list[float]:
    """Return for each step what the parts take that come in it, after those before them on their link."""
    longest = [0.0] * len(attention.schedules[direction])
    for sender, steps in enumerate(comm.allgather(sent_in(attention, comm, direction))):
        for number, sends in enumerate(steps):
            carried: dict[Any, float] = {}
            for peer, nbytes in sends:
                link, way = network.link(sender, peer), network.way(sender, peer)
                carried[way] = carried.get(way, 0.0) + nbytes / link.bandwidth
                if peer == comm.rank:
                    longest[number] = max(longest[number], carried[way] + link.latency)
    return longest


@pytest.mark.parametrize(
    "links", [{"link": LINK}, {"link": f"{LINK},shared"}, {"link_map": LINK_MAP}], ids=str
)
@pytest.mark.parametrize("way", [Way("ring"), Way("ulysses"), Way("allgather")], ids=str)
def test_without_polling_the_ways_begin_with_the_wait(
    comm: MPI.Comm, collective_assert: Check, way: Way, links: dict[str, str]
) -> None:
    """Nobody calls MPI while computing, so nothing moves meanwhile; then parts follow each other.

    In the backward pass of a ring a block and its gradients take the same link.
    """
    short: list[str] = []
    network = network_of(links.get("link"), links.get("link_map"))
    assert network is not None
    with make(comm, way, PROBLEM, progress="wait", **links) as attention:
        mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
        both_passes(attention, mine)
        records = attention.trace.records
        ways = longest_ways(comm, attention, Pass.BACKWARD, network)
        for number, least in enumerate(ways):
            waited = records["received"][number] - records["compute_done"][number]
            if least and not waited >= least - SLACK:
                short.append(f"step {number}: {waited} of {least}")
    collective_assert(not short, short)


@pytest.mark.ranks(least=2)
def test_a_long_way_is_no_stall(comm: MPI.Comm, collective_assert: Check) -> None:
    """Ranks wait in pairs for 2 s, twice as long as their patience with what makes no progress."""
    pair = comm.Split(color=comm.rank // 2, key=comm.rank)
    problem = Problem(2, 0, "contiguous", "full", heads=1, kv_heads=1)
    whole = random_tensors(problem)
    expected = attend(pair, Way("allgather"), problem, whole)["out"]
    with make(pair, Way("allgather"), problem, link="1Gbit/s,2s", timeout=1.0) as attention:
        mine = problem.shards(pair, whole)
        out, _ = attention.forward(mine["q"], mine["k"], mine["v"])
        records = attention.trace.records
        errors = clock_errors(attention, pair)
    other = 1 - pair.rank
    started = pair.allgather(records["started"][0])
    alone = pair.size == 1
    pair.Free()
    collective_assert(out.tobytes() == expected.tobytes())
    arrived = alone or records["received"][0] >= started[other] + 2.0 - errors[other] - SLACK
    collective_assert(arrived, records["received"][0] - started[0])


def test_notes_are_not_counted(comm: MPI.Comm, collective_assert: Check) -> None:
    """Arrival times and checksums go beside the parts, and change no count."""
    found = []
    for options in ({}, {"link": "1Gbit/s,1us"}, {"check_transfers": True}):
        with make(comm, Way("ring"), PROBLEM, **options) as attention:
            both_passes(attention, PROBLEM.shards(comm, random_tensors(PROBLEM)))
            records = attention.trace.records
            found.append([records[name].tolist() for name in ("bytes_sent", "messages", "hops")])
    collective_assert(found[0] == found[1] == found[2])


@pytest.mark.ranks(least=2)
def test_transfers_alone_take_the_link_too(comm: MPI.Comm, collective_assert: Check) -> None:
    with make(comm, Way("ring"), PROBLEM, link=LINK) as attention:
        mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
        attention.forward(mine["q"], mine["k"], mine["v"])
        alone = attention.transfers_alone().records
        errors = clock_errors(attention, comm)
        upstream = (comm.rank - 1) % comm.size
        sends = comm.allgather((alone["started"].tolist(), sent_in(attention, comm, Pass.FORWARD)))[
            upstream
        ]
    for number in range(comm.size - 1):
        ((_, nbytes),) = sends[1][number]
        moment = sends[0][number] + LATENCY + nbytes / BANDWIDTH - errors[upstream]
        collective_assert(alone["received"][number] >= moment - SLACK, f"step {number}")


def test_bandwidth_is_in_bits(collective_assert: Check) -> None:
    """The numbers that tests here count with."""
    link = parse_link(LINK)
    collective_assert((link.latency, link.bandwidth, link.shared) == (LATENCY, BANDWIDTH, False))


@pytest.mark.ranks(least=2, most=2)
def test_a_link_of_a_rank_that_there_is_not_is_refused_everywhere(
    comm: MPI.Comm, collective_assert: Check
) -> None:
    told = ""
    try:
        make(comm, Way("ring"), PROBLEM, link_map=f"{LINK_MAP}:1-2=1Gbit/s,1ms")
    except ConfigError as error:
        told = str(error)
    collective_assert("1-2 is no way between two of the 2 ranks" in told, told)


@pytest.mark.parametrize("per_node", [1, 2, 3])
def test_nodes_of_a_map_are_the_groups_of_methods(
    comm: MPI.Comm, collective_assert: Check, per_node: int
) -> None:
    """All ranks are on one host, and would be one group."""
    links = f"{per_node}:1Gbit/s,1us:1Gbit/s,1us"
    told, inner = "", 0
    try:
        with make(comm, Way("double-ring"), PROBLEM, link_map=links) as attention:
            inner = attention.inner
    except ConfigError as error:
        told = str(error)
    even = comm.size % per_node == 0 or comm.size < per_node
    collective_assert(
        inner == min(per_node, comm.size) if even else "nodes have" in told, f"{inner} {told}"
    )
