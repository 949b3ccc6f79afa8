"""How the ranks write tensors into the result: handed to rank 0, into files of their own, or together.

Only rank 0 has a `ResultWriter`. Every method here is collective, and rank 0 can read back what was written
once it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringmpi.encoding import create_tensor
from ringmpi.errors import ConfigError, RingMPIError
from ringmpi.layout import Layout
from ringmpi.parallel_hdf5 import opened_together, parallel_refusal, write_together
from ringmpi.shards import ShardWriter
from ringmpi.store import ResultWriter

if TYPE_CHECKING:
    from ringmpi.comm.team import Team

Array = NDArray[Any]


class TensorWriting(Protocol):
    """One way to write tensors."""

    def write(self, team: Team, name: str, layout: Layout, shard: Array) -> None:
        """Write a tensor whose shards the ranks hold, shape (batch, heads, shard_len, ...)."""

    def finish(self, team: Team) -> None:
        """Do what is left when all tensors are written, before the file appears."""


class Gather:
    """Ranks hand their shards to rank 0 in pieces, which writes them.

    Parameters
    ----------
    writer : ResultWriter or None
        None on all ranks but 0.
    team : Team
    """

    def __init__(self, writer: ResultWriter | None, team: Team) -> None:
        del team
        self._writer = writer

    def write(self, team: Team, name: str, layout: Layout, shard: Array) -> None:
        """Write a tensor."""
        pieces = team.shards_by_piece(layout, shard)
        if self._writer is None:
            for _ in pieces:  # Handing over is what the loop does.
                continue
            return
        self._writer.tensor(name, whole_shape(layout, shard), shard.dtype, layout.first)
        for positions, piece in pieces:
            self._writer.write_rows(name, positions, piece)

    def finish(self, team: Team) -> None:
        """Nothing is left."""


class Shards:
    """Every rank writes a file of its own, and rank 0 a file that shows them as one.

    Parameters
    ----------
    writer : ResultWriter or None
        None on all ranks but 0.
    team : Team

    Raises
    ------
    ConfigError
        On every rank, if one does not see the folder that rank 0 has made.
    """

    def __init__(self, writer: ResultWriter | None, team: Team) -> None:
        self._writer = writer
        made = None if writer is None else (writer.begin_shards(), writer.token)
        folder, token = team.share(made)
        refused = None
        if not folder.is_dir():
            refused = ConfigError(
                f"io=shards: {folder.parent.resolve()} is not the folder that rank 0 sees under this name; "
                f"name an output in one that all nodes share, or use gather"
            )
        team.agree(refused)
        self._own = ShardWriter(folder, token, team.rank)

    def write(self, team: Team, name: str, layout: Layout, shard: Array) -> None:
        """Write a tensor."""
        pieces = ((local, piece) for _, local, piece in team.own_pieces(layout, shard))
        self._own.write(name, shard.shape, shard.dtype, pieces)
        team.barrier()  # Rank 0 must not read a shard that is being written.
        if self._writer is not None:
            self._writer.show_shards(name, whole_shape(layout, shard), shard.dtype, layout)

    def finish(self, team: Team) -> None:
        """Seal the shards."""
        seals = team.allgather(self._own.seal())
        if self._writer is not None:
            self._writer.seal_shards(seals)


class Together:
    """All ranks write their rows into the one file, by parallel HDF5.

    Parameters
    ----------
    writer : ResultWriter or None
        None on all ranks but 0.
    team : Team
    """

    def __init__(self, writer: ResultWriter | None, team: Team) -> None:
        self._writer = writer
        self._path: Path = team.share(None if writer is None else writer.temporary)

    def write(self, team: Team, name: str, layout: Layout, shard: Array) -> None:
        """Write a tensor."""
        pieces = [(positions, piece) for positions, _, piece in team.own_pieces(layout, shard)]
        rounds = max(team.allgather(len(pieces)))
        nothing = (None, np.empty(0, shard.dtype))
        with team.together(), self._writer.lent() if self._writer is not None else nullcontext():
            team.barrier()  # Rank 0 has let go of the file.
            with opened_together(self._path, team.comm) as file:
                if name in file:
                    dataset = file[name]
                else:
                    shape = whole_shape(layout, shard)
                    dataset = create_tensor(file, name, shape, shard.dtype, layout.first)
                for number in range(rounds):
                    team.watch.look(lambda: "writes with all")
                    write_together(dataset, *(pieces[number] if number < len(pieces) else nothing))
            team.barrier()  # All have let go of it.

    def finish(self, team: Team) -> None:
        """Nothing is left."""


#: By the names that ``--io`` takes.
WRITING: dict[str, Callable[[ResultWriter | None, Team], TensorWriting]] = {
    "gather": Gather,
    "shards": Shards,
    "mpio": Together,
}


def writing_refusal(io: str) -> RingMPIError | None:
    """Return why this way cannot be taken here, or None. Local."""
    return parallel_refusal() if io == "mpio" else None


def whole_shape(layout: Layout, shard: Array) -> tuple[int, ...]:
    """Return the shape of a tensor from that of a shard. Local."""
    return (*shard.shape[:2], layout.seq_len, *shard.shape[3:])
