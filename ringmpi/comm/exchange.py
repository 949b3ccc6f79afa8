"""Buffers that blocks travel through, and the transfers that are under way.

A transfer is one or more messages, cut so that none exceeds the chunk limit: MPI counts are C ints in
many libraries, and a block may have more bytes. Chunks of a block are posted in order, under one tag;
MPI delivers messages of one pair in order, so no chunk can take another's place.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ringmpi.comm.policy import CHUNK_LIMIT, PROGRESS
from ringmpi.comm.watch import Watch
from ringmpi.errors import TransportError, check_choice
from ringmpi.schedule import Direction, Transfer

Bytes = NDArray[np.uint8]

#: Tags count the steps; the largest that every MPI library must allow is 32767.
TAGS = 32768


@dataclass
class _Message:
    """A chunk under way."""

    request: MPI.Request
    transfer: Transfer


class Exchange:
    """Two slots for blocks, and the transfers between them and the neighbours' slots.

    Parameters
    ----------
    comm : MPI.Comm
        The ring's own communicator.
    block_nbytes : sequence of int
        Bytes of the block that each rank owns.
    allocate : callable
        Returns a byte buffer of a given size that MPI can read and write.
    watch : Watch
    progress : str
        ``wait`` or ``poll``.
    chunk_limit : int
        Bytes of the largest message.
    check_transfers : bool
        Compare every arriving block with the checksum that its owner made.

    Raises
    ------
    ConfigError
        If `progress` is unknown.

    Attributes
    ----------
    bytes_sent, messages : int
        Passed to MPI for sending in the step.
    received_at, sent_at : float
        When the last receive and the last send of the step were seen complete; NaN without any.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        block_nbytes: Sequence[int],
        allocate: Callable[[int], Bytes],
        watch: Watch,
        *,
        progress: str = "poll",
        chunk_limit: int = CHUNK_LIMIT,
        check_transfers: bool = False,
    ) -> None:
        check_choice("progress", progress, PROGRESS)
        self._comm = comm
        self._block_nbytes = block_nbytes
        # A ring of one holds one block and never receives.
        self._slots = [allocate(max(block_nbytes)) for _ in range(min(2, comm.size))]
        self._watch = watch
        self._polls = PROGRESS[progress]
        self._chunk_limit = chunk_limit
        self._check_transfers = check_transfers
        self._checksums: list[int] = []
        self._pending: list[_Message] = []
        self._step = 0
        self._transfers: tuple[Transfer, ...] = ()

    def slot(self, slot: int, block: int) -> Bytes:
        """Return the bytes of a block in a slot. Local."""
        return self._slots[slot][: self._block_nbytes[block]]

    def reset(self) -> None:
        """Begin a pass: the own block lies in slot 0. Collective where transfers are checked."""
        self._step = 0
        if self._check_transfers:
            own = np.array([zlib.crc32(self.slot(0, self._comm.rank).data)], np.uint32)
            sums = np.empty(self._comm.size, np.uint32)
            self._watch.wait([self._comm.Iallgather(own, sums)], "exchanges checksums")
            self._checksums = sums.tolist()

    def start(self, transfers: tuple[Transfer, ...]) -> None:
        """Post a step's receives and sends. Collective with the peers."""
        self.bytes_sent = self.messages = 0
        self.received_at = self.sent_at = math.nan
        self._transfers = transfers
        for transfer in transfers:
            self._post(transfer)
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
        """Wait until the step's transfers are done. Collective with the peers.

        Raises
        ------
        StalledRingError
            If none of them makes progress for the time limit, and no rank is just slow.
        TransportError
            If a block arrived damaged.
        Interrupted
            If some rank received a signal.
        """
        self._watch.look(self._doing)
        wait = self._watch.begin_wait(self._doing)
        while self._pending:
            if self._test():
                wait.progressed()
            else:
                wait.rest()
        if self._check_transfers:
            self._compare_checksums()

    def _post(self, transfer: Transfer) -> None:
        data = self.slot(transfer.slot, transfer.block)
        tag = self._step % TAGS
        for start in range(0, len(data), self._chunk_limit):
            chunk = data[start : start + self._chunk_limit]
            if transfer.direction is Direction.SEND:
                request = self._comm.Isend([chunk, MPI.BYTE], dest=transfer.peer, tag=tag)
                self.bytes_sent += chunk.nbytes
                self.messages += 1
            else:
                request = self._comm.Irecv([chunk, MPI.BYTE], source=transfer.peer, tag=tag)
            self._pending.append(_Message(request, transfer))

    def _test(self) -> bool:
        """Take note of messages that are done; True if there were any."""
        if not self._pending:
            return False
        done = MPI.Request.Testsome([message.request for message in self._pending])
        if not done:
            return False
        now = time.perf_counter()
        for index in sorted(done, reverse=True):
            if self._pending.pop(index).transfer.direction is Direction.SEND:
                self.sent_at = now
            else:
                self.received_at = now
        return True

    def _doing(self) -> str:
        return f"step {self._step - 1}: {self._waiting_for()}"

    def _waiting_for(self) -> str:
        words = {Direction.SEND: "to reach", Direction.RECEIVE: "from"}
        open_transfers = {message.transfer: None for message in self._pending}
        waits = [
            f"block {transfer.block} {words[transfer.direction]} rank {transfer.peer}"
            for transfer in open_transfers
        ]
        return "waits for " + " and ".join(waits) if waits else "waits for nobody"

    def _compare_checksums(self) -> None:
        for transfer in self._transfers:
            if transfer.direction is Direction.RECEIVE:
                found = zlib.crc32(self.slot(transfer.slot, transfer.block).data)
                if found != self._checksums[transfer.block]:
                    raise TransportError(
                        f"block {transfer.block} came damaged from rank {transfer.peer} in step "
                        f"{self._step - 1}: checksum {found:08x}, its owner's is "
                        f"{self._checksums[transfer.block]:08x}"
                    )
