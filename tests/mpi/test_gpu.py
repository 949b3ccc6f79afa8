"""The ring on an emulated GPU, on which everything runs late: right with all waits, wrong without any one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from emulated.driver import EmulatedPlatform
from mpi4py import MPI
from sharded import (
    ALL_WAYS,
    Check,
    Problem,
    Tensors,
    Way,
    both_passes,
    dense_answers,
    make,
    random_tensors,
    too_far,
)

from ringmpi.comm import transport
from ringmpi.devices import cuda
from ringmpi.devices.streams import Sync
from ringmpi.errors import MissingCapabilityError, ShapeError

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(most=4)]

TRANSPORTS = ("direct", "staged")

#: As in test_methods.py: float64, sums of at most 61 terms.
TOLERANCE = 3e-13

#: Uneven lengths, grouped heads, batches, masks; also fewer tokens than ranks.
PROBLEMS = [
    Problem(25, 0, "zigzag", "causal", heads=8, kv_heads=2, head_dim=5),
    Problem(13, 6, "striped", "causal-window-documents", batch=2, heads=9, kv_heads=3, head_dim=3),
    Problem(3, 2, "contiguous", "full", batch=2, heads=8, kv_heads=1, head_dim=2),
]

#: Bytes of a staged piece here: odd, and some pieces a part.
PIECE_NBYTES = 333


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PIECE_NBYTES", PIECE_NBYTES)


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EmulatedPlatform]:
    """Make the GPUs of all ranks emulated ones, and MPI one that takes their pointers."""

    def made(**options: Any) -> EmulatedPlatform:
        platform = EmulatedPlatform(**options)
        monkeypatch.setattr(cuda._Here, "platform", platform)
        monkeypatch.setattr("ringmpi.agreed.why_no_device_pointers", lambda: "")
        return platform

    return made


def wrong_on_gpu(
    comm: MPI.Comm, way: Way, problem: Problem, transport: str, **options: Any
) -> list[str]:
    """Return what this rank has wrong after two passes each way, on the emulated GPU. Collective."""
    with make(comm, way, problem, device="cuda", transport=transport, **options) as attention:
        found = both_passes(attention, problem.shards(comm, random_tensors(problem)))
        # In the second pass slots hold what the first one has left.
        again = both_passes(attention, problem.shards(comm, random_tensors(problem)))
    exact = problem.shards(comm, dense_answers(problem))
    wrong = [*too_far(found, exact, TOLERANCE), *too_far(again, exact, TOLERANCE)]
    records = attention.trace.records
    timed = np.isfinite(records["device_time"]) & ((records["device_time"] > 0) >= (records["pairs"] > 0))
    return wrong if timed.all() else [*wrong, f"device_time: {records['device_time']}"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", ALL_WAYS, ids=str)
def test_every_method_is_exact_whatever_runs_late(
    comm: MPI.Comm, collective_assert: Check, emulate: Any, way: Way, transport: str
) -> None:
    for seed, problem in enumerate(PROBLEMS):
        emulate(seed=seed + 10 * comm.rank)

        wrong = wrong_on_gpu(comm, way, problem, transport)

        collective_assert(not wrong, f"{problem}: {wrong}")


class Need(NamedTuple):
    """Where the lack of a wait shows."""

    transport: str
    way: Way
    least: int  # Ranks.


#: Every wait of a ring, with something that cannot do without.
NEEDS = {
    Sync.HOST_READS: Need("direct", Way("ring"), 1),
    Sync.ATTENDED: Need("staged", Way("ring"), 1),
    Sync.MPI_POSTED: Need("direct", Way("ring"), 2),
    Sync.COPIED_OUT: Need("staged", Way("ring"), 2),
    Sync.MPI_SENDS: Need("staged", Way("ring"), 2),
    Sync.COPIED_IN: Need("staged", Way("passq"), 2),
    Sync.ARRIVED: Need("staged", Way("ring"), 2),
}

#: What is between the caller's stream and ours, which tests/unit/test_devices_cuda.py shows.
OF_CALLERS = {Sync.CALLER_WROTE, Sync.CALLER_READS}

#: Orders to try: a wait that is missing harms only in some of them.
SEEDS = 12


def test_every_wait_is_among_those_that_are_shown_to_be_needed() -> None:
    assert {*NEEDS, *OF_CALLERS} == set(Sync)


@pytest.mark.parametrize("sync", NEEDS, ids=lambda sync: sync.name)
def test_without_a_wait_the_result_is_wrong(
    comm: MPI.Comm, collective_assert: Check, emulate: Any, sync: Sync
) -> None:
    need = NEEDS[sync]
    if comm.size < need.least:
        pytest.fail("not at this rank count")
    problem = PROBLEMS[0]

    def wrong(seed: int, dropped: Sync | None) -> bool:
        platform = emulate(seed=seed * 10 + comm.rank, dropped=dropped)
        found = wrong_on_gpu(comm, need.way, problem, need.transport)
        collective_assert(sync in platform.driver.waits, f"{sync} is not asked for")
        return any(comm.allgather(bool(found)))

    seed = next((seed for seed in range(SEEDS) if wrong(seed, sync)), None)

    collective_assert(seed is not None, "nothing was wrong without it")
    collective_assert(not wrong(seed, None), "in the same order it was wrong with it too")
