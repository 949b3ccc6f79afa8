"""A result in as many files as ranks: each rank writes its own rows, the main file shows them as one tensor.

Beside ``r.h5`` lies the folder ``r.<run>.shards`` with a file a rank, ``0.h5`` and so on. The main file holds
virtual datasets over them, by names relative to itself, so both may be moved together; and for each shard
its size and SHA-256, the *seal*.

HDF5 fills in what it does not find of a virtual dataset, without a word. So whoever opens a result first asks
`Shards.check` whether each shard is there and is the one that was sealed, and whoever reads values asks
`Shards.check_values` whether they are those that were written.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ringmpi.encoding import create_tensor, describe_tensor, encode, fill_value
from ringmpi.errors import DAMAGE, StoreError
from ringmpi.layout import Layout

Array = NDArray[Any]

#: The group of the main file that tells of shards: the attribute `FOLDER`, and tables with a row a rank.
GROUP = "shards"
FOLDER = "folder"

#: Attributes of a shard: the run that it belongs to, and whose it is.
RUN, RANK = "shard_of_run", "rank"

#: Bytes of a shard that are hashed at a time.
PIECE_NBYTES = 2**23

#: Names that `folder_name` gives; a file that names another folder was not written by ringmpi.
_FOLDER = re.compile(r"[^/]+\.([0-9a-f]{12})\.shards")


def folder_name(path: Path, run: str) -> str:
    """Return the name of the folder of shards beside a main file. Local.

    >>> folder_name(Path("results/r.h5"), "0123456789ab")
    'r.0123456789ab.shards'
    """
    return f"{path.stem}.{run}.shards"


def shard_name(rank: int) -> str:
    """Return the name of a rank's file in the folder. Local."""
    return f"{rank}.h5"


@dataclass(frozen=True)
class Seal:
    """What a finished shard is known by."""

    nbytes: int
    sha256: str


class ShardWriter:
    """The file of one rank. Local.

    Parameters
    ----------
    folder : Path
        Where it is written.
    run : str
        What the shards of one result have in common, and no other has.
    rank : int
    """

    def __init__(self, folder: Path, run: str, rank: int) -> None:
        self._path = folder / shard_name(rank)
        with self._open("x") as file:
            file.attrs.update({RUN: run, RANK: rank})

    def write(
        self,
        name: str,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        pieces: Iterable[tuple[slice, Array]],
    ) -> None:
        """Write a tensor piece by piece, each with its place along the tokens; again, if it is there."""
        with self._open("r+") as file:
            if name in file:
                del file[name]
            dataset = create_tensor(file, name, shape, dtype)
            for tokens, piece in pieces:
                dataset[:, :, tokens] = encode(np.ascontiguousarray(piece))

    def seal(self) -> Seal:
        """Have the file on disk, and return what it is known by; nothing may be written after that."""
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        return Seal(self._path.stat().st_size, sha256_of_file(self._path))

    def _open(self, mode: str) -> Any:
        # Without a lock, which some file systems lack: nobody else opens it before it is whole.
        return h5py.File(self._path, mode, locking=False)


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes. Local."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_NBYTES):
            digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True)
class Shown:
    """A tensor that lies in shards."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: Layout

    def show(self, file: Any, folder: str) -> None:
        """Make, or make again, the virtual dataset over shards, whose folder lies at a path from the file."""
        if self.name in file:
            del file[self.name]
        fill, first = fill_value(self.dtype), self.layout.first
        whole = h5py.VirtualLayout(self.shape, fill.dtype)
        for rank in range(self.layout.size):
            runs = self.layout.runs(rank)
            if not runs:
                continue
            # HDF5 takes %b in a name for a number that it counts up.
            source = f"{folder}/{shard_name(rank)}".replace("%", "%%")
            own = (*self.shape[:2], sum(map(len, runs)), *self.shape[3:])
            shard, before = h5py.VirtualSource(source, self.name, own, fill.dtype), 0
            for run in runs:
                place = slice(run.start - first, run.stop - first, run.step)
                whole[:, :, place] = shard[:, :, before : before + len(run)]
                before += len(run)
        dataset = file.create_virtual_dataset(self.name, whole, fillvalue=fill)
        describe_tensor(dataset, self.dtype, first)


class ShardFolder:
    """The folder of a result in the making, on the rank that writes the main file. Local.

    It has a hidden name until `appear`. Until then a file in it shows what was written so far: through the
    main file, which is open for writing, HDF5 would open shards for writing too, and alter what was sealed.

    Parameters
    ----------
    path : Path
        Of the main file.
    run : str
    """

    def __init__(self, path: Path, run: str) -> None:
        self.run = run
        self._final = path.with_name(folder_name(path, run))
        self.path = path.with_name("." + self._final.name)
        self._so_far = self.path / "whole.h5"
        self._shown: dict[str, Shown] = {}
        self.path.mkdir()

    def show(self, shown: Shown) -> None:
        """Take note of a tensor that all ranks have written."""
        self._shown[shown.name] = shown
        with h5py.File(self._so_far, "a", locking=False) as file:
            shown.show(file, ".")

    @contextmanager
    def so_far(self) -> Iterator[Any]:
        """Open the file that shows what was written so far."""
        with h5py.File(self._so_far, "r", locking=False) as file:
            yield file

    def seal(self, file: Any, seals: Sequence[Seal]) -> None:
        """Let the main file show all tensors, and write into it how shards, by rank, are sealed."""
        for shown in self._shown.values():
            shown.show(file, self._final.name)
        self._so_far.unlink(missing_ok=True)
        group = file.create_group(GROUP)
        group.attrs.update({RUN: self.run, FOLDER: self._final.name})
        group["nbytes"] = np.array([seal.nbytes for seal in seals], np.int64)
        group["nbytes"].attrs.update({"unit": "B", "description": "size of a rank's shard"})
        group["sha256"] = np.array([seal.sha256 for seal in seals], "S64")
        group["sha256"].attrs.update({"unit": "", "description": "SHA-256 of a rank's shard"})

    def appear(self) -> None:
        """Give the folder its final name."""
        self.path = self.path.rename(self._final)

    def remove(self) -> None:
        """Remove the folder and what ranks have written into it."""
        for shard in self.path.glob("*.h5"):
            shard.unlink(missing_ok=True)
        # A rank that is about to be ended may still write into it.
        with suppress(OSError):
            self.path.rmdir()


class Shards:
    """The sealed shards of a result, for reading. Local.

    Parameters
    ----------
    path : Path
        The main file, with no symbolic link in it.
    folder, run : str
    seals : sequence of Seal
        By rank.
    """

    def __init__(self, path: Path, folder: str, run: str, seals: Sequence[Seal]) -> None:
        self._path = path
        self._run = run
        self._seals = seals
        self._folder = path.with_name(folder)
        self._values_checked = False

    @classmethod
    def of(cls, path: Path, file: Any) -> Shards | None:
        """Return the shards of an open main file; None if its tensors are in itself.

        Raises
        ------
        StoreError
            If what it tells of them is damaged.
        """
        try:
            if GROUP not in file:
                return None
            group = file[GROUP]
            run, folder = str(group.attrs[RUN]), str(group.attrs[FOLDER])
            nbytes, sha256 = group["nbytes"][:].tolist(), group["sha256"][:].tolist()
            seals = [Seal(size, digest.decode()) for size, digest in zip(nbytes, sha256, strict=True)]
        except DAMAGE as error:
            raise StoreError(f"{path}: what it tells of its shards is damaged: {error}") from error
        named = _FOLDER.fullmatch(folder)
        if named is None or named[1] != run:
            raise StoreError(f"{path}: its shards are in {folder!r}, which is no folder of ringmpi")
        return cls(path, folder, run, seals)

    def check(self) -> None:
        """Look whether each shard is there and is the one that was sealed, without reading its values.

        Raises
        ------
        StoreError
            If one is missing, of another size, no HDF5 file, or of another rank or run.
        """
        if os.environ.get("HDF5_VDS_PREFIX"):
            raise StoreError(
                f"{self._path}: HDF5_VDS_PREFIX is set, so HDF5 would read other shards; unset it"
            )
        for rank, seal in enumerate(self._seals):
            shard = self._shard(rank)
            try:
                nbytes = shard.stat().st_size
            except OSError as error:
                raise StoreError(
                    f"{self._path}: its shard {shard} is not there; a result and its folder "
                    f"{self._folder.name} must be kept together"
                ) from error
            if nbytes != seal.nbytes:
                raise StoreError(
                    f"{self._path}: its shard {shard} has {nbytes} bytes and was written with {seal.nbytes}; "
                    f"copy it again"
                )
            self._check_identity(shard, rank)

    def check_values(self) -> None:
        """Look whether each shard holds the bytes that were written; all are read, once.

        Raises
        ------
        StoreError
            If one does not, or cannot be read.
        """
        if self._values_checked:
            return
        for rank, seal in enumerate(self._seals):
            shard = self._shard(rank)
            try:
                found = sha256_of_file(shard)
            except OSError as error:
                raise StoreError(
                    f"{self._path}: its shard {shard} cannot be read: {error.strerror}"
                ) from error
            if found != seal.sha256:
                raise StoreError(
                    f"{self._path}: its shard {shard} is damaged: it does not hold what rank {rank} wrote; "
                    f"copy it again, or repeat the run"
                )
        self._values_checked = True

    def remove(self) -> None:
        """Remove the shards, and their folder if nothing else is in it: their result was replaced."""
        for rank in range(len(self._seals)):
            with suppress(OSError, StoreError):
                self._check_identity(self._shard(rank), rank)
                self._shard(rank).unlink()
        with suppress(OSError):
            self._folder.rmdir()

    def _shard(self, rank: int) -> Path:
        return self._folder / shard_name(rank)

    def _check_identity(self, shard: Path, rank: int) -> None:
        try:
            with h5py.File(shard, "r", locking=False) as file:
                run, whose = file.attrs.get(RUN), file.attrs.get(RANK)
        except DAMAGE as error:
            raise StoreError(
                f"{self._path}: its shard {shard} is not an HDF5 file, or a damaged one: {error}"
            ) from error
        if run != self._run:
            raise StoreError(f"{self._path}: {shard} is no shard of it; another file has its name")
        if whose != rank:
            raise StoreError(
                f"{self._path}: {shard} is the shard of rank {whose}, and should be that of {rank}"
            )


def rank_of_shard(file: Any) -> int | None:
    """Return whose shard an open file is; None if it is no shard. Local."""
    return int(file.attrs[RANK]) if RUN in file.attrs and RANK in file.attrs else None


def absent_sources(dataset: Any, path: Path) -> list[str]:
    """Return what a virtual dataset is made of and HDF5 would not find, so that it would fill it in. Local.

    Parameters
    ----------
    dataset : h5py.Dataset
        Of a file at `path`; of one that is not virtual nothing is absent.
    path : Path
        With no symbolic link in it.

    Returns
    -------
    list of str
        Files, or datasets in them.
    """
    if not dataset.is_virtual:
        return []
    absent = []
    for source in dataset.virtual_sources():
        if source.file_name == "." or "%b" in source.file_name.replace("%%", ""):
            continue  # In the file itself; or as many files as there are, none of which has to be there.
        place = path.parent / source.file_name.replace("%%", "%")
        try:
            with h5py.File(place, "r", locking=False) as file:
                if source.dset_name not in file:
                    absent.append(f"{place}:{source.dset_name}")
        except DAMAGE:
            absent.append(str(place))
    return sorted(set(absent))
