"""Emulated links: any machine becomes a cluster with a slow interconnect.

MPI moves the bytes as fast as it can; the receiver lets a part count as received only when a link of the
given latency and bandwidth could have delivered it. The sender works out when that is as it posts the send,
since it knows what else its link carries, and tells the receiver in a note. A receiver that calls MPI only to
wait moves nothing before it waits, which it works out by itself.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ringmpi.digits import whole_number
from ringmpi.errors import ConfigError

#: Bits, not bytes: links are sold in bit/s.
_RATE = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?)(?P<prefix>[kMGT]?)bit/s")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIME = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?)(?P<unit>ns|us|ms|s)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


_PAIR = re.compile(r"(?P<rank>[0-9]{1,9})-(?P<peer>[0-9]{1,9})=(?P<link>.*)")


@dataclass(frozen=True)
class Link:
    """What a link is like, one way.

    Attributes
    ----------
    bandwidth : float
        Bytes a second, one way.
    latency : float
        Seconds.
    shared : bool
        Whether all that a rank sends goes through one link, as through a network card; else there is a link
        from each rank to each other.
    """

    bandwidth: float
    latency: float
    shared: bool = False


def parse_link(text: str) -> Link:
    """Return the link that a text such as ``100Mbit/s,1ms`` or ``10Gbit/s,5us,shared`` describes. Local.

    Raises
    ------
    ConfigError
        If it does not.

    Examples
    --------
    >>> parse_link("100Mbit/s,1ms")
    Link(bandwidth=12500000.0, latency=0.001, shared=False)
    """
    rate, delay, *way = *text.split(","), ""
    found, time = _RATE.fullmatch(rate), _TIME.fullmatch(delay)
    if found and time and way in ([""], ["shared", ""]):
        bandwidth = float(found["number"]) * _PREFIXES[found["prefix"]] / 8
        latency = float(time["number"]) * _UNITS[time["unit"]]
        if 0 < bandwidth < math.inf and math.isfinite(latency):
            return Link(bandwidth, latency, "shared" in way)
    raise ConfigError(
        f"link={text!r}: use RATE,LATENCY such as 100Mbit/s,1ms or 25Gbit/s,2us, with a rate above 0; add "
        f",shared for one link a rank instead of one between each two"
    )


@dataclass(frozen=True)
class Network:
    """Which link goes from any rank to any other.

    Attributes
    ----------
    inter : Link
        Between ranks of different nodes.
    intra : Link, optional
        Between ranks of a node.
    ranks_per_node : int
        Neighbouring ranks that share a node.
    others : mapping of (rank, peer) to Link
        From one rank to another one, instead of these.
    """

    inter: Link
    intra: Link | None = None
    ranks_per_node: int = 1
    others: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def link(self, rank: int, peer: int) -> Link:
        """Return the link from a rank to another. Local."""
        other = self.others.get((rank, peer))
        if other is not None:
            return other
        return self.inter if self.intra is None or self.node(rank) != self.node(peer) else self.intra

    def way(self, rank: int, peer: int) -> Hashable:
        """Return a name for that link among those out of the rank: a shared one has one name. Local."""
        link = self.link(rank, peer)
        return (link is self.intra,) if link.shared else peer

    def node(self, rank: int) -> int:
        """Return the node of a rank. Local."""
        return rank // self.ranks_per_node

    def check(self, size: int) -> None:
        """Refuse links of ranks that there are not. Local.

        Raises
        ------
        ConfigError
            If a rank is none of `size`.
        """
        for rank, peer in self.others:
            if max(rank, peer) >= size:
                raise ConfigError(
                    f"link_map: {rank}-{peer} is no way between two of the {size} ranks, 0 to {size - 1}"
                )


def network_of(link: str | None, link_map: str | None) -> Network | None:
    """Return the network of one link or of a map; None without either. Local.

    Raises
    ------
    ConfigError
        If both are given, or one is wrong.
    """
    if link is not None and link_map is not None:
        raise ConfigError(
            f"link={link} with link_map={link_map}: give one of them; a map says it for all ranks"
        )
    if link_map is not None:
        return parse_link_map(link_map)
    return None if link is None else Network(parse_link(link))


def nodes_of(
    network: Network | None, size: int, hosts: Callable[[], Sequence[str]]
) -> Callable[[], Sequence[str]]:
    """Return what tells the node of every rank: that of the map if there is one, else its host. Local."""
    if network is None or network.intra is None:
        return hosts
    return lambda: [str(network.node(rank)) for rank in range(size)]


def parse_link_map(text: str) -> Network:
    """Return the network that ``RANKS_PER_NODE:INTRA:INTER[:A-B=LINK]...`` describes. Local.

    INTRA, INTER and LINK are as `parse_link` takes them. ``A-B=LINK`` is the link from rank A to rank B, that
    way only.

    Raises
    ------
    ConfigError
        If it describes none.

    Examples
    --------
    >>> network = parse_link_map("4:200Gbit/s,1ms:25Gbit/s,5ms,shared")
    >>> network.link(2, 3)
    Link(bandwidth=25000000000.0, latency=0.001, shared=False)
    >>> network.link(3, 4)
    Link(bandwidth=3125000000.0, latency=0.005, shared=True)
    """
    given, *links = text.split(":")
    ranks = whole_number(given)
    if not ranks or len(links) < 2:
        raise ConfigError(
            f"link_map={text!r}: use RANKS_PER_NODE:INTRA:INTER such as "
            f"4:200Gbit/s,1us:25Gbit/s,5us,shared, with 1 rank or more; add :A-B=LINK for the way from rank "
            f"A to rank B"
        )
    others: dict[tuple[int, int], Link] = {}
    for word in links[2:]:
        found = _PAIR.fullmatch(word)
        pair = (int(found["rank"]), int(found["peer"])) if found else (0, 0)
        if found is None or pair[0] == pair[1] or pair in others:
            raise ConfigError(
                f"link_map={text!r}: {word!r}: use A-B=LINK such as 2-3=1Gbit/s,1ms, with two different "
                f"ranks, each way once"
            )
        others[pair] = _link_of_map(text, found["link"])
        if others[pair].shared:
            raise ConfigError(
                f"link_map={text!r}: {word!r}: a link between two ranks is shared with nobody; leave "
                f",shared away"
            )
    intra, inter = (_link_of_map(text, word) for word in links[:2])
    return Network(inter, intra, ranks, others)


def _link_of_map(text: str, word: str) -> Link:
    try:
        return parse_link(word)
    except ConfigError as error:
        raise ConfigError(f"link_map={text!r}: {error}") from error


class Traffic:
    """What the links out of one rank carry. Local.

    A link carries one part at a time, in the order in which they are sent.

    Parameters
    ----------
    network : Network
    rank : int
    """

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self._rank = rank
        self._free: dict[Hashable, float] = defaultdict(lambda: -math.inf)
        self.begin_step()

    def begin_step(self) -> None:
        """Begin to count anew what a step sends."""
        self._carried: dict[Hashable, float] = defaultdict(float)

    def arrival(self, peer: int, nbytes: int, now: float) -> float:
        """Return when bytes that are sent now have arrived, after all that was sent before them.

        Parameters
        ----------
        peer : int
        nbytes : int
        now : float
            Seconds on this rank's clock; so is the result.
        """
        link, way = self._link_and_way(peer)
        self._carried[way] += nbytes / link.bandwidth
        self._free[way] = max(now, self._free[way]) + nbytes / link.bandwidth
        return self._free[way] + link.latency

    def lasting(self, peer: int) -> float:
        """Return what the part sent last to a peer takes, with those of its step before it on its link."""
        link, way = self._link_and_way(peer)
        return self._carried[way] + link.latency

    def _link_and_way(self, peer: int) -> tuple[Link, Hashable]:
        return self._network.link(self._rank, peer), self._network.way(self._rank, peer)


class Waiting:
    """What the links into a rank deliver that calls MPI only to wait. Local.

    Nothing moves before somebody waits for it, so all times here are seconds that the rank has waited since
    the pass began. The parts of one sender come one after the other, in steps as they were sent.
    """

    def __init__(self) -> None:
        self._steps: dict[int, tuple[int, float]] = {}
        self._free: dict[int, float] = defaultdict(float)

    def arrival(self, sender: int, step: int, lasting: float, posted: float) -> float:
        """Return for how long the rank must have waited until a part is here.

        Parameters
        ----------
        sender : int
        step : int
            In which the receive was posted.
        lasting : float
            As `Traffic.lasting` told its sender.
        posted : float
            For how long the rank had waited then.
        """
        last, began = self._steps.get(sender, (-1, 0.0))
        if last != step:
            began = max(posted, self._free[sender])
            self._steps[sender] = step, began
        self._free[sender] = max(self._free[sender], began + lasting)
        return began + lasting
