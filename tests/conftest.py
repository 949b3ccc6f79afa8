"""What all tests share: no silent skips where they are forbidden, one report a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ringmpi.devices import prepare

sys.path.insert(0, str(Path(__file__).parent))  # For tests/dense.py.

if "mpi4py.MPI" not in sys.modules:
    # Later is too late: tests may initialise MPI, and then no compiler may be started.
    prepare()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that skipped something where everything must run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if os.environ.get("RINGMPI_FORBID_SKIPS") and skipped:
        reporter.write_line(
            f"{len(skipped)} test(s) skipped, and RINGMPI_FORBID_SKIPS is set", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
