"""Devices: attend the queries of a rank to one block, in slices short enough to poll between them."""

from __future__ import annotations

from collections.abc import Callable

from ringmpi.devices.base import MAX_HEAD_DIM, Block, Device, Gradients, Outcome, Queries, Work
from ringmpi.devices.numpy import NumpyDevice
from ringmpi.errors import check_choice
from ringmpi.mask import Mask

DEVICES: dict[str, Callable[[Mask, float], Device]] = {"numpy": NumpyDevice}

#: What `auto` takes, the first one that this machine offers.
PREFERENCE = ("numpy",)

__all__ = [
    "DEVICES",
    "MAX_HEAD_DIM",
    "Block",
    "Device",
    "Gradients",
    "NumpyDevice",
    "Outcome",
    "Queries",
    "Work",
    "chosen_device",
    "make_device",
]


def make_device(name: str, mask: Mask, softmax_scale: float) -> Device:
    """Return the device called `name`, or the preferred one for ``auto``. Local.

    Raises
    ------
    ConfigError
        If the name is unknown.
    """
    return DEVICES[chosen_device(name)](mask, softmax_scale)


def chosen_device(name: str) -> str:
    """Return the name of the device that `name` means on this machine. Local.

    Raises
    ------
    ConfigError
        If the name is unknown.
    """
    check_choice("device", name, ["auto", *DEVICES])
    return PREFERENCE[0] if name == "auto" else name
