"""Devices: attend the queries of a rank to one block, in slices short enough to poll between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ringmpi.devices import cuda
from ringmpi.devices.base import MAX_HEAD_DIM, Block, Device, Gradients, Outcome, Queries, Work
from ringmpi.devices.build import passed_over
from ringmpi.devices.cuda import CUDA, CudaDevice, gpu_for
from ringmpi.devices.launch import unit
from ringmpi.devices.native import (
    MATRIX_UNIT,
    MATRIX_UNIT_DTYPES,
    NativeDevice,
    compile_seconds,
    is_missing,
    library,
    prepare,
    rounds_weights,
    uses_matrix_unit,
)
from ringmpi.devices.numpy import NumpyDevice
from ringmpi.devices.paced import PACED, PacedDevice, check_pace, slowness
from ringmpi.devices.placement import Gpu
from ringmpi.errors import ConfigError, MissingCapabilityError, check_choice
from ringmpi.mask import Mask

DEVICES: dict[str, Callable[..., Device]] = {
    "numpy": NumpyDevice,
    "native": NativeDevice,
    CUDA: CudaDevice,
    PACED: PacedDevice,
}

#: What `auto` takes, the first one that this machine offers: one that computes.
PREFERENCE = (CUDA, "native", "numpy")

#: Devices of which `auto` does not tell that they are missing, unless this machine has what they compute on.
UNEXPECTED = (CUDA,)

#: More threads than any node of today has cores; the C++ counts them in 32 bits.
MAX_THREADS = 4096

__all__ = [
    "CUDA",
    "DEVICES",
    "MATRIX_UNIT",
    "MAX_HEAD_DIM",
    "PACED",
    "Block",
    "CudaDevice",
    "Device",
    "Gpu",
    "Gradients",
    "NativeDevice",
    "NumpyDevice",
    "Outcome",
    "PacedDevice",
    "Queries",
    "Work",
    "candidates",
    "check_device",
    "check_matrix_unit",
    "check_offered",
    "check_pace",
    "chosen_device",
    "cuda_facts",
    "device_facts",
    "gpu_for",
    "is_expected",
    "make_device",
    "native_facts",
    "prepare",
    "slowness",
    "why_missing",
]


def check_device(name: str, threads: int, matrix_unit: str) -> None:
    """Refuse what no machine could offer. Local.

    Raises
    ------
    ConfigError
        If a name is unknown, or another device is asked for what only the native one has.
    """
    check_choice("device", name, ["auto", *DEVICES])
    check_choice("matrix_unit", matrix_unit, MATRIX_UNIT)
    if not 1 <= threads <= MAX_THREADS:
        raise ConfigError(f"threads={threads}: must be from 1 to {MAX_THREADS}")
    beyond = _beyond_numpy(threads, matrix_unit) if name in ("numpy", CUDA, PACED) else ""
    if beyond:
        raise ConfigError(f"{beyond}; use --device native")


def check_matrix_unit(matrix_unit: str, dtype: str) -> None:
    """Refuse a matrix unit that is asked for and would have nothing to do. Local.

    Raises
    ------
    ConfigError
        If it cannot multiply the dtype.
    """
    if matrix_unit == "on" and dtype not in MATRIX_UNIT_DTYPES:
        raise ConfigError(
            f"matrix_unit=on with dtype={dtype}: it multiplies {', '.join(MATRIX_UNIT_DTYPES)} only; use auto"
        )


def why_missing(name: str) -> str | None:
    """Return why this machine does not offer a device, or None. Local; starts no process."""
    if name == CUDA:
        missing: str | None = cuda.platform().why_missing()
        return missing
    return is_missing() if name == "native" else None


def is_expected(name: str) -> bool:
    """Return whether this machine looks as if it offered a device, so that its lack is news. Local."""
    return name not in UNEXPECTED or cuda.platform().gpus_of_driver() > 0


def candidates(threads: int, matrix_unit: str) -> tuple[str, ...]:
    """Return what ``auto`` may become, best first: a GPU has neither threads nor a matrix unit. Local."""
    only_native = bool(_beyond_numpy(threads, matrix_unit))
    return tuple(name for name in PREFERENCE if not (only_native and name == CUDA))


def check_offered(name: str, threads: int, matrix_unit: str, reason: str = "") -> None:
    """Refuse what this machine does not have. Local; starts no process.

    Parameters
    ----------
    name : str
        Of a device, not ``auto``.
    threads : int
    matrix_unit : str
    reason : str
        Why ``auto`` has not become a better one.

    Raises
    ------
    MissingCapabilityError
        If it lacks the device, or the device what is asked of it.
    """
    missing = why_missing(name)
    if missing is not None:
        raise MissingCapabilityError(f"device={name}: {missing}; or use --device {_instead(name)}")
    if name == "native":
        uses_matrix_unit(matrix_unit)
        return
    beyond = _beyond_numpy(threads, matrix_unit)
    if beyond:
        raise MissingCapabilityError(f"{beyond}, and there is none: {reason}")


def chosen_device(name: str, threads: int = 1, matrix_unit: str = "auto") -> str:
    """Return the name of the device that `name` means on this machine. Local; starts no process.

    Raises
    ------
    ConfigError
        If a parameter breaks a rule.
    MissingCapabilityError
        If this machine does not have what is asked for.
    """
    check_device(name, threads, matrix_unit)
    reason = ""
    if name == "auto":
        reasons = {device: why_missing(device) for device in candidates(threads, matrix_unit)}
        name = next(device for device, missing in reasons.items() if missing is None)
        reason = next((r for d, r in reasons.items() if r is not None and is_expected(d)), "")
    check_offered(name, threads, matrix_unit, reason)
    return name


def make_device(
    name: str,
    mask: Mask,
    softmax_scale: float,
    threads: int = 1,
    matrix_unit: str = "auto",
    flops: float | None = None,
    gpu: Gpu | None = None,
    weights: str = "exact",
) -> Device:
    """Return the device called `name`, or the preferred one for ``auto``. Local; starts no process.

    Parameters
    ----------
    name : str
    mask : Mask
    softmax_scale : float
    threads : int
    matrix_unit : str
    flops : float, optional
        FLOP/s of a paced device, which needs it, and no other one has it.
    gpu : Gpu, optional
        Which one the ``cuda`` device takes; the first one by default.
    weights : str
        One of `softmax.WEIGHTS`.

    Raises
    ------
    ConfigError, MissingCapabilityError
        As `chosen_device` does.
    """
    name = chosen_device(name, threads, matrix_unit)
    check_pace(name, flops, None)
    options: dict[str, tuple[Any, ...]] = {
        "numpy": (weights,),
        "native": (threads, matrix_unit, weights),
        CUDA: (gpu, weights),
        PACED: (flops,),
    }
    return DEVICES[name](mask, softmax_scale, *options[name])


def device_facts(
    name: str,
    threads: int,
    matrix_unit: str,
    dtype: str,
    flops: float = 0.0,
    gpu: Gpu | None = None,
    weights: str = "exact",
) -> dict[str, Any]:
    """Return what a result file tells of the device of a rank. Local."""
    rounds = weights == "rounded" and _rounds_weights(name, matrix_unit, dtype, gpu)
    facts: dict[str, Any] = {
        "device": name,
        "instruction_set": "",
        "matrix_unit": "off",
        "weights": "rounded" if rounds else "exact",
        "paced_flops": flops,
        "compile_s": compile_seconds() + cuda.compile_seconds(),
        "gpu": "" if gpu is None else str(gpu),
        "gpu_identity": "" if gpu is None else gpu.identity,
        "gpu_sharing": 0 if gpu is None else gpu.sharing,
    }
    if name == "native":
        used = uses_matrix_unit(matrix_unit) and dtype in MATRIX_UNIT_DTYPES
        facts |= {
            "instruction_set": library().instruction_set,
            "matrix_unit": "on" if used else "off",
            "threads": threads,
        }
    return facts


def cuda_facts() -> Iterator[tuple[str, str]]:
    """Yield what there is to tell of the GPUs, by name. Local; starts no process."""
    missing = why_missing(CUDA)
    if missing is not None:
        yield CUDA, f"not offered: {missing}"
        return
    for index in range(cuda.platform().visible()):
        yield CUDA, f"{index}: {cuda.platform().gpu(index)}"


def native_facts() -> Iterator[tuple[str, str]]:
    """Yield what there is to tell of the native device, by name. Local; starts no process."""
    missing = why_missing("native")
    if missing is not None:
        yield "native", f"not offered: {missing}"
        return
    here = library()
    used_for = f"for {', '.join(MATRIX_UNIT_DTYPES)}" if here.has_matrix_unit else "none"
    took = f"; compiled in {compile_seconds():.1f} s" if compile_seconds() else ""
    elsewhere = "".join(f"; {reason}" for reason in passed_over(here.path))
    yield "native", f"{here.instruction_set}; matrix unit: {used_for}"
    yield "library", f"{here.path}{took}{elsewhere}"


def _rounds_weights(name: str, matrix_unit: str, dtype: str, gpu: Gpu | None) -> bool:
    """Return whether a device rounds weights that may be rounded to a 16-bit dtype."""
    if name == "native":
        return rounds_weights(matrix_unit, dtype)
    if name == CUDA:
        return gpu is not None and unit(dtype, gpu.capability) == "Tensor"
    return name == "numpy"


def _instead(name: str) -> str:
    """Return what every machine has, or most, instead of a device."""
    return "native" if name == CUDA else "numpy"


def _beyond_numpy(threads: int, matrix_unit: str) -> str:
    """Return what is asked for beyond what the NumPy device has, as the beginning of a complaint."""
    if threads > 1:
        return f"threads={threads}: only the native device has them (NumPy takes OMP_NUM_THREADS)"
    return "matrix_unit=on: only the native device can use one" if matrix_unit == "on" else ""
