"""What a run takes from its environment, and what of it the file holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
from running import Ended, Running, Scenario, command_line
from test_doctor_page import MISTAKES, SECRET, SECRETS

from ringmpi.comm.cores import affinity, available_cores

RUN = "run --seq-len 60 --heads 2 --head-dim 8 --repeats 1"


def repository(work: Path) -> None:
    """Make the job's folder a repository whose remote has a password."""
    (work / ".git").mkdir()
    (work / ".git" / "config").write_text(f'[remote "origin"]\nurl = https://me:{SECRET}@host/x.git\n')


#: Also in the command line: the place of the result, which two ranks write together.
WITH_SECRETS = Scenario(
    2,
    f"{RUN} --device numpy --output {SECRET}.h5",
    env=SECRETS | MISTAKES | {"RINGMPI_TEST_WATCH": "processes"},
    files=repository,
)


@pytest.mark.parametrize("ended", [pytest.param(WITH_SECRETS, id="2 ranks")], indirect=True)
def test_no_secret_is_in_the_file(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    path = ended.work / f"{SECRET}.h5"
    assert SECRET.encode() not in path.read_bytes()
    with h5py.File(path) as file:
        machine, command = dict(file["machine"].attrs), str(file.attrs["command"])
        config = str(file.attrs["config"])
    # Else the secrets might be absent because nothing was read.
    assert "https://[redacted]@host/x" in str(machine["scheduler"])
    assert "1,[redacted]" in str(machine["settings"])
    assert command.endswith("--output [redacted].h5")
    assert '"output": "[redacted].h5"' in config


@pytest.mark.parametrize("ended", [pytest.param(WITH_SECRETS, id="2 ranks")], indirect=True)
def test_the_cores_of_every_rank_are_in_the_file(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    with h5py.File(ended.work / f"{SECRET}.h5") as file:
        told = [set(map(int, text.split(","))) for text in file["ranks/affinity"].asstr()[...]]
        local = file["ranks/local_rank"][...].tolist()
        quotas = file["ranks/cpu_quota"][...].tolist()
    assert len(told) == 2
    assert all(cores and cores <= set(affinity()) for cores in told)
    assert local == [0, 1]
    assert all(quota >= 0 for quota in quotas)


def unset(ranks: int, options: str, tmp_path: Path, *settings: str) -> Ended:
    """Run without thread counts in the environment, but with some settings."""
    names = [f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL", "BLIS")]
    without = [word for name in names for word in ("-u", name)]
    command = command_line(ranks, *RUN.split(), *options.split(), "--output", "r.h5")
    return Running(["env", *without, *settings, *command], tmp_path, {}).wait(60)


def threads_in(ended: Ended) -> tuple[list[int], bool]:
    assert ended.returncode == 0, ended.told()
    with h5py.File(ended.work / "r.h5") as file:
        return file["ranks/threads"][...].tolist(), bool(file["machine"].attrs["oversubscribed"])


@pytest.mark.skipif(available_cores() < 2, reason="needs two cores")
def test_ranks_share_the_cores_of_their_node(tmp_path: Path) -> None:
    threads, crowded = threads_in(unset(2, "--device numpy", tmp_path))

    # Bound to a core each, or to all of them, or not at all.
    assert all(1 <= count <= available_cores() // 2 for count in threads)
    assert not crowded


@pytest.mark.any_mpi
def test_more_threads_than_cores_are_flagged(tmp_path: Path) -> None:
    # OpenBLAS takes as many as there are cores at most, whatever it is told.
    many = available_cores()

    threads, crowded = threads_in(unset(2, "--device numpy", tmp_path, f"OMP_NUM_THREADS={many}"))

    assert threads == [many, many]
    assert crowded


@pytest.mark.any_mpi
def test_a_sweep_leaves_threads_to_the_ranks_that_it_starts(
    tmp_path: Path, launch: Callable[..., Ended]
) -> None:
    # A launcher that notes what it was given, and starts nothing.
    fake = tmp_path / "mpiexec"
    fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] || env > {tmp_path}/given\n')
    fake.chmod(0o755)
    command = ["env", "-u", "OMP_NUM_THREADS", "-u", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS=3"]
    command += command_line(0, "sweep", "--ranks", "2", "--seq-len", "8", "--launcher", str(fake))

    Running(command, tmp_path / "job", {}).wait(60)

    given = (tmp_path / "given").read_text().splitlines()
    assert "MKL_NUM_THREADS=3" in given
    assert [line for line in given if line.startswith(("OMP_NUM", "OPENBLAS_NUM", "BLIS_NUM"))] == []
