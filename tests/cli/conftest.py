"""Fixtures for tests that start ringmpi as people do. See `running` for what they are made of."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from running import Ended, Here, Queue, Running, Scenario, command_line

from ringmpi.cli import main

#: Seconds for a test: a few jobs, each with a limit of its own, on a machine that does other things too.
TEST_LIMIT = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_LIMIT))


@pytest.fixture(scope="session")
def queue(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    """Run the jobs of all tests that will look at one, a few at a time."""
    parameters = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    scenarios = [value for found in parameters for value in found.values() if type(value) is Scenario]
    made = Queue(scenarios, tmp_path_factory.mktemp("jobs"))
    yield made
    made.close()


@pytest.fixture
def ended(request: pytest.FixtureRequest, queue: Queue) -> Ended:
    """The job that the test looks at, after its end; given by ``indirect`` parameters."""
    return queue.result(request.param)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Ended]]:
    """Run ringmpi on some ranks, without a launcher for 0, and return how it ended."""
    numbers, started = itertools.count(), []

    def run(
        ranks: int,
        *args: str | Path,
        fault: str = "",
        env: Mapping[str, str] | None = None,
        as_module: bool = False,
        timeout: float = 60.0,
    ) -> Ended:
        command = command_line(ranks, *map(str, args), as_module=as_module)
        folder = tmp_path / f"job{next(numbers)}"
        running = Running(command, folder, {"RINGMPI_TEST_FAULT": fault, **(env or {})})
        started.append(running)
        return running.wait(timeout)

    yield run
    for running in started:
        running.end_all()


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Run a command that needs no ranks in this process: many files, and no start-up for each."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # The command line sets thread counts.

    def run(*args: str | Path) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(word) for word in args])
        return code, capsys.readouterr().out

    return run
