"""Every script that people submit, submitted with small sizes to a real Slurm, and its results verified."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from submitting import ROOT, Interrupted, Jobs, Submitted, scheduler, verified

from ringmpi.schedule import METHODS
from ringmpi.store import ResultFile


@dataclass(frozen=True)
class Case:
    """A script with small sizes.

    Attributes
    ----------
    ranks : sequence of int
        Of its points, in the order of the table.
    made : sequence of str
        Names of files that it makes beside the results, with a star for what depends on the job.
    """

    site: str
    env: Mapping[str, str]
    ranks: tuple[int, ...]
    options: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    experiment: Mapping[str, object] = field(default_factory=dict)


CASES = {
    "strong_scaling": Case("local", {"RANKS": "1,2,3"}, (1, 2, 3), made=("scaling-*.png",)),
    # Without RANKS: 1, 2, and all. With the launcher that goes with the library, whichever it is.
    "weak_scaling": Case("generic", {"TOKENS": "40"}, (1, 2, 4), made=("scaling-*.png",)),
    "exactness": Case(
        "local",
        {"RANKS": "1,3", "DTYPES": "float64,bfloat16", "LAYOUTS": "zigzag", "SEQ_LEN": "61"},
        (1, 3, 1, 3),
        options=("--array=0-1",),
        experiment={"backward": True, "check_transfers": True, "seq_len": 61},
    ),
    "stall_study": Case(
        "local", {"RANKS": "2", "BLOCKS": "16,32", "PROGRESS": "wait"}, (2, 2), made=("stall-*.png",)
    ),
    "methods": Case(
        "generic", {"RANKS": "2", "LAUNCHER": "mpiexec"}, (2,) * len(METHODS), made=("methods-*.csv",)
    ),
    "gpu": Case(
        "local",
        {"DEVICE": "native", "RANKS": "4", "DTYPES": "bfloat16"},
        (4,),
        experiment={"backward": True, "device": "native", "dtype": "bfloat16", "transport": "auto"},
    ),
}


@pytest.fixture(scope="module")
def submitted(jobs: Jobs, late: Interrupted) -> dict[str, list[Submitted]]:
    """All of them, side by side as far as there is room."""
    del late  # It takes longest, and runs beside them.
    return {
        name: jobs.submit(name, *case.options, site=case.site, env=case.env)
        for name, case in CASES.items()
    }


def test_no_script_is_left_out() -> None:
    assert {path.stem for path in ROOT.glob("jobs/*.sbatch")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_script_answers_its_question(name: str, submitted: dict[str, list[Submitted]]) -> None:
    case, tasks = CASES[name], submitted[name]
    for task in tasks:
        task.ended("COMPLETED")
        said = task.log.read_text()
        assert "all OK" in said
        assert f"task {task.name.split('_')[1]}, attempt 1 on n[1-2]" in said

    (task, *_) = tasks
    rows = task.table()
    assert [int(row["ranks"]) for row in rows] == list(case.ranks), task.said()
    assert {row["verdict"] for row in rows} == {"OK"}
    assert sum(int(path.stem.rpartition("-p")[2]) for path in task.files()) == sum(case.ranks)
    for path in task.files():
        assert verified(path)
        with ResultFile(path) as result:
            assert scheduler(result)["SLURM_ARRAY_JOB_ID"] == task.name.split("_")[0]
            for key, value in case.experiment.items():
                assert getattr(result.experiment, key) == value
    for pattern in case.made:
        assert len(list(task.results.glob(pattern))) == 1, task.said()
    assert not list(task.results.glob(".*")), "something unfinished is left"


def test_tasks_of_an_array_share_the_points_of_one_sweep(submitted: dict[str, list[Submitted]]) -> None:
    first, second = submitted["exactness"]
    first.ended("COMPLETED")
    second.ended("COMPLETED")

    def run_by(task: Submitted) -> set[str]:
        lines = [line for line in task.log.read_text().splitlines() if line.startswith("[")]
        return {line.split("--output ")[1].split()[0] for line in lines}

    assert len(run_by(first)) == len(run_by(second)) == 2
    assert run_by(first) | run_by(second) == set(map(str, first.files()))
    assert first.results == second.results
    assert len(first.table()) == 4


def test_weak_scaling_has_as_many_tokens_for_each_rank(submitted: dict[str, list[Submitted]]) -> None:
    (task,) = submitted["weak_scaling"]
    task.ended("COMPLETED")

    assert [row["seq_len"] for row in task.table()] == ["40", "80", "160"]
    for ranks in (1, 2, 4):
        with task.of_ranks(ranks) as result:
            assert result.experiment.seq_len == 40 * ranks


def test_ranks_of_a_script_are_on_both_nodes(submitted: dict[str, list[Submitted]]) -> None:
    (task,) = submitted["gpu"]
    task.ended("COMPLETED")

    with task.of_ranks(4) as result:
        told = scheduler(result)
    assert (told["SLURM_STEP_NUM_TASKS"], told["SLURM_JOB_NUM_NODES"]) == ("4", "2")


@pytest.mark.both_mpi
def test_script_runs_with_the_launcher_of_the_library(jobs: Jobs) -> None:
    """Under Open MPI it is mpirun: it knows nothing of PMI-2, and a site without PMIx has no other way."""
    few = {"RANKS": "1,4", "DTYPES": "float32", "LAYOUTS": "zigzag"}
    (task,) = jobs.submit("exactness", site="generic", env=few)

    task.ended("COMPLETED")
    assert [row["verdict"] for row in task.table()] == ["OK", "OK"]
    for path in task.files():
        assert verified(path)
    commands = [line for line in task.log.read_text().splitlines() if line.startswith("[")]
    assert all(f"{Path(sys.executable).parent}/mpiexec" in line for line in commands)


def test_a_gpu_that_is_not_there_is_refused(jobs: Jobs) -> None:
    (task,) = jobs.submit("gpu", env={"RANKS": "1"})

    task.ended("FAILED")
    assert "cuda" in task.said()
    assert not task.files()


def test_a_site_that_there_is_not_is_refused_in_the_job_too(jobs: Jobs) -> None:
    told = jobs.cluster.run(
        *("sbatch", "--parsable", "--wait", jobs.checkout / "jobs/gpu.sbatch"),
        env={"SITE": "atlantis"},
        cwd=jobs.checkout,
        check=False,
    )

    assert told.returncode == 2
    log = jobs.checkout / f"gpu-{told.stdout.strip()}_0.out"
    assert "SITE=atlantis: no such file in jobs/site" in log.read_text()
