"""An emulated link: any machine becomes a cluster with a slow interconnect.

MPI moves the bytes as fast as it can; the receiver lets a part count as received only when a link of the
given latency and bandwidth could have delivered it. The sender works out when that is as it posts the send,
since it knows what else its link carries, and tells the receiver in a note.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ringmpi.errors import ConfigError

#: Bits, not bytes: links are sold in bit/s.
_RATE = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?)(?P<prefix>[kMGT]?)bit/s")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIME = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?)(?P<unit>ns|us|ms|s)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """What a link is like.

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


class Traffic:
    """What the links out of one rank carry. Local.

    Parameters
    ----------
    link : Link
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free: dict[int, float] = {}

    def arrival(self, peer: int, nbytes: int, now: float) -> float:
        """Return when bytes that are sent now have arrived, after all that was sent before them.

        Parameters
        ----------
        peer : int
        nbytes : int
        now : float
            Seconds on this rank's clock; so is the result.
        """
        way = 0 if self._link.shared else peer
        self._free[way] = max(now, self._free.get(way, -math.inf)) + nbytes / self._link.bandwidth
        return self._free[way] + self._link.latency
