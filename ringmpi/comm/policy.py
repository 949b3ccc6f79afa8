"""Choices about transfers that can be named without MPI."""

from __future__ import annotations

#: May MPI be called while the device computes? `wait` never does, `poll` does between tiles.
PROGRESS = {"wait": False, "poll": True}

#: How a block gets from the device to MPI. Host memory is read by MPI itself; `auto` takes the best there is.
TRANSPORTS = ("auto", "direct")

#: Largest message, in bytes. Below 2**31 for libraries that count in C ints; small enough that on a slow
#: link some chunk ends within the time limit, which counts as progress (4.5 MB/s suffices for 60 s).
CHUNK_LIMIT = 2**28
