"""GPUs, CUDA, and whether MPI reads a GPU's memory. Starts processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ringmpi.doctor.ask import answer, first_line
from ringmpi.doctor.launching import works
from ringmpi.doctor.page import Fact, way_to
from ringmpi.doctor.software import found

Environment = Mapping[str, str]

#: Where the kernel's part of NVIDIA's driver tells its version.
DRIVER = Path("/proc/driver/nvidia/version")

#: What makes libraries that can read GPU memory do it, by what their names begin with.
SWITCHES = {
    "CRAY MPICH": "MPICH_GPU_SUPPORT_ENABLED",
    "Intel": "I_MPI_OFFLOAD",
    "MVAPICH2": "MV2_USE_CUDA",
    "MVAPICH": "MVP_USE_CUDA",
}

#: CuPy's packages are named by the major version of CUDA; this one where nothing tells it.
CUDA_MAJOR = "12"


def gpus(environment: Environment, driver: Path = DRIVER) -> Iterator[Fact]:
    """Tell of GPUs that are visible, and the driver."""
    smi = found("nvidia-smi", environment)
    if smi is None:
        version = first_line(driver.read_text()) if driver.exists() else ""
        value = f"driver is there ({version}), nvidia-smi is not" if version else "no NVIDIA driver"
        srun = found("srun", environment)
        elsewhere = srun is not None and works(answer([srun, "--version"], environment))
        yield Fact("gpu", value, "srun --gpus=1 ringmpi doctor" if elsewhere and not version else "")
        return
    query = [smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    lines = answer(query, environment).splitlines()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"
    kinds = [f"{lines.count(line)} x {line}" for line in dict.fromkeys(lines)]
    yield Fact("gpu", ", ".join(kinds) + shown)


def cuda(environment: Environment) -> Iterator[Fact]:
    """Tell of CUDA's compiler, and CuPy."""
    path = found("nvcc", environment)
    major = CUDA_MAJOR
    if path is None:
        remedy = way_to("cuda", "apt-get install nvidia-cuda-toolkit", environment)
        yield Fact("nvcc", "not found", f"{remedy} (only to check the GPU's kernels)")
    else:
        told = answer([path, "--version"], environment)
        release = re.search(r"release (\d+)[.\d]*", told)
        major = release[1] if release else major
        yield Fact("nvcc", f"{path}: {release[0] if release else first_line(told)}")
    package = next((name for name in _distributions() if name.startswith("cupy")), None)
    if package is None:
        yield Fact("cupy", "not installed", f"pip install cupy-cuda{major}x")
    else:
        yield Fact("cupy", f"{package} {metadata.version(package)}")


def awareness(library: str, refusal: str | None, environment: Environment) -> Fact:
    """Return whether MPI reads a GPU's memory, and what would let it.

    Parameters
    ----------
    library : str
        Name and version of the MPI library.
    refusal : str or None
        Why it is not given device pointers (`ringmpi.comm.awareness`), empty if it takes them; None where it
        could not be asked.
    environment : mapping
    """
    switch = next((name for start, name in SWITCHES.items() if library.startswith(start)), None)
    value = environment.get(switch, "") if switch else ""
    setting = f"; {switch}={value or 'unset'}" if switch else ""
    if refusal is None:
        return Fact("gpu-aware", f"could not be asked{setting}")
    if not refusal:
        return Fact("gpu-aware", f"yes, says the library{setting}")
    if switch and value in ("", "0"):
        return Fact("gpu-aware", f"no: {refusal}{setting}", f"export {switch}=1")
    remedy = way_to("an MPI library built with CUDA", "", environment)
    return Fact("gpu-aware", f"no: {refusal}{setting}", remedy)


def _distributions() -> list[str]:
    names = (found.metadata["Name"] for found in metadata.distributions())
    return sorted({name.lower() for name in names if name})
