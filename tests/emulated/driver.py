"""A GPU that is none: streams in which everything runs late, in an order from a seed that no wait forbids.

Nothing runs when it is begun. Whenever somebody waits, or asks an event, some of what may run runs: in each
stream in order, among streams in a random one, and only behind the events that a stream was told to wait for.
Memory of the device is memory of the host, full of NaN at first, so an MPI library that is given its address
reads and writes what is there at that moment. One wait can be left out, to show that it is needed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.devices.launch import Launch, Variant
from ringmpi.devices.placement import Gpu
from ringmpi.devices.region import Region
from ringmpi.devices.streams import Sync

from . import kernels

Run = Callable[[Variant, Launch, Sequence[np.generic]], None]

#: In every dtype, a float with all bits set is NaN.
POISON = 0xFF

#: How much may run when an event is asked: nothing, often.
MOST_AT_ONCE = 4

#: Some streams are slow: while others could go on they hardly do, and they rest though nobody else could.
HASTE = (1.0, 0.1)


@dataclass(eq=False)
class Event:
    """A moment in a stream: the number of things done before it, once it has happened."""

    happened_at: float = math.nan

    @property
    def has_happened(self) -> bool:
        return not math.isnan(self.happened_at)


@dataclass(eq=False)
class Stream:
    """What is still to be done: things to do, events to happen, and events to wait for.

    `haste` is how likely it goes on, beside others that could.
    """

    haste: float
    ahead: deque[Callable[[], None] | Event | tuple[Event]] = field(default_factory=deque)

    @property
    def may_go_on(self) -> bool:
        if not self.ahead:
            return False
        first = self.ahead[0]
        return not isinstance(first, tuple) or first[0].has_happened


@dataclass(eq=False)
class Memory:
    """Memory that begins as NaN."""

    held: NDArray[np.uint8]
    nbytes: int

    @property
    def address(self) -> int:
        return int(self.held.ctypes.data)


class EmulatedDriver:
    """The device.

    Parameters
    ----------
    gpu : Gpu
    seed : int
        Of the order.
    dropped : Sync, optional
        The wait that is left out.
    run : callable
        Does what a kernel does.
    """

    def __init__(
        self, gpu: Gpu, seed: int = 0, dropped: Sync | None = None, run: Run = kernels.run
    ) -> None:
        self.index, self.capability = gpu.index, gpu.capability
        self.dropped = dropped
        self.waits: set[Sync] = set()
        self.loaded: list[Variant] = []
        self._run = run
        self._order = np.random.default_rng(seed)
        self._streams: list[Stream] = []
        self._pinned: list[NDArray[np.uint8]] = []
        self._kept: list[
            Any
        ] = []  # cudaFree waits for what is under way; here nothing is freed before the end.
        self._lock = RLock()
        self._done = 0
        self.default = self.new_stream()

    def allocate(self, nbytes: int) -> Memory:
        memory = Memory(np.full(max(1, nbytes), POISON, np.uint8), nbytes)
        self._kept.append(memory)
        return memory

    def allocate_pinned(self, nbytes: int) -> NDArray[np.uint8]:
        pinned = np.full(nbytes, POISON, np.uint8)
        self._pinned.append(pinned)
        return pinned

    def new_stream(self) -> Stream:
        with self._lock:
            self._streams.append(Stream(float(self._order.choice(HASTE))))
            return self._streams[-1]

    def callers_stream(self, handle: int | None) -> Stream:
        return self.default if handle is None else self._streams[handle]

    def copy_in(self, target: int, source: NDArray[np.uint8], stream: Stream) -> None:
        # A copy from memory that is not pinned has read it when it returns (CUDA Runtime API).
        held = (
            source
            if any(np.shares_memory(source, pinned) for pinned in self._pinned)
            else source.copy()
        )
        place = kernels.memory_at(target, held.shape, np.uint8)
        self.do(lambda: np.copyto(place, held), stream)

    def copy_out(self, target: NDArray[np.uint8], source: int, stream: Stream) -> None:
        place = kernels.memory_at(source, target.shape, np.uint8)
        self.do(lambda: np.copyto(target, place), stream)

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
        def copy() -> None:
            for row in range(rows):
                found = kernels.memory_at(source + row * source_pitch, (width,), np.uint8)
                kernels.memory_at(target + row * target_pitch, (width,), np.uint8)[...] = found

        assert min(target_pitch, source_pitch) >= width
        self.do(copy, stream)

    def clear(self, target: int, nbytes: int, stream: Stream) -> None:
        self.do(lambda: kernels.memory_at(target, (nbytes,), np.uint8).fill(0), stream)

    def load(self, variant: Variant) -> float:
        self.loaded.append(variant)
        return 0.25

    def launch(
        self, variant: Variant, launch: Launch, arguments: Sequence[np.generic], stream: Stream
    ) -> None:
        kernels.check_types(variant, launch.kernel, arguments)
        self.do(lambda: self._run(variant, launch, arguments), stream)

    def record(self, stream: Stream) -> Event:
        event = Event()
        with self._lock:
            stream.ahead.append(event)
        return event

    def hold(self, stream: Stream, event: Event, protects: Sync) -> None:
        if self._heeds(protects):
            with self._lock:
                stream.ahead.append((event,))

    def has_happened(self, event: Event, protects: Sync) -> bool:
        if not self._heeds(protects):
            return True
        for _ in range(self._order.integers(MOST_AT_ONCE)):
            self._go_on(in_haste=False)
        return event.has_happened

    def wait(self, event: Event, protects: Sync) -> None:
        if self._heeds(protects):
            while not event.has_happened:
                assert self._go_on(), "a wait for what nobody does"

    def seconds_between(self, first: Event, last: Event) -> float:
        return last.happened_at - first.happened_at

    def export(self, array: Region) -> Exported:
        return Exported(array, self)

    def do(self, doing: Callable[[], None], stream: Stream) -> None:
        """Put something into a stream."""
        with self._lock:
            stream.ahead.append(doing)

    def run_all(self) -> None:
        """Do all that is to be done."""
        while self._go_on():
            pass

    def _heeds(self, protects: Sync) -> bool:
        self.waits.add(protects)
        return protects is not self.dropped

    def _go_on(self, in_haste: bool = True) -> bool:
        """Do one thing that may be done now, if any; a slow stream may rest, unless in haste."""
        with self._lock:
            ready = [stream for stream in self._streams if stream.may_go_on]
            if not ready:
                return False
            haste = np.array([stream.haste for stream in ready])
            chosen = ready[self._order.choice(len(ready), p=haste / haste.sum())]
            if not in_haste and self._order.random() > chosen.haste:
                return True
            first = chosen.ahead.popleft()
            self._done += 1
            if isinstance(first, Event):
                first.happened_at = self._done * 1e-6
            elif not isinstance(first, tuple):
                first()
            return True


@dataclass(eq=False)
class Exported:
    """An array of the caller's in the memory of the device, as CuPy's are."""

    region: Region
    driver: EmulatedDriver
    stream: int | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.region.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.region.shape

    @property
    def device(self) -> Any:
        return type("Device", (), {"id": self.region.device})

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        dtype = self.region.dtype
        return {
            "shape": self.region.shape,
            "typestr": dtype.str,
            "data": (self.region.address, False),
            "strides": None if self.region.is_contiguous else self.region.strides,
            "version": 3,
            "stream": self.stream,
        }

    def get(self) -> NDArray[Any]:
        """Return a copy on the host, in the caller's own stream."""
        found = np.empty(self.region.nbytes, np.uint8)
        caller = self.driver.callers_stream(self.stream)
        self.driver.copy_out(found, self.region.address, caller)
        event = self.driver.record(caller)
        while not event.has_happened:
            assert self.driver._go_on()
        return found.view(self.region.dtype).reshape(self.region.shape)


@dataclass
class EmulatedPlatform:
    """A node with some of them, all ranks of which see the same."""

    number: int = 1
    seed: int = 0
    dropped: Sync | None = None
    run: Run = kernels.run
    capability: tuple[int, int] = (8, 0)
    missing: str | None = None
    driver: EmulatedDriver | None = None

    def gpus_of_driver(self) -> int:
        return self.number

    def why_missing(self) -> str | None:
        return self.missing

    def visible(self) -> int:
        return self.number

    def gpu(self, index: int) -> Gpu:
        return Gpu(index, "Emulated", f"gpu-{index}", self.capability)

    def open(self, gpu: Gpu) -> EmulatedDriver:
        self.driver = EmulatedDriver(gpu, self.seed, self.dropped, self.run)
        return self.driver
