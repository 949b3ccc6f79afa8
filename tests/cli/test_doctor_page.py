"""What this machine offers, on one page."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from running import Ended, Running, launcher, under_open_mpi


def lines_of(ended: Ended) -> dict[str, str]:
    assert ended.returncode == 0, ended.told()
    return {line.split()[0]: line for line in ended.stdout.splitlines() if line.strip()}


def test_doctor_tells_library_launcher_hdf5_and_compiler(launch: Callable[..., Ended]) -> None:
    lines = lines_of(launch(0, "doctor"))
    assert ("Open MPI" if under_open_mpi() else "MPICH") in lines["mpi"]
    assert launcher().path in lines["launcher"]
    assert lines["gpu-aware"].split(maxsplit=1)[1].startswith("no: ")
    assert lines["thread"].split() == ["thread", "level", "multiple:", "for", "--progress", "thread"]
    assert "h5py" in lines["hdf5"]
    assert "parallel: no (io=mpio: " in lines["hdf5"]
    assert os.environ.get("CXX", "c++") in lines
    assert "nvcc" in lines
    assert "slurm" in lines
    assert "numpy" in lines["devices"]


def doctor_beside(folder: Path, tmp_path: Path, env: dict[str, str]) -> Ended:
    """Let the doctor believe that its Python lies in another folder."""
    script = tmp_path / "doctor.py"
    script.write_text(
        f"import sys\nsys.executable = {str(folder / 'python3')!r}\n"
        "from ringmpi.cli import main\nsys.exit(main(['doctor']))\n"
    )
    return Running([sys.executable, script], tmp_path / "job", env).wait(60)


def test_doctor_works_without_a_launcher(tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    lines = lines_of(doctor_beside(bare, tmp_path, {"PATH": str(bare)}))
    assert "no such command" in lines["launcher"]
    assert "hdf5" in lines


def test_doctor_names_a_launcher_of_another_library(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "mpiexec"
    fake.parent.mkdir()
    other = "HYDRA build details" if under_open_mpi() else "mpiexec (OpenRTE) 5.0"
    fake.write_text(f"#!/bin/sh\necho '{other}'\n")
    fake.chmod(0o755)
    assert "does not belong" in lines_of(doctor_beside(fake.parent, tmp_path, {}))["problem"]


def test_version_is_told(launch: Callable[..., Ended]) -> None:
    ended = launch(0, "--version")
    assert ended.returncode == 0
    assert ended.stdout.startswith("ringmpi 0.")
