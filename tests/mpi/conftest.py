"""Fixtures for tests that all ranks run together.

A bare assert that fails on one rank leaves the others waiting, and their next collective can match the wrong
one; so every assertion here is collective, and every test has communicators of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from mpi4py import MPI

from ringmpi.comm.team import Team
from ringmpi.comm.watch import Watch
from ringmpi.devices import why_missing
from ringmpi.devices.build import compiler_command
from ringmpi.errors import MissingCapabilityError


def devices() -> list[str]:
    """Return what can be had here; tests/conftest.py has compiled the native one if there is a compiler."""
    try:
        compiler_command()
    except MissingCapabilityError:
        return ["numpy"]
    reason = why_missing("native")
    assert reason is None, reason  # Its tests must not vanish.
    return ["numpy", "native"]


DEVICES = devices()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let one rank speak: the others report through collective assertions."""
    if MPI.COMM_WORLD.rank != 0:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            config.pluginmanager.unregister(reporter)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that make no sense at this rank count; the report counts them as deselected."""
    left_out = []
    for item in items:
        marker = item.get_closest_marker("ranks")
        if marker is None:
            continue
        least, most = marker.kwargs.get("least", 1), marker.kwargs.get("most", 2**31)
        if not least <= MPI.COMM_WORLD.size <= most:
            left_out.append(item)
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that are marked so on every device."""
    if metafunc.definition.get_closest_marker("every_device"):
        metafunc.parametrize("device", DEVICES, indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What ``auto`` takes: NumPy in tests of all that does not depend on it."""
    name = getattr(request, "param", "numpy")
    monkeypatch.setattr("ringmpi.agreed.PREFERENCE", (name,))
    return str(name)


def pytest_report_header() -> str:
    world = MPI.COMM_WORLD
    return f"mpi: {MPI.get_vendor()}, {world.size} rank(s), devices: {', '.join(DEVICES)}"


@pytest.fixture
def comm() -> Iterator[MPI.Comm]:
    """A communicator of its own, so that no stray message reaches the next test."""
    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture
def collective_assert(comm: MPI.Comm) -> Callable[..., None]:
    """Assert on all ranks that something holds on every rank, naming the ranks where it does not."""

    def check(holds: object, message: str = "") -> None:
        answers = comm.allgather((bool(holds), str(message)))
        failing = {rank: text for rank, (good, text) in enumerate(answers) if not good}
        assert not failing, f"of {comm.size} ranks these fail: {failing}"

    return check


@pytest.fixture
def team(comm: MPI.Comm) -> Iterator[Team]:
    """A team with a watch that gives up after 20 s."""
    word = comm.Dup()
    yield Team(comm, Watch(word, timeout=20.0))
    word.Free()
