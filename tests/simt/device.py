"""A device that launches the GPU's kernels on the SIMT executor, as the one for GPUs does on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from ringmpi.devices import Block, Gradients, Outcome, Queries
from ringmpi.devices.base import Array
from ringmpi.devices.host import HostDevice
from ringmpi.devices.launch import ARGUMENTS, BACKWARD, BOUNDS, FORWARD, Sizes, Variant, variant
from ringmpi.mask import Mask
from ringmpi.softmax import State
from ringmpi.trace import Tally

from .library import Library, Memory, compiled

#: What kernels write; all else is protected against it.
OUTPUTS = {"begin", "end", "acc", "row_max", "row_sum", "dq", "dk", "dv"}

kernels = cache(compiled)


class Done:
    """Work that was done at once."""

    tally = Tally()

    def advance(self) -> bool:
        return True


class SimtDevice(HostDevice):
    """Attention by the kernels, in guarded memory.

    Attributes
    ----------
    seed : int
        Of the order in which threads and blocks run; another one for every launch.
    at_end : bool
        Whether arrays end at a page that may not be touched, or begin behind one.
    bounds : dict of str to ndarray
        The ``begin`` and ``end`` of the last block.
    """

    name = "simt"

    def __init__(
        self,
        mask: Mask,
        softmax_scale: float,
        capability: tuple[int, int] = (8, 0),
        seed: int = 0,
        at_end: bool = True,
        index: str | None = None,
        weights: str = "exact",
        library: Callable[[Variant], Library] = kernels,
    ) -> None:
        super().__init__(mask, softmax_scale)
        self._scratch: dict[str, Array] = {}
        self._capability, self._at_end, self._index, self._library = capability, at_end, index, library
        self._weights = weights
        self._seeds = np.random.default_rng(seed)

    def attend(self, queries: Queries, block: Block, state: State) -> Done:
        """Attend to a block."""
        outputs = {name: getattr(state, name) for name in ("acc", "row_max", "row_sum")}
        self._launch((FORWARD,), queries, block, {}, outputs)
        return Done()

    def attend_backward(
        self, queries: Queries, outcome: Outcome, block: Block, gradients: Gradients
    ) -> Done:
        """Add to the gradients."""
        outputs = {name: getattr(gradients, name) for name in ("dq", "dk", "dv")}
        self._launch(BACKWARD, queries, block, vars(outcome), outputs)
        return Done()

    def variant(self, sizes: Sizes, dtype: str) -> Variant:
        """Return which kernels take some inputs."""
        chosen = variant(sizes, dtype, self._capability, self._weights)
        return chosen if self._index is None else replace(chosen, index=self._index)

    def _launch(
        self,
        names: tuple[str, ...],
        queries: Queries,
        block: Block,
        given: dict[str, Array],
        outputs: dict[str, Array],
    ) -> None:
        batch, heads, rows, head_dim = queries.q.shape
        sizes = Sizes(batch, heads, block.k.shape[1], rows, block.k.shape[2], head_dim)
        chosen = self.variant(sizes, queries.q.dtype.name)
        library = self._library(chosen)
        arrays = {"q": queries.q, "k": block.k, "v": block.v, **given, **outputs}
        arrays |= {"positions": queries.positions, "key_positions": block.positions}
        arrays["documents"] = np.asarray(self.mask.documents or (), np.int64)
        # Whatever was left in it.
        arrays |= {name: np.full(rows, -(2**31), chosen.index_dtype) for name in ("begin", "end")}
        memory = {
            name: Memory.like(np.ascontiguousarray(array), self._at_end)
            for name, array in arrays.items()
        }
        scalars = chosen.scalars(sizes, self.mask, self.softmax_scale)
        try:
            for name in (BOUNDS, *names):
                launch = chosen.launch(name, sizes)
                if launch is None:
                    continue
                for argument, place in memory.items():
                    used = argument in ARGUMENTS[name]
                    place.protect(readable=used, writeable=used and argument in OUTPUTS)
                arguments: list[Any] = [
                    memory[argument].address if argument in memory else scalars[argument]
                    for argument in ARGUMENTS[name]
                ]
                library.run(launch, arguments, int(self._seeds.integers(2**63)))
            for name in ("begin", "end"):
                memory[name].protect(readable=True, writeable=True)
            self.bounds = {name: memory[name].array.copy() for name in ("begin", "end")}
            for name, array in outputs.items():
                memory[name].protect(readable=True, writeable=True)
                array[...] = memory[name].array
        finally:
            for place in memory.values():
                place.free()
