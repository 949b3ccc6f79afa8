"""The paced device: takes the time that a device of a given speed would take, and computes nothing.

It sleeps meanwhile, so more ranks than cores can be studied, and what a fast device would feel on an
interconnect shows on any machine. Transfers are real; results are zeros that nobody should read.
"""

from __future__ import annotations

import re
import time
from math import isfinite
from typing import Any

import numpy as np

from ringmpi.devices.base import Array, Block, Gradients, Outcome, Queries
from ringmpi.devices.host import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, HostDevice
from ringmpi.errors import ConfigError
from ringmpi.mask import Mask
from ringmpi.softmax import State, state_dtype
from ringmpi.trace import Tally

PACED = "paced"

#: Longest sleep, after which the executor polls: as often as between the slices of the native device.
SLICE_S = 1e-3

_SLOWER = re.compile(r"(?P<rank>[0-9]{1,9}):(?P<factor>[0-9]+(\.[0-9]*)?)")


class PacedDevice(HostDevice):
    """Attention that takes time, and does nothing with it.

    Parameters
    ----------
    mask : Mask
    softmax_scale : float
    flops : float
        FLOP/s. What is not attending takes no time.
    """

    name = PACED

    def __init__(self, mask: Mask, softmax_scale: float, flops: float) -> None:
        super().__init__(mask, softmax_scale)
        self.flops = flops
        self._overslept = 0.0

    def attend(self, queries: Queries, block: Block, state: State) -> PacedWork:
        """Start to take the time of the pairs with a block."""
        del state
        return PacedWork(self, queries, block, FORWARD_PRODUCTS)

    def attend_backward(
        self, queries: Queries, outcome: Outcome, block: Block, gradients: Gradients
    ) -> PacedWork:
        """Start to take the time of the gradients of the pairs with a block."""
        del outcome, gradients
        return PacedWork(self, queries, block, BACKWARD_PRODUCTS)

    def deadline(self, started: float, seconds: float) -> float:
        """Return when a work must end, less what the work before it has overslept."""
        return started + seconds - self._overslept

    def overslept(self, seconds: float) -> None:
        """Note by how much a work was late, so that lateness does not add up.

        No more than a slice: where somebody else had the core, nothing is made up for.
        """
        self._overslept = min(seconds, SLICE_S)

    def finish(self, state: State, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        """Return zeros."""
        return np.zeros(state.acc.shape, dtype), np.zeros(state.row_sum.shape, state.row_sum.dtype)

    def delta(self, dout: Array, out: Array) -> Array:
        """Return zeros."""
        del out
        return np.zeros(dout.shape[:-1], state_dtype(dout.dtype))

    def merge(self, state: State, other: State) -> None:
        """Do nothing."""

    def add(self, total: Array, other: Array) -> None:
        """Do nothing."""


class PacedWork:
    """The time of one block, slept away a slice an advance.

    It counts as one tile for each KV head, in which masked pairs are not worked on.
    """

    def __init__(self, device: PacedDevice, queries: Queries, block: Block, products: int) -> None:
        started = time.perf_counter()  # Counting pairs takes part of the time that is to be taken.
        batch, heads, num_queries, head_dim = queries.q.shape
        kv_heads, num_keys = block.k.shape[1:3]
        allowed = device.mask.pairs(queries.positions, block.positions)
        tiles = batch * kv_heads
        self.tally = Tally(
            pairs=allowed * batch * heads,
            computed_pairs=allowed * batch * heads,
            flops=2 * products * head_dim * allowed * batch * heads,
            tiles=tiles if allowed else 0,
            tiles_unmasked=tiles if allowed and allowed == num_queries * num_keys else 0,
            tiles_skipped=0 if allowed else tiles,
        )
        self._device = device
        self._due = device.deadline(started, self.tally.flops / device.flops) if allowed else started

    def advance(self) -> bool:
        """Sleep for a millisecond at most; True once the time is over."""
        left = self._due - time.perf_counter()
        if left > 0:
            time.sleep(min(left, SLICE_S))
        late = time.perf_counter() - self._due
        if late < 0:
            return False
        if self.tally.pairs:
            self._device.overslept(late)
        return True


def check_pace(device: str, flops: float | None, slow: str | None) -> None:
    """Refuse a pace that is none, or that is of no use to the device. Local.

    Parameters
    ----------
    device : str
    flops : float or None
        FLOP/s of a rank.
    slow : str or None
        As `parse_slow` takes it.

    Raises
    ------
    ConfigError
        If the device is paced and has no pace, or is not and has one.
    """
    if device != PACED:
        for name, value in (("flops", flops), ("slow", slow)):
            if value is not None:
                raise ConfigError(
                    f"{name}={value} with device={device}: only paced ranks have a pace; use --device "
                    f"paced, or leave {name} away"
                )
        return
    if flops is None:
        raise ConfigError("device=paced: needs the FLOP/s of a rank, such as --flops 50e12")
    if not (isfinite(flops) and flops > 0):
        raise ConfigError(f"flops={flops}: must be a positive finite number of FLOP/s, such as 50e12")
    if slow is not None:
        parse_slow(slow)


def parse_slow(text: str) -> dict[int, float]:
    """Return by rank how many times as long it computes. Local.

    Raises
    ------
    ConfigError
        If the text does not say that.

    Examples
    --------
    >>> parse_slow("2:2.5,5:1.5")
    {2: 2.5, 5: 1.5}
    """
    found: dict[int, float] = {}
    for word in text.split(","):
        match = _SLOWER.fullmatch(word)
        factor = float(match["factor"]) if match else 0.0
        if match is None or not (isfinite(factor) and factor > 0) or int(match["rank"]) in found:
            raise ConfigError(
                f"slow={text!r}: use RANK:FACTOR,... such as 2:2.5,5:1.5, each rank once, with factors "
                f"above 0"
            )
        found[int(match["rank"])] = factor
    return found


def slowness(text: str | None, size: int) -> list[float]:
    """Return how many times as long each of `size` ranks computes. Local.

    Raises
    ------
    ConfigError
        If the text names a rank that there is not.
    """
    factors = parse_slow(text) if text is not None else {}
    for rank in factors:
        if rank >= size:
            raise ConfigError(f"slow={text}: rank {rank} is none of the {size}, 0 to {size - 1}")
    return [factors.get(rank, 1.0) for rank in range(size)]
