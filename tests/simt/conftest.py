from __future__ import annotations

import pytest

from ringmpi.devices.build import compiler_command
from ringmpi.errors import MissingCapabilityError


@pytest.fixture(autouse=True, scope="session")
def compiler() -> None:
    """Without one there is no executor."""
    try:
        compiler_command()
    except MissingCapabilityError as error:
        pytest.skip(str(error))
