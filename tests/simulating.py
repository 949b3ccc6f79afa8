"""Machines, work and passes for tests of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from ringmpi.encoding import numpy_dtype
from ringmpi.layout import Layout
from ringmpi.model.machine import INTER, INTRA, Compute, Connection, Machine, Topology, constant
from ringmpi.model.prices import Task
from ringmpi.schedule import Pass
from ringmpi.simulator.disturbance import Disturbance
from ringmpi.simulator.flows import Flows, Load
from ringmpi.simulator.network import Shared
from ringmpi.simulator.passes import Simulation
from ringmpi.simulator.work import Work
from ringmpi.tensors import Shape

Array = np.ndarray[Any, np.dtype[Any]]

#: The example of a block: 8 heads of 128, 4096 tokens, 16 bits.
SHAPE = Shape(1, 8, 8, 128, numpy_dtype("float16"))
TOKENS = 4096
BLOCK_NBYTES = 16_777_216
BLOCK_FLOPS = 4 * 8 * 128 * TOKENS**2

CALM = Disturbance()


def machine(
    per_node: int = 64,
    *,
    flops: float = 1e12,
    latency: float = 5e-6,
    bandwidth: float = 12.5e9,
    total: float | None = None,
    node_total: float = inf,
    eager_limit: float = 0.0,
    inter: float | None = None,
    topology: Topology | None = None,
) -> Machine:
    def connection(rate: float) -> Connection:
        return Connection(constant(latency), constant(rate), total or rate, node_total, eager_limit)

    rates = Compute(constant(flops), constant(flops))
    links = {INTRA: connection(bandwidth), INTER: connection(inter or bandwidth)}
    return Machine("made", "", 80e9, per_node, {"float16": rates}, links, topology=topology)


def task(
    ranks: int,
    *,
    seq_len: int | None = None,
    query_len: int | None = None,
    layout: str = "contiguous",
    shape: Shape = SHAPE,
    **mask: Any,
) -> Task:
    length = ranks * TOKENS if seq_len is None else seq_len
    asking = length if query_len is None else query_len
    queries = Layout(layout, asking, ranks, length - asking)
    return Task(shape, Layout(layout, length, ranks), queries, **{"causal": False, **mask})


def work(
    given: Task, on: Machine, method: str = "ring", inner: int = 1, direction: Pass = Pass.FORWARD
) -> Work:
    return Work(given, method, inner, on, "float16", direction, 2**28)


def simulation(
    given: Task,
    on: Machine,
    method: str = "ring",
    inner: int = 1,
    direction: Pass = Pass.FORWARD,
    *,
    progress: str = "poll",
    disturbance: Disturbance = CALM,
) -> Simulation:
    return Simulation(work(given, on, method, inner, direction), on, progress, disturbance)


def by_events(made: Simulation) -> Simulation:
    """Let a simulation go through its passes event after event, also where it need not."""
    made.by_recurrence = False
    return made


@dataclass
class Message:
    """What a rank of `ByHand` sends in a step."""

    sender: int
    receiver: int
    seconds: float
    step: int = 0
    due: int = 0
    latency: float = 0.0
    eager: bool = False
    nbytes: float = 1.0


@dataclass
class ByHand:
    """Work of a few ranks, as a test wants it: in place of `Work`, which makes it of schedules."""

    compute: Sequence[Sequence[float]]  # By step and rank.
    messages: Sequence[Message]
    flops_per_pair: int = 1
    held_nbytes: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def size(self) -> int:
        return len(self.compute[0])

    @property
    def steps(self) -> int:
        return len(self.compute)

    @property
    def span(self) -> int:
        return max((m.due - m.step + 1 for m in self.messages), default=1)

    def load(self, number: int, computing: bool = True) -> Load:
        nothing = np.zeros(self.size)
        compute = np.array(self.compute[number], np.float64) if computing else nothing
        flows = [(self._flow(m), m.due) for m in self.messages if m.step == number]
        return Load(compute, nothing, flows, dict.fromkeys(Load.SENT, nothing))

    def connections(self) -> list[tuple[int, Array, Array]]:
        ways = {(m.sender, m.receiver) for m in self.messages}
        return [(self._way(s, r), np.array([s]), np.array([r])) for s, r in sorted(ways)]

    def simulation(self, progress: str = "poll", shared: Shared | None = None) -> Simulation:
        """Return the simulation; all that it has of a machine is what is shared, nothing by default."""
        # Its nodes are of one rank, and so fast that none of its links is ever full.
        made = Simulation(self, machine(1, bandwidth=1.0, total=1e12), progress, CALM)  # type: ignore[arg-type]
        if shared is not None:
            made._shared, made.by_recurrence = shared, False
        return made

    def _way(self, sender: int, receiver: int) -> int:
        return (receiver - sender) % self.size

    def _flow(self, message: Message) -> Flows:
        def column(value: Any, kind: Any = np.float64) -> Array:
            return np.array([value], kind)

        return Flows(
            self._way(message.sender, message.receiver),
            column(message.sender, np.intp),
            column(message.receiver, np.intp),
            column(message.nbytes),
            column(message.seconds),
            column(message.latency),
            column(message.eager, bool),
            column(1.0),
            column(1.0),
            message.eager,
        )
