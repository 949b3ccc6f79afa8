from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringmpi.comm import threads as room
from ringmpi.comm.cores import Cores
from ringmpi.comm.threads import (
    THREAD_VARIABLES,
    blas_threads,
    inherited_environment,
    limit_blas_threads,
    threads_of_rank,
)

#: Sixteen cores, and a rank that may run on all of them or is bound to some.
UNBOUND = Cores(tuple(range(16)), tuple(range(16)))
BOUND = Cores((4, 5, 6, 7), tuple(range(16)))
ONE_CORE = Cores((4,), tuple(range(16)))
TIMED = Cores(tuple(range(16)), tuple(range(16)), quota=4.0)

FOUR = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
HERE = os.uname().nodename

CASES = {
    "alone": ({}, UNBOUND, 16, "16 core(s)"),
    "four ranks": (FOUR, UNBOUND, 4, "16 core(s) for 4"),
    "four bound ranks": (FOUR, BOUND, 4, "16 core(s) for 4"),
    "bound to a core each": (FOUR, ONE_CORE, 1, "16 core(s) for 4"),
    "a control group": (FOUR, TIMED, 1, "4 core(s) for 4"),
    "more ranks than cores": (FOUR | {"MPI_LOCALNRANKS": "40"}, UNBOUND, 1, "for 40 rank(s)"),
    "Slurm by task": ({"SLURM_CPUS_PER_TASK": "8"} | FOUR, UNBOUND, 8, "SLURM_CPUS_PER_TASK=8"),
    "Slurm by task, bound": ({"SLURM_CPUS_PER_TASK": "8"}, ONE_CORE, 1, "SLURM_CPUS_PER_TASK=8"),
    "Slurm by node": (
        {"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "8"} | FOUR,
        UNBOUND,
        2,
        "SLURM_CPUS_ON_NODE=8",
    ),
    "PBS": ({"PBS_JOBID": "1", "NCPUS": "8"} | FOUR, UNBOUND, 2, "NCPUS=8"),
    "Torque": ({"PBS_JOBID": "1", "PBS_NUM_PPN": "12"} | FOUR, UNBOUND, 3, "PBS_NUM_PPN=12"),
    "LSF": (
        {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": f"elsewhere 4 {HERE} 8"} | FOUR,
        UNBOUND,
        2,
        "LSB_MCPU_HOSTS=8",
    ),
    "LSF elsewhere": ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "elsewhere 8"} | FOUR, UNBOUND, 4, "16"),
    "NCPUS of something else": ({"NCPUS": "8"} | FOUR, UNBOUND, 4, "16 core(s)"),
    "more than there are": ({"PBS_JOBID": "1", "NCPUS": "64"} | FOUR, UNBOUND, 4, "NCPUS=64"),
}


@pytest.mark.parametrize(("environment", "cores", "count", "source"), CASES.values(), ids=CASES)
def test_a_rank_takes_what_scheduler_and_node_give_it(
    environment: dict[str, str], cores: Cores, count: int, source: str
) -> None:
    threads = threads_of_rank(environment, cores)

    assert threads.count == count
    assert source in threads.source


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread count is set, and eight cores are given by a scheduler."""
    monkeypatch.setattr(os, "environ", {"SLURM_CPUS_PER_TASK": "8"})
    monkeypatch.setattr(room, "cores_here", lambda: UNBOUND)
    monkeypatch.setattr(room, "_set_here", {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["8", "8", "8", "8"]),
        ({"OMP_NUM_THREADS": "3"}, ["3", "3", "3", "3"]),
        ({"OMP_NUM_THREADS": "3,2"}, ["3,2", "3", "3", "3"]),
        ({"OMP_NUM_THREADS": "many"}, ["many", "8", "8", "8"]),
        ({"OPENBLAS_NUM_THREADS": "2"}, ["8", "2", "8", "8"]),
        ({"MKL_NUM_THREADS": ""}, ["8", "8", "", "8"]),
    ],
    ids=str,
)
def test_thread_counts_are_set_only_where_nobody_has(
    unset: None, given: dict[str, str], expected: list[str]
) -> None:
    os.environ.update(given)

    limit_blas_threads()

    assert [os.environ[name] for name in THREAD_VARIABLES] == expected
    assert {
        name: value for name, value in inherited_environment().items() if name in THREAD_VARIABLES
    } == given


def test_they_are_set_before_numpy_is_loaded() -> None:
    program = """
import os, sys

def watch(event, arguments):
    if event == "import" and arguments[0] == "numpy":
        print("numpy", *(os.environ.get(name, "unset") for name in NAMES))

NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
sys.addaudithook(watch)
sys.argv = ["ringmpi", "plan", "--machine", "h100", "--ranks", "2", "--seq-len", "64", "--json"]
from ringmpi.cli import main
main()
import numpy
from ringmpi.comm.threads import blas_threads
print("blas", blas_threads())
"""
    given = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}

    told = subprocess.run(
        [sys.executable, "-c", program],
        env=given | {"SLURM_CPUS_PER_TASK": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.splitlines()

    assert next(line for line in told if line.startswith("numpy")) == "numpy 1 1 1 1"
    assert told[-1] == "blas 1"


@pytest.mark.parametrize("count", ["1", "2"])
def test_the_loaded_library_is_asked(count: str) -> None:
    # OpenBLAS reads its own variable before that of OpenMP, which alone would be a wrong answer.
    program = "import numpy; from ringmpi.comm.threads import blas_threads; print(blas_threads())"
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"OMP_NUM_THREADS": "7", "OPENBLAS_NUM_THREADS": count},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert told.stdout.strip() == count


@pytest.mark.parametrize(
    ("environment", "threads"),
    [({}, 0), ({"OMP_NUM_THREADS": ""}, 0), ({"OMP_NUM_THREADS": "many"}, 0)]
    + [({"OMP_NUM_THREADS": text}, 4) for text in ("4", " 4 ", "4,2")],
    ids=str,
)
def test_without_a_library_the_environment_tells(environment: dict[str, str], threads: int) -> None:
    assert blas_threads(environment) == threads


def test_a_library_that_was_deleted_meanwhile_is_not_asked(tmp_path: Path) -> None:
    assert room._answers(str(tmp_path / "libopenblas.so"), ("openblas_get_num_threads",)) == []
