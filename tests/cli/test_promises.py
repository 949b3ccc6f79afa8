"""What a job never does: fork after MPI is up, pickle a block, hold more than its share."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest
from running import Ended, Queue, Running, Scenario, command_line

# Blocks of 2 * 2 heads * 400 tokens * 64 * 4 bytes: 410 kB, far above what may be pickled.
RUN = "run --seq-len 1200 --heads 2 --head-dim 64 --repeats 1 --verify sample:8 --output r.h5"
WATCHED = Scenario(
    3, f"{RUN} --store-inputs --backward", env={"RINGMPI_TEST_WATCH": "processes,pickles"}
)


@pytest.mark.parametrize("ended", [pytest.param(WATCHED, id="3 ranks")], indirect=True)
def test_no_process_is_started_after_mpi_and_no_block_is_pickled(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    assert "# verdict: OK" in ended.stdout


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(
            Scenario(
                2, RUN, fault=f"{action}:place=commit", env={"RINGMPI_TEST_WATCH": "processes,pickles"}
            ),
            id=action,
        )
        for action in ("fork", "pickle")
    ],
    indirect=True,
)
def test_forks_and_large_pickles_would_be_seen(ended: Ended) -> None:
    assert ended.returncode != 0, ended.told()
    assert any("after MPI was" in line or "were pickled" in line for line in ended.complaints())


TOKENS, HEADS, WIDTH = 8192, 4, 64
MEMORY = {
    size: Scenario(
        size,
        f"run --seq-len {TOKENS} --heads {HEADS} --head-dim {WIDTH} --repeats 1 --causal --window 256 "
        "--verify sample:16 --output r.h5",
        env={"RINGMPI_TEST_WATCH": "memory"},
        timeout=90,
    )
    for size in (1, 2, 4, 8)
}

#: Not verified, since the judge of gradients holds whole heads on rank 0.
BACKWARD_MEMORY = {
    size: Scenario(
        size,
        f"run --seq-len {TOKENS} --heads {HEADS} --head-dim {WIDTH} --repeats 1 --causal --window 256 "
        "--backward --verify none --output r.h5",
        env={"RINGMPI_TEST_WATCH": "memory"},
        timeout=90,
    )
    for size in (2, 8)
}

#: Bytes of a tensor of the whole sequence, such as q.
TENSOR = HEADS * TOKENS * WIDTH * 4

#: Whatever does not depend on the number of ranks: scratch memory of tiles, rows that rank 0 makes again for
#: verification and digests a piece at a time, the pieces of a shard (8 MiB) on their way to rank 0, modules
#: that are loaded late.
CONSTANT = 16e6


def allowed_bytes(size: int) -> float:
    """Return what a rank may hold: in units of a shard of one tensor,

    3 for q, k and v, 4 for two blocks of keys and values, 1 for the accumulator that becomes out, 1 for
    out of the pass before, with which it is compared; row maxima and sums, and lse, are 1/64 of that each.
    """
    return (3 + 4 + 1 + 1) * 1.05 * TENSOR / size + CONSTANT


def allowed_backward_bytes(size: int) -> float:
    """Return the same for a run with gradients:

    4 for q, k, v and dout, 4 for two blocks of keys and values, 6 for three sums of dk and dv, 4 for out, dq,
    dk and dv, 4 for those of the pass before.
    """
    return (4 + 4 + 6 + 4 + 4) * 1.05 * TENSOR / size + CONSTANT


def peaks(ended: Ended) -> dict[int, int]:
    found = {path.name: int(path.read_text()) for path in ended.marks.glob("peak-*")}
    return {int(name.removeprefix("peak-")): nbytes for name, nbytes in found.items()}


@pytest.mark.parametrize(
    ("ended", "size"),
    [pytest.param(scenario, size, id=f"{size} ranks") for size, scenario in MEMORY.items()],
    indirect=["ended"],
)
def test_rank_holds_its_shard_and_a_bounded_piece(ended: Ended, size: int) -> None:
    assert ended.returncode == 0, ended.told()
    found = peaks(ended)
    assert sorted(found) == list(range(size))
    assert max(found.values()) <= allowed_bytes(size), found


@pytest.mark.parametrize(
    ("ended", "size"),
    [pytest.param(scenario, size, id=f"{size} ranks") for size, scenario in BACKWARD_MEMORY.items()],
    indirect=["ended"],
)
def test_rank_holds_no_more_than_sums_beside_them_on_the_way_back(ended: Ended, size: int) -> None:
    assert ended.returncode == 0, ended.told()
    found = peaks(ended)
    assert sorted(found) == list(range(size))
    assert max(found.values()) <= allowed_backward_bytes(size), found


def test_memory_of_a_rank_falls_with_the_number_of_ranks(queue: Queue) -> None:
    largest = [max(peaks(queue.result(scenario)).values()) for scenario in MEMORY.values()]
    assert largest == sorted(largest, reverse=True)
    # The part in proportion falls to an eighth, the constant stays.
    assert largest[-1] < largest[0] / 8 + CONSTANT, largest


def test_two_runs_with_one_output_leave_one_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "both.h5"
    options = ["--seq-len", "64", "--heads", "1", "--head-dim", "4", "--output", str(target)]
    jobs = [
        Running(command_line(2, "run", *options, "--seed", seed), tmp_path / seed, {})
        for seed in ("1", "2")
    ]
    ends = [job.wait(60) for job in jobs]
    assert [ended.returncode for ended in ends] == [0, 0], "".join(ended.told() for ended in ends)
    with h5py.File(target) as file:
        assert file.attrs["complete"]
        assert file["verification/out"].attrs["passed"]
    left = [path.name for path in tmp_path.iterdir() if path.is_file()]
    assert left == ["both.h5"]
    verified = Running(command_line(0, "verify", str(target)), tmp_path / "verify", {}).wait(60)
    assert verified.returncode == 0, verified.told()
