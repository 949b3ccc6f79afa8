"""A GPU through CuPy: the only module that imports it, and only once somebody asks for a GPU."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.devices import nvrtc
from ringmpi.devices.build import sealed_content
from ringmpi.devices.launch import Launch, Variant
from ringmpi.devices.placement import Gpu
from ringmpi.devices.region import Region
from ringmpi.devices.streams import Argument, Event, Stream, Sync
from ringmpi.errors import MissingCapabilityError

#: The driver's library, which comes with a GPU and not from PyPI.
DRIVER = "libcuda.so.1"

#: Shared memory that a kernel may have without being told so, bytes (CUDA Programming Guide).
DEFAULT_SHARED = 48 * 1024

#: The longest pitch of a copy of rows, bytes (cudaDeviceProp.memPitch of every GPU so far).
MAX_PITCH = 2**31 - 1

#: How the CUDA Array Interface calls the legacy default stream, which is 0 to CuPy; 2 is that of the thread.
LEGACY_STREAM = 1


class CupyPlatform:
    """The GPUs of this process."""

    def gpus_of_driver(self) -> int:
        """Return how many GPUs the driver shows, without CuPy; 0 where there is none. Local."""
        return _gpus_of_driver()

    def why_missing(self) -> str | None:
        """Return why no GPU can be used, or None. Local; starts no process."""
        return _why_missing()

    def visible(self) -> int:
        """Return how many GPUs this process sees. Local."""
        return int(_cupy().cuda.runtime.getDeviceCount())

    def gpu(self, index: int) -> Gpu:
        """Return what there is to tell of a visible device. Local."""
        runtime = _cupy().cuda.runtime
        told = runtime.getDeviceProperties(index)
        return Gpu(
            index,
            told["name"].decode(),
            bytes(told["uuid"]).hex() if "uuid" in told else runtime.deviceGetPCIBusId(index),
            (int(told["major"]), int(told["minor"])),
        )

    def open(self, gpu: Gpu) -> CupyDriver:
        """Return a device to work with. Local."""
        return CupyDriver(gpu)


class CupyMemory:
    """Memory from ``cudaMalloc`` itself: MPI cannot share what a pool or a stream-ordered allocator gives."""

    def __init__(self, cupy: Any, nbytes: int) -> None:
        self.held = cupy.cuda.Memory(max(1, nbytes))
        self.address, self.nbytes = int(self.held.ptr), nbytes


class CupyDriver:
    """One GPU.

    Parameters
    ----------
    gpu : Gpu
    """

    def __init__(self, gpu: Gpu) -> None:
        self.index, self.capability = gpu.index, gpu.capability
        self._cupy = _cupy()
        # Every call names the device: which one is current is up to each thread, and to the caller.
        self._device = self._cupy.cuda.Device(gpu.index)
        self._kernels: dict[tuple[Variant, str], Any] = {}
        self._modules: dict[Variant, Any] = {}

    def allocate(self, nbytes: int) -> CupyMemory:
        """Return memory from ``cudaMalloc``."""
        with self._device:
            return CupyMemory(self._cupy, nbytes)

    def allocate_pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Return page-locked host memory."""
        with self._device:
            held = self._cupy.cuda.alloc_pinned_memory(max(1, nbytes))
        return np.frombuffer(held, np.uint8, nbytes)

    def new_stream(self) -> Stream:
        """Return a stream that does not wait for the default one."""
        with self._device:
            return self._cupy.cuda.Stream(non_blocking=True)

    def callers_stream(self, handle: int | None) -> Stream:
        """Return the stream of that handle; the caller's current one if there is none."""
        with self._device:
            if handle is None:
                return self._cupy.cuda.get_current_stream()
            return self._cupy.cuda.ExternalStream(0 if handle == LEGACY_STREAM else handle)

    def copy_in(self, target: int, source: NDArray[np.uint8], stream: Stream) -> None:
        """Begin to copy from the host."""
        runtime = self._cupy.cuda.runtime
        with self._device:
            runtime.memcpyAsync(
                target, source.ctypes.data, source.nbytes, runtime.memcpyHostToDevice, stream.ptr
            )

    def copy_out(self, target: NDArray[np.uint8], source: int, stream: Stream) -> None:
        """Begin to copy to the host."""
        runtime = self._cupy.cuda.runtime
        with self._device:
            runtime.memcpyAsync(
                target.ctypes.data, source, target.nbytes, runtime.memcpyDeviceToHost, stream.ptr
            )

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        stream: Stream,
    ) -> None:
        """Begin to copy rows on the device."""
        runtime = self._cupy.cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        with self._device:
            if rows == 1:
                runtime.memcpyAsync(target, source, width, kind, stream.ptr)
            elif max(target_pitch, source_pitch) <= MAX_PITCH:
                runtime.memcpy2DAsync(
                    target, target_pitch, source, source_pitch, width, rows, kind, stream.ptr
                )
            else:
                for row in range(rows):
                    to, start = target + row * target_pitch, source + row * source_pitch
                    runtime.memcpyAsync(to, start, width, kind, stream.ptr)

    def clear(self, target: int, nbytes: int, stream: Stream) -> None:
        """Begin to set bytes to zero."""
        with self._device:
            self._cupy.cuda.runtime.memsetAsync(target, 0, nbytes, stream.ptr)

    def load(self, variant: Variant) -> float:
        """Have a variant's kernels ready; returns the seconds that compiling them took."""
        if variant in self._modules:
            return 0.0
        with self._device:
            built = nvrtc.module(variant, self.capability, CupyNvrtc())
            self._modules[variant] = _loaded(self._cupy, built.path)
        return built.seconds

    def launch(
        self, variant: Variant, launch: Launch, arguments: Sequence[Argument], stream: Stream
    ) -> None:
        """Start a kernel."""
        with self._device, stream:
            kernel = self._kernel(variant, launch)
            kernel((launch.grid,), (launch.block,), tuple(arguments), shared_mem=launch.shared_nbytes)

    def record(self, stream: Stream) -> Event:
        """Return an event at what is now the end of a stream."""
        with self._device:
            event = self._cupy.cuda.Event()
            event.record(stream)
            return event

    def hold(self, stream: Stream, event: Event, protects: Sync) -> None:
        """Let a stream wait."""
        del protects
        with self._device:
            stream.wait_event(event)

    def has_happened(self, event: Event, protects: Sync) -> bool:
        """Ask an event."""
        del protects
        return bool(event.done)

    def wait(self, event: Event, protects: Sync) -> None:
        """Wait on the host."""
        del protects
        event.synchronize()

    def seconds_between(self, first: Event, last: Event) -> float:
        """Return what the device's own clock says."""
        return float(self._cupy.cuda.get_elapsed_time(first, last)) * 1e-3

    def export(self, array: Region) -> Any:
        """Return an array as CuPy's."""
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(array.address, array.nbytes, array.owner, self.index)
        pointer = cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray(array.shape, array.dtype, pointer)

    def _kernel(self, variant: Variant, launch: Launch) -> Any:
        kernel = self._kernels.get((variant, launch.kernel))
        if kernel is None:
            self.load(variant)
            kernel = self._modules[variant].get_function(launch.kernel)
            if launch.shared_nbytes + kernel.shared_size_bytes > DEFAULT_SHARED:
                kernel.max_dynamic_shared_size_bytes = launch.shared_nbytes
            self._kernels[variant, launch.kernel] = kernel
        return kernel


class CupyNvrtc:
    """NVRTC, as CuPy loads it."""

    def version(self) -> tuple[int, int]:
        """Return its version."""
        major, minor = _nvrtc().getVersion()
        return int(major), int(minor)

    def architectures(self) -> Sequence[int]:
        """Return what it compiles for."""
        return [int(known) for known in _nvrtc().getSupportedArchs()]

    def compile(self, sources: dict[str, str], options: tuple[str, ...]) -> bytes:
        """Compile the kernels."""
        library = _nvrtc()
        # CuPy encodes the source and its name, and takes those of the headers as they are.
        headers = {n.encode(): t.encode() for n, t in sources.items() if n != nvrtc.SOURCE}
        program = library.createProgram(
            sources[nvrtc.SOURCE], nvrtc.SOURCE, tuple(headers.values()), tuple(headers)
        )
        try:
            library.compileProgram(program, options)
            native = any(option.startswith("-arch=sm_") for option in options)
            return bytes(library.getCUBIN(program) if native else _encoded(library.getPTX(program)))
        except library.NVRTCError as error:
            complaint = nvrtc.first_complaint(library.getProgramLog(program))
            raise MissingCapabilityError(f"NVRTC could not compile the kernels: {complaint}") from error
        finally:
            library.destroyProgram(program)


def _encoded(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _loaded(cupy: Any, path: Path) -> Any:
    """Return a module that is loaded from a copy without its seal, which PTX could not be read with."""
    descriptor, name = tempfile.mkstemp(suffix=path.suffix)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(sealed_content(path))
        module = cupy.RawModule(path=name)
        module.compile()  # Or it would be read at the first launch.
        return module
    finally:
        Path(name).unlink()


def _cupy() -> Any:
    return import_module("cupy")


def _nvrtc() -> Any:
    return _cupy().cuda.nvrtc


@cache
def _gpus_of_driver() -> int:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


@cache
def _why_missing() -> str | None:
    if not _has_driver():
        return f"there is no NVIDIA driver here ({DRIVER})"
    try:
        cupy = _cupy()
    except ImportError as error:
        reason = str(error).splitlines()[0]
        return f"CuPy cannot be imported ({reason}); pip install 'ringmpi[cuda12]' or 'ringmpi[cuda13]'"
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"no GPU can be used: {error}"
    if not count:
        return "no GPU is visible; see CUDA_VISIBLE_DEVICES"
    return _trouble(CupyNvrtc().version) or _trouble(CupyNvrtc().architectures)


def _has_driver() -> bool:
    with suppress(OSError):
        ctypes.CDLL(DRIVER)
        return True
    return False


def _trouble(question: Callable[[], object]) -> str | None:
    """Return why NVRTC does not answer, or None: CuPy loads it late, and raises what it likes."""
    try:
        question()
    except Exception as error:
        return f"NVRTC does not answer ({error}); pip install 'ringmpi[cuda12]' or 'ringmpi[cuda13]'"
    return None
