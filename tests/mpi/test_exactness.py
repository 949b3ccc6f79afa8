"""Odd arrays, wild values, large blocks and real text; `test_methods` has shapes, masks and layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from dense import (
    dense_attention,
    uniform_inputs,
)
from mpi4py import MPI
from sharded import Check, error_of

from ringmpi import ring_attention
from ringmpi.layout import Layout

pytestmark = [pytest.mark.mpi, pytest.mark.every_device]


def random_inputs(
    seq_len: int, heads: int, kv_heads: int, head_dim: int, dtype: Any = np.float64, batch: int = 1
) -> list[Any]:
    """Return whole q, k, v, the same on every rank."""
    rng = np.random.default_rng(seq_len * 1000 + head_dim)
    shapes = [(batch, count, seq_len, head_dim) for count in (heads, kv_heads, kv_heads)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def shards(comm: MPI.Comm, layout: str, tensors: list[Any]) -> list[Any]:
    positions = Layout(layout, tensors[0].shape[2], comm.size).positions(comm.rank)
    return [tensor[:, :, positions] for tensor in tensors]


def test_blocks_of_several_tiles_and_above_the_eager_limit(
    comm: MPI.Comm, collective_assert: Check
) -> None:
    """Blocks of megabytes go by rendezvous, which a schedule that only works when eager cannot do."""
    whole = random_inputs(4096, 2, 2, 256, np.float32)
    out, _ = ring_attention(
        *shards(comm, "zigzag", whole), comm, layout="zigzag", causal=True, window=40
    )
    rows = np.arange(64)
    mine = Layout("zigzag", 4096, comm.size).positions(comm.rank)[rows]
    for index, row in enumerate(mine[::8]):
        keys = slice(max(0, row - 40), row + 1)
        one = [whole[0][:, :, row : row + 1], whole[1][:, :, keys], whole[2][:, :, keys]]
        exact, _ = dense_attention(*one, np.ones((1, row + 1 - keys.start), bool))
        # 41 keys in float32 with scores below 8: a relative error below 100 * 2**-24 of values below 5.
        collective_assert(error_of(out[:, :, 8 * index, None], exact) < 3e-5, f"row {row}")


def test_real_text_gives_the_published_output(comm: MPI.Comm, collective_assert: Check) -> None:
    with h5py.File(Path(__file__).parents[1] / "data" / "minilm_2heads.h5") as file:
        mine = Layout("zigzag", 2048, comm.size).positions(comm.rank)
        inputs = [file[name][:, :, mine] for name in "qkv"]
        documents = tuple(file["documents"][:])
        expected = file["expected/out"][:, :, mine]
    out, _ = ring_attention(*inputs, comm, layout="zigzag", documents=documents)
    # Expected was rounded to float32 once, and the ring computes in float32 with scores below 20: an error of
    # 20 * 2**-24 in an exponent and 512 roundings of random sign, of values below 4.
    collective_assert(error_of(out, expected) < 2e-5)


ODD_ARRAYS: dict[str, Callable[[Any], Any]] = {
    "fortran order": np.asfortranarray,
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "little-endian": lambda a: a.astype(a.dtype.newbyteorder("<")),
    "negative strides": lambda a: np.ascontiguousarray(a[:, :, ::-1, ::-1])[:, :, ::-1, ::-1],
    "every other element": lambda a: np.repeat(a, 2, axis=3)[..., ::2],
    "heads inside tokens": lambda a: np.ascontiguousarray(a.transpose(0, 2, 1, 3)).transpose(
        0, 2, 1, 3
    ),
    "broadcast": lambda a: np.broadcast_to(a[:, :1], a.shape),
}


@pytest.mark.ranks(most=3)  # Shards are made contiguous before anything else happens.
@pytest.mark.parametrize("kind", ODD_ARRAYS)
def test_strides_byte_order_and_read_only_do_not_matter(
    comm: MPI.Comm, collective_assert: Check, kind: str
) -> None:
    whole = random_inputs(29, 2, 2, 6, np.float32)
    if kind == "broadcast":
        whole = [np.repeat(tensor[:, :1], 2, axis=1) for tensor in whole]
    plain = shards(comm, "contiguous", whole)
    odd = [ODD_ARRAYS[kind](shard) for shard in plain]
    for array in odd:
        array.flags.writeable = False
    before = [array.tobytes() for array in odd]
    expected, _ = ring_attention(*plain, comm)
    out, _ = ring_attention(*odd, comm)
    collective_assert(np.array_equal(out, expected) and out.dtype.isnative)
    collective_assert([array.tobytes() for array in odd] == before, "inputs were written to")


def test_a_value_that_is_nan_reaches_every_row_that_sees_it(
    comm: MPI.Comm, collective_assert: Check
) -> None:
    whole = random_inputs(50, 1, 1, 8)
    whole[2][:, :, 30, 3] = np.nan
    out, _ = ring_attention(*shards(comm, "striped", whole), comm, layout="striped", causal=True)
    mine = Layout("striped", 50, comm.size).positions(comm.rank)
    collective_assert(np.array_equal(np.isnan(out[0, 0, :, 3]), mine >= 30))
    collective_assert(not np.isnan(np.delete(out, 3, axis=3)).any())


def test_scores_as_large_as_the_dtype_holds(comm: MPI.Comm, collective_assert: Check) -> None:
    """The largest float32 score is near 3e38; the winner takes all."""
    q = np.full((1, 1, 12, 1), 1e19, np.float32)
    k = np.full((1, 1, 12, 1), -1e19, np.float32)
    k[0, 0, 5] = 3e19
    v = np.arange(12, dtype=np.float32)[None, None, :, None]
    out, lse = ring_attention(*shards(comm, "striped", [q, k, v]), comm, layout="striped")
    collective_assert((out == 5).all() and np.allclose(lse, 3e38, rtol=1e-6), f"{out} {lse}")


def test_other_traffic_on_the_users_communicator_does_not_matter(
    comm: MPI.Comm, collective_assert: Check
) -> None:
    """Messages of the user with the same tags and peers are still there afterwards."""
    there, back = np.full(3, float(comm.rank)), np.zeros(3)
    requests = [comm.Isend(there, (comm.rank + 1) % comm.size, tag=tag) for tag in range(3)]
    inputs = shards(comm, "contiguous", list(uniform_inputs(1, 1, 1, 20, 2)))
    out, _ = ring_attention(*inputs, comm)
    for tag in range(3):
        comm.Recv(back, (comm.rank - 1) % comm.size, tag=tag)
        collective_assert((back == (comm.rank - 1) % comm.size).all())
    MPI.Request.Waitall(requests)
    collective_assert(error_of(out, np.full(out.shape, 9.5)) < 1e-12)
