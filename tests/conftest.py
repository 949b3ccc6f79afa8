"""What all tests share: temporary folders, and no silent skips where they are forbidden."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from ringmpi.devices import prepare

sys.path.insert(0, str(Path(__file__).parent))  # For tests/dense.py.

if "mpi4py.MPI" not in sys.modules:
    # Later is too late: tests may initialise MPI, and then no compiler may be started.
    prepare()


@pytest.hookimpl(tryfirst=True)  # Before pytest reads where its temporary folders go.
def pytest_configure(config: pytest.Config) -> None:
    """Give each rank a temporary folder of its own.

    In the one that pytest takes by default, ranks that end together tidy up at once, and those that find
    a folder half removed by another fail.
    """
    if config.getoption("with_mpi") and config.option.basetemp is None:
        folder = tempfile.mkdtemp(prefix="ringmpi-tests-")
        config.option.basetemp = folder
        config.add_cleanup(lambda: shutil.rmtree(folder))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that skipped something where everything must run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if os.environ.get("RINGMPI_FORBID_SKIPS") and skipped:
        reporter.write_line(
            f"{len(skipped)} test(s) skipped, and RINGMPI_FORBID_SKIPS is set", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
