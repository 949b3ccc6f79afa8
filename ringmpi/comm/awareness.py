"""Whether the MPI library takes pointers to GPU memory: where it does not, to give it one ends the process.

Nobody tries. The library is asked, and so are the parts that it has loaded and the settings that switch them
off; in doubt the answer is no, since blocks can always be staged through host memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringmpi.comm.probe import is_mpi, loaded_files, mpi_libraries

#: Of `MPIX_GPU_query_support`, as MPICH and its kin declare it.
SUPPORT_CUDA = 0

#: Settings that switch CUDA off in libraries that have it: Open MPI up to 4, MPICH and its kin, MVAPICH.
SWITCHES = (
    *("OMPI_MCA_opal_cuda_support", "OMPI_MCA_mpi_cuda_support"),
    *("MPIR_CVAR_ENABLE_GPU", "MV2_USE_CUDA", "MVP_USE_CUDA"),
)
OFF = ("0", "false", "no", "off", "n", "f")

#: Of UCX, a list of the transports that it may use, or behind ``^`` may not.
UCX_TRANSPORTS = "UCX_TLS"

#: Only `cuda_copy` knows device memory when it sees it (openucx/ucx#3776); the group names have it in them.
UCX_NEEDED = ("all", "cuda", "cuda_copy")


def why_no_device_pointers() -> str:
    """Return why the loaded MPI library is not given device pointers; empty if it takes them. Local.

    MPI must be initialised: MPICH ends the process otherwise.
    """
    several = mpi_libraries()
    if len(several) > 1:  # Which of them to ask, and what the other would make of it, nobody knows.
        return f"two MPI libraries are loaded, {' and '.join(several)}"
    files = loaded_files()
    version = ""
    for path in files:
        if is_mpi(path):
            library = ctypes.CDLL(path)
            version = version or _version(library)
            reason = refusal(library, version, files, os.environ)
            if reason is not None:
                return reason
    return f"{version or 'the MPI library'} does not say that it takes device pointers"


def takes_device_pointers() -> bool:
    """Return whether the loaded MPI library is given device pointers, if there is a GPU. Local."""
    return not why_no_device_pointers()


def refusal(
    library: Any, version: str, files: Sequence[str], environment: Mapping[str, str]
) -> str | None:
    """Return why a library takes no device pointers, "" if it does, None if it does not say. Local.

    Parameters
    ----------
    library : CDLL
    version : str
        What it calls itself.
    files : sequence of str
        Mapped into the process.
    environment : mapping
    """
    if "CRAY MPICH" in version.upper():
        return _cray_refusal(version, files, environment)
    said = _asked(library)
    if said is None:
        return None
    if not said:
        return f"{version} says that it takes no device pointers"
    for switch in SWITCHES:
        if environment.get(switch, "1").strip().lower() in OFF:
            return f"{version} takes no device pointers with {switch}={environment[switch]}"
    if "MVAPICH2" in version.upper() and "MV2_USE_CUDA" not in environment:
        return f"{version} takes device pointers only with MV2_USE_CUDA=1, which is not set"
    return _ucx_refusal(version, files, environment)


def _asked(library: Any) -> bool | None:
    """Ask the functions that MPI libraries have for it; None if there is none."""
    # Open MPI, and MPICH and its kin. It says what the library does now, not what it was built for.
    query = getattr(library, "MPIX_Query_cuda_support", None)
    if query is not None:
        return bool(query())
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is not None:
        supported = ctypes.c_int(0)
        failed = query(SUPPORT_CUDA, ctypes.byref(supported))
        return not failed and bool(supported.value)
    return None


def _cray_refusal(version: str, files: Sequence[str], environment: Mapping[str, str]) -> str:
    """Cray MPICH needs a setting, which it reads as it starts, and a library beside it."""
    setting = environment.get("MPICH_GPU_SUPPORT_ENABLED", "0")
    if setting != "1":
        return (
            f"{version} takes device pointers only with MPICH_GPU_SUPPORT_ENABLED=1, which is {setting}"
        )
    if not any(Path(file).name.startswith("libmpi_gtl_cuda") for file in files):
        return f"{version} takes device pointers only with libmpi_gtl_cuda, which is not loaded; preload it"
    return ""


def _ucx_refusal(version: str, files: Sequence[str], environment: Mapping[str, str]) -> str:
    """UCX below the library may have been built without CUDA, or told to leave it alone."""
    names = [Path(file).name for file in files]
    if not any(name.startswith("libucp") for name in names):
        return ""
    told = environment.get(UCX_TRANSPORTS, "all").strip()
    off = told.startswith("^")
    transports = [word.strip() for word in told.removeprefix("^").split(",")]
    named = any(word in UCX_NEEDED for word in transports)
    if named if off else not named:
        return f"{version} moves data by UCX, which {UCX_TRANSPORTS}={told} keeps from GPUs; add cuda"
    if not any(name.startswith("libuct_cuda") for name in names):
        return f"{version} moves data by UCX, which was built without CUDA (no libuct_cuda is loaded)"
    return ""


def _version(library: Any) -> str:
    """Return what a library calls itself, in its first line."""
    query = getattr(library, "MPI_Get_library_version", None)
    if query is None:
        return ""
    text, length = ctypes.create_string_buffer(2**13), ctypes.c_int(0)
    query(text, ctypes.byref(length))
    lines = text.value.decode(errors="replace").splitlines()
    return " ".join(lines[0].split(",")[0].replace("Version:", "").split()) if lines else ""
