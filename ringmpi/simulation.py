"""One simulated run, in reading order: take the machine, price the schedules, write the file.

The file is one like that of a measured run, with ``kind = simulated``, no outputs and clocks that agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from ringmpi.comm.link import parse_link
from ringmpi.config import Experiment, experiment_from
from ringmpi.devices.paced import parse_slow
from ringmpi.errors import ConfigError
from ringmpi.model.machine import INTER, INTRA, Connection, Machine, constant, read_machine
from ringmpi.model.prices import Task
from ringmpi.provenance import command_line
from ringmpi.recording import CLOCK_COLUMNS, write_clocks, write_ranks
from ringmpi.schedule import Pass, check_heads, inner_ranks
from ringmpi.simulator.disturbance import (
    Disturbance,
    parse_delays,
    parse_noise,
    parse_stragglers,
)
from ringmpi.simulator.passes import Simulated, Simulation
from ringmpi.simulator.work import Work
from ringmpi.store import TIMINGS, ResultWriter, refusal

#: The most ranks: an MPI job of a whole large system, one rank a device.
MOST_RANKS = 16384

#: Shows how far a pass has come; told its name.
Track = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes
    ----------
    experiment : Experiment
        With `ranks`.
    machine : Machine
        With the links that the experiment gives, if it does.
    inner : int
        Ranks of an inner group of the method.
    disturbance : Disturbance
    asked : dict of str to str
        The options that say how ranks are disturbed, as they were given.
    """

    experiment: Experiment
    machine: Machine
    inner: int
    disturbance: Disturbance = field(default_factory=Disturbance)
    asked: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        assert self.experiment.ranks is not None
        return self.experiment.ranks

    def work(self, direction: Pass) -> Work:
        """Return what all ranks do in a pass."""
        experiment, layouts = self.experiment, self.experiment.layouts(self.ranks)
        task = Task(
            experiment.shape,
            layouts["k"],
            layouts["q"],
            experiment.causal,
            experiment.window,
            experiment.documents,
        )
        return Work(
            task,
            experiment.method,
            self.inner,
            self.machine,
            experiment.dtype,
            direction,
            experiment.chunk_limit,
        )

    def simulation(self, direction: Pass) -> Simulation:
        """Return the simulation of a pass."""
        return Simulation(
            self.work(direction), self.machine, self.experiment.progress, self.disturbance
        )

    @property
    def path(self) -> Path:
        """Where the result goes: as asked, or a name in ``results/`` that says what was simulated."""
        if self.experiment.output is not None:
            return Path(self.experiment.output)
        told = self.experiment.record() | {"output": None}
        told |= {"machine": self.machine.text, "disturbance": sorted(self.asked.items())}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
        name = f"{self.machine.name}-{self.experiment.name}-{digest}-p{self.ranks}.h5"
        return Path("results") / f"simulated-{name}"


def scenario_from(
    given: Mapping[str, Any], machine_name: str, asked: Mapping[str, str] | None = None
) -> Scenario:
    """Make the scenario that some options ask for. Local.

    Parameters
    ----------
    given : mapping
        Options of an experiment by name, without those left at their default. `dtype` is then the first that
        the machine has rates for, and one pass is simulated, since without noise all are alike.
    machine_name : str
        Of a built-in machine, or a file.
    asked : mapping of str to str, optional
        ``noise``, ``slow``, ``stragglers`` and ``delay``, as texts.

    Raises
    ------
    ConfigError
        If an option breaks a rule, or the machine lacks what is needed.
    """
    machine = read_machine(machine_name)
    if given.get("input") is not None:
        raise ConfigError(
            f"input={given['input']}: a simulation reads no inputs; give --seq-len, --heads and so on"
        )
    values = dict(given)
    if values.get("ranks") is None:
        raise ConfigError("give --ranks P, the number of ranks to simulate")
    values = {"dtype": next(iter(machine.compute)), "repeats": 1, "verify": "none"} | values
    experiment = experiment_from(values)
    ranks = experiment.ranks
    assert ranks is not None
    if ranks > MOST_RANKS:
        raise ConfigError(f"ranks={ranks}: at most {MOST_RANKS} are simulated")
    if experiment.link is not None:
        machine = with_link(machine, experiment.link)
    machine.check_ranks(ranks)
    machine.rates(experiment.dtype)
    inner = inner_ranks(
        experiment.method,
        ranks,
        experiment.group_ranks,
        lambda: [str(machine.node(rank)) for rank in range(ranks)],
    )
    check_heads(experiment.method, inner, experiment.heads)
    return Scenario(
        experiment,
        machine,
        inner,
        _disturbance(asked or {}, machine, ranks, experiment.seed),
        dict(asked or {}),
    )


def with_link(machine: Machine, text: str) -> Machine:
    """Return a machine whose links are all like the one that a text describes, as in an emulation. Local.

    Raises
    ------
    ConfigError
        If the text describes none.
    """
    link = parse_link(text)
    total = link.bandwidth if link.shared else inf
    connection = Connection(constant(link.latency), constant(link.bandwidth), total)
    return replace(machine, links={INTRA: connection, INTER: connection}, topology=None)


def _disturbance(asked: Mapping[str, str], machine: Machine, ranks: int, seed: int) -> Disturbance:
    slow: dict[int, float] = {}
    if "stragglers" in asked:
        slow |= parse_stragglers(asked["stragglers"], ranks, seed)
    if "slow" in asked:
        slow |= parse_slow(asked["slow"])
    delays = parse_delays(asked["delay"]) if "delay" in asked else {}
    noise = parse_noise(asked["noise"]) if "noise" in asked else machine.noise
    disturbance = Disturbance(noise, seed, slow, delays)
    disturbance.check(ranks)
    return disturbance


def simulate(scenario: Scenario, track: Track) -> Path:
    """Simulate all passes of a scenario, write the file and return where it is. Local.

    Parameters
    ----------
    scenario : Scenario
    track : callable
        Shows how far a pass has come.

    Raises
    ------
    ConfigError
        If the file cannot be written, or the simulation would take hours.
    """
    path, experiment = scenario.path, scenario.experiment
    refused = refusal(path)
    if refused is not None:
        raise refused
    with ResultWriter(path) as writer:
        held, exact = {}, {}
        for direction in list(Pass) if experiment.backward else [Pass.FORWARD]:
            simulation = scenario.simulation(direction)
            passes = []
            for repeat in range(experiment.repeats):
                with track(f"simulating the {direction.value} pass") as progress:
                    passes.append(simulation.run(repeat, progress=progress))
            with track("simulating its transfers alone") as progress:
                alone = simulation.run(computing=False, progress=progress)
            _write_passes(writer, direction, passes, alone)
            held[direction] = simulation.held_nbytes
            exact[direction.value] = simulation.way
        layouts = experiment.layouts(scenario.ranks)
        write_ranks(
            writer,
            [
                {
                    "hostname": f"node{scenario.machine.node(rank)}",
                    "pid": 0,
                    "local_rank": rank % scenario.machine.ranks_per_node,
                    "device": "simulated",
                    "instruction_set": "",
                    "gpu": "",
                    "gpu_identity": "",
                    "gpu_sharing": 0,
                    "matrix_unit": "",
                    "weights": "",
                    "compile_s": 0.0,
                    "paced_flops": 0.0,
                    "threads": 1,
                    "affinity": "",
                    "cpu_quota": 0.0,
                    "shard_len": layouts["k"].shard_len(rank),
                    "query_shard_len": layouts["q"].shard_len(rank),
                    "held_forward_nbytes": int(held[Pass.FORWARD][rank]),
                    "held_backward_nbytes": int(held[Pass.BACKWARD][rank])
                    if experiment.backward
                    else 0,
                    "staged_nbytes": 0,
                    "peak_nbytes": 0,
                }
                for rank in range(scenario.ranks)
            ],
        )
        write_clocks(writer, np.zeros((1, scenario.ranks, len(CLOCK_COLUMNS))))
        writer.facts("machine", _facts(scenario, exact))
        writer.facts("inputs", {})
        writer.describe(experiment, command_line(), kind="simulated")
        writer.verdicts("none", [])
        writer.commit()
    return path


def _write_passes(
    writer: ResultWriter, direction: Pass, passes: list[Simulated], alone: Simulated
) -> None:
    group = TIMINGS[direction]
    for name, made in ((group, passes), (f"{group}/warmup", []), (f"{group}/alone", [alone])):
        records = np.stack([one.records for one in made]) if made else alone.records[None][:0]
        writer.records(name, records.shape)
        writer.write_records(name, slice(None), records)
    if alone.condensed:
        writer.condense(group, alone.watched, np.stack([one.steps for one in passes]))
    waited = np.zeros((len(passes), len(alone.records)))
    writer.table(f"{group}/barrier", waited, "s", "wait before each repeat, in no other quantity")


def _facts(scenario: Scenario, ways: Mapping[str, str]) -> dict[str, Any]:
    machine = scenario.machine
    topology = machine.topology
    return {
        "mpi_library": "none: simulated",
        "processor": machine.name,
        "machine_file": machine.text,
        "about": machine.about,
        "ranks_per_node": machine.ranks_per_node,
        "topology": "none" if topology is None else asdict(topology),
        "inner_ranks": scenario.inner,
        "noise": scenario.disturbance.noise,
        "disturbed": dict(scenario.asked),
        "slow": {str(rank): factor for rank, factor in scenario.disturbance.slow.items()},
        "simulated_by": dict(ways),
        "oversubscribed": False,
    }
