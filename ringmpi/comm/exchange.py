"""Buffers that parts travel through, and the transfers that are under way.

A transfer is one or more messages, cut so that none exceeds the chunk limit: MPI counts are C ints in
many libraries, and a part may have more bytes. Chunks of a part are posted in order, under one tag;
MPI delivers messages of one pair in order, so no chunk can take another's place. A note goes with each
transfer, on a communicator of its own: when its sender posted it, so that a stall can be blamed, and more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ringmpi.comm.link import Network, Traffic, Waiting
from ringmpi.comm.policy import CHUNK_LIMIT, PROGRESS
from ringmpi.comm.progress import Helper
from ringmpi.comm.transport import HostTransport, Piece, Transport
from ringmpi.comm.watch import Watch
from ringmpi.errors import TransportError, check_choice
from ringmpi.schedule.steps import RESULTS, Direction, Part, Transfer
from ringmpi.trace import now

Bytes = NDArray[np.uint8]

#: Tags count the steps; the largest that every MPI library must allow is 32767.
TAGS = 32768

#: What goes with a transfer: on the sender's clock, when it was posted and when an emulated network has
#: delivered it; how long that takes, with what is before it; its checksum, where parts are checked.
NOTE = np.dtype(
    [("posted", np.float64), ("arrival", np.float64), ("lasting", np.float64), ("checksum", np.uint32)]
)


@dataclass(eq=False)
class _Flight:
    """A transfer under way; posted in step `step`, due at the end of step `due`.

    `open` of its messages are not where they belong.

    It has arrived at the moment `arrival`, if the rank has waited for `waiting` seconds of the pass by then;
    it had waited for `waited` when the transfer was posted.
    """

    transfer: Transfer
    step: int
    due: int
    waited: float
    note: NDArray[np.void]
    open: int = 0
    arrival: float = -math.inf
    waiting: float = -math.inf
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
    notes : MPI.Comm
        Of the same ranks, for what goes with transfers.
    progress : str
        ``wait``, ``poll`` or ``thread``.
    chunk_limit : int
        Bytes of the largest message.
    check_transfers : bool
        Compare every arriving part with the checksum that its sender made; that of an input goes along
        with it from its owner on, so that damage in between is noticed too.
    network : Network, optional
        Emulated between the ranks.
    offsets : sequence of float
        Seconds by which each rank's clock is ahead of rank 0's; needed where a network is emulated.
    transport : Transport, optional
        From what `allocate` returns to MPI; that of host memory by default.

    Raises
    ------
    ConfigError
        If `progress` is unknown.

    Attributes
    ----------
    bytes_sent, messages, hops : int
        Bytes and messages passed to MPI for sending in the step, and the parts that they were.
    noted : dict of str to float
        More of the step, by the names of a trace: `received`, `sent`, `waited_for` and `peer_posted`, NaN
        where nothing was due, and `polling`.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        nbytes: Callable[[Part], int],
        allocate: Callable[[int], Bytes],
        watch: Watch,
        notes: MPI.Comm,
        *,
        progress: str = "poll",
        chunk_limit: int = CHUNK_LIMIT,
        check_transfers: bool = False,
        network: Network | None = None,
        offsets: Sequence[float] = (),
        transport: Transport | None = None,
    ) -> None:
        check_choice("progress", progress, PROGRESS)
        self._comm = comm
        self._nbytes = nbytes
        self._allocate = allocate
        self._watch = watch
        self._notes = notes
        self._progress = progress
        self._chunk_limit = chunk_limit
        self._check_transfers = check_transfers
        self._network = network
        self._offsets = offsets
        self._transport: Transport = transport or HostTransport()
        self._slots: dict[int, Bytes] = {}
        # A helper thread tests what is under way while the main thread computes, which then at most asks what
        # it waits for. The lock keeps the two lists, and what is in them, from changing meanwhile. In `start`
        # and `finish` the helper pauses.
        self._lock = Lock()
        self._helper: Helper | None = None
        self._pending: list[tuple[MPI.Request, _Flight, Piece | None]] = []
        # Pieces that MPI may not read yet, in the order in which they must be sent; and those that MPI has
        # written and that are not home.
        self._leaving: deque[tuple[Piece, _Flight]] = deque()
        self._landing: list[tuple[Piece, _Flight]] = []
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
        self._transport.begin(self._slots)
        self._step = 0
        self._owners_sums: dict[int, tuple[Part, int]] = {}
        self._traffic = None if self._network is None else Traffic(self._network, self._comm.rank)
        self._waiting = Waiting()
        self._waited = 0.0

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Have a helper thread for the length of a pass, where the policy is ``thread``. Local."""
        if self._progress != "thread":
            yield
            return
        with Helper(self._move, self._lock) as self._helper:
            try:
                yield
            finally:
                self._helper = None

    def start(self, transfers: tuple[Transfer, ...]) -> None:
        """Post a step's receives and sends. Collective with the peers."""
        self.bytes_sent = self.messages = self.hops = 0
        self._polling = 0.0
        if self._traffic is not None:
            self._traffic.begin_step()
        self._transport.start_step()
        # Sends first. Where two ranks swap large parts over one stream of bytes, such as TCP, a part must be
        # announced before the other rank's is asked for: the peer, once asked, sends all of it, and its own
        # request for ours would come after that.
        for transfer in sorted(transfers, key=lambda t: t.direction is Direction.RECEIVE):
            last = self._step + transfer.steps - 1
            flight = _Flight(transfer, self._step, last, self._waited, np.zeros(1, NOTE))
            self._flights.append(flight)
            self._post(flight)
        self._step += 1
        if self._helper is not None:
            self._helper.resume()

    def poll(self) -> None:
        """Give MPI a chance to move data, if the policy allows it, and heed signals. Local.

        Raises
        ------
        Interrupted
            If some rank received a signal.
        Exception
            What went wrong in the helper thread.
        """
        if self._progress == "wait":
            return
        began = now()
        if self._helper is None:
            self._test()
        else:
            self._helper.check()
        self._watch.look(lambda: f"step {self._step - 1}: computing; {self._waiting_for()}")
        self._polling += now() - began

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
        Exception
            What went wrong in the helper thread.
        """
        if self._helper is not None:
            self._polling = self._helper.pause()
        self._watch.look(self._doing)
        wait = self._watch.begin_wait(self._doing)
        self._waits_since = now()
        due = [flight for flight in self._flights if flight.due < self._step]
        while open_flights := [flight for flight in due if math.isnan(flight.done_at)]:
            if self._test():
                wait.progressed()
            elif any(flight.open for flight in open_flights):
                wait.rest()
            else:
                wait.pass_time(min(map(self._arrival, open_flights)))
        self._waited += now() - self._waits_since
        self._waits_since = math.inf
        self._flights = [flight for flight in self._flights if flight.due >= self._step]
        self.noted = self._summary(due)
        if self._check_transfers:
            for flight in due:
                self._compare_checksum(flight)

    def _summary(self, due: Sequence[_Flight]) -> dict[str, float]:
        """Return what a trace notes of the transfers that the step waited for, now that they are done."""
        noted = dict.fromkeys(("received", "sent", "waited_for", "peer_posted"), math.nan)
        # Of several that were seen complete at once a receive, which brings news of its sender.
        for flight in sorted(due, key=lambda flight: (flight.done_at, not flight.sends)):
            noted["sent" if flight.sends else "received"] = flight.done_at
            noted["waited_for"] = flight.transfer.peer
            noted["peer_posted"] = math.nan if flight.sends else float(flight.note["posted"][0])
        return noted | {"polling": self._polling}

    def _post(self, flight: _Flight) -> None:
        transfer = flight.transfer
        data = self.slot(transfer.part, transfer.slot)
        if flight.sends:
            self._write_note(flight, data)
            for piece in self._transport.leaving(transfer.slot, data, self._chunk_limit):
                self._leaving.append((piece, flight))
                flight.open += 1
                self.bytes_sent += piece.nbytes
                self.messages += 1
            self._send_what_may_leave()
        else:
            for piece in self._transport.arriving(transfer.slot, data, self._chunk_limit):
                self._call(self._comm.Irecv, piece.buffer, flight, piece)
                flight.open += 1
        self.hops += flight.sends
        self._call(
            self._notes.Isend if flight.sends else self._notes.Irecv, flight.note.view(np.uint8), flight
        )
        flight.open += 1

    def _call(
        self,
        post: Callable[..., MPI.Request],
        buffer: object,
        flight: _Flight,
        piece: Piece | None = None,
    ) -> None:
        """Hand a buffer over to MPI."""
        request = post([buffer, MPI.BYTE], flight.transfer.peer, tag=flight.step % TAGS)
        self._pending.append((request, flight, piece))

    def _send_what_may_leave(self) -> bool:
        """Send the pieces that MPI may read, in their order; True if there were any."""
        sent = False
        while self._leaving and self._leaving[0][0].may_leave():
            piece, flight = self._leaving.popleft()
            self._call(self._comm.Isend, piece.buffer, flight)
            sent = True
        return sent

    def _write_note(self, flight: _Flight, data: Bytes) -> None:
        """Say when the part was posted and has arrived, and what its checksum is."""
        transfer = flight.transfer
        posted = now()
        flight.note["posted"] = posted
        if self._traffic is not None:
            flight.note["arrival"] = self._traffic.arrival(transfer.peer, len(data), posted)
            flight.note["lasting"] = self._traffic.lasting(transfer.peer)
        if self._check_transfers:
            part, known = self._owners_sums.get(transfer.slot, (None, 0))
            if part != transfer.part or transfer.part.payload in RESULTS:
                known = self._transport.checksum(data)
            flight.note["checksum"] = known

    def _test(self) -> bool:
        """Take note of messages that are done; True if there were any."""
        moved = self._send_what_may_leave()
        requests = [request for request, _, _ in self._pending]
        done = MPI.Request.Testsome(requests) if requests else None
        for index in sorted(done or ()):  # In order, so that they go home in order.
            _, flight, piece = self._pending[index]
            if piece is None:
                self._close_one(flight)
            else:
                piece.land()
                self._landing.append((piece, flight))
        for index in sorted(done or (), reverse=True):
            self._pending.pop(index)
        home = [landing for landing in self._landing if landing[0].is_home()]
        for landing in home:
            self._landing.remove(landing)
            self._close_one(landing[1])
        seen = now()
        for flight in self._flights:
            if not flight.open and math.isnan(flight.done_at) and self._arrival(flight) <= seen:
                flight.done_at = seen
        return bool(done or moved or home)

    def _close_one(self, flight: _Flight) -> None:
        """Take note that a message of a transfer is where it belongs."""
        flight.open -= 1
        if not flight.open:
            self._read_note(flight)

    def _move(self) -> bool:
        """Test beside the compute, in the helper thread; True while there is more to come."""
        self._test()
        return any(math.isnan(flight.done_at) for flight in self._flights)

    def _read_note(self, flight: _Flight) -> None:
        """Find out when the emulated network delivers a part whose messages are all here."""
        if self._network is None or flight.sends:
            return
        peer, note = flight.transfer.peer, flight.note[0]
        offset = self._offsets[self._comm.rank] - self._offsets[peer]
        flight.arrival = float(note["arrival"]) + offset
        if self._progress == "wait":
            lasting = float(note["lasting"])
            flight.waiting = self._waiting.arrival(peer, flight.step, lasting, flight.waited)

    def _arrival(self, flight: _Flight) -> float:
        """Return when the part is here, if the rank goes on waiting, on this rank's clock.

        Under ``wait`` nothing moves before somebody waits for it.
        """
        if self._progress != "wait":
            return flight.arrival
        return max(flight.arrival, self._waits_since + flight.waiting - self._waited)

    def _doing(self) -> str:
        return f"step {self._step - 1}: {self._waiting_for()}"

    def _waiting_for(self) -> str:
        words = {Direction.SEND: "to reach", Direction.RECEIVE: "from"}
        with self._lock:
            under_way = (f for f in self._flights if f.open)
            open_transfers = {flight.transfer: None for flight in under_way}
        waits = [
            f"{transfer.part} {words[transfer.direction]} rank {transfer.peer}"
            for transfer in sorted(open_transfers, key=lambda t: t.direction is Direction.SEND)
        ]
        return "waits for " + " and ".join(waits) if waits else "waits for nobody"

    def _compare_checksum(self, flight: _Flight) -> None:
        transfer = flight.transfer
        if flight.sends:
            return
        found = self._transport.checksum(self.slot(transfer.part, transfer.slot))
        told = int(flight.note["checksum"][0])
        if found != told:
            raise TransportError(
                f"{transfer.part} came damaged from rank {transfer.peer} in step {self._step - 1}: "
                f"checksum {found:08x}, its sender's or owner's is {told:08x}"
            )
        self._owners_sums[transfer.slot] = transfer.part, told
