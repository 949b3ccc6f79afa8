from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from ringmpi.provenance import (
    SCHEDULER_VARIABLES,
    machine_facts,
    package_versions,
    peak_nbytes,
    processor,
    rank_facts,
)


def test_of_the_environment_only_listed_variables_are_kept() -> None:
    environment = {
        "AWS_SECRET_ACCESS_KEY": "secret-1",
        "SLURM_JWT": "secret-2",
        "HOME": "/home/secret-3",
        "SLURM_JOB_ID": "17",
        "OMP_NUM_THREADS": "3",
    }

    facts = machine_facts(environment)

    assert facts["scheduler"] == {"SLURM_JOB_ID": "17", "OMP_NUM_THREADS": "3"}
    assert "secret" not in json.dumps(facts)


def test_a_secret_of_this_process_is_in_no_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2-hunter2")

    told = json.dumps([rank_facts(), machine_facts()], default=str)

    assert "hunter2" not in told


@pytest.mark.parametrize("word", ["KEY", "TOKEN", "SECRET", "PASS", "JWT", "USER", "AUTH"])
def test_no_listed_variable_can_hold_a_secret(word: str) -> None:
    assert [name for name in SCHEDULER_VARIABLES if word in name] == []


def test_no_process_is_started() -> None:
    # A fresh interpreter, as facts that were found before are remembered by the standard library.
    program = """
import sys

def refuse(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"):
        raise AssertionError(f"{event}: {arguments}")

from ringmpi.provenance import machine_facts, rank_facts
sys.addaudithook(refuse)
rank_facts()
machine_facts()
"""

    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )

    assert answer.stderr == ""
    assert answer.returncode == 0


def test_a_rank_tells_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 0, 12})

    facts = rank_facts()

    assert facts["pid"] == os.getpid()
    assert facts["threads"] == 3
    assert facts["affinity"] == "0,7,12"
    assert facts["hostname"]


@pytest.mark.parametrize("threads", [None, ""], ids=["unset", "empty"])
def test_an_unknown_number_of_threads_is_zero(
    monkeypatch: pytest.MonkeyPatch, threads: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)

    assert rank_facts()["threads"] == 0


@pytest.mark.parametrize("threads", ["4,2", "many"])
def test_a_thread_setting_that_is_no_number_loses_no_result(
    monkeypatch: pytest.MonkeyPatch, threads: str
) -> None:
    # OpenMP takes a list, one number a level of nesting.
    monkeypatch.setenv("OMP_NUM_THREADS", threads)

    assert isinstance(rank_facts()["threads"], int)


def test_the_machine_tells_its_versions() -> None:
    versions = package_versions()

    assert versions["numpy"] == np.__version__
    assert {"ringmpi", "mpi4py", "h5py", "ml_dtypes"} <= set(versions)
    assert machine_facts({})["packages"] == versions
    assert machine_facts({})["python"] == ".".join(map(str, sys.version_info[:3]))
    assert machine_facts({})["byteorder"] == sys.byteorder


def test_the_peak_is_in_bytes() -> None:
    before = peak_nbytes()

    held = np.ones(2**23)  # 64 MiB, every page of them touched.

    # More than a Python with NumPy needs at least, in bytes; in KiB it would be 1024 times less.
    assert peak_nbytes() >= max(before, held.nbytes)


def test_the_processor_has_a_name() -> None:
    assert processor().strip()
