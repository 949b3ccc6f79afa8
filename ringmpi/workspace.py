"""A rank's own tensors and its slots, and what the words of a schedule do to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.devices import Block, Device, Gradients, Outcome, Queries, Work
from ringmpi.schedule.steps import (
    HOME,
    OF_KEYS,
    Attend,
    Chore,
    Clear,
    Copy,
    Finish,
    Held,
    Merge,
    Part,
    Payload,
    Shards,
)
from ringmpi.softmax import IDENTITY, State
from ringmpi.tensors import TENSORS_OF, Shape

Array = NDArray[Any]


class Workspace:
    """The tensors that a schedule's parts are, on one rank. Local.

    Parameters
    ----------
    shape : Shape
    shards : Shards
    device : Device
    slot : callable
        Returns the bytes of a part in a slot.
    own : mapping
        The rank's inputs by name, such as q, k and v: contiguous, of native byte order.
    """

    def __init__(
        self,
        shape: Shape,
        shards: Shards,
        device: Device,
        slot: Callable[[Part, int], NDArray[np.uint8]],
        own: Mapping[str, Array],
    ) -> None:
        self._shape = shape
        self._shards = shards
        self._device = device
        self._slot = slot
        self._own = dict(own)

    def own(self, name: str) -> Array:
        """Return a result of this rank, such as ``out``."""
        payload = next(p for p, ts in TENSORS_OF.items() if any(t.name == name for t in ts))
        return self._whole(Part(payload, self._shards.rank))[name]

    def do(self, chores: Iterable[Chore]) -> None:
        """Do chores, one after the other."""
        for chore in chores:
            match chore:
                case Clear(held):
                    for name, array in self._tensors(held).items():
                        self._device.fill(array, IDENTITY.get(name, 0.0))
                case Copy(source, into):
                    found, target = self._tensors(source), self._tensors(into)
                    for name, array in target.items():
                        self._device.copy(found[name], array)
                case Merge(source, into):
                    self._merge(self._tensors(source), self._tensors(into), into.part.payload)
                case Finish(state, into):
                    self._finish(state, into)

    def settle(self) -> None:
        """Wait until all that was done is done on the device too."""
        self._device.settle()

    def works(self, attends: Iterable[Attend]) -> Iterator[Work]:
        """Yield the work of attends, each begun when it is asked for."""
        for attend in attends:
            for heads, kv_heads in self._shape.groups(attend.queries.part):
                yield self._work(attend, heads, kv_heads)

    def _work(self, attend: Attend, heads: slice, kv_heads: slice) -> Work:
        asking = {name: a[:, heads] for name, a in self._tensors(attend.queries).items()}
        kv = {name: a[:, kv_heads] for name, a in self._tensors(attend.keys).items()}
        queries = Queries(asking["q"], self._positions(attend.queries.part))
        block = Block(kv["k"], kv["v"], self._positions(attend.keys.part))
        results: dict[str, Array] = {}
        for held in attend.into:
            of_keys = held.part.payload in OF_KEYS
            cut = kv_heads if of_keys else heads
            results |= {name: a[:, cut] for name, a in self._tensors(held).items()}
        if attend.queries.part.payload is Payload.Q:
            return self._device.attend(queries, block, State(**results))
        outcome = Outcome(asking["dout"], asking["lse"], asking["delta"])
        return self._device.attend_backward(queries, outcome, block, Gradients(**results))

    def _merge(self, source: dict[str, Array], into: dict[str, Array], payload: Payload) -> None:
        if payload is Payload.STATE:
            self._device.merge(State(**into), State(**source))
            return
        for name, total in into.items():
            self._device.add(total, source[name])

    def _finish(self, state: Held, into: Held) -> None:
        out, lse = self._device.finish(State(**self._tensors(state)), self._shape.dtype)
        if into.slot == HOME:
            self._own |= {"out": out, "lse": lse}
            return
        target = self._tensors(into)
        self._device.copy(out, target["out"])
        self._device.copy(lse, target["lse"])

    def _positions(self, part: Part) -> NDArray[np.int64]:
        layout = self._shards.keys if part.payload in OF_KEYS else self._shards.queries
        tokens = self._shards.tokens(part)
        return layout.positions(part.owner)[tokens.start : tokens.stop]

    def _tensors(self, held: Held) -> dict[str, Array]:
        """Return the tensors of a part, where it is held."""
        part = held.part
        if held.slot != HOME:
            return self._shape.views(part, self._shards, self._slot(part, held.slot))
        heads, tokens = self._shape.heads(part), self._shards.tokens(part)
        at = np.s_[:, heads.start : heads.stop, tokens.start : tokens.stop]
        return {name: array[at] for name, array in self._whole(part).items()}

    def _whole(self, part: Part) -> dict[str, Array]:
        """Return the whole tensors of a payload at home, made when they are first asked for."""
        whole = Part(part.payload, self._shards.rank)
        tokens = len(self._shards.tokens(whole))
        for name, shape, dtype in self._shape.tensors(whole, tokens):
            if name not in self._own:
                self._own[name] = self._device.full(shape, IDENTITY.get(name, 0.0), dtype)
        return {tensor.name: self._own[tensor.name] for tensor in TENSORS_OF[part.payload]}
