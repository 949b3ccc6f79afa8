"""The GPU's kernels, held against dense attention as every other device is: here thread by thread on a CPU.

`gpu.test_kernels` has those that ask nothing of the executor run on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dense import DTYPES, assert_exact_up_to_rounding
from numpy.typing import NDArray
from unit.attending import Backward, Case, attend, cut, state_of, striped
from unit.rounding import assert_weights_rounded_at_most
from unit.test_devices_attend import REACH

from ringmpi.devices import Block, Outcome, Queries
from ringmpi.mask import Mask
from ringmpi.softmax import SIGNIFICANT_DIGITS

from .conftest import DeviceOf, Kind
from .device import SimtDevice

#: Rows and columns of most tiles.
TILE = 64


def assert_right(case: Case, blocks: list[NDArray[np.int64]], device: Any) -> None:
    """Attend to blocks and back, and hold both against dense attention."""
    tensors = case.tensors()
    out, lse, _ = attend(device, case, tensors, blocks)
    assert_exact_up_to_rounding((out, lse), tensors, case.allowed, case.scale)
    backward = Backward.of(case, tensors)
    backward.assert_exact(backward.run(device, blocks)[0])


#: Small and odd first; then around the ends of tiles, in each class of head sizes.
GRID = {
    "one token": (Case(tokens=1, head_dim=1), [np.arange(1)]),
    "blocks of 0, 1, 3 and 13": (Case(head_dim=5), cut(17, 0, 1, 3)),
    "causal, striped, grouped": (
        Case(tokens=37, heads=4, kv_heads=2, head_dim=8, batch=2, causal=True),
        striped(37, 3),
    ),
    "no queries": (Case(tokens=9, queries=0, causal=True), cut(9, 4)),
    "a tile less one": (Case(tokens=TILE - 1, head_dim=12, causal=True), cut(TILE - 1)),
    "a tile": (Case(tokens=TILE, heads=1, kv_heads=1, head_dim=16), cut(TILE)),
    "a tile and one": (Case(tokens=TILE + 1, head_dim=40, causal=True, window=9), cut(TILE + 1)),
    "two tiles, queries at the end": (
        Case(tokens=2 * TILE, queries=7, heads=3, kv_heads=1, head_dim=64),
        cut(2 * TILE, TILE + 1),
    ),
    "documents": (
        Case(tokens=150, head_dim=80, heads=1, kv_heads=1, documents=(0, 1, 70, 70, 150)),
        cut(150, 80),
    ),
    "all masks": (
        Case(
            tokens=140, heads=1, kv_heads=1, head_dim=96, causal=True, window=50, documents=(0, 30, 140)
        ),
        striped(140, 2),
    ),
    "head_dim 128": (Case(tokens=100, heads=1, kv_heads=1, head_dim=128, causal=True), cut(100)),
    "head_dim 160": (Case(tokens=35, heads=1, kv_heads=1, head_dim=160, window=20), cut(35, 17)),
    "head_dim 256": (Case(tokens=70, heads=1, kv_heads=1, head_dim=256, causal=True), cut(70, 33)),
}


@pytest.mark.parametrize(("case", "blocks"), GRID.values(), ids=GRID.keys())
def test_blocks_give_dense_attention_and_its_gradients(
    device_of: DeviceOf, case: Case, blocks: list[NDArray[np.int64]], kind: Kind
) -> None:
    case = replace(case, dtype=kind[0])

    assert_right(case, blocks, device_of(case, kind[1]))


ROUNDED = {
    "odd": (Case(tokens=67, queries=40, heads=3, kv_heads=1, head_dim=33), cut(67, 1, 17)),
    "causal": (Case(tokens=100, heads=4, kv_heads=2, head_dim=16, causal=True), striped(100, 2)),
    "widest heads": (Case(tokens=40, heads=1, kv_heads=1, head_dim=136, causal=True), cut(40, 3)),
}


@pytest.mark.parametrize("dtype", SIGNIFICANT_DIGITS)
@pytest.mark.parametrize(("case", "blocks"), ROUNDED.values(), ids=ROUNDED.keys())
def test_a_weight_changes_by_half_a_unit_in_its_last_place_at_most(
    device_of: DeviceOf, case: Case, blocks: list[NDArray[np.int64]], dtype: str
) -> None:
    case = replace(case, dtype=dtype)

    assert_weights_rounded_at_most(case, blocks, device_of(case, weights="rounded"))


@pytest.mark.parametrize("dtype", SIGNIFICANT_DIGITS)
def test_rounded_weights_are_neither_cut_nor_exact(device_of: DeviceOf, dtype: str) -> None:
    case = Case(tokens=150, batch=1, head_dim=16, dtype=dtype)
    q, k, v = case.tensors()
    backward = Backward.of(case, (q, k, np.ones_like(v)))
    backward.dout[...] = 1  # so that dv is the sums of the weights

    (_, _, dv), _ = backward.run(device_of(case, weights="rounded"), cut(150))
    (_, _, exact), _ = backward.run(device_of(case), cut(150))

    unit = 2.0 ** -SIGNIFICANT_DIGITS[dtype]
    errors = (dv / exact - 1).mean(axis=-1)
    assert np.abs(errors).max() < unit
    assert abs(errors.mean()) < unit / 10  # cut numbers are off by half a unit or more, to one side
    assert errors.std() > unit / 100


MASKS = {
    "none": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window=5),
    "causal window of 0": Mask(causal=True, window=0),
    "documents": Mask(documents=(0, 3, 3, 60, 200)),
    "all": Mask(causal=True, window=30, documents=(0, 1, 90, 90, 200)),
}


@pytest.mark.parametrize("index", ["int", "long long"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_keys_that_a_query_may_see_are_those_of_the_mask(mask: Mask, index: str) -> None:
    chosen = np.random.default_rng(7).permutation(200)
    q, k = np.zeros((1, 1, 150, 1), np.float32), np.zeros((1, 1, 90, 1), np.float32)
    queries, keys = Queries(q, np.sort(chosen[:150])), Block(k, k, np.sort(chosen[-90:]))
    device = SimtDevice(mask, 1.0, index=index)

    device.attend(queries, keys, state_of(q))

    begin, end = mask.bounds(queries.positions, keys.positions)
    assert device.bounds["begin"].tolist() == begin.tolist()
    assert device.bounds["end"].tolist() == end.tolist()


def bits(arrays: Any) -> list[bytes]:
    return [array.tobytes() for array in arrays]


SEVERAL = Case(tokens=150, heads=2, kv_heads=1, head_dim=24, causal=True, window=90)


def test_the_same_bits_come_out_in_whatever_order_threads_run(
    device_of: DeviceOf,
    kind: Kind,
) -> None:
    case = replace(SEVERAL, dtype=kind[0])
    backward = Backward.of(case)

    found = []
    for seed in range(3):
        device = device_of(case, kind[1], seed=seed)
        out, lse, _ = attend(device, case, case.tensors(), cut(150, 70))
        found.append(bits((out, lse, *backward.run(device, cut(150, 70))[0])))

    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("head_dim", [8, 9], ids=["aligned", "unaligned"])
def test_memory_in_front_and_behind_is_left_alone(
    device_of: DeviceOf, head_dim: int, kind: Kind
) -> None:
    # Arrays of 8 numbers a token are multiples of 16 bytes long, and begin at one wherever they end.
    case = replace(SEVERAL, head_dim=head_dim, dtype=kind[0], queries=77)

    found = []
    for at_end in (True, False):
        device = device_of(case, kind[1], at_end=at_end)
        assert_right(case, cut(150, 31), device)
        found.append(bits(attend(device, case, case.tensors(), cut(150, 31))[:2]))

    assert found[0] == found[1]  # copies of 16 bytes, and of one number at a time


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_indices_give_the_same_bits(device_of: DeviceOf, dtype: str) -> None:
    case = replace(SEVERAL, dtype=dtype)
    backward = Backward.of(case)

    found = []
    for index in ("int", "long long"):
        device = device_of(case, index=index)
        out, lse, _ = attend(device, case, case.tensors(), cut(150, 70))
        found.append(bits((out, lse, *backward.run(device, cut(150, 70))[0])))

    assert found[0] == found[1]


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [2, 0, 3, 1]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_may_come_in_any_order(device_of: DeviceOf, dtype: str, order: list[int]) -> None:
    case = Case(tokens=90, dtype=dtype, causal=True, window=40)
    blocks = cut(90, 3, 65, 1)

    assert_right(case, [blocks[at] for at in order], device_of(case))


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("where", ["k", "v", "k and v"])
def test_a_wild_key_behind_the_mask_reaches_nobody(
    device_of: DeviceOf, where: str, bad: float, kind: Kind
) -> None:
    case = Case(tokens=80, dtype=kind[0], causal=True, documents=(0, 6, 80))
    q, k, v = case.tensors()
    wild_k, wild_v = k.copy(), v.copy()
    if "k" in where:
        wild_k[:, :, 11] = bad
    if "v" in where:
        wild_v[:, :, 11] = bad

    out, lse, _ = attend(device_of(case, kind[1]), case, (q, wild_k, wild_v), cut(80, 9))

    hidden = ~case.allowed[:, 11]
    assert hidden.sum() == 11
    assert_exact_up_to_rounding(
        (out[:, :, hidden], lse[:, :, hidden]),
        (q[:, :, hidden], k, v),
        case.allowed[hidden],
        case.scale,
    )
    assert not np.isfinite(out[:, :, ~hidden].astype(np.float64)).any() or bad == np.inf


def test_a_nan_value_reaches_exactly_the_rows_that_see_it(device_of: DeviceOf, kind: Kind) -> None:
    case = Case(tokens=80, head_dim=16, dtype=kind[0], causal=True, window=30)
    q, k, v = case.tensors()
    v[:, :, 5] = np.nan

    out, lse, _ = attend(device_of(case, kind[1]), case, (q, k, v), cut(80, 4, 4))

    touched = np.isnan(out.astype(np.float64)).all(axis=(0, 1, 3))
    assert touched.tolist() == case.allowed[:, 5].tolist()
    assert np.isnan(out.astype(np.float64)).any(axis=(0, 1, 3)).tolist() == touched.tolist()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("name", REACH)
def test_a_nan_reaches_the_gradients_of_its_pairs_and_no_others(
    device_of: DeviceOf, name: str, kind: Kind
) -> None:
    case = Case(causal=True, documents=(0, 6, 17), heads=4, batch=2, dtype=kind[0])
    clean, token = Backward.of(case), 8
    tensor = clean.inputs()[name].copy()
    tensor[:, :, token] = np.nan

    found, _ = replace(clean, **{name: tensor}).run(device_of(case, kind[1]), cut(17, 4, 7))

    itself = np.arange(17) == token
    seen = case.allowed[:, token] if name in ("k", "v") else case.allowed[token]
    expected = {"itself": itself, "all": seen, "none": np.zeros(17, np.bool_)}
    exact, _ = clean.run(device_of(case, kind[1]), cut(17, 4, 7))
    clean.assert_exact(exact)
    for gradient, reach, right in zip(found, REACH[name], exact, strict=True):
        touched = np.isnan(gradient)
        assert touched.any(axis=(0, 1, 3)).tolist() == expected[reach].tolist()
        assert touched.all(axis=(0, 1, 3)).tolist() == expected[reach].tolist()
        # Rows beyond its reach are right: 17 sums of terms of which the largest is below 100, in float32.
        assert np.abs(gradient - right)[~touched].max() <= 17 * 100 * np.finfo(np.float32).eps


def test_rows_without_a_key_give_and_get_nothing(device_of: DeviceOf, kind: Kind) -> None:
    # Only later keys are offered, so causal rows before them see nothing.
    case = Case(tokens=70, dtype=kind[0], causal=True)
    device, late = device_of(case, kind[1]), [np.arange(40, 70)]
    backward = Backward.of(case)
    backward.lse[:, :, :40] = -np.inf
    backward.dout[:, :, :40] = np.nan

    out, lse, _ = attend(device, case, case.tensors(), late)
    (dq, dk, dv), _ = backward.run(device, late)

    assert not out[:, :, :40].astype(np.float64).any()
    assert np.isneginf(lse[:, :, :40]).all()
    assert np.isfinite(lse[:, :, 40:]).all()
    assert not dq[:, :, :40].any()
    assert all(np.isfinite(gradient).all() for gradient in (dq, dk, dv))
    assert np.abs(dv[:, :, 40:]).max() > 0.1


@pytest.mark.parametrize("head_dim", [1, 5, 12, 80])
def test_the_scale_is_that_of_the_device_and_not_of_a_padded_head(
    device_of: DeviceOf, head_dim: int
) -> None:
    case = Case(tokens=1, heads=1, kv_heads=1, head_dim=head_dim, dtype="float64")
    ones = np.ones((1, 1, 1, head_dim))

    _, lse, _ = attend(device_of(case), case, (ones, ones, ones), cut(1))

    # head_dim products, summed, times the rounded scale: head_dim roundings of at most sqrt(head_dim).
    budget = (head_dim + 2) * np.finfo(np.float64).eps * head_dim**0.5
    assert abs(lse.item() - head_dim**0.5) <= budget


def test_gradients_are_added_to_what_is_there(device_of: DeviceOf, kind: Kind) -> None:
    backward = Backward.of(replace(SEVERAL, dtype=kind[0]))
    device = device_of(backward.case, kind[1])
    (alone, _), total = backward.run(device, cut(150)), backward.gradients()
    for array in (total.dq, total.dk, total.dv):
        array[...] = 64

    device.attend_backward(
        Queries(backward.q, np.arange(150)),
        Outcome(backward.dout, backward.lse, backward.delta),
        Block(backward.k, backward.v, np.arange(150)),
        total,
    )

    # One rounded addition to 64, of at most as much again, and a subtraction that rounds nothing more.
    for array, expected in zip((total.dq, total.dk, total.dv), alone, strict=True):
        assert np.abs(array - 64 - expected).max() <= 128 * np.finfo(array.dtype).eps
        assert 0.1 < np.abs(expected).max() < 64


def test_large_gradients_of_float16_keep_their_range(device_of: DeviceOf) -> None:
    # ds reaches beyond the largest float16, 65504, and below the smallest.
    case = Case(tokens=66, head_dim=16, dtype="float16", window=40)
    for factor in (2.0**12, 2.0**-12):
        q, k, v = case.tensors()
        backward = Backward.of(
            case, (q, k, (v * np.float16(2.0**4 if factor > 1 else 2.0**-4)).astype(v.dtype))
        )
        backward.dout[...] = (backward.dout * np.float16(factor)).astype(v.dtype)
        product = backward.dout.astype(np.float64) * backward.out.astype(np.float64)
        backward.delta[...] = product.sum(axis=-1)

        found, _ = backward.run(device_of(case), cut(66, 30))

        backward.assert_exact(found)
