from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringmpi import provenance as room
from ringmpi.provenance import (
    SCHEDULER_VARIABLES,
    TRANSPORT_VARIABLES,
    command_line,
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
        # Names that begin like those of a scheduler or a library.
        "SLURM_MY_TOKEN": "secret-4",
        "UCX_TOKEN": "secret-5",
        "OMPI_MCA_secret": "secret-6",
        # Values of listed variables, in which somebody has put a secret.
        "SLURM_JOB_NAME": "https://me:secret-7@host/x",
        "UCX_TLS": "rc,secret-4",
        "SLURM_JOB_ID": "17",
        "OMP_NUM_THREADS": "3",
    }

    facts = machine_facts(environment)

    name = "https://[redacted]@host/x"
    assert facts["scheduler"] == {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": name, "OMP_NUM_THREADS": "3"}
    assert facts["settings"] == {"UCX_TLS": "rc,[redacted]"}
    assert "secret" not in json.dumps(facts)


def test_a_secret_of_this_process_is_in_no_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2-hunter2")

    told = json.dumps([rank_facts(), machine_facts()], default=str)

    assert "hunter2" not in told


@pytest.mark.parametrize("word", ["KEY", "TOKEN", "SECRET", "PASS", "JWT", "USER", "AUTH"])
def test_no_listed_variable_can_hold_a_secret(word: str) -> None:
    listed = (*SCHEDULER_VARIABLES, *TRANSPORT_VARIABLES)
    assert [name for name in listed if word in name] == []


def test_the_command_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["ringmpi", "run", "--output", "x y.h5", "--input", "s3://a:b@c/d"]
    )

    assert command_line({}) == "ringmpi run --output 'x y.h5' --input s3://[redacted]@c/d"


#: Rooms that may start processes, all of them before MPI is initialised.
STARTS_PROCESSES = {
    "comm/launcher.py",  # a launcher's version
    "devices/build.py",  # the compiler
    "doctor/ask.py",
    "sweep.py",  # jobs; it never touches MPI itself
}


def test_processes_are_started_in_few_rooms_only() -> None:
    package = Path(room.__file__).parent
    starting = re.compile(
        r"import subprocess|from subprocess|multiprocessing|os\.(fork|system|popen|spawn|posix_spawn)"
    )

    found = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if starting.search(file.read_text())
    }

    assert found == STARTS_PROCESSES


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
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 0, 12})
    monkeypatch.setattr(room, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(room, "blas_threads", lambda: 3)

    facts = rank_facts()

    assert facts["pid"] == os.getpid()
    assert facts["threads"] == 3
    assert facts["affinity"] == "0,7,12"
    assert facts["cpu_quota"] == 1.5
    assert facts["hostname"]


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
