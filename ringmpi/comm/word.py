"""Word among ranks: that a signal came, and what each of them does when one waits too long.

Word travels as short messages on a communicator of its own, so no transfer can be taken for one. They are
sent eagerly, so a rank in trouble never waits for them to be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from mpi4py import MPI

#: Longest text, in characters; with what goes round it well below the smallest eager limit known, 1 KiB.
LONGEST_TEXT = 400


@dataclass(frozen=True)
class Status:
    """What a rank does, and for how many seconds nothing has moved for it; 0 while it works."""

    doing: str
    idle: float


class Word:
    """Short messages to all ranks. Local.

    Parameters
    ----------
    comm : MPI.Comm
        Nobody else may communicate on it.

    Attributes
    ----------
    stop : int or None
        The signal that some rank said it had received.
    answers : dict of int to Status
        What each rank answered to the last question of this rank.
    asking : set of int
        Ranks that have asked.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.stop: int | None = None
        self.answers: dict[int, Status] = {}
        self.asking: set[int] = set()
        self._comm = comm
        self._round = 0
        self._sends: list[tuple[MPI.Request, bytes]] = []

    def tell_stop(self, signal_number: int) -> None:
        """Tell all ranks that a signal came."""
        self.stop = signal_number
        self._send({"stop": signal_number}, range(self._comm.size))

    def ask(self, own: Status) -> None:
        """Ask all ranks what they do; `answers` fills up while this rank listens."""
        self._round += 1
        self.answers = {self._comm.rank: own}
        self.asking.add(self._comm.rank)
        self._send({"asks": self._round}, range(self._comm.size))

    def listen(self, status: Callable[[], Status]) -> None:
        """Take in what has come, and answer those that ask."""
        found = MPI.Status()
        while self._comm.Iprobe(source=MPI.ANY_SOURCE, status=found):
            message = bytearray(found.Get_count(MPI.BYTE))
            self._comm.Recv([message, MPI.BYTE], source=found.source, tag=found.tag)
            word = json.loads(message)
            if "stop" in word:
                self.stop = self.stop or int(word["stop"])
            elif "asks" in word:
                self.asking.add(found.source)
                answer = asdict(status()) | {"to": word["asks"]}
                answer["doing"] = answer["doing"][:LONGEST_TEXT]
                self._send(answer, [found.source])
            elif word["to"] == self._round:
                self.answers[found.source] = Status(word["doing"], word["idle"])

    def _send(self, word: dict[str, Any], ranks: Iterable[int]) -> None:
        self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        message = json.dumps(word).encode()
        for rank in ranks:
            if rank != self._comm.rank:
                self._sends.append((self._comm.Isend([message, MPI.BYTE], dest=rank), message))
