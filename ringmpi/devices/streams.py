"""What a GPU offers, in the few words that the device and the transports use.

CuPy is one implementation; tests have another one, in which everything runs as late as it may. Work in one
stream runs in order; all else is ordered by waits alone, and each wait is one of `Sync`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ringmpi.devices.launch import Launch, Variant
from ringmpi.devices.placement import Gpu

#: An argument of a kernel: an address, or a scalar of the kernel's own type.
Argument: TypeAlias = np.generic

#: An implementation's own stream, and its own event.
Stream: TypeAlias = Any
Event: TypeAlias = Any


class Sync(Enum):
    """Every wait between streams, the host and MPI, by what it protects."""

    CALLER_WROTE = (
        "inputs: what writes them in the caller's stream is done before our kernels read them"
    )
    CALLER_READS = "results: our kernels are done before the caller's stream reads them"
    HOST_READS = "results: kernels and the copy to the host are done before the host reads them"
    ATTENDED = "moments: compute is called done only once its kernels are"
    MPI_POSTED = (
        "parts under way, direct: kernels that write what leaves, or read what is about to be replaced, are "
        "done before MPI reads or writes it"
    )
    COPIED_OUT = "what leaves, staged: kernels that write it are done before it is copied to the host"
    MPI_SENDS = "a piece that leaves, staged: it has been copied to the host before MPI reads it there"
    COPIED_IN = (
        "what arrives, staged: kernels that read what it replaces are done before it is copied over it"
    )
    ARRIVED = (
        "what arrived, staged: it has been copied to the device before kernels read it there, and before "
        "MPI writes its place on the host again"
    )


class Memory(Protocol):
    """Memory of a device, given back with its last reference."""

    address: int
    nbytes: int


class Platform(Protocol):
    """The GPUs that this process sees. Every method is local, and starts no process."""

    def gpus_of_driver(self) -> int:
        """Return how many GPUs the driver shows, whatever else is missing; 0 without a driver."""

    def why_missing(self) -> str | None:
        """Return why no GPU can be used, or None."""

    def visible(self) -> int:
        """Return how many GPUs there are to choose from."""

    def gpu(self, index: int) -> Gpu:
        """Return what there is to tell of one of them."""

    def open(self, gpu: Gpu) -> Driver:
        """Return one to work with."""


class Driver(Protocol):
    """One GPU, used by one process. Every method may be called by any of its threads, and is local.

    Attributes
    ----------
    index : int
        Of the device, among those that this process sees.
    capability : tuple of int
        Of its architecture, such as (8, 0).
    """

    index: int
    capability: tuple[int, int]

    def allocate(self, nbytes: int) -> Memory:
        """Return memory that MPI may be given: from ``cudaMalloc``, whatever the caller's allocator."""

    def allocate_pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Return host memory that copies run beside other work from and to."""

    def new_stream(self) -> Stream:
        """Return a stream that waits for no other one unless it is told to."""

    def callers_stream(self, handle: int | None) -> Stream:
        """Return the stream that the caller's own work is in; the current one if it names none."""

    def copy_in(self, target: int, source: NDArray[np.uint8], stream: Stream) -> None:
        """Begin to copy from the host to an address; memory that is not pinned may be changed at once."""

    def copy_out(self, target: NDArray[np.uint8], source: int, stream: Stream) -> None:
        """Begin to copy from an address to the host."""

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        stream: Stream,
    ) -> None:
        """Begin to copy rows of `width` bytes on the device; a pitch is bytes from one row to the next."""

    def clear(self, target: int, nbytes: int, stream: Stream) -> None:
        """Begin to set bytes to zero."""

    def load(self, variant: Variant) -> float:
        """Have the kernels of a variant ready, and return the seconds that compiling them took."""

    def launch(
        self, variant: Variant, launch: Launch, arguments: Sequence[Argument], stream: Stream
    ) -> None:
        """Start a kernel."""

    def record(self, stream: Stream) -> Event:
        """Return an event that happens once all is done that is in a stream now."""

    def hold(self, stream: Stream, event: Event, protects: Sync) -> None:
        """Let what comes next in a stream wait for an event."""

    def has_happened(self, event: Event, protects: Sync) -> bool:
        """Return whether an event has happened."""

    def wait(self, event: Event, protects: Sync) -> None:
        """Let the host wait for an event."""

    def seconds_between(self, first: Event, last: Event) -> float:
        """Return the seconds between two events that have happened."""

    def export(self, array: Any) -> Any:
        """Return an array of the device in the form in which callers have theirs."""
