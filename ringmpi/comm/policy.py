"""Choices about transfers that can be named without MPI."""

from __future__ import annotations

from math import isfinite

from ringmpi.errors import ConfigError, MissingCapabilityError, check_choice

#: Who calls MPI while the device computes: nobody, the main thread between tiles, or a thread beside it.
PROGRESS = ("wait", "poll", "thread")

#: How a block gets from the device to MPI: MPI reads it where it lies, or a copy in pinned host memory.
#: `auto` takes the former where it can be had. Memory of the host is always read where it lies.
TRANSPORTS = ("auto", "direct", "staged")

#: Largest message, in bytes. Below 2**31 for libraries that count in C ints; small enough that on a slow
#: link some chunk ends within the time limit, which counts as progress (4.5 MB/s suffices for 60 s).
CHUNK_LIMIT = 2**28


def chosen_transport(name: str, device: str, why_not_direct: str) -> str:
    """Return the transport that `name` means for a device. Local.

    Parameters
    ----------
    name : str
    device : str
    why_not_direct : str
        Why MPI cannot read the device's memory; empty where it can, as that of the host.

    Raises
    ------
    ConfigError
        If the name is unknown, or host memory would be staged.
    MissingCapabilityError
        If MPI cannot read the device's memory and was to.
    """
    check_choice("transport", name, TRANSPORTS)
    if name == "staged" and device != "cuda":
        raise ConfigError(
            f"transport=staged with device={device}: MPI reads host memory as it is; use auto, or a device "
            f"that has memory of its own, cuda"
        )
    if name == "direct" and why_not_direct:
        raise MissingCapabilityError(
            f"transport=direct: {why_not_direct}; use --transport staged, or an MPI library with CUDA support"
        )
    if name == "auto":
        return "staged" if why_not_direct else "direct"
    return name


def check_timeout(seconds: float) -> None:
    """Refuse a time limit that is none. Local.

    Raises
    ------
    ConfigError
        If it is not a positive finite number.
    """
    if not (isfinite(seconds) and seconds > 0):
        raise ConfigError(f"timeout={seconds}: must be a positive number of seconds")
