"""Buffers that parts travel through, and the transfers that are under way.

A transfer is one or more messages, cut so that none exceeds the chunk limit: MPI counts are C ints in
many libraries, and a part may have more bytes. Chunks of a part are posted in order, under one tag;
MPI delivers messages of one pair in order, so no chunk can take another's place. Where parts are checked or a
link is emulated, a note goes with each transfer, on a communicator of its own.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ringmpi.comm.link import Link, Traffic
from ringmpi.comm.policy import CHUNK_LIMIT, PROGRESS
from ringmpi.comm.watch import Watch
from ringmpi.errors import TransportError, check_choice
from ringmpi.schedule.steps import RESULTS, Direction, Part, Transfer

Bytes = NDArray[np.uint8]

#: Tags count the steps; the largest that every MPI library must allow is 32767.
TAGS = 32768

#: What goes with a transfer: when it has arrived, on the sender's clock, and its checksum.
NOTE = np.dtype([("arrival", np.float64), ("checksum", np.uint32)])


@dataclass(eq=False)
class _Flight:
    """A transfer under way, in `open` messages; due at the end of step `due`."""

    transfer: Transfer
    due: int
    note: NDArray[np.void]
    open: int = 0
    done_at: float = math.nan

    @property
    def sends(self) -> bool:
        return self.transfer.direction is Direction.SEND


class Exchange:
    """Slots for parts, and the transfers between them and the peers' slots.

    Parameters
    ----------
    comm : MPI.Comm
        The ring's own communicator.
    nbytes : callable
        Returns the size of a part.
    allocate : callable
        Returns a byte buffer of a given size that MPI can read and write.
    watch : Watch
    notes : MPI.Comm, optional
        For what goes with transfers; needed where they are checked or a link is emulated.
    progress : str
        ``wait`` or ``poll``.
    chunk_limit : int
        Bytes of the largest message.
    check_transfers : bool
        Compare every arriving part with the checksum that its sender made; that of an input goes along
        with it from its owner on, so that damage in between is noticed too.
    link : Link, optional
        Emulated between ranks.
    offsets : sequence of float
        Seconds by which each rank's clock is ahead of rank 0's; needed where a link is emulated.

    Raises
    ------
    ConfigError
        If `progress` is unknown.

    Attributes
    ----------
    bytes_sent, messages, hops : int
        Bytes and messages passed to MPI for sending in the step, and the parts that they were.
    received_at, sent_at : float
        When the last receive and the last send that were due in the step were seen complete; NaN
        without any.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        nbytes: Callable[[Part], int],
        allocate: Callable[[int], Bytes],
        watch: Watch,
        *,
        notes: MPI.Comm | None = None,
        progress: str = "poll",
        chunk_limit: int = CHUNK_LIMIT,
        check_transfers: bool = False,
        link: Link | None = None,
        offsets: Sequence[float] = (),
    ) -> None:
        check_choice("progress", progress, PROGRESS)
        self._comm = comm
        self._nbytes = nbytes
        self._allocate = allocate
        self._watch = watch
        self._notes = notes
        self._polls = PROGRESS[progress]
        self._chunk_limit = chunk_limit
        self._check_transfers = check_transfers
        self._link = link
        self._offsets = offsets
        self._slots: dict[int, Bytes] = {}
        self._pending: list[tuple[MPI.Request, _Flight]] = []
        self._flights: list[_Flight] = []
        self._waits_since = math.inf
        self.begin({})

    def slot(self, part: Part, slot: int) -> Bytes:
        """Return the bytes of a part in a slot. Local."""
        return self._slots[slot][: self._nbytes(part)]

    def begin(self, slots: Mapping[int, int]) -> None:
        """Begin a pass: have a buffer for each slot, of at least the given bytes. Local."""
        for slot, nbytes in slots.items():
            if slot not in self._slots or self._slots[slot].nbytes < nbytes:
                self._slots[slot] = self._allocate(nbytes)
        self._step = 0
        self._owners_sums: dict[int, tuple[Part, int]] = {}
        self._traffic = None if self._link is None else Traffic(self._link)

    def start(self, transfers: tuple[Transfer, ...]) -> None:
        """Post a step's receives and sends. Collective with the peers."""
        self.bytes_sent = self.messages = self.hops = 0
        self.received_at = self.sent_at = math.nan
        for transfer in transfers:
            flight = _Flight(transfer, self._step + transfer.steps - 1, np.zeros(1, NOTE))
            self._flights.append(flight)
            self._post(flight)
        self._step += 1

    def poll(self) -> None:
        """Give MPI a chance to move data, if the policy allows it, and heed signals. Local.

        Raises
        ------
        Interrupted
            If some rank received a signal.
        """
        if self._polls:
            self._test()
            self._watch.look(lambda: f"step {self._step - 1}: computing; {self._waiting_for()}")

    def finish(self) -> None:
        """Wait until the transfers that are due in the step are done. Collective with the peers.

        Raises
        ------
        StalledRingError
            If none of them makes progress for the time limit, and no rank is just slow.
        TransportError
            If a part arrived damaged.
        Interrupted
            If some rank received a signal.
        """
        self._watch.look(self._doing)
        wait = self._watch.begin_wait(self._doing)
        self._waits_since = time.perf_counter()
        due = [flight for flight in self._flights if flight.due < self._step]
        while open_flights := [flight for flight in due if math.isnan(flight.done_at)]:
            if self._test():
                wait.progressed()
            elif any(flight.open for flight in open_flights):
                wait.rest()
            else:
                wait.pass_time(min(map(self._arrival, open_flights)))
        self._waits_since = math.inf
        self._flights = [flight for flight in self._flights if flight.due >= self._step]
        self.received_at = max((f.done_at for f in due if not f.sends), default=math.nan)
        self.sent_at = max((f.done_at for f in due if f.sends), default=math.nan)
        if self._check_transfers:
            for flight in due:
                self._compare_checksum(flight)

    def _post(self, flight: _Flight) -> None:
        transfer = flight.transfer
        data = self.slot(transfer.part, transfer.slot)
        tag = self._step % TAGS
        if flight.sends and self._notes is not None:
            self._write_note(flight, data)
        requests = []
        for start in range(0, len(data), self._chunk_limit):
            chunk = data[start : start + self._chunk_limit]
            if flight.sends:
                requests.append(self._comm.Isend([chunk, MPI.BYTE], dest=transfer.peer, tag=tag))
                self.bytes_sent += chunk.nbytes
                self.messages += 1
            else:
                requests.append(self._comm.Irecv([chunk, MPI.BYTE], source=transfer.peer, tag=tag))
        self.hops += flight.sends
        if self._notes is not None:
            note = [flight.note.view(np.uint8), MPI.BYTE]
            post = self._notes.Isend if flight.sends else self._notes.Irecv
            requests.append(post(note, transfer.peer, tag))
        flight.open = len(requests)
        self._pending += [(request, flight) for request in requests]

    def _write_note(self, flight: _Flight, data: Bytes) -> None:
        """Say when the part has arrived, and what its checksum is."""
        transfer = flight.transfer
        if self._traffic is not None:
            now = time.perf_counter()
            flight.note["arrival"] = self._traffic.arrival(transfer.peer, len(data), now)
        if self._check_transfers:
            part, known = self._owners_sums.get(transfer.slot, (None, 0))
            if part != transfer.part or transfer.part.payload in RESULTS:
                known = zlib.crc32(data.data)
            flight.note["checksum"] = known

    def _test(self) -> bool:
        """Take note of messages that are done; True if there were any."""
        requests = [request for request, _ in self._pending]
        done = MPI.Request.Testsome(requests) if requests else None
        now = time.perf_counter()
        for index in sorted(done or (), reverse=True):
            _, flight = self._pending.pop(index)
            flight.open -= 1
        for flight in self._flights:
            if not flight.open and math.isnan(flight.done_at) and self._arrival(flight) <= now:
                flight.done_at = now
        return bool(done)

    def _arrival(self, flight: _Flight) -> float:
        """Return when the emulated link has delivered a part, on this rank's clock.

        Without polling nothing moves before somebody waits for it, so the way begins with the wait.
        """
        if self._link is None or flight.sends:
            return -math.inf
        offset = self._offsets[self._comm.rank] - self._offsets[flight.transfer.peer]
        arrival = float(flight.note["arrival"][0]) + offset
        if self._polls:
            return arrival
        way = self._nbytes(flight.transfer.part) / self._link.bandwidth + self._link.latency
        return max(arrival, self._waits_since + way)

    def _doing(self) -> str:
        return f"step {self._step - 1}: {self._waiting_for()}"

    def _waiting_for(self) -> str:
        words = {Direction.SEND: "to reach", Direction.RECEIVE: "from"}
        open_transfers = {flight.transfer: None for _, flight in self._pending}
        waits = [
            f"{transfer.part} {words[transfer.direction]} rank {transfer.peer}"
            for transfer in open_transfers
        ]
        return "waits for " + " and ".join(waits) if waits else "waits for nobody"

    def _compare_checksum(self, flight: _Flight) -> None:
        transfer = flight.transfer
        if flight.sends:
            return
        found = zlib.crc32(self.slot(transfer.part, transfer.slot).data)
        told = int(flight.note["checksum"][0])
        if found != told:
            raise TransportError(
                f"{transfer.part} came damaged from rank {transfer.peer} in step {self._step - 1}: "
                f"checksum {found:08x}, its sender's or owner's is {told:08x}"
            )
        self._owners_sums[transfer.slot] = transfer.part, told
