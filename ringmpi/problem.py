"""The inputs q, k and v, and the gradient dout that a backward pass starts from, by global position.

Any rank can make or read any rows, so every rank count and every layout sees the same problem, and a
verifier needs nothing from the ranks that it judges.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from errno import EAGAIN, ENOLCK
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringmpi.config import Experiment
from ringmpi.encoding import decode, numpy_dtype, stored_dtype
from ringmpi.errors import DAMAGE, ConfigError, StoreError
from ringmpi.layout import Runs
from ringmpi.softmax import DTYPES

Array = NDArray[Any]

#: In the order of the generator's keys, which must not change.
TENSORS = ("q", "k", "v", "dout")

#: Values that are made or read at a time when a whole tensor is walked through: making
#: them takes about 40 bytes each.
PIECE_VALUES = 2**18


def tensors_of(experiment: Experiment) -> tuple[str, ...]:
    """Return which tensors an experiment has: dout only if it goes backward. Local."""
    return TENSORS if experiment.backward else TENSORS[:3]


def positions_of(tensor: str, experiment: Experiment) -> range:
    """Return the global positions that a tensor covers: all, or for q and dout those that attend. Local.

    The gradients and results of a tensor cover the same positions as the tensor itself.
    """
    of_queries = tensor in ("q", "dout")
    return range(experiment.seq_len - experiment.num_queries if of_queries else 0, experiment.seq_len)


class Problem(Protocol):
    """Somewhere that rows of the tensors come from. Every method is local."""

    def heads_of(self, tensor: str) -> int:
        """Return the number of heads of a tensor."""

    def rows(self, tensor: str, runs: Runs, heads: range, batch: range) -> Array:
        """Return rows at global positions, shape (len(batch), len(heads), sum of run lengths, head_dim)."""


class Generated:
    """Values that are a function of (seed, tensor, batch, head, position) alone.

    Each row is read from a counter-based generator (Philox 4x64, Salmon et al. 2011) keyed by the
    first four, at a counter given by the position. A value is the sum of four 16-bit integers, centred
    and scaled to variance 1: close to normal, within 3.5 of 0, and made without any transcendental
    function, so that it has the same bits on every machine.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._dtype = numpy_dtype(experiment.dtype)

    def heads_of(self, tensor: str) -> int:
        """Return the number of heads of a tensor."""
        return _heads_of(tensor, self._experiment)

    def rows(self, tensor: str, runs: Runs, heads: range, batch: range) -> Array:
        """Return generated rows."""
        tokens, width = sum(map(len, runs)), self._experiment.head_dim
        rows = np.empty((len(batch), len(heads), tokens, width), self._dtype)
        for b in batch:
            for head in heads:
                found = self._one_head(tensor, b, head, runs)
                np.copyto(rows[b - batch.start, head - heads.start], found, casting="unsafe")
        return rows

    def _one_head(self, tensor: str, batch: int, head: int, runs: Runs) -> Array:
        width = self._experiment.head_dim
        blocks = -(-width // 4)  # A counter gives four words, a word one value.
        entropy = [self._experiment.seed, TENSORS.index(tensor), batch, head]
        key = np.random.SeedSequence(entropy).generate_state(2, np.uint64)
        words = []
        for run in runs:
            # Neighbours in the sequence are neighbours in the counter, so one call makes a whole run.
            spans = [run] if run.step == 1 else [range(at, at + 1) for at in run]
            for span in spans:
                bits = np.random.Philox(key=key, counter=span.start * blocks)
                words.append(bits.random_raw(len(span) * blocks * 4))
        raw = np.concatenate(words) if words else np.empty(0, np.uint64)
        quarters = raw.view(np.uint16).reshape(-1, blocks * 4, 4)[:, :width]
        total = quarters.sum(axis=-1, dtype=np.int32)
        # Four uniform integers below 2**16 have mean 2 * (2**16 - 1) and variance (2**32 - 1) / 3.
        return np.asarray((total - 2 * (2**16 - 1)) * ((2**32 - 1) / 3) ** -0.5)


class FromFile:
    """Rows of an HDF5 file; only those asked for are read, and converted where asked to.

    The file is opened for reading only, and without a lock where the file system has none. Tensors may lack
    the first positions of the sequence, as q does where only the last ones attend; dout may be absent, and is
    then generated.

    Parameters
    ----------
    experiment : Experiment
    path : str
    group : str
        Where in the file q, k and v are.
    """

    def __init__(self, experiment: Experiment, path: str, group: str = "/") -> None:
        self._experiment = experiment
        self._dtype = numpy_dtype(experiment.dtype)
        self._path = path
        self._file = open_input(path)[group]
        self._generated = Generated(experiment)

    def heads_of(self, tensor: str) -> int:
        """Return the number of heads of a tensor."""
        return _heads_of(tensor, self._experiment)

    def rows(self, tensor: str, runs: Runs, heads: range, batch: range) -> Array:
        """Return rows from the file.

        Raises
        ------
        StoreError
            If they cannot be read.
        """
        try:
            if tensor == "dout" and tensor not in self._file:
                return self._generated.rows(tensor, runs, heads, batch)
            return self._read(self._file[tensor], runs, heads, batch)
        except DAMAGE as error:
            told = " ".join(str(error).split())
            raise StoreError(f"{self._path}: {tensor} cannot be read: {told}") from error

    def _read(self, dataset: Any, runs: Runs, heads: range, batch: range) -> Array:
        # The last row of any tensor is that of the last position.
        first = self._experiment.seq_len - dataset.shape[2]
        tokens = sum(map(len, runs))
        rows = np.empty((len(batch), len(heads), tokens, dataset.shape[3]), self._dtype)
        at = 0
        for run in runs:
            part = slice(run.start - first, run.stop - first, run.step)
            piece = dataset[batch.start : batch.stop, heads.start : heads.stop, part]
            with np.errstate(over="ignore"):  # What is too large for the dtype becomes infinite in it.
                rows[:, :, at : at + len(run)] = decode(dataset, piece).astype(self._dtype)
            at += len(run)
        return rows


def _heads_of(tensor: str, experiment: Experiment) -> int:
    return experiment.heads if tensor in ("q", "dout") else experiment.kv_heads


def problem_of(experiment: Experiment) -> Problem:
    """Return where the rows of an experiment come from. Local."""
    return FromFile(experiment, experiment.input) if experiment.input else Generated(experiment)


def shard_of(
    problem: Problem, tensor: str, runs: Runs, experiment: Experiment, between: Callable[[], None]
) -> Array:
    """Return all heads of some rows, head by head. Local.

    Parameters
    ----------
    problem : Problem
    tensor : str
    runs : tuple of range
        Positions of the rows.
    experiment : Experiment
    between : callable
        Called after every head; may raise to give up.

    Returns
    -------
    ndarray, shape (batch, heads, tokens, head_dim)
    """
    heads = problem.heads_of(tensor)
    shape = (experiment.batch, heads, sum(map(len, runs)), experiment.head_dim)
    shard = np.empty(shape, numpy_dtype(experiment.dtype))
    for batch, head in product(range(experiment.batch), range(heads)):
        one = range(head, head + 1), range(batch, batch + 1)
        shard[batch, head] = problem.rows(tensor, runs, *one)[0, 0]
        between()
    return shard


def pieces_of(seq_len: int, width: int, first: int = 0) -> Iterator[range]:
    """Yield the positions from `first` on in pieces of bounded size, for rows of `width` values."""
    tokens = max(1, PIECE_VALUES // width)
    for start in range(first, seq_len, tokens):
        yield range(start, min(seq_len, start + tokens))


def sha256_of(
    problem: Problem, tensor: str, experiment: Experiment, between: Callable[[], None]
) -> str:
    """Return the SHA-256 of a tensor's bytes in C order, little-endian, at all positions it covers. Local.

    The tensor is walked through head by head in pieces, never held; `between` is called after each, and
    may raise to give up.
    """
    digest = hashlib.sha256()
    first = positions_of(tensor, experiment).start
    for batch in range(experiment.batch):
        for head in range(problem.heads_of(tensor)):
            for piece in pieces_of(experiment.seq_len, experiment.head_dim, first):
                one = range(batch, batch + 1), range(head, head + 1)
                rows = problem.rows(tensor, (piece,), one[1], one[0])
                digest.update(np.ascontiguousarray(rows).view(np.uint8).data)
                between()
    return digest.hexdigest()


def open_input(path: str) -> Any:
    """Open an HDF5 file for reading. Local.

    Raises
    ------
    ConfigError
        If it cannot be opened or is not HDF5.
    """
    import h5py

    if not Path(path).is_file():
        raise ConfigError(f"input={path}: no such file")
    # What a virtual dataset is made of HDF5 looks for beside the name that it is given, which may be a link.
    there = Path(path).resolve()
    try:
        return h5py.File(there, "r")
    except OSError as error:
        # Another process holds the lock, or the file system has none. Input is only read, and was complete
        # before this run began.
        if error.errno in (EAGAIN, ENOLCK):
            return h5py.File(there, "r", locking=False)
        raise ConfigError(f"input={path}: cannot be read as HDF5: {error}") from error


def describe_input(path: str) -> dict[str, Any]:
    """Return what an input file says of itself, by option name. Local.

    Nothing is read of the tensors yet, but it is seen whether all their values are there.

    Fewer tokens in /q than in /k are the queries of the last positions, and say `query_len`.

    Raises
    ------
    ConfigError
        If the file lacks q, k or v, or the shapes or dtypes of its tensors do not belong together.
    """
    with open_input(path) as file:
        try:
            return _described(path, file)
        except ConfigError:
            raise
        except DAMAGE as error:
            raise ConfigError(f"input={path}: damaged: {' '.join(str(error).split())}") from error


def _described(path: str, file: Any) -> dict[str, Any]:
    """Return what an open file says of itself, and refuse what does not belong together."""
    import h5py

    for name in "qkv":
        if not isinstance(file.get(name), h5py.Dataset) or file[name].shape is None:
            raise ConfigError(f"input={path}: has no dataset /{name}; needs /q, /k and /v")
    _check_parts(path, file)
    q, k, v = (file[name] for name in "qkv")
    shapes = ", ".join(f"/{name} {file[name].shape}" for name in "qkv")
    if any(tensor.ndim != 4 or 0 in tensor.shape for tensor in (q, k, v)):
        raise ConfigError(f"input={path}: {shapes}: needs [batch, heads, tokens, head_dim]")
    same = (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    if not same or k.shape != v.shape:
        raise ConfigError(
            f"input={path}: {shapes}: batch and head_dim must be alike, and the heads and tokens of "
            f"/k and /v"
        )
    if q.shape[2] > k.shape[2]:
        raise ConfigError(
            f"input={path}: {shapes}: /q may have at most as many tokens as /k, since its rows are the "
            f"last positions of the sequence"
        )
    dtypes = {stored_dtype(tensor) for tensor in (q, k, v)}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise ConfigError(
            f"input={path}: dtypes {', '.join(sorted(dtypes))}: use one of {', '.join(DTYPES)} "
            f"for all three (bfloat16 as uint16 with the attribute dtype)"
        )
    _check_dout(path, file, q)
    for name in "qkv":
        _check_values(path, name, file[name])
    found = {
        "batch": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "seq_len": k.shape[2],
        "head_dim": q.shape[3],
        "dtype": dtypes.pop(),
    }
    if q.shape[2] < k.shape[2]:
        found["query_len"] = q.shape[2]
    documents = file.get("documents")
    if documents is not None:
        plain = isinstance(documents, h5py.Dataset) and documents.shape is not None
        if not plain or documents.ndim != 1 or documents.dtype.kind not in "iu":
            raise ConfigError(f"input={path}: /documents must be a list of whole numbers")
        if len(documents) > k.shape[2] + 1:
            raise ConfigError(
                f"input={path}: /documents has {len(documents)} offsets, more than {k.shape[2]} tokens have"
            )
        found["documents"] = tuple(int(offset) for offset in documents[:])
    return found


def _check_values(path: str, name: str, dataset: Any) -> None:
    """Refuse a dataset whose values are not there: HDF5 would give zeros in their place."""
    empty = not dataset.is_virtual and dataset.chunks is None
    if empty and dataset.id.get_storage_size() < dataset.nbytes:
        raise ConfigError(f"input={path}: /{name} has no values, only a shape, {dataset.shape}")


def _check_parts(path: str, file: Any) -> None:
    """Refuse datasets that are made of others of which some are missing: HDF5 fills those in."""
    import h5py

    from ringmpi.shards import absent_sources

    for name in (*TENSORS, "documents"):
        dataset = file.get(name)
        absent = (
            absent_sources(dataset, Path(path).resolve()) if isinstance(dataset, h5py.Dataset) else []
        )
        if absent:
            raise ConfigError(
                f"input={path}: /{name} is made of {', '.join(absent)}, which is not there or cannot be read"
            )


def _check_dout(path: str, file: Any, q: Any) -> None:
    """Refuse a /dout that does not belong to /q."""
    import h5py

    dout = file.get("dout")
    if dout is None:
        return
    if not isinstance(dout, h5py.Dataset) or dout.shape is None:
        raise ConfigError(f"input={path}: /dout must be a dataset like /q")
    if (dout.shape, stored_dtype(dout)) != (q.shape, stored_dtype(q)):
        raise ConfigError(
            f"input={path}: /dout {dout.shape} {stored_dtype(dout)}: must have the shape and dtype of /q, "
            f"{q.shape} {stored_dtype(q)}"
        )
