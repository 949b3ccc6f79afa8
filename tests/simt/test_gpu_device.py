"""The GPU device on the kernels themselves, chores included: alone, and as a ring of two ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense import DTYPES
from emulated.driver import EmulatedPlatform
from numpy.typing import NDArray
from unit.attending import Case, cut, striped
from unit.test_devices_cuda import both_passes

from ringmpi.comm.launcher import find_launcher
from ringmpi.devices import cuda, make_device
from ringmpi.devices.base import Sizes
from ringmpi.devices.launch import Launch, Variant, variant
from ringmpi.softmax import state_dtype

from .device import kernels

#: Seconds for two ranks, each of which starts Python.
LIMIT = 100


def on_simt(chosen: Variant, launch: Launch, arguments: Sequence[np.generic]) -> None:
    """Run a kernel thread by thread."""
    kernels(chosen).run(launch, list(arguments), launch.grid)


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(capability: tuple[int, int] = (8, 0)) -> None:
        platform = EmulatedPlatform(seed=3, run=on_simt, capability=capability)
        monkeypatch.setattr(cuda._Here, "platform", platform)

    return made


CASES = {
    "odd, with gaps": (Case(tokens=19, head_dim=5), cut(19, 0, 1, 3)),
    "causal, grouped": (
        Case(tokens=37, heads=4, kv_heads=2, head_dim=8, batch=2, causal=True),
        striped(37, 3),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "blocks"), CASES.values(), ids=CASES)
def test_blocks_are_begun_attended_merged_and_finished_by_kernels_alone(
    emulate: Any, case: Case, blocks: list[NDArray[np.int64]], dtype: str
) -> None:
    emulate()
    case = replace(case, dtype=dtype)

    both_passes(make_device("cuda", case.mask, case.scale), case, blocks)


def bits_of(numbers: Any) -> list[int]:
    return np.asarray(numbers).view(np.uint16).tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_are_rounded_to_the_nearest_and_of_two_to_the_even_one(
    emulate: Any, dtype: str
) -> None:
    emulate()
    narrow = np.dtype(DTYPES[dtype])
    device: Any = make_device("cuda", Case().mask, 1.0)
    halves = np.arange(2**16, dtype=np.uint16).view(narrow).astype(np.float32)
    finite = halves[np.isfinite(halves)]
    steps = np.array([-(2.0**-12), 0.0, 2.0**-12], np.float32)
    near = finite[:-1, None] + (np.diff(finite) / 2)[:, None] * (1 + steps)
    random = np.random.default_rng(5).integers(2**32, size=50000, dtype=np.uint32).view(np.float32)
    special = np.array([np.inf, -np.inf, 65519.99, 65520.0, 1e-8, -1e-8, 3.4e38, -0.0], np.float32)
    values = np.concatenate([near.reshape(-1), random[~np.isnan(random)], special]).astype(np.float32)

    found = device.fetch(device.rounded(device.place(values, values.dtype), narrow))

    with np.errstate(over="ignore"):
        assert bits_of(found) == bits_of(values.astype(narrow))
    nan = np.array([0x7F800001, 0x7FC00000, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(
        device.fetch(device.rounded(device.place(nan, nan.dtype), narrow)).astype(float)
    ).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_ring_of_two_ranks_is_exact_on_the_kernels(dtype: str) -> None:
    # Compiled here: ranks may start no compiler.
    kernels(variant(Sizes(1, 1, 1, 1, 1, 8), dtype, (8, 0)))
    assert state_dtype(np.dtype(DTYPES[dtype])) == np.float32
    script = Path(__file__).with_name("ring.py")
    command = find_launcher("mpiexec").command(2, [sys.executable, str(script), dtype])

    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("exact") == 4, done.stdout
