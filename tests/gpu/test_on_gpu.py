"""The GPU device on a GPU: chores included, the same bits every time, and rings of ranks on what there is."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense import DTYPES
from numpy.typing import NDArray
from simt.test_kernels import GRID, SEVERAL
from unit.attending import Backward, Case, cut
from unit.test_devices_cuda import both_passes

from ringmpi.comm.launcher import find_launcher
from ringmpi.devices import Block, Queries, make_device
from ringmpi.softmax import State, state_dtype

#: Seconds for a few ranks, each of which may compile kernels first.
LIMIT = 300


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "blocks"), GRID.values(), ids=GRID)
def test_blocks_that_stay_on_the_gpu_give_dense_attention(
    case: Case, blocks: list[NDArray[np.int64]], dtype: str
) -> None:
    case = replace(case, dtype=dtype)

    both_passes(make_device("cuda", case.mask, case.scale), case, blocks)


def forward_bits(case: Case) -> bytes:
    """Attend to two blocks on a device of its own; return the bits of out and lse."""
    device: Any = make_device("cuda", case.mask, case.scale)
    backward = Backward.of(case)
    dtype = backward.q.dtype
    shape, kind = backward.q.shape, state_dtype(dtype)
    state = State(
        acc=device.full(shape, 0.0, kind),
        row_max=device.full(shape[:-1], -np.inf, kind),
        row_sum=device.full(shape[:-1], 0.0, kind),
    )
    queries = Queries(device.place(backward.q, dtype), case.positions)
    for at in cut(case.tokens, case.tokens // 2):
        k, v = (device.place(array[:, :, at], dtype) for array in (backward.k, backward.v))
        work = device.attend(queries, Block(k, v, at), state)
        while not work.advance():
            pass
    return b"".join(device.fetch(array).tobytes() for array in device.finish(state, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_come_out_every_time(dtype: str) -> None:
    case = replace(SEVERAL, dtype=dtype)

    assert len({forward_bits(case) for _ in range(5)}) == 1


@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("transport", ["auto", "staged"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_ring_that_shares_the_gpus_is_exact(
    tmp_path: Path, ranks: int, dtype: str, transport: str
) -> None:
    command = [sys.executable, "-m", "ringmpi", "run", "--device", "cuda", "--transport", transport]
    command += ["--seq-len", "1031", "--heads", "4", "--kv-heads", "2", "--head-dim", "64"]
    command += ["--dtype", dtype, "--causal", "--layout", "zigzag", "--backward", "--verify", "full"]
    command += ["--repeats", "2", "--output", str(tmp_path / "ring.h5")]

    done = subprocess.run(
        find_launcher("mpiexec").command(ranks, command),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
