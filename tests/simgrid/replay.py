"""Replays the programs of ranks on SimGrid, and prints when each rank ends. Knows nothing of ringmpi.

    /usr/bin/python3 replay.py < case.json

Needs Debian's python3-simgrid. The case has ``links`` (bytes a second by name), ``routes`` (sender,
receiver, names of links, seconds of latency), ``waits`` (post the messages that are not eager only once the
compute is done, as if MPI moved nothing before) and ``programs``: of each rank a list of steps, each with
``compute`` in seconds, ``sends`` and ``receives`` (a number of the message, peer, bytes, whether it is
eager) and ``due`` (numbers to wait for).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import simgrid

#: SimGrid's plain flow model. Its default corrects bandwidth and latency for TCP as measured on Ethernet
#: (factors of 0.97 and 13.01), bounds rates by a TCP window, and lets acknowledgements take a part of the
#: way back: none of that is in what is compared here. Without weight-S flows of equal latency share a link
#: equally.
MODEL = (
    "network/model:CM02",
    "network/latency-factor:1",
    "network/bandwidth-factor:1",
    "network/weight-S:0",
    "network/TCP-gamma:0",
    "network/crosstraffic:0",
    "network/loopback-lat:0",
)


def mailbox(number: int) -> simgrid.Mailbox:
    return simgrid.Engine.instance.mailbox_by_name_or_create(f"message {number}")


def run_rank(rank: int, steps: list[dict[str, Any]], waits: bool, ends: dict[int, float]) -> None:
    """Post, compute and wait, step after step."""
    for step in steps:
        for number, _, _, eager in step["receives"]:
            if (
                eager
            ):  # Its mailbox belongs to the receiver, so that it leaves before anybody asks for it.
                mailbox(number).set_receiver(simgrid.Actor.self())
    simgrid.this_actor.yield_()
    posted: dict[
        int, tuple[Any, ...]
    ] = {}  # What is received stays where it is put until it is waited for.
    for step in steps:
        late: list[Any] = []
        for message in step["receives"]:
            number, _, _, eager = message
            if waits and not eager:
                late.append((message, False))
            else:
                posted[number] = mailbox(number).get_async()
        for message in step["sends"]:
            number, _, nbytes, eager = message
            if waits and not eager:
                late.append((message, True))
            elif eager:
                mailbox(number).put_init(number, nbytes).detach()
            else:
                posted[number] = (mailbox(number).put_async(number, nbytes),)
        simgrid.this_actor.sleep_for(step["compute"])
        for (number, _, nbytes, _), sends in late:
            box = mailbox(number)
            posted[number] = (box.put_async(number, nbytes),) if sends else box.get_async()
        for number in step["due"]:
            posted[number][0].wait()
    ends[rank] = simgrid.Engine.clock


def main() -> None:
    case = json.load(sys.stdin)
    engine = simgrid.Engine(["replay", *(f"--cfg={option}" for option in MODEL)])
    ends: dict[int, float] = {}
    platform = simgrid.NetZone.create_full_zone("machine")
    ranks = range(len(case["programs"]))
    hosts = [platform.create_host(f"rank {rank}", 1e9) for rank in ranks]
    links = {
        name: platform.create_link(name, bandwidth).seal() for name, bandwidth in case["links"].items()
    }
    for sender, receiver, names, latency in case["routes"]:
        way = platform.create_link(f"way {sender} {receiver}", 1e18).set_latency(latency).seal()
        over = [simgrid.LinkInRoute(link) for link in (way, *(links[name] for name in names))]
        platform.add_route(hosts[sender].netpoint, hosts[receiver].netpoint, None, None, over, False)
    platform.seal()
    for rank in ranks:
        simgrid.Actor.create(
            f"rank {rank}", hosts[rank], run_rank, rank, case["programs"][rank], case["waits"], ends
        )
    engine.run()
    json.dump([ends[rank] for rank in ranks], sys.stdout)


if __name__ == "__main__":
    main()
