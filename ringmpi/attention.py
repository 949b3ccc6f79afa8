"""Exact attention over a sequence that is sharded across ranks: the schedule, executed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.comm.exchange import Exchange
from ringmpi.comm.policy import CHUNK_LIMIT, PROGRESS, check_timeout
from ringmpi.comm.team import Team
from ringmpi.comm.watch import Watch
from ringmpi.devices import MAX_HEAD_DIM, Block, Device, Queries, chosen_device, make_device
from ringmpi.errors import ConfigError, RingMPIError, ShapeError, check_choice
from ringmpi.layout import Layout
from ringmpi.mask import Mask
from ringmpi.schedule import METHODS, Attend, Step
from ringmpi.softmax import DTYPES, State, check_scale
from ringmpi.trace import Trace

if TYPE_CHECKING:
    from mpi4py import MPI

Array = NDArray[Any]


@dataclass(frozen=True)
class Shape:
    """What the shards of all ranks have in common, and the size of a block in flight."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype[Any]

    def kv_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Return the shape of a block: keys and values, one behind the other."""
        return 2, self.batch, self.num_kv_heads, tokens, self.head_dim

    def block_nbytes(self, tokens: int) -> int:
        """Return ``2 * batch * num_kv_heads * tokens * head_dim * itemsize``."""
        return int(np.prod(self.kv_shape(tokens), dtype=np.int64)) * self.dtype.itemsize


class RingAttention:
    """Attention over shards, set up once and used for many inputs.

    Collective over `comm`, as are all its methods unless they say otherwise. Call `close` at the end,
    or use it in a ``with`` statement.

    Parameters
    ----------
    comm : MPI.Comm
        The ranks that share the sequence; duplicated, so other traffic on it does not matter.
    seq_len : int
        Tokens of the whole sequence.
    layout : str
        ``contiguous``, ``striped`` or ``zigzag``: which positions a rank owns.
    causal : bool
        A query sees no key after itself.
    window : int, optional
        How many previous keys are visible beside the own one.
    documents : sequence of int, optional
        Cumulative offsets from 0 to `seq_len`; a query sees its own document.
    softmax_scale : float, optional
        Factor of the scores; ``head_dim ** -0.5`` by default.
    method : str
        ``ring``.
    device : str
        ``auto`` or ``numpy``.
    progress : str
        ``poll``: MPI is called between tiles, so that transfers go on; ``wait``: it is not.
    timeout : float
        Seconds without progress of any transfer after which it is given up.
    chunk_limit : int
        Bytes of the largest MPI message.
    check_transfers : bool
        Compare every arriving block with its owner's checksum.
    watch : Watch, optional
        Shared with others who wait; one of its own by default, which heeds no signal.

    Raises
    ------
    ConfigError
        If a parameter breaks a rule; on every rank if all were given the same one.
    ShapeError
        On every rank, if parameters differ between ranks.

    Attributes
    ----------
    layout : Layout
    schedule : list of Step
        Of this rank.
    trace : Trace
        Of the last pass.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        seq_len: int,
        layout: str = "contiguous",
        causal: bool = False,
        window: int | None = None,
        documents: Sequence[int] | None = None,
        softmax_scale: float | None = None,
        method: str = "ring",
        device: str = "auto",
        progress: str = "poll",
        timeout: float = 60.0,
        chunk_limit: int = CHUNK_LIMIT,
        check_transfers: bool = False,
        watch: Watch | None = None,
    ) -> None:
        check_choice("method", method, METHODS)
        check_choice("progress", progress, PROGRESS)
        check_timeout(timeout)
        if chunk_limit < 1:
            raise ConfigError(f"chunk_limit={chunk_limit}: a message carries at least 1 byte")
        self.layout = Layout(layout, seq_len, comm.size)
        offsets = None if documents is None else tuple(map(_whole, documents))
        window = None if window is None else _whole(window)
        self.mask = Mask(causal, window, offsets)
        if offsets is not None and offsets[-1] != seq_len:
            raise ConfigError(
                f"documents end at {offsets[-1]} and the sequence at {seq_len}: append {seq_len}"
            )
        self._owns_watch = watch is None
        self._watch = watch or Watch(comm.Dup(), timeout)
        # Not the blocking kind: a rank that heeds a signal before it comes here would leave the others in it.
        self._comm, duplicated = comm.Idup()
        self._watch.wait([duplicated], "waits for all to set up the ring")
        self._team = Team(self._comm, self._watch)
        self._softmax_scale = softmax_scale
        self._device_name = chosen_device(device)
        self._exchange_options: dict[str, Any] = {
            "progress": progress,
            "chunk_limit": chunk_limit,
            "check_transfers": check_transfers,
        }
        given = (self.layout, self.mask, softmax_scale, method, chunk_limit, check_transfers)
        try:
            self._refuse_difference("parameters", repr(given))
        except ShapeError:
            self.close()
            raise
        self.schedule: list[Step] = METHODS[method](self.layout, comm.rank)
        self.trace = Trace(len(self.schedule))
        self._shape: Shape | None = None

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Attend the queries of this rank to the keys of all ranks.

        Parameters
        ----------
        q : ndarray, shape (batch, num_heads, shard_len, head_dim)
            float64, float32, float16 or bfloat16; any strides and byte order. Token ``i`` is the one
            at ``layout.positions(rank)[i]``.
        k, v : ndarray, shape (batch, num_kv_heads, shard_len, head_dim)
            `num_kv_heads` divides `num_heads`. None of the three is written to.

        Returns
        -------
        out : ndarray, shape and dtype of `q`
            0 in rows that may see no key.
        lse : ndarray, shape (batch, num_heads, shard_len)
            Natural logarithm of the sum of exponentials; float64 for float64, else float32;
            ``-inf`` in rows that may see no key.

        Raises
        ------
        ShapeError
            On every rank, if the arrays do not belong together.
        StalledRingError, TransportError
            On the rank that notices.
        """
        queries = self._load(*(np.asarray(array) for array in (q, k, v)))
        state = self._device.begin(queries)
        self.trace = Trace(len(self.schedule))
        execute(self.schedule, self._exchange, self._device, queries, self._block, state, self.trace)
        return self._device.finish(queries, state)

    def transfers_alone(self) -> Trace:
        """Make the transfers of the last pass again with no compute beside them.

        Returns
        -------
        Trace
            What the transfers take when nothing hides them.

        Raises
        ------
        ConfigError
            If there was no pass before, whose blocks could be moved.
        """
        if self._shape is None:
            raise ConfigError("transfers_alone: there are no blocks yet; call forward first")
        silent = [replace(step, attends=()) for step in self.schedule]
        trace = Trace(len(silent))
        nothing = Queries(np.empty(0), np.empty(0, np.int64))
        state = State(*(np.empty(0),) * 3)
        self._exchange.reset()
        execute(silent, self._exchange, self._device, nothing, self._block, state, trace)
        return trace

    def close(self) -> None:
        """Give the communicators back to MPI."""
        self._comm.Free()
        if self._owns_watch:
            self._watch.close()

    def __enter__(self) -> RingAttention:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Giving back is collective; after an error of one rank the others may never come to it.
        if error is None or (isinstance(error, RingMPIError) and error.everywhere):
            self.close()

    def _load(self, q: Array, k: Array, v: Array) -> Queries:
        """Check the shards, and put the own block into slot 0."""
        self._admit(q, k, v)
        own = self._block(Attend(self._comm.rank, slot=0))
        np.copyto(own.k, k)
        np.copyto(own.v, v)
        self._exchange.reset()
        return Queries(np.ascontiguousarray(q, self._dtype), own.positions)

    def _admit(self, q: Array, k: Array, v: Array) -> None:
        """Refuse shards that do not fit, and make device and exchange for a new shape."""
        error: RingMPIError | None = None
        shape = None
        try:
            shape = _common_shape(q, k, v, self.layout.shard_len(self._comm.rank))
        except ShapeError as wrong:
            error = wrong
        self._team.agree(error)
        self._refuse_difference("shapes", repr(shape))
        check_scale(self._softmax_scale, q.dtype)
        if shape is None or shape == self._shape:
            return
        self._shape, self._dtype = shape, shape.dtype
        scale = shape.head_dim**-0.5 if self._softmax_scale is None else self._softmax_scale
        self._device: Device = make_device(self._device_name, self.mask, scale)
        tokens = map(self.layout.shard_len, range(self.layout.size))
        self._exchange = Exchange(
            self._comm,
            [shape.block_nbytes(number) for number in tokens],
            self._device.allocate,
            self._watch,
            **self._exchange_options,
        )

    def _block(self, attend: Attend) -> Block:
        """Return the block in a slot, seen as keys and values."""
        assert self._shape is not None  # Blocks exist only after `_admit`.
        positions = self.layout.positions(attend.block)
        data = self._exchange.slot(attend.slot, attend.block).view(self._dtype)
        k, v = data.reshape(self._shape.kv_shape(len(positions)))
        return Block(k, v, positions)

    def _refuse_difference(self, what: str, mine: str) -> None:
        """Raise on every rank if any rank has another value than rank 0."""
        values = self._team.allgather(mine)
        for rank, value in enumerate(values):
            if value != values[0]:
                error = ShapeError(
                    f"{what} differ between ranks: rank 0 has {values[0]}, rank {rank} {value}; "
                    f"all ranks of a ring must agree"
                )
                error.everywhere = True
                raise error


def execute(
    schedule: Sequence[Step],
    exchange: Exchange,
    device: Device,
    queries: Queries,
    block_of: Callable[[Attend], Block],
    state: State,
    trace: Trace,
) -> None:
    """Run a schedule: post, attend while the transfers move, wait for what is left. Collective.

    The wait in ``exchange.finish`` is the stall that ringmpi exists to measure.

    Parameters
    ----------
    schedule : sequence of Step
        Of this rank.
    exchange : Exchange
        Holds the blocks, the own one in slot 0.
    device : Device
    queries : Queries
        Of this rank.
    block_of : callable
        Returns the block that an attend reads.
    state : State
        Updated in place.
    trace : Trace
        Takes a record a step.
    """
    for number, step in enumerate(schedule):
        trace.begin(number)
        exchange.start(step.transfers)
        trace.mark("posted")
        trace.mark("launched")
        for attend in step.attends:
            work = device.attend(queries, block_of(attend), state)
            while not work.advance():
                exchange.poll()
            trace.count(**work.tally.counts())
        trace.mark("compute_done")
        exchange.finish()
        trace.mark("received", exchange.received_at)
        trace.mark("sent", exchange.sent_at)
        trace.count(bytes_sent=exchange.bytes_sent, messages=exchange.messages)
        trace.mark("step_end")


def ring_attention(q: Array, k: Array, v: Array, comm: MPI.Comm, **options: Any) -> tuple[Array, Array]:
    """Attend once over a sequence whose shards the ranks of `comm` hold.

    Collective over `comm`.

    Parameters
    ----------
    q, k, v : ndarray
        As in `RingAttention.forward`; the sequence is as long as all shards together.
    comm : MPI.Comm
    **options
        As in `RingAttention`, apart from `seq_len`.

    Returns
    -------
    out, lse : ndarray
        As in `RingAttention.forward`.
    """
    shape = np.shape(q)
    tokens = shape[2] if len(shape) == 4 else 0
    seq_len = sum(comm.allgather(tokens))
    with RingAttention(comm, seq_len=seq_len, **options) as attention:
        return attention.forward(q, k, v)


def _whole(number: Any) -> int:
    """Return a position or a width as an int; 1.9 is neither."""
    try:
        return operator.index(number)
    except TypeError as error:
        raise ConfigError(f"{number!r}: positions and widths are whole numbers") from error


def _common_shape(q: Array, k: Array, v: Array, shard_len: int) -> Shape:
    """Return what must be alike on all ranks, after checking what can be checked on one."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ShapeError(f"{name} of shape {array.shape}: needs [batch, heads, tokens, head_dim]")
        if array.dtype.name not in DTYPES:
            raise ShapeError(f"{name} of dtype {array.dtype}: use one of {', '.join(DTYPES)}")
        if array.dtype.name != q.dtype.name:
            raise ShapeError(f"{name} is {array.dtype} and q is {q.dtype}: use one dtype for all")
        if array.shape[2] != shard_len:
            raise ShapeError(
                f"{name} has {array.shape[2]} tokens: the layout gives this rank {shard_len}"
            )
    batch, heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    if k.shape != v.shape or (batch, head_dim) != (k.shape[0], k.shape[3]):
        raise ShapeError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: k and v must have one shape, and the batch and "
            f"head_dim of q"
        )
    if batch < 1 or kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ShapeError(
            f"batch={batch}, num_heads={heads}, num_kv_heads={kv_heads}: each must be at least 1, and "
            f"num_kv_heads must divide num_heads"
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ShapeError(f"head_dim={head_dim}: must be from 1 to {MAX_HEAD_DIM}")
    native = q.dtype if q.dtype.isnative else q.dtype.newbyteorder("=")
    return Shape(batch, heads, kv_heads, head_dim, native)
