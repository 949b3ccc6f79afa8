"""The tests for a GPU, on the emulated one with the kernels themselves: right before there is a GPU."""

from __future__ import annotations

from typing import Any

import gpu.test_kernels
import pytest
from emulated.driver import EmulatedPlatform
from gpu.device import OnGpu
from unit.attending import Case

from ringmpi.devices import cuda
from ringmpi.devices.launch import TENSOR_CAPABILITY

from .conftest import DeviceOf, Kind
from .test_gpu_device import on_simt


# One dtype for each way to multiply; the rest is up to `test_kernels`.
@pytest.fixture(params=["float32", "bfloat16"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param, TENSOR_CAPABILITY


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> DeviceOf:
    def made(case: Case, capability: tuple[int, int] = TENSOR_CAPABILITY, **options: Any) -> OnGpu:
        platform = EmulatedPlatform(seed=case.tokens, run=on_simt, capability=capability)
        monkeypatch.setattr(cuda._Here, "platform", platform)
        return OnGpu(case.mask, case.scale, **options)

    return made


globals().update(
    {name: test for name, test in vars(gpu.test_kernels).items() if name.startswith("test_")}
)
