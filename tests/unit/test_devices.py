from __future__ import annotations

import pytest

from ringmpi.devices import DEVICES, PREFERENCE, chosen_device, make_device
from ringmpi.errors import ConfigError
from ringmpi.mask import Mask


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_device_is_made_by_its_name(name: str) -> None:
    device = make_device(name, Mask(), 0.5)

    assert device.name == name
    assert chosen_device(name) == name


def test_auto_takes_a_device_that_there_is() -> None:
    assert chosen_device("auto") == PREFERENCE[0]
    assert make_device("auto", Mask(), 0.5).name in DEVICES


def test_an_unknown_device_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"device='nunpy'.*auto, .*did you mean 'numpy'"):
        make_device("nunpy", Mask(), 0.5)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 17, 4096])
@pytest.mark.parametrize("name", sorted(DEVICES))
def test_buffers_have_the_length_asked_for_and_start_on_a_cache_line(name: str, nbytes: int) -> None:
    device = make_device(name, Mask(), 0.5)

    buffers = [device.allocate(nbytes) for _ in range(5)]

    assert [buffer.nbytes for buffer in buffers] == [nbytes] * 5
    assert all(buffer.ctypes.data % 64 == 0 for buffer in buffers if nbytes)
    assert all(buffer.flags.writeable and buffer.flags.c_contiguous for buffer in buffers)
