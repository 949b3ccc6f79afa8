"""Files in the making: what of them is left after a full disk, a crash or a kill."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ringmpi.config import experiment_from
from ringmpi.errors import WriteError
from ringmpi.store import ResultWriter
from ringmpi.unfinished import UnfinishedFile, abandoned_beside, temporary_name


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """Let no file grow beyond a size: to a writer that is a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("nbytes", [0, 100, 5000, 50_000])
def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "r.h5"
    path.write_text("older")

    with pytest.raises(WriteError, match="cannot be written: File too large; no file appears"):  # noqa: SIM117
        with room_for(nbytes), ResultWriter(path) as writer:
            writer.tensor("outputs/out", (1, 2, 5000, 4), np.dtype(np.float32))
            writer.write_rows("outputs/out", range(5000), np.zeros((1, 2, 5000, 4), np.float32))
            writer.table("ranks/pid", np.arange(9), "1", "process")
            writer.describe(experiment_from({"seq_len": 5000}), "ringmpi run")
            writer.commit()

    assert names(tmp_path) == ["r.h5"]
    assert path.read_text() == "older"


def test_a_disk_that_is_full_as_the_file_is_synced_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    file = UnfinishedFile(tmp_path / "r.h5")
    with pytest.raises(WriteError, match="No space left"):
        file.appear()
    file.remove()
    assert names(tmp_path) == []


def killed_writer(path: Path) -> None:
    """Let a process that writes to a place be killed."""
    code = (
        f"import os, pathlib, ringmpi.unfinished as u; u.UnfinishedFile(pathlib.Path({str(path)!r})); "
        f"os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -9


@pytest.mark.parametrize("name", ["r.h5", "two words.h5", "[1]*.h5"])
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path, name: str) -> None:
    killed_writer(tmp_path / name)
    killed_writer(tmp_path / "other.h5")
    assert len(names(tmp_path)) == 2

    UnfinishedFile(tmp_path / name).remove()

    (left,) = names(tmp_path)
    assert left.startswith(".other.h5.")


def test_what_another_writer_still_writes_stays(tmp_path: Path) -> None:
    path = tmp_path / "r.h5"
    one = UnfinishedFile(path)
    other = UnfinishedFile(path)
    assert len(names(tmp_path)) == 2
    one.appear()
    one.remove()
    other.remove()
    assert names(tmp_path) == ["r.h5"]


def dead_pid() -> int:
    done = subprocess.Popen(["true"])
    done.wait(20)
    return done.pid


def test_a_locked_file_stays_whatever_its_process_id(tmp_path: Path) -> None:
    """In a container a living process may have an id that is dead out here."""
    path = tmp_path / "r.h5"
    theirs = Path(str(temporary_name(path)).replace(f"-{os.getpid()}-", f"-{dead_pid()}-"))
    with theirs.open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert list(abandoned_beside(path)) == []
    assert list(abandoned_beside(path)) == [theirs]


def test_a_file_of_another_node_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.h5"
    killed_writer(path)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert list(abandoned_beside(path)) == []
