"""What jobs leave behind: processes, shared memory, files. Looked at from outside, without asking ringmpi."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: The variable that all processes of a run have in their environment, with a value of its own.
MARK = "RINGMPI_SOAK_RUN"

#: How the MPI libraries' launchers tell a process which rank it is.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")

#: Where shared memory has its names.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, nothing is made there


def processes(mark: str) -> dict[int, str]:
    """Return the living processes of a run: the rank, or an empty text, by process id."""
    return {
        pid: _rank(environment) for pid, environment in _environments() if environment.get(MARK) == mark
    }


def rank_process(mark: str, rank: int) -> int | None:
    """Return the process of a rank of a run, once there is one."""
    of_rank = [pid for pid, found in processes(mark).items() if found == str(rank)]
    return of_rank[0] if of_rank else None


def linger(mark: str, seconds: float) -> dict[int, str]:
    """Return the processes that are still there after some seconds; at once if there is none."""
    limit = time.monotonic() + seconds
    while found := processes(mark):
        if time.monotonic() > limit:
            return found
        time.sleep(0.05)
    return {}


def segments() -> set[str]:
    """Return the names in shared memory that belong to this user."""
    found = set()
    for path in SHARED_MEMORY.iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.geteuid():
                found.add(path.name)
    return found


def dead_segments(before: set[str]) -> set[str]:
    """Return the names that have come since and that no living process has mapped."""
    new = segments() - before
    if not new:
        return new
    maps = "".join(_maps())
    return {name for name in new if f"{SHARED_MEMORY}/{name}\n" not in maps}


def files(folder: Path) -> set[Path]:
    """Return all that is in a folder, at any depth, apart from folders."""
    return {path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


def _rank(environment: dict[str, str]) -> str:
    return next((environment[name] for name in RANK_VARIABLES if name in environment), "")


def _environments() -> Iterator[tuple[int, dict[str, str]]]:
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or process.name == str(os.getpid()):
            continue
        with suppress(OSError):  # It is gone, a zombie, or somebody else's.
            words = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            yield int(process.name), dict(word.split("=", 1) for word in words if "=" in word)


def _maps() -> Iterator[str]:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                yield (process / "maps").read_text(errors="replace")
