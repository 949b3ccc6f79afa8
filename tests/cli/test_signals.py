"""A scheduler's warning: finished work is on disk soon after, and the exit code names the signal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import h5py
import numpy as np
import pytest
from running import Ended, Running, Scenario, under_open_mpi

#: Seconds from the signal to the launcher's end: 5 s as promised, and the launcher's own part, which under
#: Open MPI is up to 5 s of waiting for ranks to leave.
LIMIT = 5.0
SLACK = 5.0

#: Seconds that a slow rank spends in each step, which the limit is extended by.
STEP = 1.0

#: More repeats than any machine makes until the signal comes.
ENDLESS = "run --seq-len 96 --heads 2 --head-dim 4 --repeats 1000000 --output r.h5"
SLOW = f"sleep:seconds={STEP}:rank=1:place=attend:call=each"

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


def signalling(number: int, target: str, after: str) -> Callable[[Running], None]:
    """Return what sends a signal once a mark is there."""

    def act(running: Running) -> None:
        running.await_mark(after)
        time.sleep(0.1)
        pids = running.rank_pids()
        running.note("signalled")
        if target == "mpiexec":
            running.process.send_signal(number)
        for pid in (
            pids.values() if target == "all" else [pids[int(target)]] if target.isdigit() else []
        ):
            os.kill(pid, number)

    return act


def interrupted(
    number: int, target: str, options: str = "", *, ranks: int = 3, slow: bool = False, call: int = 0
) -> Scenario:
    """Return a run that a signal ends; it comes in the third pass, or in another attend as asked."""
    faults = [f"mark:rank=0:place=attend:call={call or 2 * ranks + 1}", *[SLOW] * slow]
    return Scenario(
        ranks,
        f"{ENDLESS} {options}",
        fault=";".join(faults),
        meanwhile=signalling(number, target, "mark-0"),
    )


COMPUTING = {
    "SIGTERM to a middle rank that computes, poll": (TERM, "1", "--progress poll"),
    "SIGUSR1 to rank 0 that computes, wait": (USR1, "0", "--progress wait"),
    "SIGTERM to all ranks that compute, wait": (TERM, "all", "--progress wait"),
    "SIGUSR1 to all ranks that compute, thread": (USR1, "all", "--progress thread"),
    "SIGUSR1 to mpiexec": (USR1, "mpiexec", "--progress poll"),
}
WAITING = {
    "SIGTERM to a rank that waits for a slow one, poll": (TERM, "2", "--progress poll"),
    "SIGUSR1 to the slow rank, wait": (USR1, "1", "--progress wait"),
    "SIGTERM to all while one is slow, thread": (TERM, "all", "--progress thread"),
}
if not under_open_mpi():
    # Open MPI's mpiexec kills its ranks a quarter of a second after it was told to end.
    COMPUTING["SIGTERM to mpiexec"] = (TERM, "mpiexec", "--progress wait")
    WAITING["SIGTERM to mpiexec while one is slow"] = (TERM, "mpiexec", "--progress poll")

FINISHED = [
    *(
        pytest.param(interrupted(number, target, options), number, id=name)
        for name, (number, target, options) in COMPUTING.items()
    ),
    *(
        pytest.param(interrupted(number, target, options, slow=True), number, id=name)
        for name, (number, target, options) in WAITING.items()
    ),
    pytest.param(interrupted(TERM, "0", ranks=1), TERM, id="SIGTERM to the only rank"),
    # Three attends forward and three back a pass: in the third pass, on the way back.
    pytest.param(
        interrupted(USR1, "0", "--backward --progress poll", call=16),
        USR1,
        id="SIGUSR1 on the way back",
    ),
    pytest.param(
        interrupted(TERM, "all", "--backward --progress wait", slow=True, call=16),
        TERM,
        id="SIGTERM to all on the way back while one is slow",
    ),
]


@pytest.mark.parametrize(("ended", "number"), FINISHED, indirect=["ended"])
def test_signal_leaves_the_finished_passes_in_a_complete_file(
    ended: Ended, number: int, launch: Callable[..., Ended]
) -> None:
    assert ended.returncode == 128 + number, ended.told()
    assert ended.since("signalled") < LIMIT + STEP + SLACK, ended.told()
    assert f"ringmpi: interrupted by signal {number:d}" in ended.complaints(), ended.told()
    assert "Traceback" not in ended.stderr, ended.told()
    assert ended.files() == ["r.h5"]
    with h5py.File(ended.work / "r.h5") as file:
        assert file.attrs["complete"]
        assert file.attrs["interrupted"] == number
        passes, ranks, steps = file["timings/started"].shape
        assert passes >= 1
        assert ranks == steps
        assert np.isfinite(file["timings/step_end"][:]).all()
        assert file["timings/barrier"].shape[0] == passes
        tensors = {"out", "lse", *(("dq", "dk", "dv") if "--backward" in ended.args else ())}
        assert set(file["outputs"]) == tensors
        assert all(np.isfinite(tensor[:]).all() for tensor in file["outputs"].values())
        assert set(file["verification"]) == tensors
        assert all(found.attrs["passed"] for found in file["verification"].values())
        if "--backward" in ended.args:
            # The last pass back may be one that was given up.
            back = file["timings/backward/step_end"][:]
            assert passes - 1 <= len(back) <= passes
            assert back.shape[1:] == (ranks, ranks + 1)
            assert np.isfinite(back).all()
            assert file["timings/backward/barrier"].shape == (len(back), ranks)
    reported = launch(0, "report", ended.work / "r.h5")
    assert reported.returncode == 0, reported.told()
    assert f"ended early by signal {number:d}" in reported.stdout
    assert not reported.stderr, reported.told()


@pytest.mark.parametrize("ended", [FINISHED[0].values[0]], indirect=True)
def test_interrupted_result_can_be_verified(ended: Ended, launch: Callable[..., Ended]) -> None:
    verified = launch(0, "verify", ended.work / "r.h5")
    assert verified.returncode == 0, verified.told()


@pytest.mark.parametrize(
    ("ended", "number"),
    [
        pytest.param(interrupted(TERM, "2", "--progress wait", slow=True, call=1), TERM, id="one rank"),
        pytest.param(interrupted(USR1, "all", slow=True, call=1), USR1, id="all ranks"),
        # What the forward pass found is not kept without the gradients that were asked for.
        pytest.param(
            interrupted(TERM, "1", "--backward", slow=True, call=4), TERM, id="on the way back"
        ),
    ],
    indirect=["ended"],
)
def test_signal_before_the_first_pass_leaves_no_file(ended: Ended, number: int) -> None:
    assert ended.returncode == 128 + number, ended.told()
    assert ended.since("signalled") < LIMIT + STEP + SLACK, ended.told()
    assert ended.complaints() == [f"ringmpi: interrupted by signal {number:d}"], ended.told()
    assert ended.files() == []


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(
            Scenario(
                2,
                "run --seq-len 12000 --heads 4 --head-dim 64 --repeats 1 --output r.h5",
                fault="mark:rank=0:place=verify",
                meanwhile=signalling(TERM, "1", "mark-0"),
            ),
            id="SIGTERM",
        )
    ],
    indirect=True,
)
def test_signal_during_a_long_verification_keeps_the_outputs(ended: Ended) -> None:
    assert ended.returncode == 128 + TERM, ended.told()
    assert ended.since("signalled") < LIMIT + SLACK, ended.told()
    with h5py.File(ended.work / "r.h5") as file:
        assert file.attrs["interrupted"] == TERM
        assert np.isfinite(file["outputs/out"][:]).all()
        assert not file["verification"].keys()


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(
            Scenario(
                3,
                "run --seq-len 48 --heads 2 --head-dim 4 --output r.h5",
                fault="sleep:seconds=2:rank=1:place=shards",
                meanwhile=signalling(TERM, "1", "sleep-1"),
            ),
            id="a rank still makes its shard",
        ),
        pytest.param(
            # Rank 3 hears of it from rank 2, while rank 0 has told it and gone on.
            Scenario(
                4,
                "run --seq-len 48 --heads 2 --head-dim 4 --output r.h5",
                fault="sleep:seconds=2:rank=2:place=begin",
                meanwhile=signalling(TERM, "3", "sleep-2"),
            ),
            id="a rank has not heard yet of the file that rank 0 has begun",
        ),
    ],
    indirect=True,
)
def test_signal_while_others_set_up_the_ring_ends_all(ended: Ended) -> None:
    """The others are in a collective that the signalled rank will never enter."""
    assert ended.returncode == 128 + TERM, ended.told()
    assert ended.since("signalled") < LIMIT + SLACK, ended.told()
    assert ended.files() == []


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(
            Scenario(
                3,
                "run --seq-len 48 --heads 2 --head-dim 4 --output r.h5",
                fault="sleep:seconds=2:rank=0:place=commit",
                meanwhile=signalling(USR1, "all", "sleep-0"),
            ),
            id="rank 0 still writes",
        )
    ],
    indirect=True,
)
def test_signal_when_only_the_file_is_left_changes_nothing(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    with h5py.File(ended.work / "r.h5") as file:
        assert file.attrs["complete"]
        assert "interrupted" not in file.attrs
