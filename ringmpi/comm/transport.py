"""How a part gets from where it lies to MPI, and back: at once, or in pieces through host memory.

A *piece* is what one message carries. Before MPI reads one it may have to be brought to it, and after MPI has
written one it may have to be brought home; meanwhile other pieces move. Waits are named (`streams.Sync`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ringmpi.devices.cuda import CudaDevice
from ringmpi.devices.region import Region
from ringmpi.devices.streams import Event, Sync

#: Bytes of a piece that is staged. To start its copy costs some 10 us, and the copy takes 160 us at 25 GB/s;
#: only those of the first piece and of the last are not hidden behind the messages of others.
PIECE_NBYTES = 4 * 2**20


class Piece:
    """Some bytes that MPI can be given as they are.

    Attributes
    ----------
    buffer : object
        For MPI.
    nbytes : int
    """

    def __init__(self, buffer: Any, nbytes: int) -> None:
        self.buffer, self.nbytes = buffer, nbytes

    def may_leave(self) -> bool:
        """Return whether MPI may read it."""
        return True

    def land(self) -> None:
        """Begin to bring it home, now that MPI has written it."""

    def is_home(self) -> bool:
        """Return whether it is where it belongs."""
        return True


class Transport(Protocol):
    """What an exchange asks for. Every method is local."""

    @property
    def staged_nbytes(self) -> int:
        """Host memory that it holds, bytes."""

    def begin(self, slots: dict[int, Any]) -> None:
        """Begin a pass with some slots, by number."""

    def start_step(self) -> None:
        """Get ready for the transfers of a step, all chores before which are begun."""

    def leaving(self, slot: int, data: Any, limit: int) -> Iterator[Piece]:
        """Yield the pieces of a part that is sent from a slot, none of which exceeds a limit, in order."""

    def arriving(self, slot: int, data: Any, limit: int) -> Iterator[Piece]:
        """Yield the pieces of a part that arrives in a slot: of the same sizes as those that leave."""

    def checksum(self, data: Any) -> int:
        """Return the CRC-32 of bytes, as soon as all that writes them is done."""


class HostTransport:
    """Memory of the host, which MPI reads and writes where it lies."""

    staged_nbytes = 0

    def begin(self, slots: dict[int, Any]) -> None:
        """Do nothing."""

    def start_step(self) -> None:
        """Do nothing: devices of the host have done what they have begun."""

    def leaving(self, slot: int, data: NDArray[np.uint8], limit: int) -> Iterator[Piece]:
        """Yield pieces."""
        del slot
        for start in range(0, len(data), limit):
            chunk = data[start : start + limit]
            yield Piece(chunk, chunk.nbytes)

    def arriving(self, slot: int, data: NDArray[np.uint8], limit: int) -> Iterator[Piece]:
        """Yield pieces."""
        return self.leaving(slot, data, limit)

    def checksum(self, data: NDArray[np.uint8]) -> int:
        """Return the CRC-32."""
        return zlib.crc32(data.data)


class DirectTransport:
    """Memory of a GPU, which MPI reads and writes where it lies.

    Parameters
    ----------
    device : CudaDevice
    """

    staged_nbytes = 0

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def begin(self, slots: dict[int, Any]) -> None:
        """Do nothing."""

    def start_step(self) -> None:
        """Wait for all kernels that were begun: MPI knows nothing of streams.

        Once for the step. What leaves may still be written, by a copy, a merge or an attend; what lies where
        something arrives may still be read.
        """
        driver = self._device.driver
        driver.wait(driver.record(self._device.stream), Sync.MPI_POSTED)

    def leaving(self, slot: int, data: Region, limit: int) -> Iterator[Piece]:
        """Yield pieces."""
        del slot
        for start in range(0, len(data), limit):
            chunk = data[start : start + limit]
            yield Piece(MPI.buffer.fromaddress(chunk.address, chunk.nbytes), chunk.nbytes)

    def arriving(self, slot: int, data: Region, limit: int) -> Iterator[Piece]:
        """Yield pieces."""
        return self.leaving(slot, data, limit)

    def checksum(self, data: Region) -> int:
        """Return the CRC-32 of a copy."""
        return zlib.crc32(self._device.fetch(data).data)


class StagedTransport:
    """Memory of a GPU that is copied to and from pinned memory of the host, a piece at a time.

    Every slot that anything is sent from or arrives in has a twin there. Copies out and copies in are in a
    stream each, since a GPU does both at once, beside its kernels.

    Parameters
    ----------
    device : CudaDevice
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._driver = device, device.driver
        self._outward, self._inward = self._driver.new_stream(), self._driver.new_stream()
        self._twins: dict[int, NDArray[np.uint8]] = {}

    @property
    def staged_nbytes(self) -> int:
        """Pinned memory that is held."""
        return sum(twin.nbytes for twin in self._twins.values())

    def begin(self, slots: dict[int, Any]) -> None:
        """Forget the twins of slots that have grown."""
        for slot, data in slots.items():
            if slot in self._twins and self._twins[slot].nbytes < data.nbytes:
                del self._twins[slot]

    def start_step(self) -> None:
        """Let copies of the step wait, on the device, for all kernels that were begun before it.

        Those of the step itself are not waited for: they read what is here, and neither write what leaves nor
        read what arrives.
        """
        begun = self._driver.record(self._device.stream)
        self._driver.hold(self._outward, begun, Sync.COPIED_OUT)
        self._driver.hold(self._inward, begun, Sync.COPIED_IN)

    def leaving(self, slot: int, data: Region, limit: int) -> Iterator[Piece]:
        """Begin to copy all of a part to the host, and yield its pieces."""
        for region, twin in self._pieces(slot, data, limit):
            self._driver.copy_out(twin, region.address, self._outward)
            yield LeavingPiece(twin, self._driver, self._driver.record(self._outward))

    def arriving(self, slot: int, data: Region, limit: int) -> Iterator[Piece]:
        """Yield pieces that are copied to the device once they are here."""
        for region, twin in self._pieces(slot, data, limit):
            yield ArrivingPiece(twin, self._driver, region, self._inward)

    def checksum(self, data: Region) -> int:
        """Return the CRC-32 of a copy."""
        return zlib.crc32(self._device.fetch(data).data)

    def _pieces(
        self, slot: int, data: Region, limit: int
    ) -> Iterator[tuple[Region, NDArray[np.uint8]]]:
        limit = min(limit, PIECE_NBYTES)
        if slot not in self._twins or self._twins[slot].nbytes < data.nbytes:
            # Nothing is under way in a slot while it is posted, so neither in a twin that is too small.
            self._twins[slot] = self._driver.allocate_pinned(data.nbytes)
        for start in range(0, len(data), limit):
            region = data[start : start + limit]
            yield region, self._twins[slot][start : start + region.nbytes]


class LeavingPiece(Piece):
    """A piece on its way to the host, and from there to a peer."""

    def __init__(self, twin: NDArray[np.uint8], driver: Any, copied: Event) -> None:
        super().__init__(twin, twin.nbytes)
        self._driver, self._copied = driver, copied

    def may_leave(self) -> bool:
        """Return whether it is in host memory, so that MPI reads what was copied and not what was there."""
        return bool(self._driver.has_happened(self._copied, Sync.MPI_SENDS))


class ArrivingPiece(Piece):
    """A piece on its way to the host, and from there to the device."""

    def __init__(self, twin: NDArray[np.uint8], driver: Any, home: Region, stream: Any) -> None:
        super().__init__(twin, twin.nbytes)
        self._driver, self._home, self._stream = driver, home, stream
        self._copied: Event | None = None

    def land(self) -> None:
        """Begin to copy it to the device."""
        self._driver.copy_in(self._home.address, self.buffer, self._stream)
        self._copied = self._driver.record(self._stream)

    def is_home(self) -> bool:
        """Return whether it is on the device, where the kernels of the next step read it.

        Until then its twin is in use too.
        """
        return bool(self._driver.has_happened(self._copied, Sync.ARRIVED))


def transport_of(name: str, device: Any) -> Transport:
    """Return the transport called `name` for a device. Local."""
    if not isinstance(device, CudaDevice):
        return HostTransport()
    return StagedTransport(device) if name == "staged" else DirectTransport(device)
