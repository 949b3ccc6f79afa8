"""Wrong numbers never pass: neither damaged on the way, nor on disk, nor computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray
from running import Ended, Here, Queue, Scenario

pytestmark = pytest.mark.any_mpi

Array = NDArray[np.float64]

RUN = "run --seq-len 48 --heads 2 --head-dim 4 --causal --output r.h5"


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        pytest.param(
            Scenario(4, f"{RUN} --check-transfers", fault="flip:rank=1:place=start:call=1"),
            # In its second step rank 1 hands on the block of rank 0.
            ["rank 2 of 4", "kv of 0 came damaged from rank 1 in step 1"],
            id="a block handed on",
        ),
        pytest.param(
            Scenario(3, f"{RUN} --check-transfers", fault="flip:rank=2:place=send:call=0"),
            ["rank 0 of 3", "kv of 2 came damaged from rank 2 in step 0"],
            id="the own block",
        ),
        pytest.param(
            # Rank 1 sends two blocks forward, a third one backward, then a block before the first sums.
            Scenario(3, f"{RUN} --check-transfers --backward", fault="flip:rank=1:place=send:call=4"),
            ["rank 2 of 3", "dkv of 1 came damaged from rank 1 in step 1"],
            id="sums of gradients",
        ),
    ],
    indirect=["ended"],
)
def test_damaged_part_is_named(ended: Ended, words: list[str]) -> None:
    assert ended.returncode not in (0, 2), ended.told()
    assert all(any(word in line for line in ended.complaints()) for word in words), ended.told()
    assert ended.since("flip") < 10
    assert "r.h5" not in ended.files()


@pytest.mark.parametrize(
    ("ended", "rank", "tensor"),
    [
        pytest.param(
            Scenario(3, RUN, fault="flip:rank=2:place=forward:call=1"), 2, "out", id="first repeat"
        ),
        pytest.param(
            Scenario(1, RUN, fault="flip:rank=0:place=forward:call=3"), 0, "out", id="last repeat"
        ),
        pytest.param(
            Scenario(2, f"{RUN} --backward", fault="flip:rank=1:place=backward:call=2"),
            1,
            "dk",
            id="backward",
        ),
    ],
    indirect=["ended"],
)
def test_repeat_with_other_bits_ends_the_job(ended: Ended, rank: int, tensor: str) -> None:
    assert ended.returncode not in (0, 2), ended.told()
    told = f"other bits of {tensor}"
    assert any(f"rank {rank} of" in line and told in line for line in ended.complaints()), ended.told()
    assert "r.h5" not in ended.files()


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(Scenario(3, RUN, fault="scale:rank=1"), id="one rank"),
        pytest.param(Scenario(1, f"{RUN} --verify sample:8", fault="scale"), id="sampled"),
        pytest.param(Scenario(2, f"{RUN} --dtype bfloat16", fault="scale"), id="bfloat16"),
    ],
    indirect=True,
)
def test_wrong_device_fails_verification_and_has_no_times(
    ended: Ended, launch: Callable[..., Ended]
) -> None:
    assert ended.returncode == 1, ended.told()
    assert "# verdict: FAILED" in ended.stdout
    assert "Traceback" not in ended.stderr
    with h5py.File(ended.work / "r.h5") as file:
        assert file.attrs["complete"]
        assert len(file["timings/started"]) == 0
        assert not file["verification/lse"].attrs["passed"]
    reported = launch(0, "report", ended.work / "r.h5")
    assert "# verdict: FAILED" in reported.stdout, reported.told()
    assert "GFLOP/s" not in reported.stdout
    assert launch(0, "verify", ended.work / "r.h5").returncode == 1


GOOD = Scenario(3, RUN)


@pytest.fixture
def good(queue: Queue, tmp_path: Path) -> Path:
    """A copy of a good result."""
    copy = tmp_path / "copy.h5"
    copy.write_bytes((queue.result(GOOD).work / "r.h5").read_bytes())
    return copy


@pytest.mark.parametrize(
    ("tensor", "index", "rank"),
    [
        pytest.param("out", (0, 1, 17, 2), 1, id="out"),
        pytest.param("out", (0, 0, 47, 0), 2, id="last row of out"),
        pytest.param("lse", (0, 1, 0), 0, id="lse"),
    ],
)
@pytest.mark.parametrize("wrong", [0.5, np.nan], ids=["a little", "NaN"])
def test_one_wrong_element_is_found_and_named(
    tensor: str,
    index: tuple[int, ...],
    rank: int,
    wrong: float,
    good: Path,
    launch: Callable[..., Ended],
) -> None:
    with h5py.File(good, "a") as file:
        right = float(file[f"outputs/{tensor}"][index])
        file[f"outputs/{tensor}"][index] = right + wrong
    ended = launch(0, "verify", good)
    assert ended.returncode == 1, ended.told()
    named = [line for line in ended.stdout.splitlines() if line.startswith(f"{tensor}[")]
    assert len(named) == 1, ended.told()
    assert named[0].startswith(f"{tensor}[{', '.join(map(str, index))}] of rank {rank}: found "), named
    assert f"found {right + wrong:.5}"[:10] in named[0]
    assert f"expected {right:.5}"[:13] in named[0]
    assert ended.stdout.rstrip().endswith("# verdict: FAILED")


WRONG_BACKWARD = Scenario(3, f"{RUN} --backward", fault="scale-backward:rank=1")


@pytest.mark.parametrize("ended", [pytest.param(WRONG_BACKWARD, id="one rank")], indirect=True)
def test_wrong_backward_pass_of_a_device_fails_where_the_forward_pass_does_not(ended: Ended) -> None:
    assert ended.returncode == 1, ended.told()
    assert "# verdict: FAILED" in ended.stdout
    with h5py.File(ended.work / "r.h5") as file:
        passed = {name: bool(found.attrs["passed"]) for name, found in file["verification"].items()}
        assert passed == {"out": True, "lse": True, "dq": False, "dk": False, "dv": False}
        assert len(file["timings/started"]) == len(file["timings/backward/started"]) == 0
        assert file["timings/backward/warmup/started"].shape == (1, 3, 4)


def one_element(values: Array) -> Array:
    values[0, 1, 17, 2] += 0.01
    return values


def a_nan(values: Array) -> Array:
    values[0, 0, 31, 0] = np.nan
    return values


#: What is done to which gradient of a finished file; each is wrong by far less than the gradient is large.
DAMAGES: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "one element of dk": ("dk", one_element),
    "one element of dq": ("dq", one_element),
    "rows of dq in another order": ("dq", lambda values: values[:, :, ::-1]),
    "heads of dv in another order": ("dv", lambda values: values[:, ::-1]),
    "dv of zeros": ("dv", np.zeros_like),
    "dq too large by 1 %": ("dq", lambda values: values * 1.01),
    "dk too large by 1 %": ("dk", lambda values: values * 1.01),
    "dv in another sign": ("dv", np.negative),
    "NaN in dk": ("dk", a_nan),
}
GRADIENTS = Scenario(3, f"{RUN} --backward")


@pytest.mark.parametrize(("tensor", "damage"), DAMAGES.values(), ids=DAMAGES.keys())
def test_wrong_gradients_in_a_file_are_found_and_named(
    tensor: str, damage: Callable[[Array], Array], queue: Queue, tmp_path: Path, here: Here
) -> None:
    copy = tmp_path / "copy.h5"
    copy.write_bytes((queue.result(GRADIENTS).work / "r.h5").read_bytes())
    with h5py.File(copy, "a") as file:
        file[f"outputs/{tensor}"][:] = damage(file[f"outputs/{tensor}"][:])
    code, told = here("verify", copy)
    assert code == 1, told
    named = {line.partition("[")[0] for line in told.splitlines() if " of rank " in line}
    assert named == {tensor}, told
    assert told.rstrip().endswith("# verdict: FAILED")


@pytest.mark.parametrize("ended", [pytest.param(GRADIENTS, id="3 ranks")], indirect=True)
def test_right_gradients_in_a_file_pass(ended: Ended, launch: Callable[..., Ended]) -> None:
    assert ended.returncode == 0, ended.told()
    verified = launch(0, "verify", ended.work / "r.h5")
    assert verified.returncode == 0, verified.told()
    assert [line.split()[0] for line in verified.stdout.splitlines()[2:7]] == [
        "out",
        "lse",
        "dq",
        "dk",
        "dv",
    ], verified.told()


@pytest.mark.parametrize(("row", "code"), [(0, 1), (47, 1), (None, 0)], ids=["first", "last", "none"])
def test_sample_always_holds_the_first_and_the_last_row(
    row: int | None, code: int, good: Path, launch: Callable[..., Ended]
) -> None:
    if row is not None:
        with h5py.File(good, "a") as file:
            file["outputs/out"][0, 0, row, 3] += 0.01
    ended = launch(0, "verify", good, "--verify", "sample:2")
    assert ended.returncode == code, ended.told()
    assert "sample:2" in ended.stdout


def test_shuffled_rows_and_zeros_fail(good: Path, launch: Callable[..., Ended]) -> None:
    with h5py.File(good, "a") as file:
        out = file["outputs/out"][:]
        file["outputs/out"][:] = out[:, :, ::-1]
    assert launch(0, "verify", good).returncode == 1
    with h5py.File(good, "a") as file:
        file["outputs/out"][:] = 0
    assert launch(0, "verify", good).returncode == 1


def assert_unreadable(ended: Ended, path: Path) -> None:
    assert ended.returncode == 2, ended.told()
    assert len(ended.complaints()) == 1, ended.told()
    assert path.name in ended.complaints()[0]
    assert "Traceback" not in ended.stderr, ended.told()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def mark_incomplete(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file.attrs["complete"] = False


def lack_mark(path: Path) -> None:
    with h5py.File(path, "a") as file:
        del file.attrs["complete"]


def another_version(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file.attrs["format_version"] = 99


@pytest.mark.parametrize("command", ["verify", "report"])
@pytest.mark.parametrize("damage", [cut, empty, mark_incomplete, lack_mark, another_version])
def test_file_that_is_not_whole_is_refused(
    damage: Callable[[Path], None], command: str, good: Path, launch: Callable[..., Ended]
) -> None:
    damage(good)
    assert_unreadable(launch(0, command, good), good)


def test_outputs_that_begin_at_another_token_are_refused(
    good: Path, launch: Callable[..., Ended]
) -> None:
    """Not compared less of: a slice beyond the end would be empty."""
    with h5py.File(good, "r+") as file:
        tokens = file["outputs/out"].shape[2]
        file["outputs/out"].attrs["first_token"] = tokens

    ended = launch(0, "verify", good)

    assert ended.returncode == 2, ended.told()
    assert f"outputs/out has tokens {tokens} to {2 * tokens - 1}, and not 0" in ended.complaints()[0]


def test_input_that_changed_since_the_run_is_refused(
    tmp_path: Path, launch: Callable[..., Ended]
) -> None:
    path, result = tmp_path / "in.h5", tmp_path / "r.h5"
    with h5py.File(path, "w") as file:
        for name in "qkv":
            file[name] = np.random.default_rng(1).standard_normal((1, 2, 20, 4))
    options = ["--repeats", "1", "--verify", "none", "--output", result]
    assert launch(0, "run", "--input", path, *options).returncode == 0
    assert launch(0, "verify", result).returncode == 0
    with h5py.File(path, "a") as file:
        file["v"][0, 1, 7, 2] += 1
    changed = launch(0, "verify", result)
    assert_unreadable(changed, result)
    assert "v is not what it was" in changed.complaints()[0]
    path.unlink()
    gone = launch(0, "verify", result)
    assert gone.returncode == 2, gone.told()
    assert len(gone.complaints()) == 1
