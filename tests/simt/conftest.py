from __future__ import annotations

from typing import Any, Protocol

import pytest
from dense import DTYPES
from unit.attending import Case

from ringmpi.devices.build import compiler_command
from ringmpi.devices.launch import TENSOR_CAPABILITY
from ringmpi.errors import MissingCapabilityError

from .device import SimtDevice

#: A dtype, and the architecture whose kernels attend to it.
Kind = tuple[str, tuple[int, int]]

#: An architecture without matrix instructions, and one with them, which matters to 16-bit numbers only.
OLD, NEW = (7, 5), TENSOR_CAPABILITY

UNITS = {dtype: ((NEW,) if dtype in ("float64", "float32") else (NEW, OLD)) for dtype in DTYPES}
KINDS = {
    f"{dtype}{'' if capability == NEW else ', plain'}": (dtype, capability)
    for dtype, capabilities in UNITS.items()
    for capability in capabilities
}


class DeviceOf(Protocol):
    """Makes a device for a problem; of which kind, the folder of a test says."""

    def __call__(self, case: Case, capability: tuple[int, int] = NEW, **options: Any) -> Any: ...


@pytest.fixture(autouse=True, scope="session")
def compiler() -> None:
    """Without one there is no executor."""
    try:
        compiler_command()
    except MissingCapabilityError as error:
        pytest.skip(str(error))


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def kind(request: pytest.FixtureRequest) -> Kind:
    """Every dtype, and both ways to multiply."""
    found: Kind = request.param
    return found


@pytest.fixture
def device_of() -> DeviceOf:
    def made(case: Case, capability: tuple[int, int] = NEW, **options: Any) -> SimtDevice:
        return SimtDevice(case.mask, case.scale, capability, **options)

    return made
