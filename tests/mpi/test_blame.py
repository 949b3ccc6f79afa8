"""What is put in to make ranks wait is named in the report, and nobody where nothing is.

Whole runs, file and report included. Ranks sleep instead of computing and links are emulated, so that eight
of them do well on two cores.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from rich.console import Console
from sharded import Check

from ringmpi.blame import Cause, blame
from ringmpi.comm.job import Job
from ringmpi.comm.signals import Signals
from ringmpi.config import experiment_from
from ringmpi.errors import OK
from ringmpi.experiment import run
from ringmpi.metrics import stall_time
from ringmpi.report.culprits import timeline_in
from ringmpi.report.tables import report
from ringmpi.schedule import Pass
from ringmpi.store import ResultFile

pytestmark = pytest.mark.mpi

#: Tokens of a rank; their block of 64 KiB takes 0.5 ms on the quick link, and `COMPUTE` to attend to.
TOKENS = 32
NBYTES = 2 * 4 * TOKENS * 64 * 4
COMPUTE = 0.02
FLOPS = 4 * 64 * 4 * TOKENS**2 / COMPUTE
QUICK = "1Gbit/s,10us"

#: A way of three computes, and one of half a compute.
SLOW = f"{NBYTES * 8 / (3 * COMPUTE) / 1e6:.6f}Mbit/s,10us"
HALF = f"{NBYTES * 8 / (COMPUTE / 2) / 1e6:.6f}Mbit/s,10us"

PACED = {"heads": 4, "head_dim": 64, "device": "paced", "flops": FLOPS, "verify": "none"}


@pytest.fixture
def reported(comm: MPI.Comm) -> Iterator[Callable[..., tuple[Path, str]]]:
    """Run an experiment, and return its file and what the report of rank 0 says."""
    # Not pytest's own: all ranks would number and remove its folders at once.
    folder = tempfile.TemporaryDirectory()

    def go(**options: object) -> tuple[Path, str]:
        path = comm.bcast(Path(folder.name) / "r.h5")
        experiment = experiment_from(
            {**PACED, "seq_len": TOKENS * comm.size, "output": str(path), **options}
        )
        code = run(experiment, Job(MPI, 60.0, Signals()))
        text = io.StringIO()
        if comm.rank == 0:
            with ResultFile(path) as result:
                report(result, Console(file=text, width=140))
        return path, comm.bcast(text.getvalue() if code == OK else f"exit code {code}")

    yield go
    comm.Barrier()
    folder.cleanup()


def told(text: str, direction: str) -> list[str]:
    """Return the lines about the blame of a pass."""
    found = re.search(rf"^blame, {direction} pass.*?(?=^\S+, per rank|^# |\Z)", text, re.M | re.S)
    return found[0].splitlines() if found else ["", "", ""]


@pytest.mark.ranks(least=3)  # Two ranks post once, before they compute: nobody can be late.
def test_nobody_is_blamed_where_nothing_is_put_in(
    reported: Callable[..., tuple[Path, str]], collective_assert: Check
) -> None:
    _, text = reported(link=QUICK)
    lines = told(text, "forward")
    collective_assert(len(lines) == 1 and ": nobody; all stalls together are" in lines[0], text)
    collective_assert("# warning" not in text, text)


@pytest.mark.ranks(least=3)
@pytest.mark.parametrize(
    ("options", "line", "sentence"),
    [
        pytest.param(
            {"link": QUICK, "slow": "1:3"},
            "late sender rank 1 ",
            r"rank 1 is slow, computing at 0\.[34]\d of the median rate: .* ms of stalls on \d rank",
            id="a slow rank",
        ),
        pytest.param(
            {"link_map": f"1:{QUICK}:{QUICK}:1-2={SLOW}"},
            "link 1 -> 2 ",
            r"link 1 -> 2 takes longer than the compute beside it: .* ms of stalls on \d rank",
            id="a slow link",
        ),
        # Three ranks have too few steps to wait on the way there: the way back names it.
        pytest.param(
            {"link": QUICK, "causal": True, "backward": True, "repeats": 2},
            "imbalance rank {last} ",
            r"imbalance: rank {last} has 1\.\d\d times the mean pairs: .* ms of stalls on \d rank",
            id="imbalance",
        ),
        pytest.param(
            {"link": HALF, "progress": "wait"},
            "progress all ranks ",
            r"progress: .*; try --progress poll: .* ms of stalls on {size} rank",
            id="no progress",
        ),
    ],
)
def test_the_cause_of_stalls_is_named_first(
    comm: MPI.Comm,
    reported: Callable[..., tuple[Path, str]],
    collective_assert: Check,
    options: dict[str, object],
    line: str,
    sentence: str,
) -> None:
    _, text = reported(**options)
    lines = told(text, "backward" if "backward" in options else "forward")
    first = " ".join(lines[2].split()) + " "
    collective_assert(first.startswith(line.format(last=comm.size - 1)), text)
    words = sentence.replace("{last}", str(comm.size - 1)).replace("{size}", str(comm.size))
    collective_assert(re.search(words, "\n".join(lines)), text)
    collective_assert("# warning" not in text, text)


@pytest.mark.ranks(least=3, most=3)
@pytest.mark.parametrize("method", ["bidirectional", "ulysses"])
def test_a_slow_rank_is_most_of_the_blame_by_other_methods(
    comm: MPI.Comm, reported: Callable[..., tuple[Path, str]], collective_assert: Check, method: str
) -> None:
    """On the way back, where every method has something to wait for once it has computed.

    Half is enough on a busy machine, in the middle one of three repeats.
    """
    path, text = reported(method=method, slow="1:3", link=QUICK, backward=True, kv_heads=4)
    parts = []
    if comm.rank == 0:
        with ResultFile(path) as result:
            for repeat in range(3):
                timeline = timeline_in(result, Pass.BACKWARD, repeat)
                assert timeline is not None
                found = [
                    p for p in blame(timeline) if (p.cause, p.culprit) == (Cause.LATE_SENDER, (1,))
                ]
                stalls = stall_time(timeline.records).sum()
                parts.append(sum(piece.seconds for piece in found) / stalls)
    parts = comm.bcast(parts)
    collective_assert(np.median(parts) > 0.5, f"{parts} {text}")
