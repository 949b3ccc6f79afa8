"""Jobs that Slurm ends too early: nothing finished is lost, and the table in the end is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster
from submitting import Interrupted, Jobs, Submitted, without_times


@pytest.fixture(scope="module")
def whole(jobs: Jobs) -> Submitted:
    """The same sweep, uninterrupted."""
    (job,) = jobs.submit(Interrupted.SCRIPT, env=Interrupted.SWEPT)
    return job


@pytest.fixture(scope="module")
def stopped(
    jobs: Jobs, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Interrupted]:
    """The jobs that are interrupted in their second point, side by side."""
    folder = tmp_path_factory.mktemp("slowed")
    made = {
        "warned": Interrupted(
            jobs, folder / "warned", "--time=10", "--signal=B:USR1@50", REQUEUE="yes"
        ),
        "cancelled": Interrupted(jobs, folder / "cancelled"),
        "requeued": Interrupted(jobs, folder / "requeued"),
    }
    by = {
        # Less time than the warning comes before its end, so that it comes at once.
        "warned": ("update", "timelimit=1", "jobid={}"),
        "cancelled": ("cancel",),
        "requeued": ("requeue", "{}"),
    }
    for name, words in by.items():
        made[name].await_second_point()
        job = made[name].job.name
        if words == ("cancel",):
            cluster.run("scancel", job)
        else:
            cluster.run("scontrol", *(word.format(job) for word in words))
    return made


def same_table(job: Submitted, whole: Submitted, results: Path | None = None) -> None:
    whole.ended("COMPLETED")
    rows = job.table(results)
    assert {row["verdict"] for row in rows} == {"OK"}
    assert without_times(rows) == without_times(whole.table())


def test_warned_job_goes_back_into_the_queue_and_on(
    stopped: dict[str, Interrupted], whole: Submitted, cluster: Cluster
) -> None:
    warned = stopped["warned"]
    warned.job.until(lambda: cluster.job(warned.job.name).restarts, "it is in the queue again")
    # Else it is warned again as soon as it runs.
    cluster.run("scontrol", "update", f"jobid={warned.job.name}", "timelimit=10")
    warned.finished_is_there()

    assert warned.job.ended("COMPLETED").restarts == 1
    said = warned.job.log.read_text()
    assert "# USR1 at" in said
    assert "interrupted by signal 10" in said
    assert "# stopped by USR1" in said
    assert said.index("attempt 1 on") < said.index("attempt 2 on")
    assert "done before" in said
    warned.finished_is_there()
    same_table(warned.job, whole)


def test_requeued_job_goes_on_where_it_was(stopped: dict[str, Interrupted], whole: Submitted) -> None:
    requeued = stopped["requeued"]

    assert requeued.job.ended("COMPLETED").restarts == 1
    said = requeued.job.log.read_text()
    assert said.index("attempt 1 on") < said.index("attempt 2 on")
    # One log for each time that the second point was begun, and none of them lost.
    assert len(list(requeued.job.results.glob("*-p2*.log"))) == 2
    assert len(list(requeued.job.results.glob("*-p1*.log"))) == 1
    requeued.finished_is_there()
    same_table(requeued.job, whole)


def test_cancelled_job_leaves_what_is_finished_and_another_goes_on(
    stopped: dict[str, Interrupted], whole: Submitted
) -> None:
    cancelled = stopped["cancelled"]

    cancelled.job.ended("CANCELLED")
    cancelled.finished_is_there()
    later = cancelled.go_on()
    later.ended("COMPLETED")
    assert "done before" in later.log.read_text()
    cancelled.finished_is_there()
    same_table(later, whole, cancelled.job.results)


def test_job_that_is_killed_at_its_time_limit_loses_nothing_finished(
    late: Interrupted, whole: Submitted
) -> None:
    late.job.ended("TIMEOUT")
    late.finished_is_there()
    # What its ranks were at is not there, not even half of it.
    assert [path.stem.rpartition("-p")[2] for path in late.job.files()] == ["1"]
    later = late.go_on()
    later.ended("COMPLETED")
    late.finished_is_there()
    same_table(later, whole, late.job.results)


def test_preempted_job_goes_on_when_the_urgent_one_is_done(
    jobs: Jobs, whole: Submitted, cluster: Cluster, tmp_path: Path
) -> None:
    """All of its nodes are wanted; the jobs before have ended."""
    preempted = Interrupted(jobs, tmp_path / "preempted")
    preempted.await_second_point()
    cluster.run(
        *("sbatch", "--wait", "--partition=urgent", "--nodes=2", "--exclusive"),
        *("--output=/dev/null", "--wrap=true"),
    )
    preempted.finished_is_there()

    assert preempted.job.ended("COMPLETED").restarts == 1
    said = preempted.job.log.read_text()
    assert "PREEMPTION" in said
    assert "attempt 2 on n[1-2]" in said
    preempted.finished_is_there()
    same_table(preempted.job, whole)


def test_job_of_a_failed_node_goes_on_when_the_node_is_back(
    jobs: Jobs, whole: Submitted, cluster: Cluster, tmp_path: Path
) -> None:
    """Jobs beside it would be requeued too; those before have ended."""
    failed = Interrupted(jobs, tmp_path / "failed")
    failed.await_second_point()
    cluster.kill_node("n2")
    cluster.await_state(failed.job.name, ("PENDING",), 60)
    failed.finished_is_there()
    cluster.start_node("n2")
    cluster.run("scontrol", "update", "nodename=n2", "state=resume")

    assert failed.job.ended("COMPLETED").restarts == 1
    said = failed.job.log.read_text()
    assert "NODE FAILURE" in said
    assert "attempt 2 on n[1-2]" in said
    failed.finished_is_there()
    same_table(failed.job, whole)


def test_nothing_is_left_of_all_these_jobs(cluster: Cluster) -> None:
    cluster.await_(lambda: not cluster.processes(), "no process of a job is left", 30)
