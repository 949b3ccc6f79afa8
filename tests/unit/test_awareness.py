"""What MPI libraries say of device pointers, and what they need besides; asked of libraries that are none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringmpi.comm.awareness import is_mpi, loaded_files, refusal
from ringmpi.comm.policy import chosen_transport
from ringmpi.errors import ConfigError, MissingCapabilityError

OPEN_MPI, MPICH, CRAY = "Open MPI v5.0.5", "MPICH 4.3.0", "MPI VERSION : CRAY MPICH version 8.1.30"
UCX = ["/usr/lib/libucp.so.0", "/usr/lib/libmpi.so.40"]
UCX_WITH_CUDA = [*UCX, "/usr/lib/ucx/libuct_cuda.so.0"]
GTL = "/opt/cray/lib/libmpi_gtl_cuda.so.0"


class Library:
    """Has the functions that it is given."""

    def __init__(self, **functions: Callable[..., int]) -> None:
        vars(self).update(functions)


def open_mpi(answer: int) -> Library:
    return Library(MPIX_Query_cuda_support=lambda: answer)


def mpich(answer: int, code: int = 0) -> Library:
    def query(kind: int, supported: Any) -> int:
        assert kind == 0  # MPIX_GPU_SUPPORT_CUDA
        supported._obj.value = answer
        return code

    return Library(MPIX_GPU_query_support=query)


YES: dict[str, tuple[Any, str, list[str], dict[str, str]]] = {
    "Open MPI": (open_mpi(1), OPEN_MPI, [], {}),
    "its own transports, whatever UCX is told": (open_mpi(1), OPEN_MPI, [], {"UCX_TLS": "tcp"}),
    "UCX": (open_mpi(1), OPEN_MPI, UCX_WITH_CUDA, {}),
    "UCX, told so": (open_mpi(1), OPEN_MPI, UCX_WITH_CUDA, {"UCX_TLS": "rc,sm,cuda_copy,cuda_ipc"}),
    "UCX, by group": (open_mpi(1), OPEN_MPI, UCX_WITH_CUDA, {"UCX_TLS": "tcp,cuda"}),
    "UCX without something else": (open_mpi(1), OPEN_MPI, UCX_WITH_CUDA, {"UCX_TLS": "^ib"}),
    "MPICH": (mpich(1), MPICH, [], {}),
    "Cray": (Library(), CRAY, [GTL], {"MPICH_GPU_SUPPORT_ENABLED": "1"}),
    "MVAPICH2": (open_mpi(1), "MVAPICH2 Version 2.3.7", [], {"MV2_USE_CUDA": "1"}),
}

NO: dict[str, tuple[Any, str, list[str], dict[str, str], str]] = {
    "Open MPI": (open_mpi(0), OPEN_MPI, UCX_WITH_CUDA, {}, "v5.0.5 says that it takes no"),
    "Open MPI, switched off": (
        *(open_mpi(1), "Open MPI v4.1.6", [], {"OMPI_MCA_opal_cuda_support": "false"}),
        "OMPI_MCA_opal_cuda_support=false",
    ),
    "UCX without CUDA": (open_mpi(1), OPEN_MPI, UCX, {}, "UCX, which was built without CUDA"),
    "UCX, told otherwise": (
        *(open_mpi(1), OPEN_MPI, UCX_WITH_CUDA, {"UCX_TLS": "rc,sm"}),
        "UCX_TLS=rc,sm keeps from GPUs",
    ),
    "UCX without its base": (
        *(open_mpi(1), OPEN_MPI, UCX_WITH_CUDA, {"UCX_TLS": "rc,gdr_copy"}),
        "UCX_TLS=rc,gdr_copy",
    ),
    "UCX but for": (
        *(open_mpi(1), OPEN_MPI, UCX_WITH_CUDA, {"UCX_TLS": "^cuda_copy,tcp"}),
        r"UCX_TLS=\^cuda_copy",
    ),
    "MPICH": (mpich(0), MPICH, [], {}, "MPICH 4.3.0 says that it takes no"),
    "MPICH that fails": (mpich(1, code=5), MPICH, [], {}, "says that it takes no"),
    "MPICH, switched off": (
        mpich(1),
        MPICH,
        [],
        {"MPIR_CVAR_ENABLE_GPU": "0"},
        "MPIR_CVAR_ENABLE_GPU=0",
    ),
    "Cray without its setting": (mpich(1), CRAY, [GTL], {}, "MPICH_GPU_SUPPORT_ENABLED=1, which is 0"),
    "Cray without its library": (
        *(mpich(1), CRAY, [], {"MPICH_GPU_SUPPORT_ENABLED": "1"}),
        "libmpi_gtl_cuda, which is not loaded",
    ),
    "MVAPICH2": (open_mpi(1), "MVAPICH2 Version 2.3.7", [], {}, "MV2_USE_CUDA=1, which is not set"),
}


@pytest.mark.parametrize("asked", YES.values(), ids=YES)
def test_a_library_that_takes_device_pointers_is_given_them(asked: tuple[Any, ...]) -> None:
    assert refusal(*asked) == ""


@pytest.mark.parametrize("asked", NO.values(), ids=NO)
def test_a_library_that_does_not_is_refused_with_the_reason(asked: tuple[Any, ...]) -> None:
    *asked_of, told = asked  # type: ignore[assignment]

    reason = refusal(*asked_of)

    assert reason
    with pytest.raises(MissingCapabilityError, match=told):
        chosen_transport("direct", "cuda", reason)
    assert chosen_transport("auto", "cuda", reason) == "staged"


def test_a_library_that_does_not_say_is_no_answer() -> None:
    assert refusal(Library(), "Some MPI 1", [], {}) is None


def test_host_memory_is_read_as_it_is() -> None:
    assert chosen_transport("auto", "numpy", "") == "direct"
    assert chosen_transport("direct", "native", "") == "direct"
    with pytest.raises(ConfigError, match=r"transport=staged with device=native: .*host memory"):
        chosen_transport("staged", "native", "")
    with pytest.raises(ConfigError, match="did you mean 'staged'"):
        chosen_transport("stagd", "cuda", "")


def test_loaded_files_are_those_of_the_maps(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 0000 08:01 12    /usr/lib/libmpi.so.40.30.1\n"
        "7f01-7f02 r--p 0000 08:01 12    /usr/lib/libmpi.so.40.30.1\n"
        "7f02-7f03 rw-p 0000 00:00 0     [heap]\n"
        "7f03-7f04 r-xp 0000 08:01 13    /a folder/libucp.so.0\n"
    )

    assert loaded_files(maps) == ["/a folder/libucp.so.0", "/usr/lib/libmpi.so.40.30.1"]
    assert [is_mpi(file) for file in loaded_files(maps)] == [False, True]
    assert any("libc" in Path(file).name for file in loaded_files())
    ctypes.CDLL(next(file for file in loaded_files() if Path(file).name.startswith("libc.so")))
