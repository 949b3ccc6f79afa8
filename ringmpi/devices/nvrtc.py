"""The GPU's kernels as modules: compiled by NVRTC at first use, by one process of a node, and kept.

The name in the cache says all that a module depends on: the sources, the variant, the architecture and the
compiler's version. NVRTC is a library, so this starts no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Protocol

from ringmpi.devices.build import Built, build_named, digest
from ringmpi.devices.launch import Variant
from ringmpi.errors import MissingCapabilityError

#: The file that is compiled; it includes the others.
SOURCE = "attention.cu"


class Nvrtc(Protocol):
    """The compiler."""

    def version(self) -> tuple[int, int]:
        """Return its version."""

    def architectures(self) -> Sequence[int]:
        """Return what it compiles for, such as 90 for sm_90."""

    def compile(self, sources: dict[str, str], options: tuple[str, ...]) -> bytes:
        """Return what `SOURCE` becomes: machine code for ``sm_..``, PTX for ``compute_..``.

        Raises
        ------
        MissingCapabilityError
            If it cannot be compiled, with the first complaint.
        """


def kernel_sources() -> dict[str, str]:
    """Return the CUDA files that ship with the package, by name. Local."""
    files = resources.files("ringmpi.kernels").iterdir()
    return {f.name: f.read_text(encoding="utf-8") for f in files if f.name.endswith((".cu", ".cuh"))}


def target(capability: tuple[int, int], architectures: Sequence[int]) -> str:
    """Return what to compile for. Local.

    That of the device, or PTX of the newest before it, which the driver compiles on.

    Raises
    ------
    MissingCapabilityError
        If the compiler knows neither.

    Examples
    --------
    >>> target((9, 0), [75, 80, 90]), target((12, 1), [75, 80, 90])
    ('sm_90', 'compute_90')
    """
    wanted = capability[0] * 10 + capability[1]
    if wanted in architectures:
        return f"sm_{wanted}"
    older = [known for known in architectures if known < wanted]
    if not older:
        raise MissingCapabilityError(
            f"the GPU is of sm_{wanted} and this NVRTC compiles for sm_{min(architectures)} and newer; "
            f"install an older CUDA, such as 'ringmpi[cuda12]'"
        )
    return f"compute_{max(older)}"


def module(variant: Variant, capability: tuple[int, int], compiler: Nvrtc) -> Built:
    """Return the file of a variant's kernels for an architecture. Local.

    Raises
    ------
    MissingCapabilityError
        If it cannot be had, with the reason.
    """
    sources, arch = kernel_sources(), target(capability, compiler.architectures())
    options = (f"-arch={arch}", *variant.options)
    told = [*map(str, compiler.version()), *options]
    for name, text in sorted(sources.items()):
        told += [name, text]
    suffix = "cubin" if arch.startswith("sm_") else "ptx"
    return build_named(
        f"cuda-{arch}-{digest(told)}.{suffix}", lambda: compiler.compile(sources, options)
    )


def first_complaint(log: str) -> str:
    """Return the line of a compiler's log that says what is wrong. Local."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no reason given")
