"""Machines as data: how fast a rank computes, how fast its links are, what fits into its memory.

A machine file is TOML. `calibrate` writes one, `plan` and `simulate` read it. All numbers are in the units
without prefix: seconds, bytes, bytes a second (not bits), FLOP/s.

::

    about = "what this is, and where its numbers come from"
    memory = 80e9                     # bytes a rank
    ranks_per_node = 8                # neighbouring ranks whose links are [links.intra]

    [compute.bfloat16]                # one table for each dtype of q, k and v
    forward = 312e12                  # FLOP/s of a rank that attends
    backward = [[1024, 2e14], [8192, 3e14]]   # [tokens of a block, FLOP/s]; left away: as forward

    [links.intra]                     # between two ranks of a node
    latency = 1e-5                    # seconds
    bandwidth = 300e9                 # bytes a second, one way, from a rank to one other
    total = 300e9                     # to all others together; left away: as bandwidth
    eager_limit = 65536               # bytes; larger messages wait until the receiver has posted

    [links.inter]                     # between ranks of two nodes
    latency = 2e-5
    bandwidth = [[65536, 8e9], [16777216, 25e9]]   # [bytes of a message, bytes a second]
    node_total = 100e9                # one way, of all ranks of a node; left away: as many times total
    eager_limit = 65536               # bytes; larger messages wait until the receiver has posted

    [noise]
    relative = 0.01                   # standard deviation of a step's compute, as a share of it

    [topology]                        # left away: what leaves a node is not held up any more
    kind = "fat-tree"                 # or "dragonfly"
    ranks_per_group = 512             # neighbouring ranks under one leaf, or in one dragonfly group
    taper = 0.5                       # what can leave a group, as a share of what its nodes can send
    latency = 1e-6                    # seconds that a message between groups takes longer; left away: 0
    groups = 25                       # of the whole machine; for a dragonfly

    [noise]                           # left away: none
    relative = 0.01                   # standard deviation of the compute of a step, over its mean

    [overlap]                         # measured: which part of a transfer is hidden behind as long a compute
    poll = 0.98
    wait = 0.03

One rank needs no links. Each of forward, backward, latency and bandwidth is a number or a curve; a number is
a curve of one point.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from itertools import pairwise
from math import inf, isfinite, log
from pathlib import Path
from typing import Any

from ringmpi.comm.policy import PROGRESS
from ringmpi.config import text_of
from ringmpi.errors import ConfigError, check_choice
from ringmpi.schedule import Pass
from ringmpi.softmax import DTYPES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Sizes, rising, and what was found for each.
Points = Sequence[tuple[float, float]]

#: Between ranks of a node, and of two nodes.
INTRA, INTER = "intra", "inter"

#: What a machine file must give, and what it may.
NEEDED = ("memory", "ranks_per_node", "compute")
OTHERS = ("about", "links", "noise", "overlap", "topology")

#: How groups of nodes are joined: all of them above one tapered uplink each; each two by a link of their own.
FAT_TREE, DRAGONFLY = "fat-tree", "dragonfly"

#: Bytes up to which a message leaves before its receiver has posted, where a machine file does not say: as
#: in Open MPI over TCP (btl_tcp_eager_limit, github.com/open-mpi/ompi) and in LogGOPSim's defaults.
EAGER_LIMIT = 65536.0

#: Below these a number is most likely in another unit, such as GB/s. A modem sends 7 kB/s.
LEAST_BANDWIDTH = 1e3
LEAST_FLOPS = 1e6
LEAST_MEMORY = 1e6

#: No link that anybody attends over has such a latency, in seconds; it was most likely meant in us.
LARGEST_LATENCY = 10.0


@dataclass(frozen=True)
class Curve:
    """A quantity that depends on a size.

    Between two points it is linear in the logarithm of the size, since sizes are measured at powers of two;
    outside of them it is that of the nearest point.

    Attributes
    ----------
    points : tuple of (float, float)
        Size and value, sizes rising.

    Examples
    --------
    >>> Curve(((1024, 100.0), (4096, 300.0))).at(2048)
    200.0
    """

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        """Return the value at a size. Local."""
        if size <= self.points[0][0]:
            return self.points[0][1]
        for (left, low), (right, high) in pairwise(self.points):
            if size <= right:
                part = log(size / left) / log(right / left)
                return (1 - part) * low + part * high
        return self.last

    @property
    def last(self) -> float:
        """The value at the largest size."""
        return self.points[-1][1]


def constant(value: float) -> Curve:
    """Return the curve of a quantity that depends on nothing."""
    return Curve(((1.0, value),))


@dataclass(frozen=True)
class Connection:
    """What the links of one kind are like.

    Attributes
    ----------
    latency : Curve
        Seconds, by the bytes of a message.
    bandwidth : Curve
        Bytes a second, one way, from a rank to one other, by the bytes of a message.
    total : float
        Bytes a second, one way, from a rank to all others together.
    node_total : float
        Bytes a second, one way, of all ranks of a node together.
    eager_limit : float
        Bytes of the largest message that leaves before its receiver has posted.
    """

    latency: Curve
    bandwidth: Curve
    total: float
    node_total: float = inf
    eager_limit: float = EAGER_LIMIT

    def seconds(self, nbytes: float) -> float:
        """Return how long one message takes that nothing else is beside: Hockney's ``alpha + n / B``."""
        return self.latency.at(nbytes) + nbytes / self.bandwidth.at(nbytes)


@dataclass(frozen=True)
class Compute:
    """How fast a rank attends.

    Attributes
    ----------
    forward, backward : Curve
        FLOP/s, by the tokens of a block; masked pairs are no FLOPs.
    """

    forward: Curve
    backward: Curve

    def of(self, direction: Pass) -> Curve:
        """Return the curve of a pass."""
        return self.forward if direction is Pass.FORWARD else self.backward


@dataclass(frozen=True)
class Topology:
    """How nodes are joined.

    Attributes
    ----------
    kind : str
        `FAT_TREE`: a message may meet all others that leave or enter its groups. `DRAGONFLY`: between each
        two groups there is a link of its own, an equal part of what leaves a group, and messages take no
        other way (minimal routing; an adaptive one does as well as a fat tree at best).
    ranks_per_group : int
    taper : float
        What can leave a group, as a share of what its nodes can send.
    latency : float
        Seconds that a message between groups takes longer.
    groups : int
        Of the whole machine.
    """

    kind: str
    ranks_per_group: int
    taper: float
    latency: float = 0.0
    groups: int = 2


@dataclass(frozen=True)
class Machine:
    """What ranks run on.

    Attributes
    ----------
    name : str
    about : str
        What it is, and where its numbers come from.
    memory : float
        Bytes a rank.
    ranks_per_node : int
    compute : mapping
        How fast a rank attends, by dtype.
    links : mapping
        `INTRA`, `INTER`, both, or none for a single rank.
    noise : float
        Standard deviation of a step's compute, as a share of it.
    overlap : mapping
        Part of a transfer that was hidden behind as much compute, 0 to 1, by progress; empty if unknown.
    topology : Topology or None
        None where all nodes are alike far.
    text : str
        The machine file.
    """

    name: str
    about: str
    memory: float
    ranks_per_node: int
    compute: Mapping[str, Compute]
    links: Mapping[str, Connection]
    noise: float = 0.0
    overlap: Mapping[str, float] = field(default_factory=dict)
    topology: Topology | None = None
    text: str = ""

    def kind(self, rank: int, peer: int) -> str:
        """Return which kind of link is between two ranks; neighbouring ranks share a node. Local."""
        return INTRA if self.node(rank) == self.node(peer) else INTER

    def node(self, rank: int) -> int:
        """Return the node of a rank. Local."""
        return rank // self.ranks_per_node

    def kinds(self, ranks: int) -> list[str]:
        """Return the kinds of link that a ring of so many ranks goes over. Local."""
        between = [INTRA] if min(ranks, self.ranks_per_node) > 1 else []
        return between + ([INTER] if ranks > self.ranks_per_node else [])

    def rates(self, dtype: str) -> Compute:
        """Return how fast a rank attends to inputs of a dtype.

        Raises
        ------
        ConfigError
            If the machine has no rates for it.
        """
        if dtype not in self.compute:
            raise ConfigError(
                f"dtype={dtype}: machine {self.name} has no rates for it; use {' or '.join(self.compute)}, "
                f"or a machine file with [compute.{dtype}]"
            )
        return self.compute[dtype]

    def check_ranks(self, ranks: int) -> None:
        """Refuse more ranks than the links of the machine connect.

        Raises
        ------
        ConfigError
            If there is no link between some two of them.
        """
        for kind in self.kinds(ranks):
            if kind not in self.links:
                most = self.ranks_per_node if kind == INTER else 1
                raise ConfigError(
                    f"ranks={ranks}: machine {self.name} has no [links.{kind}], and {self.ranks_per_node} "
                    f"rank(s) a node; use at most {most}, or a machine file with that table"
                )
        topology = self.topology
        if topology is None or topology.kind != DRAGONFLY:
            return
        if ranks > topology.groups * topology.ranks_per_group:
            raise ConfigError(
                f"ranks={ranks}: machine {self.name} has {topology.groups} groups of "
                f"{topology.ranks_per_group} ranks; use at most {topology.groups * topology.ranks_per_group}"
            )


def built_in() -> dict[str, str]:
    """Return the machine files that come with ringmpi: TOML text by name. Local."""
    folder = files("ringmpi.model").joinpath("machines")
    found = sorted(folder.iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".toml"): file.read_text("utf-8")
        for file in found
        if file.name.endswith(".toml")
    }


def machine_text(given: str) -> str:
    """Return the TOML of a machine, by the name of a built-in one or of a file. Local.

    Raises
    ------
    ConfigError
        If there is none.
    """
    if not given.endswith(".toml"):
        machines = built_in()
        check_choice("machine", given, [*machines, "FILE.toml"])
        return machines[given]
    try:
        return text_of(given)
    except (OSError, ValueError) as error:
        raise ConfigError(f"machine={given}: cannot be read: {error}") from error


def read_machine(given: str) -> Machine:
    """Return a machine, by the name of a built-in one or of a file. Local.

    Parameters
    ----------
    given : str
        What ends with ``.toml`` is a file, anything else a name.

    Raises
    ------
    ConfigError
        If there is none, or its file breaks a rule.

    Examples
    --------
    >>> read_machine("a100-nvlink").links["intra"].bandwidth.last
    300000000000.0
    """
    text = machine_text(given)
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"machine={given}: not TOML: {error}") from error
    return _Reader(given, text).machine(table)


class _Reader:
    """Takes a machine file apart; every refusal names the file and the key."""

    def __init__(self, given: str, text: str) -> None:
        self._given = given
        self._text = text

    def machine(self, table: Mapping[str, Any]) -> Machine:
        self._check_keys("", table, NEEDED, OTHERS)
        about = table.get("about", "")
        if not isinstance(about, str):
            raise self._error("about", about, "must be a text")
        ranks = self._count("ranks_per_node", table["ranks_per_node"])
        rates = self._table("compute", table["compute"])
        links, noise, overlap = (
            self._table(name, table.get(name, {})) for name in ("links", "noise", "overlap")
        )
        self._check_keys("compute", rates, (), DTYPES)
        self._check_keys("links", links, (), (INTRA, INTER))
        self._check_keys("noise", noise, ("relative",) if "noise" in table else (), ())
        self._check_keys("overlap", overlap, (), tuple(PROGRESS))
        if not rates:
            raise self._error(
                "compute", rates, "is empty; give FLOP/s in a table such as [compute.float32]"
            )
        return Machine(
            name=Path(self._given).name.removesuffix(".toml"),
            about=about,
            memory=self._number("memory", table["memory"], LEAST_MEMORY, "bytes; 80 GB are 80e9"),
            ranks_per_node=ranks,
            compute={name: self._compute(f"compute.{name}", rates[name]) for name in rates},
            links={name: self._connection(f"links.{name}", links[name]) for name in links},
            noise=self._number(
                "noise.relative", noise.get("relative", 0.0), 0.0, "shares of the compute"
            ),
            overlap={
                name: self._number(f"overlap.{name}", value, 0.0, "parts of a transfer, 0 to 1")
                for name, value in overlap.items()
            },
            topology=self._topology(table["topology"], ranks) if "topology" in table else None,
            text=self._text,
        )

    def _topology(self, value: Any, ranks_per_node: int) -> Topology:
        table = self._table("topology", value)
        self._check_keys("topology", table, ("kind", "ranks_per_group", "taper"), ("latency", "groups"))
        kind = table["kind"]
        if kind not in (FAT_TREE, DRAGONFLY):
            raise self._error("topology.kind", kind, f"must be {FAT_TREE} or {DRAGONFLY}")
        ranks = self._count("topology.ranks_per_group", table["ranks_per_group"])
        if ranks % ranks_per_node:
            raise self._error(
                "topology.ranks_per_group", ranks, f"must be whole nodes of {ranks_per_node} ranks"
            )
        taper = self._number("topology.taper", table["taper"], 0.0, "shares of what nodes can send")
        if not taper:
            raise self._error("topology.taper", taper, "must be above 0, or nothing leaves a group")
        if (kind == DRAGONFLY) != ("groups" in table):
            raise self._error(
                "topology.groups", table.get("groups"), "a dragonfly, and it alone, has it"
            )
        latency = self._seconds("topology.latency", table.get("latency", 0.0))
        groups = self._count("topology.groups", table.get("groups", 2))
        if groups < 2:
            raise self._error("topology.groups", groups, "must be 2 or more")
        return Topology(kind, ranks, taper, latency, groups)

    def _count(self, path: str, value: Any) -> int:
        if type(value) is not int or value < 1:
            raise self._error(path, value, "must be a whole number, 1 or more")
        return value

    def _seconds(self, path: str, value: Any) -> float:
        seconds = self._number(path, value, 0.0, "seconds; 5 us are 5e-6")
        if seconds > LARGEST_LATENCY:
            raise self._error(path, seconds, f"more than {LARGEST_LATENCY:g} s; 5 us are 5e-6")
        return seconds

    def _compute(self, path: str, value: Any) -> Compute:
        table = self._table(path, value)
        self._check_keys(path, table, ("forward",), ("backward",))
        unit = "FLOP/s; 312 TFLOP/s are 312e12"
        forward, backward = (
            self._curve(f"{path}.{key}", table.get(key, table["forward"]), LEAST_FLOPS, unit)
            for key in ("forward", "backward")
        )
        return Compute(forward, backward)

    def _connection(self, path: str, value: Any) -> Connection:
        table = self._table(path, value)
        self._check_keys(path, table, ("latency", "bandwidth"), ("total", "node_total", "eager_limit"))
        unit = "bytes a second; 300 GB/s are 300e9, 100 Gbit/s are 12.5e9"
        bandwidth = self._curve(f"{path}.bandwidth", table["bandwidth"], LEAST_BANDWIDTH, unit)
        latency = self._curve(f"{path}.latency", table["latency"], 0.0, "seconds; 5 us are 5e-6")
        for _, seconds in latency.points:
            self._seconds(f"{path}.latency", seconds)
        largest = max(rate for _, rate in bandwidth.points)
        total = self._number(f"{path}.total", table.get("total", largest), LEAST_BANDWIDTH, unit)
        if total < largest:
            raise self._error(
                f"{path}.total", total, f"must be at least the bandwidth to one other rank, {largest:g}"
            )
        node_total = inf
        if "node_total" in table:
            node_total = self._number(f"{path}.node_total", table["node_total"], LEAST_BANDWIDTH, unit)
        limit = self._number(
            f"{path}.eager_limit", table.get("eager_limit", EAGER_LIMIT), 0.0, "bytes; 64 KiB are 65536"
        )
        return Connection(latency, bandwidth, total, node_total, limit)

    def _curve(self, path: str, value: Any, least: float, unit: str) -> Curve:
        if not isinstance(value, list):
            return constant(self._number(path, value, least, unit))
        pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
        if not value or len(pairs) < len(value):
            raise self._error(path, value, "a curve is a list of pairs like [[1024, 1e9], [4096, 2e9]]")
        points = [
            (self._number(path, size, 1.0, "sizes"), self._number(path, number, least, unit))
            for size, number in pairs
        ]
        if any(left >= right for (left, _), (right, _) in pairwise(points)):
            raise self._error(path, value, "the sizes of a curve, first in each pair, must rise")
        return Curve(tuple(points))

    def _number(self, path: str, value: Any, least: float, unit: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self._error(path, value, f"must be a finite number, in {unit}")
        if value < least:
            raise self._error(path, value, f"below {least:g}, the least that makes sense in {unit}")
        return float(value)

    def _table(self, path: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self._error(path, value, f"must be a table, [{path}]")
        return value

    def _check_keys(
        self, path: str, table: Mapping[str, Any], needed: tuple[str, ...], others: tuple[str, ...]
    ) -> None:
        known = (*needed, *others)
        for key in table:
            if key not in known:
                nearest = get_close_matches(key, known, n=1)
                hint = f"; did you mean {nearest[0]}?" if nearest else ""
                raise ConfigError(
                    f"machine={self._given}: {_joined(path, key)}: no such key, only {', '.join(known)}{hint}"
                )
        for key in needed:
            if key not in table:
                raise ConfigError(
                    f"machine={self._given}: {_joined(path, key)} is missing; a machine file must give it"
                )

    def _error(self, path: str, value: Any, rule: str) -> ConfigError:
        return ConfigError(f"machine={self._given}: {path}={value!r}: {rule}")


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
