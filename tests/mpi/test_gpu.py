"""The ring on an emulated GPU, on which everything runs late: right with all waits, wrong without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from emulated.driver import EmulatedPlatform, Exported
from mpi4py import MPI
from sharded import (
    ALL_WAYS,
    Check,
    Problem,
    Way,
    both_passes,
    dense_answers,
    make,
    random_tensors,
    spread,
    too_far,
)

from ringmpi.comm import transport
from ringmpi.devices import cuda
from ringmpi.devices.region import Region
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
    timed = np.isfinite(records["device_time"]) & (
        (records["device_time"] > 0) >= (records["pairs"] > 0)
    )
    return wrong if timed.all() else [*wrong, f"device_time: {records['device_time']}"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", ALL_WAYS, ids=str)
def test_every_method_is_exact_whatever_runs_late(
    comm: MPI.Comm, collective_assert: Check, emulate: Any, way: Way, transport: str
) -> None:
    for seed, problem in enumerate(spread(PROBLEMS, way, {2: 3, 4: 1})):
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
    Sync.COPIED_IN: Need("staged", Way("ring"), 2),
    Sync.ARRIVED: Need("staged", Way("ring"), 2),
}

#: What is between the caller's stream and ours, which tests/unit/test_devices_cuda.py shows.
OF_CALLERS = {Sync.CALLER_WROTE, Sync.CALLER_READS}

#: Orders to try: a wait that is missing harms only in some of them.
SEEDS = 40


def test_every_wait_is_among_those_that_are_shown_to_be_needed() -> None:
    assert {*NEEDS, *OF_CALLERS} == set(Sync)


@pytest.mark.parametrize(
    "sync", [s for s, need in NEEDS.items() if need.least <= MPI.COMM_WORLD.size], ids=lambda s: s.name
)
def test_without_a_wait_the_result_is_wrong(
    comm: MPI.Comm, collective_assert: Check, emulate: Any, sync: Sync
) -> None:
    need, problem = NEEDS[sync], PROBLEMS[0]

    def wrong(seed: int, dropped: Sync | None) -> bool:
        platform = emulate(seed=seed * 10 + comm.rank, dropped=dropped)
        found = wrong_on_gpu(comm, need.way, problem, need.transport)
        collective_assert(sync in platform.driver.waits, f"{sync} is not asked for")
        return any(comm.allgather(bool(found)))

    seed = next((seed for seed in range(SEEDS) if wrong(seed, sync)), None)

    collective_assert(seed is not None, "nothing was wrong without it")
    collective_assert(not wrong(seed, None), "in the same order it was wrong with it too")


@pytest.mark.parametrize("progress", ["wait", "thread"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_other_ways_to_make_progress_are_exact_too(
    comm: MPI.Comm, collective_assert: Check, emulate: Any, transport: str, progress: str
) -> None:
    emulate(seed=comm.rank)

    wrong = wrong_on_gpu(
        comm, Way("ring"), PROBLEMS[0], transport, progress=progress, check_transfers=True
    )

    collective_assert(not wrong, wrong)


@pytest.mark.parametrize("limit", [1, 100, 2**28])
def test_staged_and_direct_give_the_same_bits_in_messages_of_any_size(
    comm: MPI.Comm, collective_assert: Check, emulate: Any, limit: int
) -> None:
    problem, found = Problem(9, heads=2, kv_heads=1, head_dim=3, dtype="bfloat16"), {}
    whole = random_tensors(problem)
    for name in TRANSPORTS:
        emulate(seed=comm.rank)
        options = {"device": "cuda", "transport": name, "chunk_limit": limit}
        with make(comm, Way("ring"), problem, **options) as attention:
            found[name] = both_passes(attention, problem.shards(comm, whole))
            collective_assert(attention.transport == name, attention.transport)
            held, size = attention.staged_nbytes, attention.held_nbytes
            moves = comm.size > 1 and name == "staged"
            collective_assert((held > 0) == moves, f"{name}: {held} bytes")
            collective_assert(held <= max(map(size, attention.schedules)), f"{held} bytes")

    same = all(found["direct"][n].tobytes() == found["staged"][n].tobytes() for n in found["direct"])
    collective_assert(same)


def test_gpus_are_shared_in_turns_and_told(
    comm: MPI.Comm, collective_assert: Check, emulate: Any
) -> None:
    emulate(number=2)

    with make(comm, Way("ring"), Problem(8), device="cuda") as attention:
        gpu = attention.gpu

    assert gpu is not None
    # Open MPI numbers the ranks of a node by core, not always as it numbers all ranks.
    taken = comm.allgather(gpu.index)
    collective_assert(sorted(taken) == sorted(rank % 2 for rank in range(comm.size)), str(taken))
    collective_assert(gpu.sharing == taken.count(gpu.index), gpu)


def test_auto_takes_the_gpu_and_the_transport_that_every_rank_has(
    comm: MPI.Comm, collective_assert: Check, emulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate()
    monkeypatch.setattr("ringmpi.agreed.PREFERENCE", ("cuda", "numpy"))
    why = "this library reads host memory only" if comm.rank == comm.size - 1 else ""
    monkeypatch.setattr("ringmpi.agreed.why_no_device_pointers", lambda: why)

    with make(comm, Way("ring"), Problem(8)) as attention:
        collective_assert((attention.device, attention.transport) == ("cuda", "staged"))


def test_direct_is_refused_on_all_ranks_before_a_gpu_is_touched(
    comm: MPI.Comm, collective_assert: Check, emulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = emulate()
    why = "this library reads host memory only" if comm.rank == comm.size - 1 else ""
    monkeypatch.setattr("ringmpi.agreed.why_no_device_pointers", lambda: why)

    with pytest.raises(
        MissingCapabilityError, match=r"direct: this library .*\(rank \d.*staged"
    ) as told:
        make(comm, Way("ring"), Problem(8), device="cuda", transport="direct")

    collective_assert(platform.driver is None)
    collective_assert(f"(rank {comm.size - 1} of {comm.size})" in str(told.value), told.value)


def test_a_rank_without_a_gpu_is_named_by_all(
    comm: MPI.Comm, collective_assert: Check, emulate: Any
) -> None:
    emulate(missing="no GPU is visible" if comm.rank == 0 else None)

    with pytest.raises(
        MissingCapabilityError, match=r"device=cuda: no GPU is visible.*native.*\(rank 0"
    ):
        make(comm, Way("ring"), Problem(8), device="cuda")


def test_arrays_on_another_gpu_or_for_another_device_are_refused_by_all(
    comm: MPI.Comm, collective_assert: Check, emulate: Any
) -> None:
    platform, problem = emulate(), Problem(8, heads=2, kv_heads=1, head_dim=2)
    mine = problem.shards(comm, random_tensors(problem))
    for device, told in (
        ("cuda", "lies on GPU 3.*computes on GPU 0"),
        ("numpy", "device=numpy computes in"),
    ):
        with make(comm, Way("ring"), problem, device=device) as attention:
            attention.forward(mine["q"], mine["k"], mine["v"])
            driver = platform.driver
            place, shape = driver.allocate(mine["q"].nbytes), mine["q"].shape
            there = Exported(Region.contiguous(place, place.address, shape, mine["q"].dtype, 3), driver)
            q = there if comm.rank == 0 else mine["q"]
            with pytest.raises(ShapeError, match=told):
                attention.forward(q, mine["k"], mine["v"])
