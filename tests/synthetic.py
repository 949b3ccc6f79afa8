"""Result files as a run would have written them, with times that follow from a rule and are known exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.config import experiment_from
from ringmpi.report.view import bytes_of_hops
from ringmpi.schedule import Pass, Step
from ringmpi.schedule.hops import Hop, hops
from ringmpi.store import TIMINGS, ResultWriter
from ringmpi.trace import MOMENTS, RECORD
from ringmpi.verify import Verdict

Array = NDArray[Any]

#: Seconds from the beginning of a step until its transfers are posted, and from its last wait to its end.
POSTING, AFTER = 1e-4, 2e-4

PASSED = Verdict("out", True, 1e-7, 1e-8, 1e-7, 1e-6, 1e-6, 2e-7, 2e-8, 8, [0, 0, 0, 0], 0, 1.0, 1.0)


@dataclass(frozen=True)
class Rule:
    """What takes how long; every hop has a link of its own.

    Attributes
    ----------
    compute : callable
        Gives the seconds that a rank computes in a step.
    transfer : float
        Seconds of a hop, once both ranks have posted it.
    flops : float
        FLOP/s of a rank.
    after : float
        Seconds from the last wait of a step to its end.
    """

    compute: Callable[[int, int], float] = lambda rank, step: 0.01
    transfer: float = 0.004
    flops: float = 1e9
    after: float = AFTER

    def slower(self, factor: float) -> Rule:
        return replace(self, compute=lambda rank, step: factor * self.compute(rank, step))

    def records(self, schedules: Sequence[Sequence[Step]], nbytes: Callable[[Hop], int]) -> Array:
        """Return the records of a pass from 0 s on, shape (ranks, steps)."""
        size, steps = len(schedules), len(schedules[0])
        records = np.zeros((size, steps), RECORD)
        for name in (*MOMENTS, "waited_for", "peer_posted"):
            records[name] = np.nan
        due = defaultdict(list)
        for hop in hops(schedules):
            due[hop.due].append(hop)
            records["bytes_sent"][hop.sender, hop.step] += nbytes(hop)
            records["hops"][hop.sender, hop.step] += 1
        free = np.zeros(size)
        for step in range(steps):
            now = records[:, step]
            now["started"] = free
            now["posted"] = now["launched"] = free + POSTING
            took = np.array([self.compute(rank, step) for rank in range(size)])
            now["compute_done"] = now["launched"] + took
            now["flops"], now["pairs"] = took * self.flops, 1000 * (step + 1)
            for hop in due[step]:
                posted = [records["posted"][rank, hop.step] for rank in (hop.sender, hop.receiver)]
                there, here = records[hop.sender, step], records[hop.receiver, step]
                there["sent"] = np.fmax(there["sent"], posted[0])  # Small sends are copied by MPI.
                arrived = max(posted) + self.transfer
                if not here["received"] >= arrived:
                    here["received"], here["waited_for"], here["peer_posted"] = (
                        arrived,
                        hop.sender,
                        posted[0],
                    )
            ends = np.fmax(np.fmax(now["received"], now["sent"]), now["compute_done"])
            now["step_end"] = free = ends + self.after
        return records


#: Every step computes for 10 ms, which hides a hop of 4 ms.
RULE = Rule()


def write_result(
    path: Path,
    size: int,
    *,
    repeats: int = 3,
    alone: bool = True,
    kind: str = "measured",
    oversubscribed: bool = False,
    interrupted: int | None = None,
    offsets: Sequence[float] = (),
    inner: int = 1,
    verdicts: Sequence[Verdict] = (PASSED,),
    command: str = "ringmpi run",
    rule: Rule = RULE,
    **options: Any,
) -> Path:
    """Write a result on `size` ranks, and return its path.

    Parameters
    ----------
    repeats : int
        Of each pass; repeat ``i`` computes for ``1 + i / 100`` times as long as the rule says.
    alone : bool
        Whether transfers were made alone too.
    offsets : sequence of float
        By which the clocks of the ranks are ahead of rank 0's; seconds.
    rule : Rule
    **options
        Of `Experiment`.
    """
    experiment = experiment_from({"seq_len": 64, "heads": 2, "head_dim": 4} | options)
    ahead = np.array(offsets or np.zeros(size), np.float64)
    with ResultWriter(path) as writer:
        for number, direction in enumerate(Pass if experiment.backward else [Pass.FORWARD]):
            schedules = experiment.schedules(size, inner, direction)
            nbytes = bytes_of_hops(experiment, size)
            timed = [rule.slower(1 + i / 100).records(schedules, nbytes) for i in range(repeats)]
            apart = [rule.slower(0).records(schedules, nbytes)] if alone else []
            for group, found in ((TIMINGS[direction], timed), (f"{TIMINGS[direction]}/alone", apart)):
                writer.records(group, (len(found), size, len(schedules[0])))
                for at, records in enumerate(found):
                    _set_clocks(records, ahead, 100.0 + 10 * at + 50 * number)
                for rank in range(size if found else 0):
                    writer.write_records(group, rank, np.stack([records[rank] for records in found]))
        writer.texts("ranks/hostname", [f"node{rank % 2}" for rank in range(size)], "node")
        writer.texts("ranks/device", ["numpy"] * size, "what computed")
        writer.facts("machine", {"oversubscribed": oversubscribed, "inner_ranks": inner})
        if kind == "simulated":
            told = {"processor": "h100", "ranks_per_node": 8, "noise": 0.0, "disturbed": {}}
            writer.facts("machine", told)
        writer.table("clocks/measured_at", np.outer([0.0, 1000.0], np.ones(size)), "s", "when")
        writer.table("clocks/offset", np.stack([ahead, ahead]), "s", "offset")
        writer.table("clocks/error_bound", np.zeros((2, size)), "s", "error")
        writer.verdicts("full" if verdicts else "none", verdicts)
        writer.describe(experiment, command, kind)
        if interrupted is not None:
            writer.mark_interrupted(interrupted)
        writer.commit()
    return path


def _set_clocks(records: Array, ahead: Array, begin: float) -> None:
    """Let a pass begin at a moment of rank 0's clock, and tell each moment on the clock of its rank."""
    for name in MOMENTS:
        records[name] += begin + ahead[:, None]
    peers = np.nan_to_num(records["waited_for"]).astype(int)
    records["peer_posted"] += begin + ahead[peers]
