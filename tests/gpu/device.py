"""The GPU device behind the interface of devices in host memory, for which most tests are written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from numpy.typing import NDArray

from ringmpi.devices import Block, Gradients, Outcome, Queries, cuda
from ringmpi.devices.base import Sizes
from ringmpi.devices.host import HostDevice
from ringmpi.devices.launch import Variant, variant
from ringmpi.devices.region import Region
from ringmpi.mask import Mask
from ringmpi.softmax import State
from ringmpi.trace import Tally


class Done:
    """Work that was waited for."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def advance(self) -> bool:
        return True


class OnGpu(HostDevice):
    """Attention by the GPU device, on copies of what is in host memory.

    Parameters
    ----------
    mask : Mask
    softmax_scale : float
    index : str, optional
        Type of the kernels' indices, whatever the sizes need.
    shift : int
        Items between an address where memory begins and the first item of an array.
    weights : str
        One of `softmax.WEIGHTS`.
    """

    name = "on gpu"

    def __init__(
        self,
        mask: Mask,
        softmax_scale: float,
        index: str | None = None,
        shift: int = 0,
        weights: str = "exact",
    ) -> None:
        super().__init__(mask, softmax_scale)
        self._scratch: dict[str, NDArray[Any]] = {}
        self._gpu = cuda.CudaDevice(mask, softmax_scale, weights=weights)
        self._index, self._shift = index, shift

    def attend(self, queries: Queries, block: Block, state: State) -> Done:
        """Attend to a block."""
        there = State(**self._put(vars(state)))
        with self._indexed():
            work = self._gpu.attend(self._queries(queries), self._block(block), there)
        return self._done(work, there, state)

    def attend_backward(
        self, queries: Queries, outcome: Outcome, block: Block, gradients: Gradients
    ) -> Done:
        """Add to the gradients."""
        there = Gradients(**self._put(vars(gradients)))
        given = Outcome(**self._put(vars(outcome)))
        with self._indexed():
            work = self._gpu.attend_backward(self._queries(queries), given, self._block(block), there)
        return self._done(work, there, gradients)

    def _queries(self, queries: Queries) -> Queries:
        return Queries(self._put({"q": queries.q})["q"], queries.positions)

    def _block(self, block: Block) -> Block:
        return Block(**self._put({"k": block.k, "v": block.v}), positions=block.positions)

    def _put(self, arrays: dict[str, NDArray[Any]]) -> dict[str, Region]:
        """Copy arrays to the GPU, each as far behind the beginning of its memory as was asked for."""
        there = {}
        for name, array in arrays.items():
            before = self._shift * array.itemsize
            whole = self._gpu.allocate(before + array.nbytes)
            region = whole[before : before + array.nbytes].view(array.dtype).reshape(array.shape)
            self._gpu.copy(self._gpu.place(array, array.dtype), region)
            there[name] = region
        return there

    def _done(self, work: Any, there: State | Gradients, here: State | Gradients) -> Done:
        """Wait, and copy what was computed back."""
        while not work.advance():
            pass
        for name, region in vars(there).items():
            getattr(here, name)[...] = self._gpu.fetch(region)
        return Done(work.tally)

    def _indexed(self) -> Any:
        def chosen(sizes: Sizes, dtype: str, capability: tuple[int, int], weights: str) -> Variant:
            found = variant(sizes, dtype, capability, weights)
            return found if self._index is None else replace(found, index=self._index)

        return mock.patch.object(cuda, "variant", chosen)
