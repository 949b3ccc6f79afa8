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

    [links.inter]                     # between ranks of two nodes
    latency = 2e-5
    bandwidth = [[65536, 8e9], [16777216, 25e9]]   # [bytes of a message, bytes a second]

Each of forward, backward, latency and bandwidth is a number or a curve; a number is a curve of one point.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from itertools import pairwise
from math import isfinite, log
from pathlib import Path
from typing import Any

from ringmpi.errors import ConfigError, check_choice
from ringmpi.schedule import Pass
from ringmpi.softmax import DTYPES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Between ranks of a node, and of two nodes.
INTRA, INTER = "intra", "inter"

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
    """

    latency: Curve
    bandwidth: Curve
    total: float

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
        `INTRA`, `INTER` or both.
    """

    name: str
    about: str
    memory: float
    ranks_per_node: int
    compute: Mapping[str, Compute]
    links: Mapping[str, Connection]

    def kind(self, rank: int, peer: int) -> str:
        """Return which kind of link is between two ranks; neighbouring ranks share a node. Local."""
        return INTRA if rank // self.ranks_per_node == peer // self.ranks_per_node else INTER

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
        return Path(given).read_text("utf-8")
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
    return _Reader(given).machine(table)


class _Reader:
    """Takes a machine file apart; every refusal names the file and the key."""

    def __init__(self, given: str) -> None:
        self._given = given

    def machine(self, table: Mapping[str, Any]) -> Machine:
        self._check_keys("", table, ("memory", "ranks_per_node", "compute", "links"), ("about",))
        about = table.get("about", "")
        if not isinstance(about, str):
            raise self._error("about", about, "must be a text")
        ranks = table["ranks_per_node"]
        if type(ranks) is not int or ranks < 1:
            raise self._error("ranks_per_node", ranks, "must be a whole number, 1 or more")
        rates = self._table("compute", table["compute"])
        links = self._table("links", table["links"])
        self._check_keys("compute", rates, (), DTYPES)
        self._check_keys("links", links, (), (INTRA, INTER))
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
        )

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
        self._check_keys(path, table, ("latency", "bandwidth"), ("total",))
        unit = "bytes a second; 300 GB/s are 300e9, 100 Gbit/s are 12.5e9"
        bandwidth = self._curve(f"{path}.bandwidth", table["bandwidth"], LEAST_BANDWIDTH, unit)
        latency = self._curve(f"{path}.latency", table["latency"], 0.0, "seconds; 5 us are 5e-6")
        for _, seconds in latency.points:
            if seconds > LARGEST_LATENCY:
                raise self._error(
                    f"{path}.latency", seconds, f"more than {LARGEST_LATENCY:g} s; 5 us are 5e-6"
                )
        largest = max(rate for _, rate in bandwidth.points)
        total = self._number(f"{path}.total", table.get("total", largest), LEAST_BANDWIDTH, unit)
        if total < largest:
            raise self._error(
                f"{path}.total", total, f"must be at least the bandwidth to one other rank, {largest:g}"
            )
        return Connection(latency, bandwidth, total)

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
