"""The result file: written whole or not at all, read back with its rules checked.

Traces are ``[repeat, rank, step]``. Of so many simulated ranks that these don't fit, each has one record
instead, all its steps laid end to end, which metrics read like any other, and some ranks have all their
steps in a group beside it; see `ResultWriter.condense`.

It is written under a name of its own in the directory of the target, flushed to disk and then moved into
place (see `unfinished`), so that a reader never sees half a file, two writers never mix, and an older good
file stays until a newer one is complete. The tensors of a result may lie in other files beside it; see
`shards`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import datetime, timezone
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

import ringmpi
from ringmpi.config import Experiment, experiment_of_record
from ringmpi.encoding import along_tokens, create_tensor, decode, encode, stored_dtype
from ringmpi.errors import DAMAGE, ConfigError, RingMPIError, StoreError
from ringmpi.layout import Layout, Runs
from ringmpi.metrics import Clocks, Timings
from ringmpi.parallel_hdf5 import parallel_refusal, versions
from ringmpi.redaction import redacted
from ringmpi.schedule import Pass, Step
from ringmpi.shards import Seal, ShardFolder, Shards, Shown, rank_of_shard
from ringmpi.softmax import DTYPES
from ringmpi.trace import QUANTITIES, RECORD
from ringmpi.unfinished import UnfinishedFile, temporary_name
from ringmpi.verify import Verdict

Array = NDArray[Any]
P = ParamSpec("P")
T = TypeVar("T")

FORMAT_VERSION = 1

#: What a run may give, in the order in which it is told.
OUTPUTS = ("out", "lse", "dq", "dk", "dv")

#: Where the traces of a pass are.
TIMINGS = {Pass.FORWARD: "timings", Pass.BACKWARD: "timings/backward"}

#: The attribute that marks traces of which each rank has one record, all its steps laid end to end: so many
#: ranks were simulated that there is no room for all steps. In the group `WATCHED` some ranks have them all.
CONDENSED = "condensed"
WATCHED = "watched"

#: Quantities that are known of every step; others may be NaN, or missing in files of an older ringmpi.
ALWAYS = ("started", "posted", "launched", "compute_done", "step_end", "bytes_sent", "pairs")

#: A clock is compared with rank 0's before and after the passes.
MOST_COMPARISONS = 2

#: Seconds that a reader waits for a lock to be given back: a writer holds its own for a moment more after the
#: file has appeared, so one that reads its result beside another writer may meet it.
LOCK_PATIENCE = 1.0
LOCK_NAP = 0.01

#: The most that deflate makes of a byte (zlib.net/zlib_tech.html), if somebody has compressed a file.
DEFLATE = 1032


def refusal(path: Path) -> ConfigError | None:
    """Return why a result cannot be written to `path`, or None; makes its directory. Local."""
    refused = unwritable(path)
    if refused is None and path.exists() and not _is_result(path):
        return ConfigError(
            f"output={path}: is there and is no result of ringmpi, so it is not replaced; use another name"
        )
    return refused


def unwritable(path: Path) -> ConfigError | None:
    """Return why no file can be written to `path`, or None; makes its directory. Local."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = temporary_name(path)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        return ConfigError(f"output={path}: cannot be written: {error.strerror}; use another name")
    if path.is_dir():
        return ConfigError(f"output={path}: is a directory; name a file in it")
    return None


def _is_result(path: Path) -> bool:
    try:
        with h5py.File(path, "r", locking=False) as file:
            return "format_version" in file.attrs
    except DAMAGE:  # Not HDF5, or damaged.
        return False


class ResultWriter:
    """A result file in the making. Local, for the one rank that writes.

    Leaving the ``with`` block without `commit` removes what was written.

    Parameters
    ----------
    path : Path
        Where the file appears at `commit`.

    Raises
    ------
    WriteError
        From any method, once something could not be written.

    Attributes
    ----------
    token : str
        What only the shards of this file in the making have in their names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token = secrets.token_hex(6)
        self._unfinished = UnfinishedFile(path)
        self._folder: ShardFolder | None = None
        self._file = h5py.File(self._unfinished, "w")
        self._file.attrs["complete"] = False
        self._file.attrs["format_version"] = FORMAT_VERSION

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        finally:
            self._unfinished.remove()
            if self._folder is not None:
                self._folder.remove()

    @property
    def temporary(self) -> Path:
        """The name under which the file is written."""
        return self._unfinished.temporary

    def describe(self, experiment: Experiment, command: str, kind: str = "measured") -> None:
        """Write what the file is and how it was made."""
        record = experiment.record()
        # Not the input: `verify` reads it again.
        record["output"] = None if record["output"] is None else redacted(str(record["output"]))
        self._file.attrs.update(
            {
                "kind": kind,
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "ringmpi_version": ringmpi.__version__,
                "config": json.dumps(record),
                "command": _storable(command),
            }
        )

    def mark_interrupted(self, signal_number: int) -> None:
        """Write that a signal ended the run before all repeats were made."""
        self._file.attrs["interrupted"] = signal_number

    def tensor(self, name: str, shape: Sequence[int], dtype: np.dtype[Any], first: int = 0) -> None:
        """Make a dataset of tokens from `first` on, filled with NaN; does nothing if it is there."""
        if name not in self._file:
            create_tensor(self._file, name, shape, dtype, first)

    def write_rows(self, name: str, positions: range, rows: Array) -> None:
        """Write rows, shape (batch, heads, len(positions), ...), where their global positions belong."""
        dataset = self._file[name]
        dataset[:, :, along_tokens(dataset, positions)] = encode(rows)
        self._unfinished.check()

    def begin_shards(self) -> Path:
        """Make the folder that ranks write shards into, and return it."""
        self._folder = ShardFolder(self.path, self.token)
        return self._folder.path

    def show_shards(
        self, name: str, shape: Sequence[int], dtype: np.dtype[Any], layout: Layout
    ) -> None:
        """Show what ranks have written into their shards as one tensor."""
        assert self._folder is not None  # They have none to write into before it is made.
        self._folder.show(Shown(name, tuple(shape), dtype, layout))

    def seal_shards(self, seals: Sequence[Seal]) -> None:
        """Write how the shards, by rank, are known; they are not written to any more."""
        assert self._folder is not None  # Ranks have written into it.
        self._folder.seal(self._file, seals)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let go of the file for a while, so that all ranks may open it together."""
        self._file.close()
        yield
        self._file = h5py.File(self._unfinished, "r+")

    def rows(self, tensor: str, batch: int, head: int, runs: Runs) -> Array:
        """Read back rows of an output that was written before."""
        self._unfinished.check()
        if self._folder is None:
            return _rows(self._file, tensor, batch, head, runs)
        with self._folder.so_far() as file:
            return _rows(file, tensor, batch, head, runs)

    def table(self, name: str, values: Array, unit: str, description: str) -> None:
        """Write an array with its unit; floating ones are filled with NaN where nothing is written."""
        fill = np.nan if values.dtype.kind == "f" else None
        dataset = self._file.create_dataset(name, data=values, fillvalue=fill)
        dataset.attrs.update({"unit": unit, "description": description})
        self._unfinished.check()

    def texts(self, name: str, values: Sequence[str], description: str) -> None:
        """Write one text a rank."""
        dataset = self._file.create_dataset(
            name, data=[_storable(text) for text in values], dtype=h5py.string_dtype()
        )
        dataset.attrs.update({"unit": "", "description": description})

    def facts(self, group: str, facts: Mapping[str, Any]) -> None:
        """Write named facts as attributes of a group; what HDF5 has no type for is written as text."""
        attributes = self._file.require_group(group).attrs
        for name, value in facts.items():
            plain = isinstance(value, (bool, int, float, str))
            told = value if plain else json.dumps(value, default=str)
            attributes[name] = _storable(told) if isinstance(told, str) else told

    def records(self, group: str, shape: tuple[int, ...]) -> None:
        """Make a dataset [repeat, rank, step] for each quantity of a trace."""
        for name, quantity in QUANTITIES.items():
            dataset = self._file.create_dataset(f"{group}/{name}", shape, np.float64, fillvalue=np.nan)
            dataset.attrs.update({"unit": quantity.unit, "description": quantity.description})
            for axis, label in enumerate(("repeat", "rank", "step")):
                dataset.dims[axis].label = label

    def write_records(self, group: str, rank: int | slice, records: Array) -> None:
        """Write the records of one rank, shape (repeats, steps), or of several, (repeats, ranks, steps)."""
        for name in QUANTITIES:
            self._file[f"{group}/{name}"][:, rank] = records[name]

    def condense(self, group: str, ranks: Array, records: Array) -> None:
        """Say that records of a group are condensed, and write those of some ranks in full.

        Parameters
        ----------
        group : str
        ranks : ndarray of int, shape (n,)
            Ascending.
        records : ndarray of trace.RECORD, shape (repeats, n, steps)
        """
        self._file[group].attrs[CONDENSED] = True
        self.records(f"{group}/{WATCHED}", records.shape)
        self.write_records(f"{group}/{WATCHED}", slice(None), records)
        self.table(f"{group}/{WATCHED}/rank", ranks, "1", "whose steps these are")

    def verdicts(self, how: str, verdicts: Sequence[Verdict]) -> None:
        """Write how the outputs were verified and what was found."""
        self._file.require_group("verification").attrs["how"] = how
        for verdict in verdicts:
            self.facts(f"verification/{verdict.tensor}", verdict.record())

    def commit(self) -> None:
        """Mark the file complete and move it into place, its shards first."""
        self._file.attrs["complete"] = True
        self._file.close()
        if self._folder is not None:
            self._folder.appear()
        replaced = _shards_of(self.path)
        self._unfinished.appear()
        self._folder = None
        if replaced is not None:
            replaced.remove()


def _shards_of(path: Path) -> Shards | None:
    """Return the shards of a result that is about to be replaced, if it has any of its own."""
    if path.is_symlink() or not path.exists():
        return None  # What a link leads to stays.
    try:
        with h5py.File(path, "r", locking=False) as file:
            return Shards.of(path.resolve(), file)
    except (*DAMAGE, StoreError):  # Not HDF5, or damaged.
        return None


def _reading(
    method: Callable[Concatenate[ResultFile, P], T],
) -> Callable[Concatenate[ResultFile, P], T]:
    """Make a method that reads a file tell of a damaged one in one line."""

    @wraps(method)
    def read(self: ResultFile, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except RingMPIError:
            raise
        except DAMAGE as error:
            raise self.damaged(error) from error

    return read


class Facts(dict[str, Any]):
    """The attributes of a group: numbers and texts by name."""

    def __init__(self, where: str, attributes: Mapping[str, Any]) -> None:
        super().__init__(attributes)
        self._where = where
        for name, value in self.items():
            if not isinstance(value, (str, bool, int, float, np.generic)):
                raise TypeError(f"{where} has {name}, which is neither a number nor a text")

    def __missing__(self, name: str) -> Any:
        """Tell of a name that is not there."""
        raise StoreError(f"{self._where} has no {name}: damaged, or of another ringmpi")


def _opened(path: Path) -> h5py.File:
    """Open a file for reading, once nobody writes to it."""
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            # HDF5 looks for shards beside the name that it is given, which may be a link.
            return h5py.File(path.resolve(), "r")
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{path}: another process is writing to it; try again later"
                ) from error
        except OSError as error:
            raise StoreError(f"{path}: not an HDF5 file, or a damaged one: {error}") from error
        time.sleep(LOCK_NAP)


class ResultFile:
    """A complete result file, opened for reading. Local.

    What is read is held against what the file says of the run: a dataset has the shape that such a run gives,
    and all its values, or the file is damaged.

    Parameters
    ----------
    path : str or Path

    Raises
    ------
    StoreError
        If it is not there, not a result file, not complete, or of another format version, or if a shard of
        it is missing, cut short, or another file. From any method too, if the file is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise StoreError(f"{path}: is no file; name a result of ringmpi run")
        self._file = _opened(self.path)
        try:
            self._check_whole()
            self._shards = Shards.of(self.path.resolve(), self._file)
            if self._shards is not None:
                self._shards.check()
        except StoreError:
            self._file.close()
            raise

    @_reading
    def _check_whole(self) -> None:
        rank = rank_of_shard(self._file)
        if rank is not None:
            raise StoreError(
                f"{self.path}: is the shard of rank {rank}; name the result beside its folder instead"
            )
        if not self._file.attrs.get("complete", False):
            raise StoreError(f"{self.path}: not a complete result file of ringmpi")
        version = self._file.attrs.get("format_version")
        if version != FORMAT_VERSION:
            raise StoreError(
                f"{self.path}: has format version {version}, this ringmpi reads {FORMAT_VERSION}"
            )
        self._ranks: int | None = None
        self._inner = 1  # Ranks of an inner group.
        self._timings: dict[Pass, Timings] = {}
        self._describe()

    def _describe(self) -> None:
        """Read what the file says of the run, which all else is held against."""
        attributes = Facts(str(self.path), self._file.attrs)
        self.kind = str(attributes["kind"])
        self.created, self.command = str(attributes["created"]), str(attributes["command"])
        if self.kind not in ("measured", "simulated"):
            raise ValueError(f"its kind is {self.kind!r}, which is neither measured nor simulated")
        number = attributes.get("interrupted")
        self.interrupted = None if number is None else int(number)
        try:
            self.experiment = experiment_of_record(json.loads(attributes["config"]))
        except ConfigError as error:
            raise ValueError(f"what it says of the run: {error}") from error

    def damaged(self, error: Exception) -> StoreError:
        """Return the error that tells of a damaged file."""
        told = str(error).strip("'\"") or type(error).__name__
        return StoreError(f"{self.path}: damaged: {' '.join(told.split())}")

    def _dataset(self, name: str, kinds: str, shape: Sequence[int | None]) -> Any:
        """Return a dataset of the file's own, with one of the dtype kinds, a shape, and all its values.

        Raises
        ------
        KeyError, ValueError
            If it is not there, or something else.
        """
        parts = name.split("/")
        for end in range(1, len(parts) + 1):
            part = "/".join(parts[:end])
            if not isinstance(self._file.get(part, getlink=True), h5py.HardLink):
                raise KeyError(f"{part} is missing")  # A link to elsewhere is none of ours.
        dataset = self._file[name]
        if (
            not isinstance(dataset, h5py.Dataset)
            or dataset.shape is None
            or dataset.dtype.kind not in kinds
        ):
            raise ValueError(f"{name} is no table of the right kind")
        fits = len(dataset.shape) == len(shape) and all(
            want in (None, found) for want, found in zip(shape, dataset.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if want is None else str(want) for want in shape)
            raise ValueError(f"{name} has shape {dataset.shape}, the run gives ({wanted})")
        held = dataset.id.get_storage_size() * (DEFLATE if dataset.compression else 1)
        if not dataset.is_virtual and held < dataset.nbytes:
            raise ValueError(f"{name} has {dataset.nbytes} bytes, of which {held} are there")
        return dataset

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def size(self) -> int:
        """The number of ranks."""
        if self._ranks is None:
            self._ranks = self._count_ranks()
        return self._ranks

    @_reading
    def _count_ranks(self) -> int:
        ranks = len(self._dataset("ranks/hostname", "O", (None,)))
        if ranks < 1:
            raise ValueError("it has no ranks")
        self._inner = int(self.facts("machine").get("inner_ranks", 1))
        if self._inner < 1 or ranks % self._inner:
            raise ValueError(f"it has {ranks} ranks in groups of {self._inner}")
        return ranks

    @property
    def oversubscribed(self) -> bool:
        """Whether it had more ranks or threads than cores, so that its times mean little."""
        return bool(self.facts("machine").get("oversubscribed"))

    @property
    def has_inputs(self) -> bool:
        """Whether q, k and v are in the file."""
        return all(self.has(f"inputs/{name}") for name in "qkv")

    @_reading
    def facts(self, group: str) -> Facts:
        """Return the attributes of a group; empty if there is no such group."""
        where = f"{self.path}: {group}"
        return Facts(where, self._file[group].attrs if group in self._file else {})

    @_reading
    def check_outputs(self, tensors: Sequence[str]) -> None:
        """Refuse outputs of another shape than the run gives, before anybody goes through them."""
        experiment = self.experiment
        for tensor in tensors:
            of_keys = tensor in ("dk", "dv")
            heads = experiment.kv_heads if of_keys else experiment.heads
            tokens = experiment.seq_len if of_keys else experiment.num_queries
            width = () if tensor == "lse" else (experiment.head_dim,)
            shape = (experiment.batch, heads, tokens, *width)
            dataset = self._dataset(f"outputs/{tensor}", "fu", shape)
            if stored_dtype(dataset) not in DTYPES:
                raise ValueError(f"outputs/{tensor} has dtype {stored_dtype(dataset)}")

    @_reading
    def rows(self, tensor: str, batch: int, head: int, runs: Runs) -> Array:
        """Return rows of one head of an output, in its own dtype.

        Raises
        ------
        StoreError
            If a shard does not hold what was written.
        """
        self.check_values()
        return _rows(self._file, tensor, batch, head, runs)

    def check_values(self) -> None:
        """Look whether shards hold what was written; nothing is looked at twice.

        Raises
        ------
        StoreError
            If one does not.
        """
        if self._shards is not None:
            self._shards.check_values()

    @_reading
    def has(self, name: str) -> bool:
        """Return whether there is a table of that name: files of an older ringmpi have fewer."""
        return name in self._file

    @_reading
    def column(self, name: str) -> Array:
        """Return a table of numbers, one for each rank, such as ``ranks/peak_nbytes``."""
        return np.asarray(self._dataset(name, "fiu", (self.size,))[...])

    @_reading
    def texts(self, name: str) -> list[str]:
        """Return a table of texts, one for each rank."""
        return [str(text) for text in self._dataset(name, "O", (self.size,)).asstr()[...]]

    @property
    def directions(self) -> list[Pass]:
        """The passes that were run."""
        there = [direction for direction in Pass if self.has(f"{TIMINGS[direction]}/started")]
        for direction in Pass if self.experiment.backward else [Pass.FORWARD]:
            if direction not in there:
                raise StoreError(f"{self.path}: damaged: {TIMINGS[direction]}/started is missing")
        return there

    @_reading
    def repeats(self, direction: Pass) -> int:
        """Return how many repeats of a pass were timed."""
        started = self._dataset(f"{TIMINGS[direction]}/started", "f", (None, self.size, None))
        return int(started.shape[0])

    def schedules(self, direction: Pass) -> list[list[Step]]:
        """Return the schedules of all ranks, as they were executed."""
        schedules = self.experiment.schedules(self.size, self._inner, direction)
        traced = self.watched(direction)[1].records.shape[2]
        if traced != len(schedules[0]):
            raise StoreError(
                f"{self.path}: damaged: {TIMINGS[direction]} has {traced} steps, the run has "
                f"{len(schedules[0])}"
            )
        return schedules

    @_reading
    def timings(self, direction: Pass = Pass.FORWARD) -> Timings:
        """Return the trace of all ranks, which nobody may write to: it is read once."""
        if direction not in self._timings:
            self._timings[direction] = self._read_timings(direction)
        return self._timings[direction]

    def _read_timings(self, direction: Pass) -> Timings:
        group = TIMINGS[direction]
        records = self._records(group, (self.size, None))
        alone = self._records(f"{group}/alone", (self.size, records.shape[2]))
        return Timings(records, alone, self._clocks())

    @_reading
    def condensed(self, direction: Pass = Pass.FORWARD) -> bool:
        """Return whether the trace has one record a rank, all its steps laid end to end."""
        return bool(self._file[TIMINGS[direction]].attrs.get(CONDENSED, False))

    @_reading
    def watched(self, direction: Pass = Pass.FORWARD) -> tuple[list[int], Timings]:
        """Return the ranks of which every step is known, and their trace: all, unless it is condensed."""
        timings = self.timings(direction)
        if not self.condensed(direction):
            return list(range(self.size)), timings
        group = f"{TIMINGS[direction]}/{WATCHED}"
        ranks = np.asarray(self._dataset(f"{group}/rank", "iu", (None,))[...])
        if not len(ranks) or ranks.min() < 0 or ranks.max() >= self.size:
            raise ValueError(f"{group}/rank names ranks that the run does not have")
        theirs = replace(timings.clocks, of=ranks.tolist())
        records = self._records(group, (len(ranks), None))
        return ranks.tolist(), Timings(records, timings.alone[:, ranks], theirs)

    @_reading
    def verdicts(self) -> list[Verdict]:
        """Return what verification found; empty if nothing was verified."""
        names = self._file["verification"]
        if not isinstance(names, h5py.Group):
            raise TypeError("verification is a table, and should be a group of verdicts")
        return [_verdict(names[tensor].attrs) for tensor in OUTPUTS if tensor in names]

    def _clocks(self) -> Clocks:
        measured_at = self._comparisons("measured_at", None)
        offset = self._comparisons("offset", len(measured_at))
        if not np.isfinite([measured_at, offset]).all():
            raise ValueError("clocks/ has numbers that no run gives")
        bounded = self.has("clocks/error_bound")
        error = (
            self._comparisons("error_bound", len(offset)) if bounded else np.full_like(offset, np.nan)
        )
        return Clocks(measured_at, offset, error)

    def _comparisons(self, name: str, count: int | None) -> Array:
        """Return a quantity of the clocks, shape (count, size)."""
        dataset = self._dataset(f"clocks/{name}", "fiu", (count, self.size))
        if not 1 <= len(dataset) <= MOST_COMPARISONS:
            raise ValueError(f"clocks/{name} has {len(dataset)} comparisons, a run makes 1 or 2")
        return np.asarray(dataset[...])

    def _records(self, group: str, ranks_and_steps: tuple[int, int | None]) -> Array:
        """Return the records of a group."""
        shape = self._dataset(f"{group}/started", "f", (None, *ranks_and_steps)).shape
        if not shape[2]:
            raise ValueError(f"{group} has no steps")
        records = np.empty(shape, RECORD)
        for name in QUANTITIES:
            # A file of an older ringmpi has fewer.
            there = self.has(f"{group}/{name}")
            records[name] = self._dataset(f"{group}/{name}", "f", shape)[...] if there else np.nan
            unknown = np.isnan(records[name])
            if (name in ALWAYS and unknown.any()) or np.isinf(records[name]).any():
                raise ValueError(f"{group}/{name} has numbers that no run gives, or lacks some")
        peers = records["waited_for"][~np.isnan(records["waited_for"])]
        if peers.size and not ((peers >= 0) & (peers < self.size)).all():
            raise ValueError(f"{group}/waited_for names ranks that the run does not have")
        records.setflags(write=False)
        return records


def _verdict(attributes: Mapping[str, Any]) -> Verdict:
    """Return a verdict from what `Verdict.record` gave."""
    kinds: dict[str, Callable[[Any], Any]] = {"str": str, "bool": bool, "int": int, "float": float}
    facts = {
        name: kinds[str(declared.type)](attributes[name])
        for name, declared in ((declared.name, declared) for declared in fields(Verdict))
        if name != "index"
    }
    index = json.loads(attributes["index"])
    return Verdict(**facts, index=[int(number) for number in index])


def _storable(text: str) -> str:
    """Return a text that HDF5 can hold: file names and host names may contain bytes that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def hdf5_facts() -> str:
    """Return versions, and whether files can be written in parallel. Local."""
    refused = parallel_refusal()
    return f"{versions()}; parallel: {'yes' if refused is None else f'no ({refused})'}"


def _rows(file: Any, tensor: str, batch: int, head: int, runs: Runs) -> Array:
    dataset = file[f"outputs/{tensor}"]
    parts = [dataset[batch, head, along_tokens(dataset, run)] for run in runs]
    return decode(dataset, np.concatenate(parts))
