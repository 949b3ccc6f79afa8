"""Care for what is the user's: their files, their odd names, their results when something else goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from running import CONSOLE, Ended, Here, Running, Scenario, launcher

pytestmark = pytest.mark.any_mpi


def write_input(path: Path) -> Path:
    rng = np.random.default_rng(5)
    with h5py.File(path, "w") as file:
        for name in "qkv":
            file[name] = rng.standard_normal((1, 2, 40, 4))
    return path


@pytest.mark.parametrize("refusing", [0, 1], ids=["first rank", "last rank"])
def test_a_rank_that_refuses_alone_ends_the_job_for_all(refusing: int, tmp_path: Path) -> None:
    """One rank cannot read its input, such as a file that only its node lacks."""
    there = write_input(tmp_path / "there.h5")
    inputs = [there, there]
    inputs[refusing] = tmp_path / "missing.h5"
    words = list(launcher().command(2, [])[1:-2])
    for at, path in enumerate(inputs):
        words += [*[":"] * at, "-n", "1", str(CONSOLE), "run", "--input", str(path)]

    ended = Running([launcher().path, *words], tmp_path / "job", {}).wait(60)

    assert ended.returncode == 2, ended.told()
    (complaint,) = ended.complaints()
    assert "missing.h5: no such file" in complaint


@pytest.mark.parametrize("output", ["in.h5", "./in.h5", "link.h5"])
def test_an_input_is_never_written_to(
    launch: Callable[..., Ended], tmp_path: Path, output: str
) -> None:
    before = write_input(tmp_path / "in.h5").read_bytes()
    (tmp_path / "link.h5").symlink_to(tmp_path / "in.h5")

    ended = launch(2, "run", "--input", tmp_path / "in.h5", "--output", tmp_path / output)

    assert ended.returncode == 2, ended.told()
    assert len(ended.complaints()) == 1
    assert (tmp_path / "in.h5").read_bytes() == before


def test_a_foreign_file_is_not_replaced(launch: Callable[..., Ended], tmp_path: Path) -> None:
    notes = tmp_path / "notes.h5"
    notes.write_text("of somebody else")

    ended = launch(1, "run", "--seq-len", "8", "--output", notes)

    assert ended.returncode == 2, ended.told()
    assert "is no result of ringmpi" in ended.complaints()[0]
    assert notes.read_text() == "of somebody else"


def test_any_file_name_will_do(launch: Callable[..., Ended], here: Here, tmp_path: Path) -> None:
    # Markup, a word of formats, a quote, a space and letters of others.
    path = tmp_path / "[red]50% 'of' a Größe.h5"
    ended = launch(1, "run", "--seq-len", "8", "--heads", "1", "--head-dim", "2", "--output", path)

    assert ended.returncode == 0, ended.told()
    assert f"# {path}" in ended.stdout
    assert here("verify", path)[0] == 0
    assert here("report", path, "--plot")[0] == 0
    assert path.with_suffix(".png").stat().st_size > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_inputs_outlive_the_input_file(
    launch: Callable[..., Ended], tmp_path: Path, dtype: str
) -> None:
    source, result = write_input(tmp_path / "in.h5"), tmp_path / "r.h5"
    options = ["--dtype", dtype, "--layout", "zigzag", "--store-inputs", "--output", str(result)]
    assert launch(3, "run", "--input", source, *options).returncode == 0
    source.unlink()

    assert launch(0, "verify", result).returncode == 0


def test_an_input_is_found_again_from_another_folder(
    launch: Callable[..., Ended], tmp_path: Path
) -> None:
    write_input(tmp_path / "in.h5")
    command = [str(CONSOLE), "run", "--input", "in.h5", "--output", "r.h5"]
    first = Running(["env", "-C", str(tmp_path), *command], tmp_path / "job", {}).wait(60)
    assert first.returncode == 0, first.told()

    assert launch(0, "verify", tmp_path / "r.h5").returncode == 0


def test_a_full_disk_behind_stdout_does_not_cost_the_result(
    launch: Callable[..., Ended], tmp_path: Path
) -> None:
    command = f"{CONSOLE} run --seq-len 8 --heads 1 --head-dim 2 --output r.h5 > /dev/full"
    ended = Running(["sh", "-c", command], tmp_path / "job", {}).wait(60)

    assert ended.returncode == 0, ended.told()
    assert launch(0, "verify", ended.work / "r.h5").returncode == 0


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(Scenario(0, args), id=args)
        for args in (
            "run --seq-len 8 --verify sample:\N{SUPERSCRIPT TWO}",
            "run --seq-len 8 --softmax-scale 1e300",
            "run --seq-len 8 --dtype float16 --softmax-scale inf",
            "sweep --ranks \N{SUPERSCRIPT TWO} --seq-len 8",
            "sweep --ranks 1 --seq-len 8 --vary heads=1 --vary heads=2",
        )
    ],
    indirect=True,
)
def test_numbers_that_are_none_are_refused(ended: Ended) -> None:
    assert ended.returncode == 2, ended.told()
    assert len(ended.complaints()) == 1, ended.told()


@pytest.mark.parametrize("plot", ["x.xyz", "/proc/x.png"])
def test_a_picture_that_cannot_be_drawn_is_refused(
    launch: Callable[..., Ended], tmp_path: Path, plot: str
) -> None:
    result = tmp_path / "r.h5"
    run = ["run", "--seq-len", "8", "--heads", "1", "--head-dim", "2", "--output", str(result)]
    assert launch(1, *run).returncode == 0

    ended = launch(0, "report", result, "--plot", plot)

    assert ended.returncode == 2, ended.told()
    assert "plot=" in ended.complaints()[0]
