"""The simulator against SimGrid, on the same schedules and links.

SimGrid is Debian's package python3-simgrid, for the Python that comes with Debian: not for that of a virtual
environment. RINGMPI_SIMGRID_PYTHON names another one.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simgrid_case import simgrid_case

from ringmpi.encoding import numpy_dtype
from ringmpi.layout import Layout
from ringmpi.model.machine import (
    DRAGONFLY,
    FAT_TREE,
    INTER,
    INTRA,
    Compute,
    Connection,
    Machine,
    Topology,
    constant,
)
from ringmpi.model.prices import Task
from ringmpi.schedule import Pass
from ringmpi.simulator.disturbance import Disturbance
from ringmpi.simulator.passes import Simulation
from ringmpi.simulator.work import Work
from ringmpi.tensors import Shape

PYTHON = os.environ.get("RINGMPI_SIMGRID_PYTHON", "/usr/bin/python3")
REPLAY = Path(__file__).parent / "replay.py"

#: 8 heads of 64 in 16 bits: 4 MiB of keys and values a rank.
SHAPE = Shape(1, 8, 8, 64, numpy_dtype("bfloat16"))
TOKENS = 2048
BLOCK_NBYTES, BLOCK_FLOPS = 2 * 2 * 8 * 64 * TOKENS, 4 * 8 * 64 * TOKENS**2

SLOW, FAST = 10e9, 80e9


@cache
def why_missing() -> str:
    """Return why there is no SimGrid; empty if there is."""
    try:
        found = subprocess.run(
            [PYTHON, "-c", "import simgrid"], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as error:
        return f"{PYTHON}: {error.strerror}"
    return found.stderr.strip().rpartition("\n")[2] if found.returncode else ""


def machine(
    per_node: int = 2,
    *,
    total: float = SLOW,
    node_total: float = inf,
    eager_limit: float = 0.0,
    topology: Topology | None = None,
) -> Machine:
    rates = Compute(constant(1e12), constant(1e12))
    links = {
        INTRA: Connection(constant(2e-6), constant(FAST), FAST, eager_limit=eager_limit),
        INTER: Connection(constant(10e-6), constant(SLOW), total, node_total, eager_limit),
    }
    return Machine("made", "", 80e9, per_node, {"bfloat16": rates}, links, topology=topology)


@dataclass(frozen=True)
class Given:
    """An experiment to be simulated by both.

    `pace` is the compute of a whole block over its transfer between nodes: 1 is the threshold.
    """

    method: str
    ranks: int
    pace: float
    inner: int = 1
    on: Machine = field(default_factory=machine)
    direction: Pass = Pass.FORWARD
    causal: bool = False
    layout: str = "contiguous"
    odd: int = 0
    waits: bool = False
    tokens: int = TOKENS
    disturbance: Disturbance = field(default_factory=Disturbance)

    def prepared(self) -> tuple[Simulation, dict[str, Any]]:
        """Return our simulation, and the case that SimGrid is given."""
        flops = BLOCK_FLOPS / (self.pace * BLOCK_NBYTES / SLOW)
        rates = Compute(constant(flops), constant(flops))
        on = replace(self.on, compute={"bfloat16": rates})
        keys = Layout(self.layout, self.ranks * self.tokens + self.odd, self.ranks)
        task = Task(SHAPE, keys, keys, self.causal)
        work = Work(task, self.method, self.inner, on, "bfloat16", self.direction, 2**28)
        progress = "wait" if self.waits else "poll"
        case = simgrid_case(
            task, self.method, self.inner, on, self.direction, self.disturbance, waits=self.waits
        )
        return Simulation(work, on, progress, self.disturbance), case


def replayed(case: dict[str, Any]) -> list[float]:
    found = subprocess.run(
        [PYTHON, str(REPLAY)],
        input=json.dumps(case),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    ends: list[float] = json.loads(found.stdout)
    return ends


#: Several methods, below, at and above the threshold: one card a rank, or a node of two, which share it.
ONE_CARD, SHARED = machine(1), machine(node_total=SLOW)
CASES: dict[str, Given] = {}
for pace in (0.4, 1.0, 2.5):
    CASES |= {
        f"ring {pace}": Given("ring", 5, pace, odd=3),
        f"bidirectional {pace}": Given("bidirectional", 6, pace, on=ONE_CARD),
        f"allgather {pace}": Given("allgather", 6, pace, on=SHARED),
        f"ulysses {pace}": Given("ulysses", 8, pace, inner=8, on=SHARED),
        f"double-ring {pace}": Given("double-ring", 8, pace, inner=4, on=machine(4, node_total=SLOW)),
        f"passq {pace}": Given("passq", 4, pace, on=SHARED),
        f"hybrid {pace}": Given("hybrid", 8, pace, inner=2, on=machine(4, node_total=2 * SLOW)),
    }
BACK = Pass.BACKWARD
TREE = Topology(FAT_TREE, 4, 0.5, 5e-6)
CASES |= {
    "ring backward": Given("ring", 4, 0.8, direction=BACK),
    "bidirectional backward": Given("bidirectional", 5, 0.8, on=ONE_CARD, direction=BACK),
    "double-ring backward": Given("double-ring", 8, 0.8, 4, machine(4, node_total=SLOW), BACK),
    "ulysses backward": Given("ulysses", 4, 0.8, 4, SHARED, BACK),
    "causal contiguous": Given("bidirectional", 6, 1.0, on=ONE_CARD, causal=True),
    "causal zigzag": Given("bidirectional", 6, 1.0, on=ONE_CARD, causal=True, layout="zigzag"),
    "a slow rank": Given("bidirectional", 6, 1.0, on=ONE_CARD, disturbance=Disturbance(slow={2: 1.7})),
    "a slow rank, ulysses": Given("ulysses", 8, 1.0, 8, disturbance=Disturbance(slow={1: 1.3, 6: 2.1})),
    "a delay": Given("ring", 8, 1.5, disturbance=Disturbance(delays={(3, 2): 3e-3})),
    "wait": Given("bidirectional", 6, 1.0, on=ONE_CARD, waits=True),
    "wait, slow rank": Given("ring", 5, 1.0, waits=True, disturbance=Disturbance(slow={2: 1.7})),
    "eager": Given("bidirectional", 5, 40.0, on=machine(1, eager_limit=1e5), tokens=64, waits=True),
    "eager, slow rank": Given(
        "ring", 5, 40.0, on=machine(eager_limit=1e9), tokens=64, disturbance=Disturbance(slow={2: 3.0})
    ),
    "fat tree": Given("ulysses", 8, 1.0, 8, machine(topology=TREE)),
    "fat tree, bidirectional": Given(
        "bidirectional", 8, 0.5, on=machine(topology=replace(TREE, taper=0.3))
    ),
    "dragonfly": Given("ulysses", 8, 1.0, 8, machine(topology=Topology(DRAGONFLY, 4, 1.0, 0.0, 4))),
    "dragonfly, ring": Given("ring", 8, 0.5, on=machine(topology=Topology(DRAGONFLY, 2, 0.5, 0.0, 4))),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_ends_when_it_does_in_simgrid(name: str) -> None:
    if why_missing():
        pytest.skip(f"SimGrid is missing ({why_missing()}); apt-get install python3-simgrid")
    simulation, case = CASES[name].prepared()

    ours, theirs = simulation.run().records["step_end"].max(axis=1), np.array(replayed(case))

    # 2 % is what is asked for. Both solve the same equations, SimGrid's to its maxmin/precision of 1e-5.
    assert (np.abs(ours / theirs - 1) <= 1e-4).all(), f"{ours} s, SimGrid {theirs} s"


def test_in_most_cases_links_are_shared() -> None:
    """Those with links of their own only would say nothing about how capacities are shared."""
    alone = [name for name, given in CASES.items() if given.prepared()[0].by_recurrence]
    assert len(alone) < len(CASES) / 2, alone
