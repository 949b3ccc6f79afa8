"""Weights that are rounded to 16 bits for products: how much results change, and that nothing else does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dense import DTYPES
from numpy.typing import NDArray

from ringmpi.devices import device_facts, native
from ringmpi.errors import ConfigError
from ringmpi.softmax import SIGNIFICANT_DIGITS, WEIGHTS, check_weights

from .attending import KINDS, Backward, Case, HostDevice, attend, cut, native_device, striped
from .matrix_units import matrix_library
from .rounding import assert_weights_rounded_at_most
from .test_devices_attend import REACH, WILD

Array = NDArray[Any]

CASES = {
    "full": (Case(tokens=130, head_dim=64), cut(130, 50)),
    "odd": (Case(tokens=101, queries=70, batch=1, heads=3, kv_heads=1, head_dim=33), cut(101, 1, 17)),
    "causal": (Case(tokens=300, heads=4, kv_heads=2, head_dim=40, causal=True), striped(300, 2)),
    "window": (Case(tokens=200, head_dim=7, causal=True, window=13), cut(200, 99)),
    "documents": (
        Case(tokens=150, head_dim=16, heads=40, kv_heads=2, batch=1, documents=(0, 51, 52, 150)),
        cut(150),
    ),
    "one token": (Case(tokens=1, head_dim=1), cut(1)),
    "widest heads": (Case(tokens=99, head_dim=255, causal=True), cut(99, 3)),
}


def rounds(kind: str, dtype: str) -> bool:
    """Return whether a device gains by rounding, so that it does."""
    if kind == "numpy":
        return True
    return dtype == "bfloat16" and ("matrix" in kind or native.library().has_dot_products)


def device_of(kind: str, case: Case, weights: str = "rounded") -> HostDevice:
    return KINDS[kind](case.mask, case.scale, weights=weights)


@pytest.mark.parametrize("dtype", SIGNIFICANT_DIGITS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("case", "blocks"), CASES.values(), ids=CASES.keys())
def test_a_weight_changes_by_half_a_unit_in_its_last_place_at_most(
    case: Case, blocks: list[NDArray[np.int64]], kind: str, dtype: str
) -> None:
    case = replace(case, dtype=dtype)

    assert_weights_rounded_at_most(case, blocks, device_of(kind, case))


@pytest.mark.parametrize("dtype", SIGNIFICANT_DIGITS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_rounded_to_the_nearest_where_that_is_faster(kind: str, dtype: str) -> None:
    """With values that are all 1 a product is the sum of the weights, of which none hides another."""
    case = Case(tokens=400, queries=200, head_dim=24, dtype=dtype)
    q, k, v = case.tensors()
    backward = Backward.of(case, (q, k, np.ones_like(v)))
    backward.dout[...] = 1
    blocks = cut(400, 120)
    # Of weights that vary by a factor of hundreds errors are spread evenly, up to half a unit either way.
    unit = 2.0 ** -SIGNIFICANT_DIGITS[dtype]

    (_, _, dv), _ = backward.run(device_of(kind, case), blocks)
    (_, _, exact), _ = backward.run(device_of(kind, case, "exact"), blocks)

    errors = (dv / exact - 1).mean(axis=-1)
    if not rounds(kind, dtype):
        assert dv.tobytes() == exact.tobytes()
        return
    # A key's error is a mean over 200 weights: cut ones would be off by most of a unit, all to one side.
    assert np.abs(errors).max() < unit
    assert abs(errors.mean()) < unit / 20
    assert errors.std() > unit / 100


@pytest.mark.parametrize("dtype", SIGNIFICANT_DIGITS)
def test_gradients_that_float16_could_not_hold_are_rounded_all_the_same(dtype: str) -> None:
    case = Case(tokens=40, head_dim=8, dtype=dtype)
    backward = Backward.of(case)
    large = replace(backward, dout=backward.dout * DTYPES[dtype](1000), delta=backward.delta * 1000)
    large.v = (large.v * DTYPES[dtype](1000)).astype(DTYPES[dtype])
    large.delta = large.delta * 1000

    found, _ = large.run(device_of("numpy", case), cut(40))
    exact, _ = large.run(device_of("numpy", case, "exact"), cut(40))

    assert np.abs(exact[0]).max() > 1e6
    for mine, right in zip(found, exact, strict=True):
        assert np.isfinite(mine).all()
        assert np.abs(mine - right).max() <= 2.0 ** -SIGNIFICANT_DIGITS[dtype] * 8 * np.abs(right).max()


@pytest.mark.parametrize("name", REACH)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("case", "token"), WILD.values(), ids=WILD.keys())
def test_a_nan_reaches_what_it_reaches_without_rounding(
    case: Case, kind: str, name: str, token: int
) -> None:
    case = replace(case, dtype="bfloat16")
    clean = Backward.of(case)
    tensor = clean.inputs()[name].copy()
    tensor[:, :, token] = np.nan
    wild = replace(clean, **{name: tensor})
    blocks = cut(17, 4, 7)

    found = [wild.run(device_of(kind, case, weights), blocks)[0] for weights in ("rounded", "exact")]

    assert np.isnan(found[1][0]).any() or np.isnan(found[1][2]).any()
    for mine, exact in zip(*found, strict=True):
        assert np.array_equal(np.isnan(mine), np.isnan(exact))
    if name in ("q", "k", "v"):
        tensors = wild.q, wild.k, wild.v
        outs = [
            attend(device_of(kind, case, w), case, tensors, blocks)[0] for w in ("rounded", "exact")
        ]
        reach = [np.isnan(out.astype(np.float64)) for out in outs]
        assert np.array_equal(*reach)
        assert reach[0].any()


@pytest.mark.parametrize("unit", ["off", "on"] if matrix_library() else ["off"])
@pytest.mark.skipif("native" not in KINDS, reason="no C++ compiler")
def test_neither_threads_nor_slices_change_a_bit(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=733, batch=1, heads=6, kv_heads=2, head_dim=100, causal=True, dtype="bfloat16")
    backward, blocks = Backward.of(case), cut(733, 3, 500)
    found = set()

    for threads, seconds in ((1, 1e9), (1, 0.0), (2, 1e9), (3, 0.0)):
        monkeypatch.setattr(native, "SLICE_S", seconds)
        device = native_device(case, threads, unit, "rounded")
        out, lse, tallies = attend(device, case, case.tensors(), blocks)
        gradients, more = backward.run(device, blocks)
        found.add((*(a.tobytes() for a in (out, lse, *gradients)), str(tallies), str(more)))

    assert len(found) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_leaves_alone_what_is_not_narrower_than_the_state(kind: str, dtype: str) -> None:
    case = Case(tokens=40, dtype=dtype)
    backward = Backward.of(case)

    found = [backward.run(device_of(kind, case, weights), cut(40))[0] for weights in WEIGHTS]

    assert [a.tobytes() for a in found[0]] == [a.tobytes() for a in found[1]]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_there_must_be_something_to_round_to(dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf"weights=rounded with dtype={dtype}: .*use exact"):
        check_weights("rounded", dtype)
    check_weights("exact", dtype)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights='round'.*did you mean 'rounded'"):
        check_weights("round", "bfloat16")


@pytest.mark.parametrize("dtype", SIGNIFICANT_DIGITS)
@pytest.mark.parametrize("name", [kind for kind in KINDS if "matrix" not in kind])
def test_facts_tell_whether_a_device_rounds(name: str, dtype: str) -> None:
    told = [device_facts(name, 1, "off", dtype, weights=w)["weights"] for w in ("exact", "rounded")]

    assert told == ["exact", "rounded" if rounds(name, dtype) else "exact"]
