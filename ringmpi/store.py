"""The result file: written whole or not at all, read back with its rules checked.

Traces are ``[repeat, rank, step]``. Of so many simulated ranks that these don't fit, each has one record
instead, all its steps laid end to end, which metrics read like any other, and some ranks have all their
steps in a group beside it; see `ResultWriter.condense`.

It is written under a name of its own in the directory of the target, flushed to disk and then moved into
place (see `unfinished`), so that a reader never sees half a file, two writers never mix, and an older good
file stays until a newer one is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

import ringmpi
from ringmpi.config import Experiment
from ringmpi.encoding import MARK, decode, encode
from ringmpi.errors import ConfigError, StoreError
from ringmpi.layout import Runs
from ringmpi.metrics import Clocks, Timings
from ringmpi.schedule import Pass, Step
from ringmpi.trace import QUANTITIES, RECORD
from ringmpi.unfinished import UnfinishedFile, temporary_name
from ringmpi.verify import Verdict

Array = NDArray[Any]

FORMAT_VERSION = 1

#: What a run may give, in the order in which it is told.
OUTPUTS = ("out", "lse", "dq", "dk", "dv")

#: Where the traces of a pass are.
TIMINGS = {Pass.FORWARD: "timings", Pass.BACKWARD: "timings/backward"}

#: The attribute that marks traces of which each rank has one record, all its steps laid end to end: so many
#: ranks were simulated that there is no room for all steps. In the group `WATCHED` some ranks have them all.
CONDENSED = "condensed"
WATCHED = "watched"

#: The attribute that says which global token is the first one of a dataset.
FIRST = "first_token"

#: Labels of the axes of a tensor.
_TENSOR_AXES = ("batch", "head", "token", "head_dim")


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
    except OSError:
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
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unfinished = UnfinishedFile(path)
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

    @property
    def temporary(self) -> Path:
        """The name under which the file is written."""
        return self._unfinished.temporary

    def describe(self, experiment: Experiment, command: str, kind: str = "measured") -> None:
        """Write what the file is and how it was made."""
        self._file.attrs.update(
            {
                "kind": kind,
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "ringmpi_version": ringmpi.__version__,
                "config": json.dumps(experiment.record()),
                "command": _storable(command),
            }
        )

    def mark_interrupted(self, signal_number: int) -> None:
        """Write that a signal ended the run before all repeats were made."""
        self._file.attrs["interrupted"] = signal_number

    def tensor(self, name: str, shape: Sequence[int], dtype: np.dtype[Any], first: int = 0) -> None:
        """Make a dataset of tokens from `first` on, filled with NaN; does nothing if it is there."""
        if name in self._file:
            return
        # Not chunked: any slice of tokens is then written in place.
        fill = encode(np.full(1, np.nan).astype(dtype))
        dataset = self._file.create_dataset(name, shape, fill.dtype, fillvalue=fill[0])
        if dtype.name == "bfloat16":
            dataset.attrs[MARK] = "bfloat16"
        description = f"index i along tokens is global token {f'{first} + ' if first else ''}i"
        dataset.attrs.update({"unit": "1", "description": description, FIRST: first})
        for axis, label in enumerate(_TENSOR_AXES[: len(shape)]):
            dataset.dims[axis].label = label

    def write_rows(self, name: str, positions: range, rows: Array) -> None:
        """Write rows, shape (batch, heads, len(positions), ...), where their global positions belong."""
        dataset = self._file[name]
        dataset[:, :, _indices(dataset, positions)] = encode(rows)
        self._unfinished.check()

    def rows(self, tensor: str, batch: int, head: int, runs: Runs) -> Array:
        """Read back rows of an output that was written before."""
        self._unfinished.check()
        return _rows(self._file, tensor, batch, head, runs)

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
        """Mark the file complete and move it into place."""
        self._file.attrs["complete"] = True
        self._file.close()
        self._unfinished.appear()


class ResultFile:
    """A complete result file, opened for reading. Local.

    Parameters
    ----------
    path : str or Path

    Raises
    ------
    StoreError
        If it is not there, not a result file, not complete, or of another format version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise StoreError(f"{path}: is no file; name a result of ringmpi run")
        try:
            self._file = h5py.File(path, "r")
        except BlockingIOError as error:
            raise StoreError(f"{path}: another process is writing to it; try again later") from error
        except OSError as error:
            raise StoreError(f"{path}: not an HDF5 file, or a damaged one: {error}") from error
        complete = self._file.attrs.get("complete", False)
        version = self._file.attrs.get("format_version")
        if not complete or version != FORMAT_VERSION:
            self._file.close()
        if not complete:
            raise StoreError(f"{path}: not a complete result file of ringmpi")
        if version != FORMAT_VERSION:
            raise StoreError(
                f"{path}: has format version {version}, this ringmpi reads {FORMAT_VERSION}"
            )

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
    def experiment(self) -> Experiment:
        """The experiment that was run."""
        record = json.loads(self._file.attrs["config"])
        if record["documents"] is not None:
            record["documents"] = tuple(record["documents"])
        return Experiment(**record)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._file["ranks/hostname"])

    @property
    def interrupted(self) -> int | None:
        """The signal that ended the run early, if one did."""
        number = self._file.attrs.get("interrupted")
        return None if number is None else int(number)

    @property
    def has_inputs(self) -> bool:
        """Whether q, k and v are in the file."""
        return all(f"inputs/{name}" in self._file for name in "qkv")

    @property
    def kind(self) -> str:
        """``measured`` or ``simulated``."""
        return str(self._file.attrs["kind"])

    @property
    def created(self) -> str:
        """When the file was made, in UTC."""
        return str(self._file.attrs["created"])

    @property
    def command(self) -> str:
        """The command that made the file."""
        return str(self._file.attrs["command"])

    def facts(self, group: str) -> dict[str, Any]:
        """Return the attributes of a group; empty if there is no such group."""
        return dict(self._file[group].attrs) if group in self._file else {}

    def rows(self, tensor: str, batch: int, head: int, runs: Runs) -> Array:
        """Return rows of one head of an output, in its own dtype."""
        return _rows(self._file, tensor, batch, head, runs)

    def has(self, name: str) -> bool:
        """Return whether there is a table of that name: files of an older ringmpi have fewer."""
        return name in self._file

    def column(self, name: str) -> Array:
        """Return a whole table, such as ``ranks/peak_nbytes``."""
        return np.asarray(self._file[name][...])

    def texts(self, name: str) -> list[str]:
        """Return a table of texts."""
        return [str(text) for text in self._file[name].asstr()[...]]

    @property
    def directions(self) -> list[Pass]:
        """The passes that were run."""
        return [direction for direction in Pass if f"{TIMINGS[direction]}/started" in self._file]

    def repeats(self, direction: Pass) -> int:
        """Return how many repeats of a pass were timed."""
        return int(self._file[f"{TIMINGS[direction]}/started"].shape[0])

    def schedules(self, direction: Pass) -> list[list[Step]]:
        """Return the schedules of all ranks, as they were executed."""
        inner = int(self.facts("machine").get("inner_ranks", 1))
        return self.experiment.schedules(self.size, inner, direction)

    def timings(self, direction: Pass = Pass.FORWARD) -> Timings:
        """Return the trace of all ranks."""
        return Timings(
            self._records(TIMINGS[direction]),
            self._records(f"{TIMINGS[direction]}/alone"),
            self._clocks(),
        )

    def condensed(self, direction: Pass = Pass.FORWARD) -> bool:
        """Return whether the trace has one record a rank, all its steps laid end to end."""
        return bool(self._file[TIMINGS[direction]].attrs.get(CONDENSED, False))

    def watched(self, direction: Pass = Pass.FORWARD) -> tuple[list[int], Timings]:
        """Return the ranks of which every step is known, and their trace: all, unless it is condensed."""
        timings = self.timings(direction)
        if not self.condensed(direction):
            return list(range(self.size)), timings
        group = f"{TIMINGS[direction]}/{WATCHED}"
        ranks = self.column(f"{group}/rank")
        theirs = replace(timings.clocks, of=ranks.tolist())
        return ranks.tolist(), Timings(self._records(group), timings.alone[:, ranks], theirs)

    def verdicts(self) -> list[Verdict]:
        """Return what verification found; empty if nothing was verified."""
        names = self._file["verification"]
        found = (dict(names[tensor].attrs) for tensor in OUTPUTS if tensor in names)
        return [Verdict(**(facts | {"index": json.loads(facts["index"])})) for facts in found]

    def _clocks(self) -> Clocks:
        measured_at, offset = (self.column(f"clocks/{name}") for name in ("measured_at", "offset"))
        bounded = self.has("clocks/error_bound")
        error = self.column("clocks/error_bound") if bounded else np.full_like(offset, np.nan)
        return Clocks(measured_at, offset, error)

    def _records(self, group: str) -> Array:
        shape = self._file[f"{group}/started"].shape
        records = np.empty(shape, RECORD)
        for name in QUANTITIES:
            # A file of an older ringmpi has fewer.
            there = self.has(f"{group}/{name}")
            records[name] = self._file[f"{group}/{name}"][...] if there else np.nan
        return records


def _storable(text: str) -> str:
    """Return a text that HDF5 can hold: file names and host names may contain bytes that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def hdf5_facts() -> str:
    """Return versions, and whether files can be written in parallel. Local."""
    parallel = "yes" if h5py.get_config().mpi else "no: results are gathered by rank 0"
    return f"{h5py.version.hdf5_version}, h5py {h5py.__version__}; parallel: {parallel}"


def _rows(file: Any, tensor: str, batch: int, head: int, runs: Runs) -> Array:
    dataset = file[f"outputs/{tensor}"]
    parts = [dataset[batch, head, _indices(dataset, run)] for run in runs]
    return decode(dataset, np.concatenate(parts))


def _indices(dataset: Any, positions: range) -> slice:
    """Return where global positions lie along the tokens of a dataset."""
    first = int(dataset.attrs.get(FIRST, 0))
    return slice(positions.start - first, positions.stop - first, positions.step)
