"""Simulated times of an attention, by the options of ``ringmpi simulate``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ringmpi.model.machine import read_machine
from ringmpi.schedule import Pass
from ringmpi.simulation import scenario_from

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Attention:
    """An experiment on a machine.

    Attributes
    ----------
    machine : str
        A built-in one, or a file relative to the repository.
    options : tuple of (str, value)
        By the names of ``ringmpi simulate``.
    """

    machine: str
    options: tuple[tuple[str, Any], ...]

    @property
    def command(self) -> str:
        """The command that simulates it, from the repository root."""
        words = ["ringmpi", "simulate", "--machine", self.machine]
        for name, value in self.options:
            flag = "--" + name.replace("_", "-")
            if value is not False:
                words += [flag] if value is True else [flag, str(value)]
        return shlex.join(words)

    @cache  # noqa: B019 (there are a few, and they live as long as the program)
    def seconds(self, direction: Pass = Pass.FORWARD) -> float:
        """Return what a pass of one layer takes."""
        path = ROOT / self.machine
        scenario = scenario_from(dict(self.options), str(path) if path.is_file() else self.machine)
        records = scenario.simulation(direction).run().records
        return float(records["step_end"].max() - records["started"].min())

    def both(self) -> float:
        """Return what the forward and the backward pass take."""
        return sum(self.seconds(direction) for direction in Pass)

    def changed(self, **options: Any) -> Attention:
        """Return the same with other options."""
        return Attention(self.machine, tuple((dict(self.options) | options).items()))

    def flops(self, direction: Pass = Pass.FORWARD) -> float:
        """Return the FLOPs of a pass of one layer: 4 (10) for each allowed pair and element of head_dim."""
        given = dict(self.options)
        pairs = given["seq_len"] ** 2 / (2 if given.get("causal") else 1)
        per_pair = 4 if direction is Pass.FORWARD else 10
        return float(per_pair * given["heads"] * given["head_dim"] * pairs)

    def tflops(self, direction: Pass = Pass.FORWARD) -> float:
        """Return TFLOP/s of a rank, as benchmarks count them: half of the pairs where it is causal."""
        return self.flops(direction) / self.seconds(direction) / int(dict(self.options)["ranks"]) / 1e12

    def percent_of_ideal(self, *directions: Pass) -> float:
        """Return the share of a single device's rate on the whole sequence, per cent, over some passes."""
        given = dict(self.options)
        path = ROOT / self.machine
        rates = read_machine(str(path) if path.is_file() else self.machine).rates("bfloat16")
        ideal = sum(self.flops(way) / rates.of(way).at(given["seq_len"]) for way in directions)
        return 100 * ideal / int(given["ranks"]) / sum(map(self.seconds, directions))


def attention(machine: str, given: Mapping[str, Any]) -> Attention:
    """Return an attention of some options."""
    return Attention(machine, tuple(given.items()))
