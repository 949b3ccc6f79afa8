"""A rank of a ring on emulated GPUs whose kernels run thread by thread: prints ``exact``, or fails."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from dense import DTYPES, assert_exact_up_to_rounding, attend_dense_backward, pairs_between
from emulated.driver import EmulatedPlatform
from mpi4py import MPI
from unit.gradients import assert_gradients_exact

import ringmpi.agreed
from ringmpi import RingAttention
from ringmpi.comm import transport
from ringmpi.devices import cuda
from simt.test_gpu_device import on_simt

TOKENS, SCALE = 21, 8**-0.5


def main(dtype: str) -> None:
    """Attend forward and backward by both transports."""
    comm = MPI.COMM_WORLD
    ringmpi.agreed.why_no_device_pointers = lambda: ""
    transport.PIECE_NBYTES = 300
    rng = np.random.default_rng(4)
    shapes = {"q": 4, "k": 2, "v": 2, "dout": 4}
    whole = {
        name: rng.standard_normal((1, heads, TOKENS, 8)).astype(DTYPES[dtype])
        for name, heads in shapes.items()
    }
    for name in ("direct", "staged"):
        cuda._Here.platform = EmulatedPlatform(seed=comm.rank, run=on_simt)
        options = {"layout": "zigzag", "causal": True, "device": "cuda", "transport": name}
        with RingAttention(comm, seq_len=TOKENS, timeout=30.0, **options) as attention:
            at = attention.layout.positions(comm.rank)
            mine = {name: tensor[:, :, at] for name, tensor in whole.items()}
            out, lse = attention.forward(mine["q"], mine["k"], mine["v"])
            found = attention.backward(mine["dout"], mine["q"], mine["k"], mine["v"], out, lse)
        pieces = comm.allgather((at, out, lse, *found))
        total = [np.concatenate(parts, axis=2) for parts in list(zip(*pieces, strict=True))[1:]]
        order = np.argsort(np.concatenate([piece[0] for piece in pieces]))
        out, lse, *gradients = (tensor[:, :, order] for tensor in total)
        allowed = pairs_between(np.arange(TOKENS), np.arange(TOKENS), causal=True)
        assert_exact_up_to_rounding((out, lse), (whole["q"], whole["k"], whole["v"]), allowed, SCALE)
        tensors = (whole["q"], whole["k"], whole["v"], whole["dout"])
        if dtype == "float32":
            assert_gradients_exact(gradients, tensors, allowed, SCALE, (out, lse))
        else:
            exact = attend_dense_backward(tensors, allowed, SCALE, np.float64, (out, lse))
            for mine, right in zip(gradients, exact, strict=True):
                # The last rounding, to 8 bits with the leading one; before it, sums of 42 terms below 20.
                bound = 2.0**-8 * np.abs(right) + 42 * 20 * np.finfo(np.float32).eps
                assert (np.abs(mine.astype(np.float64) - right) <= bound).all()
        print(f"{name}: exact\n", end="", flush=True)


main(sys.argv[1])
