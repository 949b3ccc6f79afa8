"""Shared memory of the MPI library: whose it is, and what of it is left by dead jobs."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest

from ringmpi.comm import segments
from ringmpi.comm.segments import SETTLED, abandoned_segments, release_segments


def segment(folder: Path, name: str, age: float = SETTLED + 10) -> Path:
    path = folder / name
    path.write_bytes(bytes(4096))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


@pytest.mark.parametrize("name", ["mpich_shm_1a2b_0", "ucx_shm_posix_77"])
def test_a_segment_that_nobody_uses_is_abandoned(tmp_path: Path, name: str) -> None:
    path = segment(tmp_path, name)
    assert abandoned_segments(tmp_path) == [path]


def test_a_segment_in_use_is_not(tmp_path: Path) -> None:
    mapped, opened = segment(tmp_path, "mpich_shm_a_0"), segment(tmp_path, "mpich_shm_b_0")
    with mapped.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    with opened.open("rb"):
        assert abandoned_segments(tmp_path) == []
    memory.close()
    assert sorted(abandoned_segments(tmp_path)) == [mapped, opened]


def test_neither_is_a_new_one_nor_one_of_another_program(tmp_path: Path) -> None:
    segment(tmp_path, "mpich_shm_new_0", age=1)
    segment(tmp_path, "sem.other")
    assert abandoned_segments(tmp_path) == []


def test_names_of_mapped_segments_are_taken_away_and_their_memory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "FOLDER", tmp_path)
    monkeypatch.setattr(segments._mapped_by, "__defaults__", (tmp_path,))
    monkeypatch.setattr(abandoned_segments, "__defaults__", (tmp_path, SETTLED))
    mine, other = segment(tmp_path, "mpich_shm_mine_0", age=0), segment(tmp_path, "other", age=0)
    memories = []
    for path in (mine, other):
        with path.open("r+b") as file:
            memories.append(mmap.mmap(file.fileno(), 4096))

    release_segments()

    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    memories[0][:3] = b"abc"
    assert memories[0][:3] == b"abc"
