"""All ranks of a job, doing one thing together without ever blocking inside MPI.

mpi4py's lower-case collectives block, and a signal would wait for them; here each is a nonblocking
collective and a loop of tests.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ringmpi.comm.watch import Watch
from ringmpi.errors import Interrupted, RingMPIError
from ringmpi.layout import Layout

T = TypeVar("T")

#: Bytes of a piece of a shard on its way to rank 0: large enough for full bandwidth, small beside a shard.
PIECE_NBYTES = 8 * 2**20

#: Tags of the pieces; the team's communicator carries nothing else point to point.
PIECE_TAG = 1


class Team:
    """A communicator and a watch.

    Parameters
    ----------
    comm : MPI.Comm
        Its ranks; used as it is, so nobody else may communicate on it.
    watch : Watch
    closing : Team, optional
        The same ranks, for the orderly end after an interruption. Without it this team is never interrupted.

    Attributes
    ----------
    rank, size : int
    """

    def __init__(self, comm: MPI.Comm, watch: Watch, closing: Team | None = None) -> None:
        self.comm = comm
        self.watch = watch
        self._closing = closing
        self.rank = comm.rank
        self.size = comm.size

    def hosts(self) -> list[str]:
        """Return the name of every rank's node, by rank. Collective."""
        return self.allgather(MPI.Get_processor_name())

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""
        self.watch.wait([self.comm.Ibarrier()], "waits for all at a barrier")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do within the block, on all ranks or on none, what blocks inside MPI. Collective.

        A rank that heeded a signal shortly before would leave the others in there. So ranks tell each
        other first, on the communicator where one that did tells it at its end (`agreed_stop`), and heed
        none until the block is done.

        Raises
        ------
        Interrupted
            On every rank, if any of them was interrupted before.
        """
        if self._closing is None:
            yield
            return
        with self.watch.held():
            stop = self._closing.agreed_stop(None)
            if stop is not None:
                raise stop
            yield

    def agreed_stop(self, mine: Interrupted | None) -> Interrupted | None:
        """Return the interruption that any rank met, or None. Collective.

        For the closing team alone: it matches `together` of ranks that were not interrupted, so a rank which
        was comes here once, and for one that learnt of it there nothing is left to tell.
        """
        if mine is not None and mine.everywhere:
            return mine
        met = self.allgather(None if mine is None else mine.signal_number)
        number = next((number for number in met if number is not None), None)
        if number is None:
            return None
        stop = Interrupted(number)
        stop.everywhere = True
        return stop

    def allgather(self, item: T) -> list[T]:
        """Return every rank's item, by rank. Collective."""
        packed = np.frombuffer(pickle.dumps(item), np.uint8)
        sizes = np.empty(self.size, np.int64)
        doing = "waits for all to share what they know"
        self.watch.wait([self.comm.Iallgather(np.array([packed.size]), sizes)], doing)
        everything = np.empty(int(sizes.sum()), np.uint8)
        self.watch.wait([self.comm.Iallgatherv(packed, [everything, sizes.tolist()])], doing)
        parts = np.split(everything, np.cumsum(sizes)[:-1])
        return [pickle.loads(part.tobytes()) for part in parts]

    def share(self, item: T | None) -> T:
        """Return rank 0's item on every rank, whatever the others gave. Collective."""
        packed = np.frombuffer(pickle.dumps(item), np.uint8).copy()
        size = np.array([packed.size])
        self.watch.wait([self.comm.Ibcast(size)], "waits for rank 0")
        if self.rank != 0:
            packed = np.empty(int(size[0]), np.uint8)
        self.watch.wait([self.comm.Ibcast(packed)], "waits for rank 0")
        shared: T = pickle.loads(packed.tobytes())
        return shared

    def agree(self, error: RingMPIError | None) -> None:
        """Raise on every rank if any rank has an error. Collective.

        Parameters
        ----------
        error : RingMPIError or None
            What this rank found, known perhaps to it alone.

        Raises
        ------
        RingMPIError
            The error of the lowest rank that has one, of its own type, naming all such ranks.
        """
        found = self.allgather((type(error), str(error)) if error else None)
        failing = [rank for rank, entry in enumerate(found) if entry]
        if failing:
            entry = found[failing[0]]
            assert entry is not None  # It is one of the entries that made `failing`.
            kind, message = entry
            ranks = ", ".join(map(str, failing))
            agreed = kind(f"{message} (rank {ranks} of {self.size})")
            agreed.everywhere = True
            raise agreed

    def collect(self, array: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield on rank 0 every rank's array, one after the other, all of one shape. Collective.

        Must be consumed to its end on every rank; nothing is yielded on the others.
        """
        if self.rank != 0:
            self._hand_over(array)
            return
        yield 0, array
        for owner in range(1, self.size):
            yield owner, self._take(owner, array.shape, array.dtype)

    def shards_by_piece(
        self, layout: Layout, shard: NDArray[Any]
    ) -> Iterator[tuple[range, NDArray[Any]]]:
        """Yield on rank 0 the pieces of all shards; send them from the others. Collective.

        Must be consumed to its end on every rank. No rank holds more than its shard and a piece.

        Parameters
        ----------
        layout : Layout
        shard : ndarray, shape (batch, heads, shard_len, ...)

        Yields
        ------
        positions : range
            Global positions of the piece.
        piece : ndarray, shape (batch, heads, len(positions), ...)
            Valid until the next one is asked for. Nothing is yielded on other ranks.
        """
        tokens = self._tokens_of_piece(shard)
        owners = range(self.size) if self.rank == 0 else [self.rank]
        for owner in owners:
            for positions, local in _pieces(layout, owner, tokens):
                if owner == 0:
                    yield positions, shard[:, :, local]
                elif self.rank == 0:
                    shape = (*shard.shape[:2], len(positions), *shard.shape[3:])
                    yield positions, self._take(owner, shape, shard.dtype)
                else:
                    self._hand_over(shard[:, :, local])

    def own_pieces(
        self, layout: Layout, shard: NDArray[Any]
    ) -> Iterator[tuple[range, slice, NDArray[Any]]]:
        """Yield the pieces of this rank's shard, looking for signals between two. Collective.

        Yields
        ------
        positions : range
            Global positions of the piece.
        local : slice
            Where in the shard it lies.
        piece : ndarray, shape (batch, heads, len(positions), ...)
        """
        for positions, local in _pieces(layout, self.rank, self._tokens_of_piece(shard)):
            self.watch.look(lambda: "writes its shard")
            yield positions, local, shard[:, :, local]

    def _tokens_of_piece(self, shard: NDArray[Any]) -> int:
        """Return how many tokens are a piece, on all ranks alike: some shards have none. Collective."""
        token_nbytes = max(1, shard[:, :, :1].nbytes)
        tokens = max(1, PIECE_NBYTES // token_nbytes) if shard.shape[2] else 1
        return min(self.allgather(tokens if shard.shape[2] else 2**62))

    def _take(self, owner: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        piece = np.empty(shape, dtype)
        request = self.comm.Irecv(_as_bytes(piece), source=owner, tag=PIECE_TAG)
        self.watch.wait([request], f"waits for a piece of rank {owner}")
        return piece

    def _hand_over(self, piece: NDArray[Any]) -> None:
        request = self.comm.Isend(_as_bytes(np.ascontiguousarray(piece)), dest=0, tag=PIECE_TAG)
        self.watch.wait([request], "waits for rank 0 to take a piece")


def duplicate(comm: MPI.Comm, watch: Watch) -> MPI.Comm:
    """Return a communicator of the same ranks. Collective.

    Not by the blocking call: a rank that heeds a signal before it comes here would leave the others in it.
    """
    copy, duplicated = comm.Idup()
    watch.wait([duplicated], "waits for all to set up the ring")
    return copy


def _pieces(layout: Layout, rank: int, tokens: int) -> Iterator[tuple[range, slice]]:
    """Yield pieces of at most `tokens` positions of a shard, and where in the shard they lie."""
    before = 0
    for run in layout.runs(rank):
        for start in range(0, len(run), tokens):
            piece = run[start : start + tokens]
            yield piece, slice(before + start, before + start + len(piece))
        before += len(run)


def _as_bytes(array: NDArray[Any]) -> list[Any]:
    """Return a buffer that MPI takes whatever the dtype; bfloat16 has no MPI type."""
    return [array.reshape(-1).view(np.uint8), MPI.BYTE]
