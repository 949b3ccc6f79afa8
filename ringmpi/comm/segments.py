"""Shared memory of the MPI library, which must not outlive a job.

MPICH keeps the name of its segment in ``/dev/shm`` until `MPI_Finalize`, so a job that is killed or aborted
leaves some megabytes of memory behind, until the node is booted. A segment without a name lives for as
long as somebody has it mapped. So once all ranks of a node have it, its name is taken away.

What a job has left that was killed before it came to that, the next one removes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Where POSIX shared memory has its names.
FOLDER = Path("/dev/shm")  # noqa: S108 - the place itself, nothing is made there

#: How the names of segments begin: of MPICH (MPL_shm, github.com/pmodels/mpich), and of UCX below it, which
#: takes its names away by itself unless it is killed before (mm_posix.c, github.com/openucx/ucx). Those of
#: Open MPI are removed by the daemon of a node.
PREFIXES = ("mpich_shm_", "ucx_shm_posix_")

#: Seconds after which a segment has been mapped by all who ever will: ranks of a node start together.
SETTLED = 60.0


def release_segments() -> None:
    """Take away the names of the segments that this process has mapped, and abandoned ones. Local.

    For one rank of a node, after all of its ranks are through MPI_Init.
    """
    mapped = [path for path in _mapped_by("self") if path.name.startswith(PREFIXES)]
    for path in {*mapped, *abandoned_segments()}:
        with suppress(OSError):
            path.unlink()


def abandoned_segments(folder: Path = FOLDER, settled: float = SETTLED) -> list[Path]:
    """Return this user's segments of MPI that no process has open or mapped, and that are not new. Local.

    Processes that hide from their own user are not looked into. Were one of them a rank, it would not miss a
    name that long after its start.
    """
    found = []
    for path in folder.iterdir():
        with suppress(OSError):
            if not path.name.startswith(PREFIXES):
                continue
            about = path.stat()
            if about.st_uid == os.geteuid() and time.time() - about.st_mtime > settled:
                found.append(path)
    if not found:
        return []
    used = set(_used(folder))
    return [path for path in found if path not in used]


def _used(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that any process of this user has open or mapped."""
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError):  # It is gone, and holds nothing; or it hides.
            if process.stat().st_uid != os.geteuid():
                continue
            # First what is open: who makes a segment maps it before it closes it.
            for handle in (process / "fd").iterdir():
                with suppress(FileNotFoundError):
                    yield handle.readlink()
            yield from _mapped_by(process.name, folder)


def _mapped_by(process: str, folder: Path = FOLDER) -> Iterator[Path]:
    """Yield the files of a folder that a process has mapped and that still have a name."""
    start = f"{folder}/"
    with Path(f"/proc/{process}/maps").open(errors="surrogateescape") as lines:
        for line in lines:
            # Address, permissions, offset, device, inode, name.
            name = line.rstrip("\n").split(maxsplit=5)[5:]
            if name and name[0].startswith(start) and not name[0].endswith(" (deleted)"):
                yield Path(name[0])
