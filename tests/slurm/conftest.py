"""Fixtures for tests with a real Slurm, see `cluster` for it, and `submitting` for its jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing
from submitting import Interrupted, Jobs

from ringmpi.comm.launcher import find_launcher

#: Seconds for a test: a few jobs, each with a limit of its own, which others may keep waiting in the queue.
TEST_LIMIT = 300


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, with Open MPI, what tells nothing of it: Slurm is the same, and tests with it take long."""
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.timeout(TEST_LIMIT))
    if ours and find_launcher().family == "openmpi":
        left_out = [item for item in ours if item.get_closest_marker("both_mpi") is None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Slurm with two nodes."""
    why = missing()
    if why:
        pytest.skip(why)
    made = Cluster()
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """What tests submit to it, from a checkout of which only the results are their own."""
    return Jobs(cluster, tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="session")
def late(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """A job whose ranks sleep through its time limit of a minute, and are killed for it.

    Whoever submits other jobs first asks for it, so that it ends while these run. It takes few CPUs.
    """
    folder = tmp_path_factory.mktemp("late") / "slowed"
    made = Interrupted(jobs, folder, "--time=1", "--signal=B:CONT@1", seconds=200, RANKS_PER_NODE="1")
    made.await_second_point()
    return made
