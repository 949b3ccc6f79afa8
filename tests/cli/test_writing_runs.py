"""Results in a file a rank, or in one that all ranks write together: whole, or not there, or refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from running import CONSOLE, Ended, Here, Queue, Running, Scenario, launcher
from test_failures import LIMIT, OLDER
from test_signals import SLACK, signalling

from ringmpi.store import ResultFile

#: What ranks of a job say of their h5py; an h5py that can do both may choose by how it was started.
PARALLEL = (
    subprocess.run(
        launcher().command(
            1, [sys.executable, "-c", "from ringmpi.parallel_hdf5 import parallel; print(parallel())"]
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.strip()
    == "True"
)

WAYS = ["shards", *["mpio"] * PARALLEL]

PROBLEMS = {
    "backward, bfloat16, fewer KV heads, inputs": (
        4,
        "--seq-len 41 --heads 4 --kv-heads 2 --head-dim 6 --batch 2 --causal --layout zigzag --backward "
        "--dtype bfloat16 --store-inputs --repeats 1",
    ),
    "ranks without rows, float16": (
        5,
        "--seq-len 3 --heads 2 --head-dim 4 --layout striped --dtype float16 --backward --repeats 1",
    ),
}

RUNS = {
    (io, name): Scenario(ranks, f"run {options} --io {io} --output r.h5")
    for name, (ranks, options) in PROBLEMS.items()
    for io in ("gather", *WAYS)
}

#: The second is what tests/mpi/test_writing.py does with every library.
MARKS = {"ranks without rows, float16": [pytest.mark.any_mpi]}


def tensors(path: Path) -> dict[str, Any]:
    """Return all tensors of a file, read with plain h5py."""
    with h5py.File(path, "r") as file:
        return {
            f"{group}/{name}": (found[...], found.attrs.get("dtype"), found.attrs["first_token"])
            for group in ("outputs", "inputs")
            for name, found in file[group].items()
        }


def test_debians_stack_has_parallel_hdf5() -> None:
    assert PARALLEL or os.environ.get("RINGMPI_MPI") != "debian"


@pytest.mark.parametrize(
    ("written", "gathered"),
    [
        pytest.param(
            RUNS[way, name], RUNS["gather", name], id=f"{way}, {name}", marks=MARKS.get(name, [])
        )
        for name in PROBLEMS
        for way in WAYS
    ],
)
def test_a_run_writes_what_it_gathers(
    written: Scenario, gathered: Scenario, queue: Queue, here: Here
) -> None:
    ended = queue.result(written)
    assert ended.returncode == 0, ended.told()
    found, right = (tensors(queue.result(run).work / "r.h5") for run in (written, gathered))
    assert list(found) == list(right)
    for name, (values, *told) in found.items():
        assert values.tobytes() == right[name][0].tobytes(), name
        assert told == list(right[name][1:])
    shards = [name for name in ended.files() if ".shards/" in name]
    assert len(shards) == (written.ranks if "--io shards" in written.args else 0), ended.files()
    assert len(ended.files()) == 1 + len(shards), ended.files()
    assert here("verify", ended.work / "r.h5")[0] == 0
    assert here("report", ended.work / "r.h5")[0] == 0


WHOLE = RUNS["shards", "backward, bfloat16, fewer KV heads, inputs"]


@pytest.fixture
def copied(queue: Queue, tmp_path: Path) -> Path:
    """A copy of a good result in shards."""
    shutil.copytree(queue.result(WHOLE).work, tmp_path / "copy")
    return tmp_path / "copy" / "r.h5"


def shard(result: Path, rank: int) -> Path:
    (found,) = result.parent.glob(f"*.shards/{rank}.h5")
    return found


def assert_refused(ended: Ended, *told: str) -> None:
    assert ended.returncode == 2, ended.told()
    (complaint,) = ended.complaints()
    assert all(word in complaint for word in told), ended.told()
    assert "Traceback" not in ended.stderr, ended.told()


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    "command",
    [
        "verify",
        "report",
        "report --plot x.png",
        "report --html x.html",
        "report --perfetto x.json",
        "report --compare",
    ],
)
def test_whatever_opens_a_result_refuses_it_without_a_shard(
    command: str, copied: Path, launch: Callable[..., Ended]
) -> None:
    shard(copied, 2).unlink()
    word, *options = command.split()
    ended = launch(0, word, copied, *options)
    assert_refused(ended, "r.h5", "2.h5 is not there", "kept together")
    assert ended.files() == []


@pytest.mark.any_mpi
def test_verify_refuses_what_a_rank_did_not_write(copied: Path, launch: Callable[..., Ended]) -> None:
    """Zeros in place of stored inputs, which the outputs would be compared with."""
    with h5py.File(shard(copied, 1), "r+") as file:
        file["inputs/q"][...] = 0
    assert_refused(launch(0, "verify", copied), "1.h5 is damaged")


@pytest.mark.any_mpi
def test_a_result_may_be_moved_with_its_folder(copied: Path, tmp_path: Path, here: Here) -> None:
    copied.parent.rename(tmp_path / "moved")
    assert here("verify", tmp_path / "moved" / "r.h5")[0] == 0


@pytest.mark.any_mpi
def test_a_sweep_repeats_what_has_lost_a_shard(launch: Callable[..., Ended], tmp_path: Path) -> None:
    options = "--ranks 2 --seq-len 12 --heads 1 --head-dim 2 --repeats 1 --vary io=gather,shards"
    words = ["sweep", *options.split(), "--output", str(tmp_path / "sweep")]
    assert launch(0, *words).returncode == 0
    (lost,) = (tmp_path / "sweep").glob("*.shards/1.h5")
    lost.unlink()

    again = launch(0, *words)

    assert again.returncode == 0, again.told()
    assert again.stdout.count("done before") == 1, again.told()
    assert not lost.parent.exists()
    assert len(list((tmp_path / "sweep").glob("*.shards/1.h5"))) == 1


SMALL = "run --seq-len 48 --heads 2 --head-dim 4 --output r.h5"


def failing(way: str, fault: str) -> Scenario:
    return Scenario(
        3,
        f"{SMALL} --io {way}",
        fault=fault,
        files=lambda work: (work / "r.h5").write_bytes(OLDER) and None,
    )


@pytest.mark.parametrize(
    ("ended", "action"),
    [
        pytest.param(failing(way, fault), fault.partition(":")[0], id=f"{way}, {name}")
        for way in WAYS
        for name, fault in {
            "the last rank writes": "raise:rank=2:place=write:call=1",
            "the last rank is killed while it writes": "kill:rank=2:place=write",
        }.items()
    ],
    indirect=["ended"],
)
def test_a_rank_that_fails_while_it_writes_ends_the_job(ended: Ended, action: str) -> None:
    assert ended.returncode not in (0, 2), ended.told()
    assert ended.since(action) < LIMIT, ended.told()
    assert (ended.work / "r.h5").read_bytes() == OLDER
    # What was not finished is hidden.
    assert all(name.startswith(".r.") for name in ended.files() if name != "r.h5"), ended.files()


@pytest.mark.parametrize(
    "ended",
    [pytest.param(failing(way, "raise:rank=0:place=commit"), id=way) for way in WAYS],
    indirect=True,
)
def test_rank_0_leaves_nothing_behind_when_the_file_cannot_appear(ended: Ended) -> None:
    assert ended.returncode not in (0, 2), ended.told()
    assert (ended.work / "r.h5").read_bytes() == OLDER
    assert ended.files() == ["r.h5"], ended.told()


def interrupted(way: str, fault: str, target: str) -> Scenario:
    mark = f"{fault.partition(':')[0]}-{fault.partition('rank=')[2][0]}"
    return Scenario(
        3,
        f"{SMALL} --repeats 100000 --io {way}",
        fault=fault,
        meanwhile=signalling(signal.SIGUSR1, target, mark),
    )


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(interrupted(way, fault, target), id=f"{way}, {name}")
        for way in WAYS
        for name, (fault, target) in {
            "later": ("mark:rank=0:place=attend:call=7", "all"),
            "one that writes": ("sleep:seconds=1:rank=1:place=write", "1"),
            "one that waits for one that writes": ("sleep:seconds=1:rank=1:place=write", "0"),
        }.items()
    ],
    indirect=True,
)
def test_a_signal_leaves_a_whole_result(ended: Ended) -> None:
    assert ended.returncode == 128 + signal.SIGUSR1, ended.told()
    assert ended.since("signalled") < LIMIT + SLACK, ended.told()
    assert "Traceback" not in ended.stderr, ended.told()
    assert not [name for name in ended.files() if name.startswith(".")], ended.files()
    with ResultFile(ended.work / "r.h5") as result:
        assert result.interrupted == signal.SIGUSR1
        out = [result.rows("out", 0, head, (range(48),)) for head in range(2)]
    assert np.isfinite(out).all()


@pytest.mark.parametrize(
    "ended",
    [
        # Rank 2 heeds a signal in its first pass, while others may be about to write.
        pytest.param(interrupted(way, "sleep:seconds=1:rank=2:place=attend:call=2", "2"), id=way)
        for way in WAYS
    ],
    indirect=True,
)
def test_a_signal_before_the_first_pass_is_done_leaves_nothing(ended: Ended) -> None:
    assert ended.returncode == 128 + signal.SIGUSR1, ended.told()
    assert ended.since("signalled") < LIMIT + SLACK, ended.told()
    assert "no file is written" in ended.stdout, ended.told()
    assert ended.files() == [], ended.told()


def test_ranks_that_see_other_folders_are_refused(tmp_path: Path) -> None:
    """As nodes do, of a folder that is local to each."""
    words = list(launcher().command(2, [])[1:-2])
    for at in range(2):
        folder = tmp_path / f"node{at}"
        folder.mkdir()
        own = ["env", "-C", str(folder), str(CONSOLE), *SMALL.split(), "--io", "shards"]
        words += [*[":"] * at, "-n", "1", *own]

    ended = Running([launcher().path, *words], tmp_path / "job", {}).wait(60)

    assert_refused(ended, "io=shards", "node1 is not the folder", "(rank 1 of 2)")
    assert not list(tmp_path.glob("node*/*"))


if not PARALLEL:

    @pytest.mark.parametrize(
        "ended",
        [pytest.param(Scenario(2, f"{SMALL} --io mpio"), id="2 ranks")],
        indirect=True,
    )
    def test_mpio_is_refused_where_hdf5_is_not_parallel(ended: Ended) -> None:
        assert ended.returncode == 3, ended.told()
        (complaint,) = ended.complaints()
        assert "io=mpio" in complaint
        assert "--io shards" in complaint
        assert ended.files() == []
