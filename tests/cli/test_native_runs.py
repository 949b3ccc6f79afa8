"""Which device a run takes, what it tells of it, and that it compiles before MPI is up, once a node."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
from running import CONSOLE, Ended, Running, Scenario, command_line

pytestmark = pytest.mark.any_mpi

RUN = "run --seq-len 60 --heads 4 --kv-heads 2 --head-dim 12 --causal --repeats 1 --output r.h5"

#: No program lies here.
EMPTY = "/usr/include"

NOBODY = {"CXX": "/nonexistent"}
BARE = {"PATH": EMPTY}


def device_line(ended: Ended) -> str:
    """Return the one line in which a run tells what computes."""
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("# device:"))
    return line


def columns(ended: Ended) -> dict[str, list[object]]:
    """Return the table of ranks."""
    with h5py.File(ended.work / "r.h5") as file:
        found = dict(file["ranks"])
        texts = h5py.check_string_dtype
        return {
            name: (column.asstr() if texts(column.dtype) else column)[...].tolist()
            for name, column in found.items()
        }


NATIVE = Scenario(
    2,
    f"{RUN} --device native --threads 2 --backward --dtype bfloat16",
    env={"RINGMPI_TEST_WATCH": "processes"},
)
AUTO = Scenario(3, RUN)
NUMPY = Scenario(2, f"{RUN} --device numpy", env={"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("ended", [pytest.param(NATIVE, id="2 ranks")], indirect=True)
def test_a_run_on_the_native_device_tells_what_computed(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    found = columns(ended)
    assert found["device"] == ["native"] * 2
    assert found["threads"] == [2, 2]
    (instruction_set,) = set(found["instruction_set"])
    (unit,) = set(found["matrix_unit"])
    assert instruction_set
    assert unit in ("on", "off")
    assert all(isinstance(seconds, float) and seconds >= 0 for seconds in found["compile_s"])
    told = f"native ({instruction_set}{' with matrix unit' * (unit == 'on')}), 2 thread(s) a rank"
    assert device_line(ended) == f"# device: {told}"
    assert f"# device   {told}" in ended.stdout
    with h5py.File(ended.work / "r.h5") as file:
        # On every machine with fewer than 4 cores, threads being counted.
        crowded = len(os.sched_getaffinity(0)) < 4
        assert bool(file["machine"].attrs["oversubscribed"]) == crowded
        assert file["ranks/compile_s"].attrs["unit"] == "s"


ROUNDED = f"{RUN.replace('60', '300')} --dtype bfloat16 --weights rounded --backward"
ROUNDED_RUNS = {
    "NumPy": Scenario(1, f"{ROUNDED} --device numpy"),
    "float16": Scenario(2, f"{ROUNDED} --device numpy --dtype float16 --layout zigzag"),
    "native": Scenario(3, f"{ROUNDED} --device native --layout striped"),
    "two rings": Scenario(4, f"{ROUNDED} --device native --method double-ring --inner 2"),
    "queries travel": Scenario(5, f"{ROUNDED} --device native --method passq"),
}


@pytest.mark.parametrize(
    "ended", [pytest.param(s, id=name) for name, s in ROUNDED_RUNS.items()], indirect=True
)
def test_weights_that_may_be_rounded_are_verified_as_such_and_told(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    assert "# verdict: OK" in ended.stdout
    found = columns(ended)
    (device,), (weights,) = set(found["device"]), set(found["weights"])
    if device == "numpy":
        assert weights == "rounded"
    assert device_line(ended).endswith(", weights rounded") == (weights == "rounded")
    assert device_line(ended)[2:].partition(": ")[2] in ended.stdout.partition("# device   ")[2]


@pytest.mark.parametrize("ended", [pytest.param(AUTO, id="3 ranks")], indirect=True)
def test_auto_is_the_native_device(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    assert device_line(ended).startswith("# device: native (")
    assert "since" not in device_line(ended)
    assert columns(ended)["threads"] == [1] * 3


@pytest.mark.parametrize("ended", [pytest.param(NUMPY, id="2 ranks")], indirect=True)
def test_numpy_is_taken_where_it_is_asked_for(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    assert device_line(ended) == "# device: numpy"
    found = columns(ended)
    assert found["device"] == ["numpy"] * 2
    assert found["instruction_set"] == ["", ""]
    assert found["compile_s"] == [0.0, 0.0]
    assert found["threads"] == [1, 1]


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        pytest.param(Scenario(2, RUN, env=NOBODY), "CXX=/nonexistent is none", id="none of that name"),
        pytest.param(Scenario(1, RUN, env=BARE), "c++; set CXX", id="none in the PATH"),
    ],
    indirect=["ended"],
)
def test_without_a_compiler_numpy_computes_and_one_line_says_so(ended: Ended, reason: str) -> None:
    assert ended.returncode == 0, ended.told()
    assert device_line(ended) == f"# device: numpy, since no C++ compiler was found ({reason})"
    assert "# verdict: OK" in ended.stdout
    assert not ended.stderr
    assert set(columns(ended)["device"]) == {"numpy"}


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        pytest.param(Scenario(2, f"{RUN} {options}", env=NOBODY), words, id=options)
        for options, words in {
            "--device native": ["device=native", "--device numpy"],
            "--threads 2": ["threads=2", "only the native device"],
            "--matrix-unit on --dtype bfloat16": ["matrix_unit=on", "only the native device"],
        }.items()
    ],
    indirect=["ended"],
)
def test_what_this_machine_does_not_have_is_refused(ended: Ended, words: list[str]) -> None:
    assert ended.returncode == 3, ended.told()
    assert len(ended.complaints()) == 1, ended.told()
    assert all(word in ended.complaints()[0] for word in (*words, "no C++ compiler was found"))
    assert ended.files() == []
    assert "Traceback" not in ended.stderr


def one_without(tmp_path: Path, options: str) -> Ended:
    """Run two ranks, of which the second has no compiler."""
    flags = [*command_line(2)[:-3]]
    words = [*flags, "-n", "1", str(CONSOLE), *RUN.split(), *options.split(), ":", "-n", "1"]
    words += ["env", "CXX=/nonexistent", str(CONSOLE), *RUN.split(), *options.split()]
    return Running(words, tmp_path, {}).wait(60)


def test_where_one_rank_has_no_compiler_all_take_numpy(tmp_path: Path) -> None:
    ended = one_without(tmp_path, "")

    assert ended.returncode == 0, ended.told()
    assert device_line(ended).endswith("(CXX=/nonexistent is none) (rank 1 of 2)")
    assert columns(ended)["device"] == ["numpy"] * 2


def test_where_one_rank_has_no_compiler_native_is_refused_on_all(tmp_path: Path) -> None:
    ended = one_without(tmp_path, "--device native")

    assert ended.returncode == 3, ended.told()
    (complaint,) = ended.complaints()
    assert complaint.endswith("(rank 1 of 2)")
    assert ended.files() == []


def compiler(path: Path, text: str) -> str:
    """Make a compiler that does something else first, and optimises nothing, to save time."""
    real = shutil.which(os.environ.get("CXX", "c++"))
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {real} "$@"\n{text}\nexec {real} "$@" -O0\n'
    )
    path.chmod(0o755)
    return str(path)


def test_the_first_run_compiles_once_and_not_in_a_step(
    tmp_path: Path, launch: Callable[..., Ended]
) -> None:
    env = {
        "CXX": compiler(tmp_path / "c++", f"echo compiled >> {tmp_path}/log; sleep 1"),
        "RINGMPI_CACHE": str(tmp_path / "cache"),
        "RINGMPI_TEST_WATCH": "processes",
    }

    first = launch(3, *RUN.split(), env=env, timeout=200)
    taken = columns(first)["compile_s"]
    with h5py.File(first.work / "r.h5") as file:
        steps = file["timings/step_end"][...] - file["timings/started"][...]
    again = launch(3, *RUN.split(), env=env)

    assert first.returncode == 0, first.told()
    assert again.returncode == 0, again.told()
    assert (tmp_path / "log").read_text() == "compiled\n"
    # Whoever comes last may find it finished.
    assert max(taken) > 1
    assert steps.max() < 1
    assert columns(again)["compile_s"] == [0.0] * 3
    assert "; compiled in " in first.stdout
    assert "; compiled in " not in again.stdout


def test_a_compiler_that_fails_is_told_in_one_line(
    tmp_path: Path, launch: Callable[..., Ended]
) -> None:
    path = compiler(tmp_path / "c++", "echo 'x.h:1: error: no such thing'; exit 1")

    ended = launch(2, *RUN.split(), env={"CXX": path, "RINGMPI_CACHE": str(tmp_path / "cache")})

    assert ended.returncode == 0, ended.told()
    expected = f"# device: numpy, since {path} could not compile it: x.h:1: error: no such thing"
    assert device_line(ended) == expected


def test_a_signal_ends_a_job_that_compiles(tmp_path: Path) -> None:
    path = compiler(tmp_path / "c++", f"touch {tmp_path}/compiling; sleep 100")
    env = {"CXX": path, "RINGMPI_CACHE": str(tmp_path / "cache")}
    running = Running(command_line(2, *RUN.split()), tmp_path / "job", env)
    try:
        limit = time.monotonic() + 40
        while not (tmp_path / "compiling").exists():
            assert time.monotonic() < limit, "nothing was compiled"
            time.sleep(0.02)
        time.sleep(0.5)
        for pid in running.rank_pids().values():
            os.kill(pid, signal.SIGTERM)

        ended = running.wait(30)
    finally:
        running.end_all()

    assert ended.returncode == 128 + signal.SIGTERM, ended.told()
    assert "interrupted by signal 15" in ended.stderr
    assert ended.files() == []


class TestDoctor:
    def test_it_tells_of_the_native_device(self, launch: Callable[..., Ended]) -> None:
        ended = launch(0, "doctor")
        lines = {line.split()[0]: line for line in ended.stdout.splitlines()}

        assert "native, numpy" in lines["devices"]
        assert "matrix unit: " in lines["native"]
        assert ".so" in lines["library"]

    def test_it_tells_why_there_is_none(self, launch: Callable[..., Ended]) -> None:
        ended = launch(0, "doctor", env=NOBODY)
        lines = {line.split()[0]: line for line in ended.stdout.splitlines()}

        assert ended.returncode == 0
        assert lines["devices"].split() == ["devices", "numpy"]
        assert lines["native"].endswith(
            "not offered: no C++ compiler was found (CXX=/nonexistent is none)"
        )
        assert "library" not in lines

    def test_it_tells_why_a_folder_is_passed_over(
        self, tmp_path: Path, launch: Callable[..., Ended]
    ) -> None:
        cache = tmp_path / "cache"
        cache.mkdir()
        cache.chmod(0o777)

        path = compiler(tmp_path / "c++", "")
        ended = launch(0, "doctor", env={"CXX": path, "RINGMPI_CACHE": str(cache)}, timeout=200)

        lines = {line.split()[0]: line for line in ended.stdout.splitlines()}
        assert f"chmod go-w {cache}" in lines["library"]
        assert str(cache / "native") not in lines["library"]
