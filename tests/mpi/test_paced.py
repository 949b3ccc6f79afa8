"""Paced ranks: the counts and transfers of real ones, the time they were told, and no results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from sharded import WAYS, Check, Problem, Way, attend, both_passes, make, random_tensors

from ringmpi import RingAttention
from ringmpi.devices.paced import SLICE_S
from ringmpi.errors import ConfigError
from ringmpi.schedule import Pass

pytestmark = pytest.mark.mpi

PROBLEM = Problem(61, 0, "zigzag", "causal", heads=8, kv_heads=8, head_dim=16, dtype="float32")

#: What paced and real ranks must count alike.
COUNTED = ("bytes_sent", "messages", "hops", "pairs", "flops")


def counts(attention: RingAttention) -> list[Any]:
    return [attention.trace.records[name].tolist() for name in COUNTED]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_paced_rank_moves_and_counts_what_a_real_one_does(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    found = []
    for options in ({"device": "numpy"}, {"device": "paced", "flops": 1e12}):
        with make(comm, way, PROBLEM, check_transfers=True, **options) as attention:
            mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
            out, lse = attention.forward(mine["q"], mine["k"], mine["v"])
            forward = counts(attention)
            attention.backward(mine["dout"], mine["q"], mine["k"], mine["v"], out, lse)
            found.append((forward, counts(attention)))
    collective_assert(found[0] == found[1], str(found))


def test_results_of_paced_ranks_are_zeros(comm: MPI.Comm, collective_assert: Check) -> None:
    whole = random_tensors(PROBLEM)
    given = PROBLEM.shards(comm, whole)
    results = attend(comm, Way("ring"), PROBLEM, whole, device="paced", flops=1e12)
    collective_assert(not any(array.any() for array in results.values()))
    shapes = {"out": "q", "dq": "q", "dk": "k", "dv": "v"}
    alike = all(
        results[n].shape == given[t].shape and results[n].dtype == given[t].dtype
        for n, t in shapes.items()
    )
    collective_assert(alike, str({name: array.shape for name, array in results.items()}))


def test_slow_ranks_take_longer_by_their_factor(comm: MPI.Comm, collective_assert: Check) -> None:
    """Sleeps end late at most, and what one is late the next makes up for, up to a slice."""
    last = comm.size - 1
    flops = 4 * 16 * 8 * 61 * 62 / 2 / comm.size / 0.02  # The causal pairs of a rank take about 20 ms.
    with make(comm, Way("ring"), PROBLEM, device="paced", flops=flops, slow=f"{last}:2.5") as attention:
        both_passes(attention, PROBLEM.shards(comm, random_tensors(PROBLEM)))
        records = attention.trace.records
    least = records["flops"].sum() / flops * (2.5 if comm.rank == last else 1.0)
    took = (records["compute_done"] - records["launched"]).sum()
    collective_assert(took >= least - SLICE_S, f"{took} of {least}")


@pytest.mark.ranks(least=2)
def test_polling_hides_the_link_and_waiting_exposes_it(
    comm: MPI.Comm, collective_assert: Check
) -> None:
    """On more ranks than cores too: paced ranks sleep. Medians over steps, since some rank may be held up."""
    # Full attention: 8 heads, 16 wide, 4 FLOPs a pair and column; a step has (61 / P)^2 pairs.
    step = 4 * 16 * 8 * (61 / comm.size) ** 2
    problem = Problem(61, 0, "contiguous", "full", heads=8, kv_heads=8, head_dim=16, dtype="float32")
    nbytes = 2 * 8 * (61 // comm.size) * 16 * 4
    link = f"{nbytes * 8 / 0.018:.0f}bit/s,2ms"  # 20 ms a block.
    stalls = {}
    for progress in ("poll", "wait"):
        options = {"device": "paced", "flops": step / 0.05, "progress": progress, "link": link}
        with make(comm, Way("ring"), problem, **options) as attention:
            mine = problem.shards(comm, random_tensors(problem))
            waits = []
            for _ in range(3):
                attention.forward(mine["q"], mine["k"], mine["v"])
                records = attention.trace.records[:-1]
                waits.append(np.maximum(0, records["received"] - records["compute_done"]))
        stalls[progress] = float(np.median(waits))
    collective_assert(stalls["wait"] >= 0.018, str(stalls))
    collective_assert(stalls["poll"] <= 0.005, str(stalls))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"device": "paced"}, "device=paced: needs the FLOP/s"),
        ({"device": "numpy", "flops": 1e12}, "only paced ranks have a pace"),
        ({"device": "paced", "flops": 1e12, "slow": "99:2"}, "rank 99 is none of the"),
    ],
    ids=["no pace", "pace of NumPy", "slow rank that there is not"],
)
def test_a_wrong_pace_is_refused_on_every_rank(
    comm: MPI.Comm, collective_assert: Check, options: dict[str, Any], told: str
) -> None:
    refusal = ""
    try:
        make(comm, Way("ring"), PROBLEM, **options)
    except ConfigError as error:
        refusal = str(error)
    collective_assert(told in refusal, refusal)


def test_both_passes_have_their_own_pace(comm: MPI.Comm, collective_assert: Check) -> None:
    """FLOPs of the backward pass are 2.5 times those of the forward pass."""
    with make(comm, Way("ring"), PROBLEM, device="paced", flops=1e12) as attention:
        mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
        found = {}
        out, lse = attention.forward(mine["q"], mine["k"], mine["v"])
        found[Pass.FORWARD] = attention.trace.records["flops"].sum()
        attention.backward(mine["dout"], mine["q"], mine["k"], mine["v"], out, lse)
        found[Pass.BACKWARD] = attention.trace.records["flops"].sum()
    collective_assert(found[Pass.BACKWARD] == 2.5 * found[Pass.FORWARD], str(found))
