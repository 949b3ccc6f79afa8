from __future__ import annotations

import pytest

from ringmpi.devices import cuda


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    """These tests are about the GPU itself; `jobs/gpu_check.sh` forbids that they are skipped."""
    missing = cuda.platform().why_missing()
    if missing is not None:
        pytest.skip(f"device=cuda: {missing}")
