"""Exact attention over a sequence that is sharded across ranks: the schedule, executed."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.agreed import agreed_device
from ringmpi.comm.clocks import clock_offsets
from ringmpi.comm.exchange import Exchange
from ringmpi.comm.link import network_of, nodes_of
from ringmpi.comm.policy import CHUNK_LIMIT, PROGRESS, TRANSPORTS, check_timeout
from ringmpi.comm.progress import thread_refusal
from ringmpi.comm.team import Team, duplicate
from ringmpi.comm.transport import Transport, transport_of
from ringmpi.comm.watch import Watch
from ringmpi.devices import (
    MAX_HEAD_DIM,
    Device,
    Gpu,
    check_device,
    check_matrix_unit,
    check_pace,
    make_device,
    slowness,
)
from ringmpi.devices.base import Sizes
from ringmpi.devices.region import callers_array, is_on_device
from ringmpi.errors import (
    ConfigError,
    MissingCapabilityError,
    RingMPIError,
    ShapeError,
    check_choice,
)
from ringmpi.layout import Layout
from ringmpi.mask import Mask
from ringmpi.schedule import METHODS, Pass, Shards, Step, check_heads, inner_ranks
from ringmpi.schedule.steps import parts_held
from ringmpi.softmax import DTYPES, WEIGHTS, check_scale, check_weights, state_dtype
from ringmpi.tensors import Shape
from ringmpi.trace import Trace
from ringmpi.workspace import Workspace

if TYPE_CHECKING:
    from mpi4py import MPI

Array = NDArray[Any]


@dataclass(frozen=True)
class _Engine:
    """What is made once for inputs of one shape."""

    shape: Shape
    device: Device
    exchange: Exchange
    transport: Transport


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
    query_len : int, optional
        How many positions attend: the last ones of the sequence, shared among the ranks by the same
        layout. All by default.
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
        ``ring``, ``bidirectional``, ``double-ring``, ``passq``, ``allgather``, ``ulysses`` or ``hybrid``.
    inner : int, optional
        Ranks of an inner group of ``hybrid`` (its ulysses degree) and ``double-ring``; those of a node
        by default.
    device : str
        ``cuda``, ``native``, ``numpy``, or ``auto``: the first of these that every rank can have. The native
        one is compiled before MPI is initialised, by `ringmpi.prepare`, or once by ``ringmpi doctor``.
        ``paced``: takes the time of a device of so many `flops` and computes nothing, so that all results
        are zeros.
    threads : int
        Of the native device on this rank.
    matrix_unit : str
        ``auto``, ``on`` or ``off``: whether the native device uses the CPU's matrix unit, for bfloat16.
    weights : str
        ``exact``, or ``rounded``: with 16-bit inputs, a device that multiplies such numbers faster rounds the
        softmax weights, and their gradients, to that dtype for products, as FlashAttention and torch do. The
        state is float32 all the same.
    flops : float, optional
        FLOP/s of a paced rank; needed for them, refused for others.
    slow : str, optional
        Paced ranks that take longer, and how many times as long: ``RANK:FACTOR,...``.
    progress : str
        Who calls MPI while the device computes, so that transfers go on. ``poll``: it is called between
        tiles; ``thread``: a helper thread does, which needs ``MPI_THREAD_MULTIPLE``; ``wait``: nobody.
    transport : str
        How blocks get from GPU memory to MPI. ``direct``: MPI reads it, which is refused where the library
        does not say that it can; ``staged``: in pieces through pinned host memory; ``auto``: the former
        where it can be had.
    timeout : float
        Seconds without progress of any transfer after which it is given up.
    chunk_limit : int
        Bytes of the largest MPI message.
    check_transfers : bool
        Compare everything that arrives with its sender's or owner's checksum.
    link : str, optional
        An emulated link between each two ranks, such as ``100Mbit/s,1ms``.
    link_map : str, optional
        Emulated links by topology instead, such as ``4:200Gbit/s,1us:25Gbit/s,5us``: in a node of 4 ranks,
        and between nodes, which count as the nodes of the ranks.
    watch : Watch, optional
        Shared with others who wait; one of its own by default, which heeds no signal.

    Raises
    ------
    ConfigError
        If a parameter breaks a rule; on every rank if all were given the same one.
    ShapeError
        On every rank, if parameters differ between ranks.
    MissingCapabilityError
        On every rank, if any rank lacks the device that is asked for.

    Attributes
    ----------
    device : str
        What computes, on all ranks.
    transport : str
        How blocks get to MPI, on all ranks.
    gpu : Gpu or None
        Which one this rank computes on.
    layout, query_layout : Layout
        Of k and v, and of q.
    inner : int
        Ranks of an inner group; 1 for methods without.
    schedules : dict of Pass to list of Step
        Of this rank.
    trace : Trace
        Of the last pass.
    before_pass : callable
        Called on every rank once a pass is prepared, before its first step. Nothing by default; who measures
        lets the ranks meet there.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        seq_len: int,
        query_len: int | None = None,
        layout: str = "contiguous",
        causal: bool = False,
        window: int | None = None,
        documents: Sequence[int] | None = None,
        softmax_scale: float | None = None,
        method: str = "ring",
        inner: int | None = None,
        device: str = "auto",
        threads: int = 1,
        matrix_unit: str = "auto",
        weights: str = "exact",
        flops: float | None = None,
        slow: str | None = None,
        progress: str = "poll",
        transport: str = "auto",
        timeout: float = 60.0,
        chunk_limit: int = CHUNK_LIMIT,
        check_transfers: bool = False,
        link: str | None = None,
        link_map: str | None = None,
        watch: Watch | None = None,
    ) -> None:
        check_choice("method", method, METHODS)
        check_choice("progress", progress, PROGRESS)
        check_choice("transport", transport, TRANSPORTS)
        check_choice("weights", weights, WEIGHTS)
        check_timeout(timeout)
        check_device(device, threads, matrix_unit)
        check_pace(device, flops, slow)
        slower = slowness(slow, comm.size)[comm.rank]
        if chunk_limit < 1:
            raise ConfigError(f"chunk_limit={chunk_limit}: a message carries at least 1 byte")
        network = network_of(link, link_map)
        if network is not None:
            network.check(comm.size)
        self.layout = Layout(layout, seq_len, comm.size)
        num_queries = seq_len if query_len is None else query_len
        if not 1 <= num_queries <= seq_len:
            raise ConfigError(f"query_len={query_len}: must be from 1 to seq_len, {seq_len}")
        self.query_layout = Layout(layout, num_queries, comm.size, seq_len - num_queries)
        offsets = None if documents is None else tuple(map(_whole, documents))
        window = None if window is None else _whole(window)
        self.mask = Mask(causal, window, offsets)
        if offsets is not None and offsets[-1] != seq_len:
            raise ConfigError(
                f"documents end at {offsets[-1]} and the sequence at {seq_len}: append {seq_len}"
            )
        self._owns_watch = watch is None
        self._watch = watch or Watch(comm.Dup(), timeout)
        self._comm = duplicate(comm, self._watch)
        self._notes = duplicate(comm, self._watch)
        self._team = Team(self._comm, self._watch)
        self._method = method
        self._softmax_scale = softmax_scale
        self._device_options: dict[str, Any] = {
            "threads": threads,
            "matrix_unit": matrix_unit,
            "weights": weights,
            "flops": None if flops is None else flops / slower,
        }
        given = (
            (self.layout, self.query_layout, self.mask, softmax_scale, method, inner),
            (
                chunk_limit,
                check_transfers,
                network,
                device,
                matrix_unit,
                weights,
                flops,
                slow,
                transport,
            ),
        )
        nodes = nodes_of(network, comm.size, self._team.hosts)
        try:
            self._refuse_difference("parameters", repr(given))
            self._team.agree(thread_refusal(progress))
            self.inner = inner_ranks(method, comm.size, inner, nodes)
            agreed = agreed_device(self._team, device, threads, matrix_unit, transport)
        except RingMPIError:
            self.close()
            raise
        self.device, self.transport, self.gpu = agreed.device, agreed.transport, agreed.gpu
        self._device_options["gpu"] = agreed.gpu
        if agreed.reason and comm.rank == 0:
            warnings.warn(f"device=auto: is {self.device}, since {agreed.reason}", stacklevel=2)
        self._exchange_options: dict[str, Any] = {
            "progress": progress,
            "chunk_limit": chunk_limit,
            "check_transfers": check_transfers,
            "network": network,
            "offsets": () if network is None else clock_offsets(self._team)[:, 1],
        }
        self._shards = Shards(self.layout, self.query_layout, comm.rank, self.inner)
        self.schedules = {direction: METHODS[method](self._shards, direction) for direction in Pass}
        self.trace = Trace(len(self.schedules[Pass.FORWARD]))
        self.before_pass: Callable[[], None] = lambda: None
        self._engine: _Engine | None = None
        self._last = Pass.FORWARD

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Attend the queries of this rank to the keys of all ranks.

        Parameters
        ----------
        q : ndarray, shape (batch, num_heads, query shard_len, head_dim)
            float64, float32, float16 or bfloat16; any strides and byte order. With ``device="cuda"`` also
            CuPy's, or of anything else with the CUDA Array Interface, on the GPU of this rank; results are
            CuPy's then. Token ``i`` is the one at ``query_layout.positions(rank)[i]``.
        k, v : ndarray, shape (batch, num_kv_heads, shard_len, head_dim)
            `num_kv_heads` divides `num_heads`; token ``i`` is at ``layout.positions(rank)[i]``. None
            of the three is written to.

        Returns
        -------
        out : ndarray, shape and dtype of `q`
            0 in rows that may see no key.
        lse : ndarray, shape (batch, num_heads, query shard_len)
            Natural logarithm of the sum of exponentials; float64 for float64, else float32;
            ``-inf`` in rows that may see no key.

        Raises
        ------
        ShapeError
            On every rank, if the arrays do not belong together.
        ConfigError
            On every rank, if their dtype does not go with what was asked for.
        StalledRingError, TransportError
            On the rank that notices.
        """
        q, k, v = map(_taken, (q, k, v))
        engine = self._admit(q, k, v)
        place, give = engine.device.place, engine.device.give
        own = {
            name: place(array, engine.shape.dtype) for name, array in zip("qkv", (q, k, v), strict=True)
        }
        done = self._pass(engine, Pass.FORWARD, own)
        return give(done.own("out"), q), give(done.own("lse"), q)

    def backward(
        self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of a loss with respect to q, k and v, given the one with respect to out.

        Parameters
        ----------
        dout : ndarray, shape and dtype of `q`
        q, k, v : ndarray
            As given to `forward`.
        out, lse : ndarray
            As `forward` returned them: over the keys of all ranks.

        Returns
        -------
        dq, dk, dv : ndarray, shapes and dtype of `q`, `k` and `v`
            Summed in float32 (float64 for float64), and rounded once. 0 where nothing may be seen.

        Raises
        ------
        ShapeError
            On every rank, if the arrays do not belong together.
        StalledRingError, TransportError
            On the rank that notices.
        """
        dout, q, k, v, out, lse = map(_taken, (dout, q, k, v, out, lse))
        misplaced = _misplaced((dout, out, lse), self.device, self.gpu)
        engine = self._admit(q, k, v, _misfit(q, dout, out, lse) or misplaced)
        device, dtype = engine.device, engine.shape.dtype
        given = {"q": q, "k": k, "v": v, "dout": dout}
        own = {name: device.place(array, dtype) for name, array in given.items()}
        own["lse"] = device.place(lse, state_dtype(dtype))
        own["delta"] = device.delta(own["dout"], device.place(out, dtype))
        done = self._pass(engine, Pass.BACKWARD, own)
        dq, dk, dv = (
            device.give(device.rounded(done.own(name), dtype), q) for name in ("dq", "dk", "dv")
        )
        return dq, dk, dv

    def transfers_alone(self, direction: Pass | None = None) -> Trace:
        """Make the transfers of a pass again with no compute beside them.

        Parameters
        ----------
        direction : Pass, optional
            The last one by default.

        Returns
        -------
        Trace
            What the transfers take when nothing hides them.

        Raises
        ------
        ConfigError
            If there was no pass before, whose parts could be moved.
        """
        if self._engine is None:
            raise ConfigError("transfers_alone: nothing has moved yet; call forward or backward first")
        direction = self._last if direction is None else direction
        silent = [Step(step.transfers) for step in self.schedules[direction]]
        self._engine.exchange.begin(self._slot_nbytes(self._engine, direction))
        trace = Trace(len(silent))
        self.before_pass()
        with self._engine.exchange.moving():
            execute(silent, self._engine.exchange, None, trace)
        return trace

    def held_nbytes(self, direction: Pass) -> int:
        """Return the bytes of all slots that a pass needs beside the tensors of this rank. Local.

        Raises
        ------
        ConfigError
            If there was no pass before, so that the shape of the parts is not known.
        """
        if self._engine is None:
            raise ConfigError("held_nbytes: shapes are not known yet; call forward or backward first")
        return sum(self._slot_nbytes(self._engine, direction).values())

    @property
    def staged_nbytes(self) -> int:
        """Pinned host memory that blocks travel through. Local."""
        return 0 if self._engine is None else self._engine.transport.staged_nbytes

    def close(self) -> None:
        """Give the communicators back to MPI."""
        for comm in (self._comm, self._notes):
            comm.Free()
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

    def _pass(self, engine: _Engine, direction: Pass, own: dict[str, Array]) -> Workspace:
        """Execute the schedule of a pass over tensors of this rank, and return what holds the results."""
        work = Workspace(engine.shape, self._shards, engine.device, engine.exchange.slot, own)
        engine.exchange.begin(self._slot_nbytes(engine, direction))
        self._last = direction
        self.trace = Trace(len(self.schedules[direction]))
        self.before_pass()
        with engine.exchange.moving():
            execute(self.schedules[direction], engine.exchange, work, self.trace)
        return work

    def _admit(self, q: Array, k: Array, v: Array, misfit: RingMPIError | None = None) -> _Engine:
        """Refuse shards that do not fit, and make device and exchange for a new shape."""
        shape, error = None, misfit or _misplaced((q, k, v), self.device, self.gpu)
        lens = (layout.shard_len(self._shards.rank) for layout in (self.query_layout, self.layout))
        try:
            shape = _common_shape(q, k, v, *lens)
            check_heads(self._method, self.inner, shape.num_heads)
        except (ShapeError, ConfigError) as wrong:
            error = wrong
        self._team.agree(error)
        assert shape is not None  # Or there was an error, of some rank.
        self._refuse_difference("shapes", repr(shape))
        check_scale(self._softmax_scale, shape.dtype)
        check_matrix_unit(self._device_options["matrix_unit"], shape.dtype.name)
        check_weights(self._device_options["weights"], shape.dtype.name)
        if self._engine is None or self._engine.shape != shape:
            error = None
            try:
                self._engine = self._make_engine(shape)
            except MissingCapabilityError as lacking:  # Such as a compiler that refuses this GPU.
                error = lacking
            self._team.agree(error)
        assert self._engine is not None  # Or there was an error, of some rank.
        return self._engine

    def _make_engine(self, shape: Shape) -> _Engine:
        scale = shape.head_dim**-0.5 if self._softmax_scale is None else self._softmax_scale
        device = make_device(self.device, self.mask, scale, **self._device_options)
        heads = (shape.batch, shape.num_heads, shape.num_kv_heads)
        # Some methods attend to more than shards; that may take wider indices.
        spans = (
            (self.query_layout.shard_len(0), self.layout.shard_len(0)),
            (self.query_layout.seq_len, self.layout.seq_len),
        )
        device.prepare((Sizes(*heads, *span, shape.head_dim) for span in spans), shape.dtype)
        transport = transport_of(self.transport, device)
        exchange = Exchange(
            self._comm,
            lambda part: shape.nbytes(part, self._shards),
            device.allocate,
            self._watch,
            self._notes,
            transport=transport,
            **self._exchange_options,
        )
        return _Engine(shape, device, exchange, transport)

    def _slot_nbytes(self, engine: _Engine, direction: Pass) -> dict[int, int]:
        """Return the bytes that each slot must have in a pass: those of the largest part in it."""
        found: dict[int, int] = {}
        for held in parts_held(self.schedules[direction]):
            nbytes = engine.shape.nbytes(held.part, self._shards)
            found[held.slot] = max(nbytes, found.get(held.slot, 0))
        return found

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


def execute(schedule: Sequence[Step], exchange: Exchange, work: Workspace | None, trace: Trace) -> None:
    """Run a schedule: post, attend while the transfers move, wait for what is left. Collective.

    The wait in ``exchange.finish`` is the stall that ringmpi exists to measure.

    Parameters
    ----------
    schedule : sequence of Step
        Of this rank.
    exchange : Exchange
        Holds the slots.
    work : Workspace or None
        The tensors that are computed with; None to move parts only.
    trace : Trace
        Takes a record a step.
    """
    for number, step in enumerate(schedule):
        trace.begin(number)
        if work is not None:
            work.do(step.before)
        exchange.start(step.transfers)
        trace.mark("posted")
        trace.mark("launched")
        for attending in work.works(step.attends) if work is not None else ():
            while not attending.advance():
                exchange.poll()
            trace.count(**attending.tally.counts())
        trace.mark("compute_done")
        exchange.finish()
        trace.note(**exchange.noted)
        trace.count(bytes_sent=exchange.bytes_sent, messages=exchange.messages, hops=exchange.hops)
        if work is not None:
            work.do(step.after)
            if number == len(schedule) - 1:
                work.settle()  # Or the pass would seem to end before its results are there.
        trace.mark("step_end")


def ring_attention(q: Array, k: Array, v: Array, comm: MPI.Comm, **options: Any) -> tuple[Array, Array]:
    """Attend once over a sequence whose shards the ranks of `comm` hold.

    Collective over `comm`.

    Parameters
    ----------
    q, k, v : ndarray
        As in `RingAttention.forward`; the sequence is as long as all shards of k together, and the
        queries are its last positions.
    comm : MPI.Comm
    **options
        As in `RingAttention`, apart from `seq_len` and `query_len`.

    Returns
    -------
    out, lse : ndarray
        As in `RingAttention.forward`.
    """
    mine = tuple(np.shape(a)[2] if np.ndim(a) == 4 else 0 for a in (q, k))
    num_queries, seq_len = map(sum, zip(*comm.allgather(mine), strict=True))
    with RingAttention(comm, seq_len=seq_len, query_len=num_queries, **options) as attention:
        return attention.forward(q, k, v)


def _taken(array: Any) -> Any:
    """Return what a caller gave as an array, wherever it lies."""
    return callers_array(array) if is_on_device(array) else np.asarray(array)


def _whole(number: Any) -> int:
    """Return a position or a width as an int; 1.9 is neither."""
    try:
        return operator.index(number)
    except TypeError as error:
        raise ConfigError(f"{number!r}: positions and widths are whole numbers") from error


def _common_shape(q: Array, k: Array, v: Array, queries: int, tokens: int) -> Shape:
    """Return what must be alike on all ranks, after checking what can be checked on one."""
    for name, array, needed in (("q", q, queries), ("k", k, tokens), ("v", v, tokens)):
        if array.ndim != 4:
            raise ShapeError(f"{name} of shape {array.shape}: needs [batch, heads, tokens, head_dim]")
        if array.dtype.name not in DTYPES:
            raise ShapeError(f"{name} of dtype {array.dtype}: use one of {', '.join(DTYPES)}")
        if array.dtype.name != q.dtype.name:
            raise ShapeError(f"{name} is {array.dtype} and q is {q.dtype}: use one dtype for all")
        if array.shape[2] != needed:
            raise ShapeError(f"{name} has {array.shape[2]} tokens: the layout gives this rank {needed}")
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


def _misplaced(arrays: Sequence[Any], device: str, gpu: Gpu | None) -> ShapeError | None:
    """Return why arrays are not where this rank computes, or None."""
    for array in arrays:
        if not is_on_device(array):
            continue
        if gpu is None:
            return ShapeError(
                f"an array lies in GPU memory, and device={device} computes in host memory; use "
                f"device='cuda', or bring it here, as cupy.asnumpy does"
            )
        if array.device not in (-1, gpu.index):
            return ShapeError(
                f"an array lies on GPU {array.device}, and this rank computes on GPU {gpu.index}; copy it "
                f"there, or make it in `with cupy.cuda.Device({gpu.index})`"
            )
    return None


def _misfit(q: Array, dout: Array, out: Array, lse: Array) -> ShapeError | None:
    """Return why what belongs to the queries does not fit them, or None."""
    for name, array in (("dout", dout), ("out", out)):
        if array.shape != q.shape or array.dtype.name != q.dtype.name:
            return ShapeError(
                f"{name} is {array.dtype} {array.shape} and q is {q.dtype} {q.shape}: must be alike"
            )
    if lse.shape != q.shape[:-1] or lse.dtype.name != state_dtype(q.dtype).name:
        return ShapeError(
            f"lse is {lse.dtype} {lse.shape} for q of {q.dtype} {q.shape}: give it as forward returned it"
        )
    return None
