"""The paced device takes its time, no less, and counts as the others do."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from ringmpi.devices import Block, Gradients, Outcome, PacedDevice, Queries, Work, make_device, slowness
from ringmpi.devices.paced import SLICE_S
from ringmpi.errors import ConfigError
from ringmpi.mask import Mask
from ringmpi.softmax import State

#: Queries and keys: batch 2, 6 heads that share 3, head_dim 4.
BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 3, 4

MASKS = {
    "full": (Mask(), range(5), range(7)),
    "causal": (Mask(causal=True), range(3, 12), range(12)),
    "behind the mask": (Mask(causal=True), range(4), range(10, 13)),
    "window": (Mask(True, 2), range(1, 20, 3), range(20)),
    "no queries": (Mask(), range(0), range(7)),
    "no keys": (Mask(), range(5), range(0)),
}


def tensors(tokens: int, heads: int, *names: str) -> dict[str, Any]:
    return {name: np.zeros((BATCH, heads, tokens, HEAD_DIM), np.float32) for name in names}


def begin(device: Any, queries: range, keys: range, backward: bool) -> Work:
    """Start to attend on any device."""
    asked = Queries(*tensors(len(queries), HEADS, "q").values(), np.array(queries, np.int64))
    block = Block(*tensors(len(keys), KV_HEADS, "k", "v").values(), np.array(keys, np.int64))
    rows = np.zeros((BATCH, HEADS, len(queries)), np.float32)
    work: Work
    if backward:
        outcome = Outcome(*tensors(len(queries), HEADS, "dout").values(), rows, rows)
        gradients = tensors(len(queries), HEADS, "dq") | tensors(len(keys), KV_HEADS, "dk", "dv")
        work = device.attend_backward(asked, outcome, block, Gradients(**gradients))
    else:
        acc = tensors(len(queries), HEADS, "acc")["acc"]
        work = device.attend(asked, block, State(acc, rows.copy(), rows.copy()))
    return work


def finish(work: Work) -> int:
    """Let a work end; return how often it was asked before."""
    asked = 0
    while not work.advance():
        asked += 1
    return asked


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("mask", "queries", "keys"), MASKS.values(), ids=MASKS.keys())
def test_pairs_and_flops_are_those_of_a_device_that_computes(
    mask: Mask, queries: range, keys: range, backward: bool
) -> None:
    paced = begin(PacedDevice(mask, 0.5, 1e15), queries, keys, backward)
    real = begin(make_device("numpy", mask, 0.5), queries, keys, backward)
    finish(paced)
    finish(real)

    assert (paced.tally.pairs, paced.tally.flops) == (real.tally.pairs, real.tally.flops)
    assert paced.tally.computed_pairs == paced.tally.pairs
    # One tile a KV head, where the NumPy device has one too at this size.
    assert paced.tally.tiles == real.tally.tiles
    assert paced.tally.tiles_unmasked in (real.tally.tiles_unmasked, 0)


def test_a_work_takes_its_flops_at_the_given_rate_and_longer_only_by_oversleeping() -> None:
    seconds = 0.05
    flops = 4 * 256 * 256 * HEAD_DIM * BATCH * HEADS
    device = PacedDevice(Mask(), 0.5, flops / seconds)

    before = time.perf_counter()
    work = begin(device, range(256), range(256), backward=False)
    polls = finish(work)

    assert work.tally.flops == flops
    assert time.perf_counter() - before >= seconds
    # Asked again after every slice at the latest; a busy machine only makes the sleeps longer.
    assert polls <= seconds / SLICE_S + 1


def test_backward_takes_two_and_a_half_times_as_long() -> None:
    device = PacedDevice(Mask(), 0.5, 1e9)

    works = [begin(device, range(8), range(8), backward) for backward in (False, True)]

    assert works[1].tally.flops == 2.5 * works[0].tally.flops


def test_lateness_does_not_add_up_and_is_forgiven_beyond_a_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each sleep is late by some microseconds here; the sum of all works is late by those of one."""
    now, late = [100.0], [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds + late[0]

    monkeypatch.setattr("time.sleep", sleep)
    # 2**-6 s a work, exact in binary, as are all sums below.
    device = PacedDevice(Mask(), 0.5, 4 * 64 * HEAD_DIM * BATCH * HEADS * 2.0**6)

    late[0] = 2.0**-14
    for number in range(1, 51):
        finish(begin(device, range(8), range(8), backward=False))
        assert 0 <= now[0] - (100 + number * 2.0**-6) <= 2.0**-14

    late[0] = 1.0  # Somebody else had the core.
    finish(begin(device, range(8), range(8), backward=False))
    late[0], began = 0.0, now[0]
    finish(begin(device, range(8), range(8), backward=False))
    assert now[0] - began == pytest.approx(2.0**-6 - SLICE_S, rel=1e-9)


def test_what_is_not_attending_takes_nothing_and_gives_zeros() -> None:
    device = PacedDevice(Mask(), 0.5, 1.0)
    state = State.identity((1, 2, 3, 4), np.dtype(np.float32))
    state.acc[...] = 7

    out, lse = device.finish(state, np.dtype(np.float16))

    assert (out.dtype, out.shape, out.any()) == (np.float16, (1, 2, 3, 4), False)
    assert (lse.dtype, lse.shape, lse.any()) == (np.float32, (1, 2, 3), False)
    assert device.delta(out, out).tolist() == np.zeros((1, 2, 3)).tolist()
    total = np.zeros(3)
    device.add(total, np.ones(3))
    device.merge(state, state)
    assert not total.any()
    assert (state.acc == 7).all()


def test_slow_ranks_are_given_by_rank() -> None:
    assert slowness("2:2.5,0:0.5", 4) == [0.5, 1.0, 2.5, 1.0]
    assert slowness(None, 2) == [1.0, 1.0]
    with pytest.raises(ConfigError, match="slow=4:2: rank 4 is none of the 4, 0 to 3"):
        slowness("4:2", 4)
