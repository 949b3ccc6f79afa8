from __future__ import annotations

import pytest

from ringmpi.comm.link import Link, Traffic, parse_link
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
def test_a_link_is_read_in_bits_a_second(text: str, link: Link) -> None:
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
SLOW, SHARED = Link(1024.0, 0.25), Link(1024.0, 0.25, shared=True)


@pytest.mark.parametrize("link", [SLOW, SHARED], ids=["alone", "shared"])
class TestTraffic:
    def test_a_transfer_takes_its_bytes_and_the_latency(self, link: Link) -> None:
        assert Traffic(link).arrival(1, 512, now=10.0) == 10 + 0.5 + 0.25

    def test_nothing_takes_the_latency(self, link: Link) -> None:
        assert Traffic(link).arrival(1, 0, now=10.0) == 10.25

    def test_a_transfer_waits_for_those_before_it_and_has_the_latency_once(self, link: Link) -> None:
        traffic = Traffic(link)

        arrivals = [traffic.arrival(1, 512, now=now) for now in (0.0, 0.0, 0.25, 1.0)]

        # The link is busy until 0.5, 1, 1.5 and 2; the latencies overlap.
        assert arrivals == [0.75, 1.25, 1.75, 2.25]

    def test_a_link_that_is_free_again_starts_at_once(self, link: Link) -> None:
        traffic = Traffic(link)
        traffic.arrival(1, 512, now=0.0)

        assert traffic.arrival(1, 512, now=7.0) == 7.75

    def test_many_small_transfers_take_what_one_large_does(self, link: Link) -> None:
        small, large = Traffic(link), Traffic(link)

        arrivals = [small.arrival(1, 64, now=3.0) for _ in range(16)]

        assert arrivals[-1] == large.arrival(1, 1024, now=3.0) == 4.25
        assert arrivals == sorted(arrivals)

    def test_two_ranks_share_nothing(self, link: Link) -> None:
        mine, others = Traffic(link), Traffic(link)
        mine.arrival(1, 1024, now=0.0)

        assert others.arrival(1, 1024, now=0.0) == 1.25


def test_each_peer_has_a_link_of_its_own_unless_they_share_one() -> None:
    alone, shared = Traffic(SLOW), Traffic(SHARED)

    assert [alone.arrival(peer, 1024, now=0.0) for peer in (0, 1, 2)] == [1.25, 1.25, 1.25]
    assert [shared.arrival(peer, 1024, now=0.0) for peer in (0, 1, 2)] == [1.25, 2.25, 3.25]
