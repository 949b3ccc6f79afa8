"""What this machine offers, on one page."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Ended, launcher, under_open_mpi


def lines_of(ended: Ended) -> dict[str, str]:
    assert ended.returncode == 0, ended.told()
    return {line.split()[0]: line for line in ended.stdout.splitlines() if line.strip()}


def test_doctor_tells_library_launcher_hdf5_and_compiler(launch: Callable[..., Ended]) -> None:
    lines = lines_of(launch(0, "doctor"))
    assert ("Open MPI" if under_open_mpi() else "MPICH") in lines["mpi"]
    assert launcher().path in lines["launcher"]
    assert "h5py" in lines["hdf5"]
    assert "parallel: no" in lines["hdf5"]
    assert os.environ.get("CXX", "c++") in lines
    assert "nvcc" in lines
    assert "slurm" in lines
    assert "numpy" in lines["devices"]


def test_doctor_works_without_a_launcher(tmp_path: Path, launch: Callable[..., Ended]) -> None:
    # A Python in a folder without mpiexec, which finds its packages by their path.
    bare = tmp_path / "bin" / "python3"
    bare.parent.mkdir()
    code = f"import sys; sys.executable = {str(bare)!r}; from ringmpi.cli import main; sys.exit(main(['doctor']))"
    (tmp_path / "doctor.py").write_text(code)
    from running import Running

    command = [sys.executable, tmp_path / "doctor.py"]
    ended = Running(command, tmp_path / "job", {"PATH": str(bare.parent)}).wait(60)
    lines = lines_of(ended)
    assert "no such command" in lines["launcher"]
    assert "hdf5" in lines


def test_doctor_names_a_launcher_of_another_library(tmp_path: Path) -> None:
    other = "HYDRA build details" if under_open_mpi() else "mpiexec (OpenRTE) 5.0"
    fake = tmp_path / "bin" / "mpiexec"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\necho '{other}'\n")
    fake.chmod(0o755)
    python = fake.parent / "python3"
    code = f"import sys; sys.executable = {str(python)!r}; from ringmpi.cli import main; sys.exit(main(['doctor']))"
    (tmp_path / "doctor.py").write_text(code)
    from running import Running

    ended = Running([sys.executable, tmp_path / "doctor.py"], tmp_path / "job", {}).wait(60)
    assert "does not belong" in lines_of(ended)["problem"]


@pytest.mark.parametrize("option", ["--version"])
def test_version_is_told(option: str, launch: Callable[..., Ended]) -> None:
    ended = launch(0, option)
    assert ended.returncode == 0
    assert ended.stdout.startswith("ringmpi 0.")
