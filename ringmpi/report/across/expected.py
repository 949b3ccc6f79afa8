"""The stall that a run should have had, by the rule of when compute hides a transfer.

A hop is hidden when ``flops / F >= latency + nbytes / bandwidth``: when the rank with most to compute, in the
steps in which the hop may take its time, is not done before it arrives. Here the FLOPs are those that each
step really had, the bytes those of the hops of its schedule, ``F`` what a rank computed a second in that very
run, and the link the emulated one; without one, the bandwidth of the transfers that were made alone.

The ranks go from step to step together, as in `model.predict`, which has machines instead of measurements.
What comes of ranks that do not, such as imbalance, is in the measured stall and not in the expected one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from ringmpi.comm.link import Link, Network, network_of
from ringmpi.metrics import rates
from ringmpi.report.view import bytes_of_hops, explainable
from ringmpi.schedule import Pass
from ringmpi.schedule.hops import hops
from ringmpi.store import ResultFile


@dataclass(frozen=True)
class Expected:
    """What a pass should have been like.

    Attributes
    ----------
    flops : float
        FLOP/s of a rank.
    stall : float
        Of all steps together; seconds.
    hidden : float
        Compute over transfer, of the hop for which it is least: from 1 on all are hidden. Hops that have
        no compute beside them, such as gradients on their last way home, are left out; NaN if all are so.
    """

    flops: float
    stall: float
    hidden: float


def expected(result: ResultFile, direction: Pass) -> Expected | None:
    """Return what a timed pass should have been like; None where nothing moved or no rate is known. Local."""
    timings = result.timings(direction)
    flops, bandwidth = rates(timings)
    experiment = result.experiment
    nbytes = bytes_of_hops(experiment, result.size)
    # Alone, all that a rank sends goes out together, and latency cannot be told from bandwidth.
    measured = Network(Link(bandwidth, 0.0, shared=True))
    network = network_of(experiment.link, experiment.link_map) or measured
    hopping = list(hops(result.schedules(direction))) if explainable(result, direction) else []
    known = np.isfinite(network.inter.bandwidth) and np.isfinite(flops) and flops > 0
    if not hopping or not known:
        return None

    compute = timings.records["flops"][-1].max(axis=0) / flops
    loads: dict[tuple[int, int, Hashable], int] = defaultdict(int)
    for hop in hopping:
        loads[hop.step, hop.sender, network.way(hop.sender, hop.receiver)] += nbytes(hop)
    transfers: dict[tuple[int, int], float] = defaultdict(float)
    for hop in hopping:
        link = network.link(hop.sender, hop.receiver)
        load = loads[hop.step, hop.sender, network.way(hop.sender, hop.receiver)]
        seconds = link.latency + load / link.bandwidth
        transfers[hop.step, hop.due] = max(transfers[hop.step, hop.due], seconds)

    stall = now = 0.0
    arrivals: dict[int, float] = defaultdict(float)
    for step, computing in enumerate(compute):
        for (posted, due), seconds in transfers.items():
            if posted == step:
                arrivals[due] = max(arrivals[due], now + seconds)
        done = now + float(computing)
        now = max(done, arrivals[step])
        stall += now - done
    beside = {(posted, due): float(compute[posted : due + 1].sum()) for posted, due in transfers}
    ratios = [beside[steps] / seconds for steps, seconds in transfers.items() if beside[steps]]
    return Expected(flops, stall, min(ratios, default=float("nan")))
