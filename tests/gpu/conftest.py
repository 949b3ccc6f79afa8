from __future__ import annotations

from typing import Any

import pytest
from dense import DTYPES
from simt.conftest import DeviceOf, Kind
from unit.attending import Case

from ringmpi.devices import cuda

from .device import OnGpu


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    """These tests are about the GPU itself; `jobs/gpu_check.sh` forbids that they are skipped."""
    missing = cuda.platform().why_missing()
    if missing is not None:
        pytest.skip(f"device=cuda: {missing}")


@pytest.fixture(params=DTYPES)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Every dtype; kernels are those of the GPU's own architecture."""
    return request.param, cuda.gpu_for(0).capability


@pytest.fixture
def device_of() -> DeviceOf:
    def made(case: Case, capability: tuple[int, int] = (0, 0), **options: Any) -> OnGpu:
        del capability  # It has its own.
        return OnGpu(case.mask, case.scale, **options)

    return made
