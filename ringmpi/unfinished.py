"""A file in the making: under its own name until it is whole, its errors kept, nothing of it left behind.

The name says whose it is, and a lock on it says that this process lives. So whoever writes to the same place
next can tell what a killed process left from what another one still writes, and removes the former.

HDF5 does not end well on a full disk: some errors it swallows, and after others it cannot be closed. So it
writes through an object that takes everything and remembers the first error, which its user asks for.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringmpi.errors import WriteError


class UnfinishedFile(io.FileIO):
    """Where a file is written before it appears. Local, for one writer.

    Making one removes what dead writers to the same place have left.

    Parameters
    ----------
    path : Path
        Where the file appears at `appear`.

    Attributes
    ----------
    temporary : Path
        What it is called until then.

    Raises
    ------
    OSError
        If it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        for abandoned in abandoned_beside(path):
            abandoned.unlink(missing_ok=True)
        self.path = path
        self.temporary = temporary_name(path)
        self._failed: OSError | None = None
        super().__init__(self.temporary, "x+")
        with suppress(OSError):  # Without locks nobody will take it for abandoned, which is fine.
            fcntl.flock(self, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, data: Any) -> int:
        """Write all of some bytes, or remember why that failed."""
        left = memoryview(data).cast("B")
        nbytes = len(left)
        try:
            while len(left) and self._failed is None:
                left = left[super().write(left) :]
        except OSError as error:
            self._failed = error
        return nbytes

    def truncate(self, size: int | None = None) -> int:
        """Set the length, or remember why that failed."""
        try:
            return super().truncate(size)
        except OSError as error:
            self._failed = self._failed or error
            return self.tell() if size is None else size

    def check(self) -> None:
        """Tell of the first error.

        Raises
        ------
        WriteError
            If anything could not be written.
        """
        if self._failed is not None:
            raise WriteError(
                f"output={self.path}: cannot be written: {self._failed.strerror}; no file appears, an older "
                f"one stays; make room, or use another place"
            ) from self._failed

    def appear(self) -> None:
        """Move what was written into place.

        Raises
        ------
        WriteError
            If not all of it is on disk.
        """
        try:
            os.fsync(self.fileno())  # The name must not appear before the data is on disk.
        except OSError as error:
            self._failed = self._failed or error
        self.check()
        self.temporary.replace(self.path)
        self.close()  # With its lock, so that readers may come.

    def remove(self) -> None:
        """Close it, and remove it unless it has appeared."""
        with suppress(OSError):  # Such as a late word of a full disk over a network.
            self.close()
        self.temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """Return a new name beside `path` that says which process it belongs to. Local."""
    return path.with_name(f"{_prefix(path)}{os.getpid()}-{secrets.token_hex(3)}.tmp")


def abandoned_beside(path: Path) -> Iterator[Path]:
    """Yield the temporary files of writers to `path` that are dead. Local.

    Those of another node, whose processes cannot be seen from here, are not among them, nor those on a
    file system without locks.
    """
    prefix = _prefix(path)
    for found in list(path.parent.iterdir()):
        if not found.name.startswith(prefix) or found.suffix != ".tmp":
            continue
        pid = found.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and _is_dead(int(pid)) and _is_unlocked(found):
            yield found


def _prefix(path: Path) -> str:
    """Return how the temporary names of this node's writers to `path` begin."""
    node = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    return f".{path.name}.{node}-"


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _is_unlocked(path: Path) -> bool:
    """Return whether nobody holds a file open for writing: a container's processes have ids of their own."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
