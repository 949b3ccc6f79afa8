"""Devices: attend the queries of a rank to one block, in slices short enough to poll between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringmpi.devices.base import MAX_HEAD_DIM, Block, Device, Gradients, Outcome, Queries, Work
from ringmpi.devices.native import (
    MATRIX_UNIT,
    NativeDevice,
    compile_seconds,
    is_missing,
    library,
    prepare,
    uses_matrix_unit,
)
from ringmpi.devices.numpy import NumpyDevice
from ringmpi.errors import ConfigError, MissingCapabilityError, check_choice
from ringmpi.mask import Mask

DEVICES: dict[str, Callable[..., Device]] = {"numpy": NumpyDevice, "native": NativeDevice}

#: What `auto` takes, the first one that this machine offers.
PREFERENCE = ("native", "numpy")

#: More threads than any node of today has cores; the C++ counts them in 32 bits.
MAX_THREADS = 4096

__all__ = [
    "DEVICES",
    "MATRIX_UNIT",
    "MAX_HEAD_DIM",
    "Block",
    "Device",
    "Gradients",
    "NativeDevice",
    "NumpyDevice",
    "Outcome",
    "Queries",
    "Work",
    "check_device",
    "chosen_device",
    "compile_seconds",
    "device_facts",
    "make_device",
    "prepare",
    "why_missing",
]


def check_device(name: str, threads: int, matrix_unit: str) -> None:
    """Refuse what no machine could offer. Local.

    Raises
    ------
    ConfigError
        If a name is unknown, or the NumPy device is asked for what only the native one has.
    """
    check_choice("device", name, ["auto", *DEVICES])
    check_choice("matrix_unit", matrix_unit, MATRIX_UNIT)
    if not 1 <= threads <= MAX_THREADS:
        raise ConfigError(f"threads={threads}: must be from 1 to {MAX_THREADS}")
    if name == "numpy":
        _check_plain(threads, matrix_unit, "use --device native", ConfigError)


def why_missing(name: str) -> str | None:
    """Return why this machine does not offer a device, or None. Local; starts no process."""
    return is_missing() if name == "native" else None


def chosen_device(name: str, threads: int = 1, matrix_unit: str = "auto") -> str:
    """Return the name of the device that `name` means on this machine. Local; starts no process.

    Raises
    ------
    ConfigError
        If a parameter breaks a rule.
    MissingCapabilityError
        If this machine does not have what is asked for.
    """
    check_device(name, threads, matrix_unit)
    if name == "auto":
        name = next(device for device in PREFERENCE if why_missing(device) is None)
    reason = why_missing(name)
    if reason is not None:
        raise MissingCapabilityError(f"device={name}: {reason}; or use --device numpy")
    if name == "native":
        uses_matrix_unit(matrix_unit)
    else:
        missing = f"there is no native device: {why_missing('native')}"
        _check_plain(threads, matrix_unit, missing, MissingCapabilityError)
    return name


def make_device(
    name: str, mask: Mask, softmax_scale: float, threads: int = 1, matrix_unit: str = "auto"
) -> Device:
    """Return the device called `name`, or the preferred one for ``auto``. Local; starts no process.

    Raises
    ------
    ConfigError, MissingCapabilityError
        As `chosen_device` does.
    """
    name = chosen_device(name, threads, matrix_unit)
    options = (threads, matrix_unit) if name == "native" else ()
    return DEVICES[name](mask, softmax_scale, *options)


def device_facts(name: str, threads: int, matrix_unit: str) -> dict[str, Any]:
    """Return what a result file tells of the device of a rank. Local."""
    facts = {"device": name, "instruction_set": "", "matrix_unit": "", "compile_s": compile_seconds()}
    if name == "native":
        used = "on" if uses_matrix_unit(matrix_unit) else "off"
        facts |= {
            "instruction_set": library().instruction_set,
            "matrix_unit": used,
            "threads": threads,
        }
    return facts


def _check_plain(
    threads: int,
    matrix_unit: str,
    what_would_work: str,
    kind: type[ConfigError | MissingCapabilityError],
) -> None:
    """Refuse what the NumPy device does not have."""
    if threads > 1:
        raise kind(
            f"threads={threads}: are those of the native device; {what_would_work}, or let NumPy have them "
            f"with OMP_NUM_THREADS={threads}"
        )
    if matrix_unit == "on":
        raise kind(f"matrix_unit=on: only the native device can use it; {what_would_work}")
