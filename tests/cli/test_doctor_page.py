"""What this machine offers, on one page; `tests/unit/test_doctor.py` has each finding of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Ended, Running, launcher, under_open_mpi

from ringmpi.comm.cores import available_cores
from ringmpi.redaction import anonymous


def lines_of(ended: Ended) -> dict[str, str]:
    assert ended.returncode == 0, ended.told()
    assert "in the doctor: " not in ended.stdout, ended.told()
    return {line.split()[0]: line for line in ended.stdout.splitlines() if line.strip()}


def test_doctor_tells_library_launcher_hdf5_and_compiler(launch: Callable[..., Ended]) -> None:
    lines = lines_of(launch(0, "doctor"))
    assert ("Open MPI" if under_open_mpi() else "MPICH") in lines["mpi"]
    assert anonymous(launcher().path) in lines["launcher"]
    assert lines["gpu-aware"].split(maxsplit=1)[1].startswith("no: ")
    assert lines["thread"].split() == ["thread", "level", "multiple:", "for", "--progress", "thread"]
    assert "h5py" in lines["hdf5"]
    assert "parallel: no (io=mpio: " in lines["hdf5"]
    assert (os.environ.get("CXX") or "c++").split()[0] in lines
    assert {"nvcc", "slurm", "gpu", "cupy", "cores", "threads", "settings"} <= set(lines)
    assert "numpy" in lines["devices"]


def doctor_beside(folder: Path, tmp_path: Path, env: dict[str, str]) -> Ended:
    """Let the doctor believe that its Python lies in another folder."""
    script = tmp_path / "doctor.py"
    script.write_text(
        f"import sys\nsys.executable = {str(folder / 'python3')!r}\n"
        "from ringmpi.cli import main\nsys.exit(main(['doctor']))\n"
    )
    return Running([sys.executable, script], tmp_path / "job", env).wait(60)


@pytest.mark.any_mpi
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
    ended = doctor_beside(fake.parent, tmp_path, {})
    assert ended.returncode == 0, ended.told()
    foreign = f"{anonymous(str(fake))} does not belong to "
    assert [line for line in ended.stdout.splitlines() if foreign in line], ended.told()


def test_doctor_knows_the_networks_of_mpich_where_slurm_starts_it(tmp_path: Path) -> None:
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(
        "#!/bin/sh\ncase $1 in --version) echo slurm 22.05.8 ;; *) echo pmi2; echo pmix ;; esac\n"
    )
    srun.chmod(0o755)
    path = f"{srun.parent}:{os.environ['PATH']}"

    ended = doctor_beside(srun.parent, tmp_path, {"PATH": path, "MPIR_CVAR_CH4_NETMOD": ""})

    assert ended.returncode == 0, ended.told()
    export = "pmix" if under_open_mpi() else "pmi2 MPIR_CVAR_CH4_NETMOD=ofi"
    assert f"-> export SLURM_MPI_TYPE={export}" in map(str.strip, ended.stdout.splitlines()), (
        ended.told()
    )


#: Names of secrets that a page and a file must not hold, all of them with one value.
SECRET = "planted-" + "s3cr3t"
SECRETS = dict.fromkeys(
    ("AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "SLURM_SITE_TOKEN", "UCX_TOKEN", "OMPI_MCA_password"), SECRET
)

#: Listed variables in which secrets stand by mistake, so that it is seen that they are read. Neither of the
#: libraries of the tests reads the second one.
MISTAKES = {"SLURM_JOB_NAME": f"https://me:{SECRET}@host/x", "MV2_USE_CUDA": f"1,{SECRET}"}


def test_under_a_launcher_one_rank_prints_one_page(launch: Callable[..., Ended]) -> None:
    crowd = available_cores() + 1
    ended = launch(crowd, "doctor", env=SECRETS | MISTAKES | {"RINGMPI_TEST_WATCH": "processes"})

    lines = lines_of(ended)
    printed = [line.split()[0] for line in ended.stdout.splitlines() if line.strip()]
    assert [printed.count(name) for name in ("ringmpi", "python", "mpi", "ranks", "gpu-aware")] == [
        1
    ] * 5
    variable = "OMPI_COMM_WORLD_SIZE" if under_open_mpi() else "PMI_SIZE"
    assert lines["ranks"].split(maxsplit=1)[1] == f"{crowd} on 1 node(s), started with {variable}"
    # Open MPI 5.0 numbers more ranks than cores in another order; see tests/mpi/test_node.py.
    words = ("agree", "in another order") if under_open_mpi() else ("MPI and the launcher agree",)
    assert any(word in lines["local"] for word in words)
    assert "more threads of all ranks than cores" in lines["problem"]
    assert SECRET not in ended.stdout + ended.stderr
    assert "[redacted]" in lines["settings"]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_are_each_alone_print_one_page_that_says_so(
    launch: Callable[..., Ended], rank: int
) -> None:
    # As a launcher of the other library would start two processes.
    foreign = "PMI" if under_open_mpi() else "OMPI_COMM_WORLD"
    ended = launch(0, "doctor", env={f"{foreign}_SIZE": "2", f"{foreign}_RANK": str(rank)})

    if rank == 0:
        assert f"2 processes were started ({foreign}_SIZE=2)" in lines_of(ended)["problem"]
    else:
        assert (ended.returncode, ended.stdout) == (0, "")


@pytest.mark.any_mpi
def test_version_is_told(launch: Callable[..., Ended]) -> None:
    ended = launch(0, "--version")
    assert ended.returncode == 0
    assert ended.stdout.startswith("ringmpi 0.")
