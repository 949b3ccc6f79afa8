"""Choices about transfers that can be named without MPI."""

from __future__ import annotations

from math import isfinite

from ringmpi.errors import ConfigError, check_choice

#: Who calls MPI while the device computes: nobody, the main thread between tiles, or a thread beside it.
PROGRESS = ("wait", "poll", "thread")

#: How a block gets from the device to MPI. Host memory is read by MPI itself; `auto` takes the best there is.
TRANSPORTS = ("auto", "direct")

#: Largest message, in bytes. Below 2**31 for libraries that count in C ints; small enough that on a slow
#: link some chunk ends within the time limit, which counts as progress (4.5 MB/s suffices for 60 s).
CHUNK_LIMIT = 2**28


def chosen_transport(name: str) -> str:
    """Return the transport that `name` means for buffers in host memory. Local.

    Raises
    ------
    ConfigError
        If the name is unknown.
    """
    check_choice("transport", name, TRANSPORTS)
    return "direct"


def check_timeout(seconds: float) -> None:
    """Refuse a time limit that is none. Local.

    Raises
    ------
    ConfigError
        If it is not a positive finite number.
    """
    if not (isfinite(seconds) and seconds > 0):
        raise ConfigError(f"timeout={seconds}: must be a positive number of seconds")
