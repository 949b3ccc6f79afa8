from __future__ import annotations

from typing import Any

import pytest

from ringmpi.comm.link import (
    Link,
    Network,
    Traffic,
    Waiting,
    network_of,
    nodes_of,
    parse_link,
    parse_link_map,
)
from ringmpi.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100Mbit/s,1ms", Link(12.5e6, 1e-3)),
        ("8bit/s,0s", Link(1.0, 0.0)),
        ("1kbit/s,1s", Link(125.0, 1.0)),
        ("25Gbit/s,2us", Link(3.125e9, 2e-6)),
        ("1.6Tbit/s,500ns", Link(2e11, 5e-7)),
        ("1e3Mbit/s,1e-1ms", Link(1.25e8, 1e-4)),
        ("0.5Mbit/s,0.25s", Link(62500.0, 0.25)),
        ("10Gbit/s,5us,shared", Link(1.25e9, 5e-6, shared=True)),
    ],
)
def test_a_link_is_read_in_bits_a_second(text: str, link: Network) -> None:
    found = parse_link(text)

    # A prefix, a unit and a division by 8, which is exact: two roundings of each number at most.
    assert found.bandwidth == pytest.approx(link.bandwidth, rel=4 * 2.0**-52)
    assert found.latency == pytest.approx(link.latency, rel=4 * 2.0**-52)
    assert found.shared is link.shared


@pytest.mark.parametrize(
    "text",
    [
        "",
        "100Mbit/s",
        "1ms,100Mbit/s",
        "100MB/s,1ms",
        "100Mbyte/s,1ms",
        "100mbit/s,1ms",
        "100Mbit/s,1min",
        "100Mbit/s,1",
        "100Mbit,1ms",
        "0Mbit/s,1ms",
        "0.0bit/s,1ms",
        "1e-400bit/s,1ms",
        "1e400Gbit/s,1ms",
        "1Mbit/s,1e400s",
        "nanMbit/s,1ms",
        "infMbit/s,1ms",
        "1Mbit/s,nanms",
        "1Mbit/s,infs",
        "-100Mbit/s,1ms",
        "100Mbit/s,-1ms",
        "1.2.3Mbit/s,1ms",
        ".Mbit/s,1ms",
        "100 Mbit/s,1ms",
        "100Mbit/s, 1ms",
        "100Mbit/s,1ms,",
        "100Mbit/s,1ms,shared,",
        "100Mbit/s,1ms,Shared",
        "100Mbit/s,1ms,mine",
        "100Mbit/s,1ms\n",
    ],
    ids=repr,
)
def test_what_is_no_link_is_refused_with_what_would_be_one(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_link(text)

    assert str(refusal.value).startswith(f"link={text!r}: use RATE,LATENCY such as 100Mbit/s,1ms")
    assert "rate above 0" in str(refusal.value)


#: 1000 bytes a second, a quarter of a second: exact in binary, as are all times below.
SLOW, SHARED = (Network(Link(1024.0, 0.25, shared)) for shared in (False, True))


@pytest.mark.parametrize("link", [SLOW, SHARED], ids=["alone", "shared"])
class TestTraffic:
    def test_a_transfer_takes_its_bytes_and_the_latency(self, link: Network) -> None:
        assert Traffic(link, 0).arrival(1, 512, now=10.0) == 10 + 0.5 + 0.25

    def test_nothing_takes_the_latency(self, link: Network) -> None:
        assert Traffic(link, 0).arrival(1, 0, now=10.0) == 10.25

    def test_a_transfer_waits_for_those_before_it_and_has_the_latency_once(self, link: Network) -> None:
        traffic = Traffic(link, 0)

        arrivals = [traffic.arrival(1, 512, now=now) for now in (0.0, 0.0, 0.25, 1.0)]

        # The link is busy until 0.5, 1, 1.5 and 2; the latencies overlap.
        assert arrivals == [0.75, 1.25, 1.75, 2.25]

    def test_a_link_that_is_free_again_starts_at_once(self, link: Network) -> None:
        traffic = Traffic(link, 0)
        traffic.arrival(1, 512, now=0.0)

        assert traffic.arrival(1, 512, now=7.0) == 7.75

    def test_many_small_transfers_take_what_one_large_does(self, link: Network) -> None:
        small, large = Traffic(link, 0), Traffic(link, 0)

        arrivals = [small.arrival(1, 64, now=3.0) for _ in range(16)]

        assert arrivals[-1] == large.arrival(1, 1024, now=3.0) == 4.25
        assert arrivals == sorted(arrivals)

    def test_two_ranks_share_nothing(self, link: Network) -> None:
        mine, others = Traffic(link, 0), Traffic(link, 2)
        mine.arrival(1, 1024, now=0.0)

        assert others.arrival(1, 1024, now=0.0) == 1.25


def test_each_peer_has_a_link_of_its_own_unless_they_share_one() -> None:
    alone, shared = Traffic(SLOW, 3), Traffic(SHARED, 3)

    assert [alone.arrival(peer, 1024, now=0.0) for peer in (0, 1, 2)] == [1.25, 1.25, 1.25]
    assert [shared.arrival(peer, 1024, now=0.0) for peer in (0, 1, 2)] == [1.25, 2.25, 3.25]


MAP = "2:8192bit/s,0.25s:4096bit/s,0.5s,shared:2-1=1024bit/s,1s:0-1=2048bit/s,0s"


def test_a_map_gives_the_links_of_a_node_those_between_nodes_and_single_ones() -> None:
    network = parse_link_map(MAP)

    assert network.link(1, 0) == network.link(2, 3) == network.link(3, 2) == Link(1024.0, 0.25)
    assert network.link(1, 2) == network.link(0, 3) == network.link(3, 0) == Link(512.0, 0.5, True)
    # One way only.
    assert network.link(2, 1) == Link(128.0, 1.0)
    assert network.link(0, 1) == Link(256.0, 0.0)


def test_a_network_card_is_shared_by_what_leaves_the_node_and_by_nothing_else() -> None:
    traffic = Traffic(parse_link_map(MAP), 2)

    arrivals = [traffic.arrival(peer, 512, now=0.0) for peer in (0, 4, 3, 0, 1)]

    # Over the card to 0, 4 and 0 again, one second each; in the node to 3; over the slow one to 1.
    assert arrivals == [1.5, 2.5, 0.75, 3.5, 5.0]


@pytest.mark.parametrize("shared", ["in a node", "between nodes", "both"])
def test_cards_of_both_kinds_are_two(shared: str) -> None:
    inner, outer = (",shared" * (shared in (kind, "both")) for kind in ("in a node", "between nodes"))
    traffic = Traffic(parse_link_map(f"3:8192bit/s,0s{inner}:8192bit/s,0s{outer}"), 0)

    arrivals = [traffic.arrival(peer, 1024, now=0.0) for peer in (1, 3, 2, 4)]

    assert arrivals == [1.0, 1.0, 2.0 if inner else 1.0, 2.0 if outer else 1.0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "use RANKS_PER_NODE:INTRA:INTER such as"),
        ("4", "use RANKS_PER_NODE:INTRA:INTER such as"),
        ("4:1Gbit/s,1ms", "use RANKS_PER_NODE:INTRA:INTER such as"),
        ("0:1Gbit/s,1ms:1Gbit/s,1ms", "1 rank or more"),
        ("-1:1Gbit/s,1ms:1Gbit/s,1ms", "1 rank or more"),
        ("two:1Gbit/s,1ms:1Gbit/s,1ms", "1 rank or more"),
        ("9999999999:1Gbit/s,1ms:1Gbit/s,1ms", "1 rank or more"),
        ("4:1Gbit/s,1ms:1Gb/s,1ms", "link='1Gb/s,1ms': use RATE,LATENCY"),
        ("4:1Gbit/s:1Gbit/s,1ms", "link='1Gbit/s': use RATE,LATENCY"),
        ("4:1Gbit/s,1ms:1Gbit/s,1ms:", "'': use A-B=LINK such as 2-3=1Gbit/s,1ms"),
        ("4:1Gbit/s,1ms:1Gbit/s,1ms:2=1Gbit/s,1ms", "use A-B=LINK"),
        ("4:1Gbit/s,1ms:1Gbit/s,1ms:2-2=1Gbit/s,1ms", "two different ranks"),
        ("4:1Gbit/s,1ms:1Gbit/s,1ms:2-3=1Gbit/s,1ms:2-3=2Gbit/s,1ms", "each way once"),
        ("4:1Gbit/s,1ms:1Gbit/s,1ms:2-3=1Gbit/s", "link='1Gbit/s': use RATE,LATENCY"),
        ("4:1Gbit/s,1ms:1Gbit/s,1ms:2-3=1Gbit/s,1ms,shared", "leave ,shared away"),
    ],
    ids=repr,
)
def test_what_is_no_map_is_refused_with_what_would_be_one(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_link_map(text)

    assert str(refusal.value).startswith(f"link_map={text!r}: ")
    assert told in str(refusal.value)


def test_a_link_between_ranks_that_there_are_not_is_refused() -> None:
    network = parse_link_map(MAP)
    network.check(3)

    with pytest.raises(ConfigError, match="2-1 is no way between two of the 2 ranks, 0 to 1"):
        network.check(2)


def test_a_link_and_a_map_are_one_too_many() -> None:
    assert network_of(None, None) is None
    with pytest.raises(ConfigError, match="give one of them"):
        network_of("1Gbit/s,1ms", MAP)


def test_a_map_says_which_ranks_share_a_node() -> None:
    def hosts() -> list[str]:
        return ["here"] * 5

    assert list(nodes_of(parse_link_map(MAP), 5, hosts)()) == ["0", "0", "1", "1", "2"]
    assert nodes_of(SLOW, 5, hosts)() == nodes_of(None, 5, hosts)() == ["here"] * 5


#: What two senders post, as (sender, step, bytes), in order; for how long the receiver had waited at the
#: beginning of each step; after how long it has each part. Links as SLOW: 512 bytes take 0.5 s, and 0.25 s.
WAITED: dict[str, tuple[list[tuple[int, int, int]], dict[int, float], list[float]]] = {
    "one": ([(1, 0, 512)], {0: 0.0}, [0.75]),
    "after a wait": ([(1, 4, 512)], {4: 2.0}, [2.75]),
    "two of one sender": ([(1, 0, 512), (1, 0, 512)], {0: 0.0}, [0.75, 1.25]),
    "of two senders": ([(1, 0, 512), (2, 0, 512)], {0: 0.0}, [0.75, 0.75]),
    "steps that overlap": ([(1, 0, 1024), (1, 1, 512)], {0: 0.0, 1: 0.25}, [1.25, 2.0]),
    "steps apart": ([(1, 0, 512), (1, 1, 512)], {0: 0.0, 1: 3.0}, [0.75, 3.75]),
}


@pytest.mark.parametrize(("posted", "waited", "expected"), WAITED.values(), ids=WAITED.keys())
def test_parts_that_wait_to_be_fetched_come_one_after_the_other(
    posted: list[tuple[int, int, int]], waited: dict[int, float], expected: list[float]
) -> None:
    traffic = {sender: Traffic(SLOW, sender) for sender in (1, 2)}
    waiting = Waiting()

    found, last = [], -1
    for sender, step, nbytes in posted:
        if step != last:
            for sent in traffic.values():
                sent.begin_step()
        last = step
        traffic[sender].arrival(0, nbytes, now=0.0)
        found.append(waiting.arrival(sender, step, traffic[sender].lasting(0), waited[step]))

    # Latencies of parts in one step overlap; those of different steps do not, as nobody has asked yet.
    assert found == expected


def test_what_goes_to_others_first_over_a_shared_card_is_waited_for_too() -> None:
    def lasting(network: Network) -> list[float]:
        traffic = Traffic(network, 0)
        found: list[Any] = []
        for peer in (1, 2, 3):
            traffic.arrival(peer, 1024, now=0.0)
            found.append(traffic.lasting(peer))
        return found

    assert lasting(SLOW) == [1.25, 1.25, 1.25]
    assert lasting(SHARED) == [1.25, 2.25, 3.25]
