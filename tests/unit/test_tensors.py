from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from dense import DTYPES

from ringmpi.layout import Layout
from ringmpi.schedule import Shards
from ringmpi.schedule.steps import Part, Payload, Share
from ringmpi.tensors import TENSORS_OF, Shape

#: Seven tokens on three ranks: shards of 3, 2 and 2. Five of them are queries: 2, 2 and 1.
SHARDS = Shards(Layout("contiguous", 7, 3), Layout("contiguous", 5, 3, 2), 1)


def shape_of(dtype: str = "bfloat16", **sizes: int) -> Shape:
    given = {"batch": 1, "num_heads": 6, "num_kv_heads": 2, "head_dim": 3} | sizes
    return Shape(**given, dtype=np.dtype(DTYPES[dtype]))


#: Bytes a token of a part, for a head_dim of d, an item of e bytes and a state of s bytes: over the query
#: heads, or over the KV heads for k and v.
TOKEN = {
    Payload.KV: lambda d, e, s: 2 * d * e,
    Payload.Q: lambda d, e, s: d * e,
    Payload.QDOUT: lambda d, e, s: 2 * d * e + 2 * s,
    Payload.STATE: lambda d, e, s: d * s + 2 * s,
    Payload.OUT: lambda d, e, s: d * e + s,
    Payload.DQ: lambda d, e, s: d * s,
    Payload.DKV: lambda d, e, s: 2 * d * s,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("payload", Payload, ids=lambda payload: payload.value)
class TestLayoutInABuffer:
    @pytest.mark.parametrize("owner", [0, 1, 2])
    @pytest.mark.parametrize(("batch", "head_dim"), [(1, 1), (1, 3), (3, 5), (2, 64)], ids=str)
    def test_a_part_is_as_large_as_its_tokens(
        self, payload: Payload, dtype: str, batch: int, head_dim: int, owner: int
    ) -> None:
        shape = shape_of(dtype, batch=batch, head_dim=head_dim)
        item, state = np.dtype(DTYPES[dtype]).itemsize, 8 if dtype == "float64" else 4

        nbytes = shape.nbytes(Part(payload, owner), SHARDS)

        of_keys = payload in (Payload.KV, Payload.DKV)
        tokens = ([3, 2, 2] if of_keys else [2, 2, 1])[owner]
        heads = 2 if of_keys else 6
        assert nbytes == batch * heads * tokens * TOKEN[payload](head_dim, item, state)

    @pytest.mark.parametrize("head_dim", [1, 3, 5, 64])
    def test_tensors_lie_one_after_the_other_and_fill_the_part(
        self, payload: Payload, dtype: str, head_dim: int
    ) -> None:
        shape, part = shape_of(dtype, head_dim=head_dim), Part(payload, 0)
        buffer = np.zeros(shape.nbytes(part, SHARDS), np.uint8)

        views = shape.views(part, SHARDS, buffer)

        assert list(views) == [tensor.name for tensor in TENSORS_OF[payload]]
        at = buffer.ctypes.data
        for view in views.values():
            assert np.shares_memory(view, buffer)
            assert view.flags.c_contiguous
            assert view.ctypes.data == at
            at += view.nbytes
        assert at == buffer.ctypes.data + buffer.nbytes

    @pytest.mark.parametrize("head_dim", [1, 3, 5, 64])
    @pytest.mark.parametrize("num_heads", [1, 3, 7])
    def test_every_tensor_begins_at_a_multiple_of_its_item(
        self, payload: Payload, dtype: str, head_dim: int, num_heads: int
    ) -> None:
        # Odd numbers of everything, so that 16-bit items end at odd multiples of two.
        shape = shape_of(dtype, num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)
        raw = np.zeros(shape.nbytes(Part(payload, 0), SHARDS) + 64, np.uint8)
        buffer = raw[-raw.ctypes.data % 64 :]

        views = shape.views(Part(payload, 0), SHARDS, buffer)

        assert all(view.flags.aligned for view in views.values())
        assert all(view.ctypes.data % view.itemsize == 0 for view in views.values())

    def test_a_part_without_tokens_has_no_bytes(self, payload: Payload, dtype: str) -> None:
        one = Layout("contiguous", 1, 3)
        shards = Shards(one, one, 0)

        views = shape_of(dtype).views(Part(payload, 2), shards, np.zeros(0, np.uint8))

        assert shape_of(dtype).nbytes(Part(payload, 2), shards) == 0
        assert {view.size for view in views.values()} == {0}

    def test_pieces_of_tokens_and_of_heads_make_up_the_whole(
        self, payload: Payload, dtype: str
    ) -> None:
        shape = shape_of(dtype, num_heads=4, num_kv_heads=4)
        whole = shape.nbytes(Part(payload, 0), SHARDS)

        halves = [shape.nbytes(Part(payload, 0, tokens=Share(at, 2)), SHARDS) for at in range(2)]
        quarters = [shape.nbytes(Part(payload, 0, heads=Share(at, 4)), SHARDS) for at in range(4)]

        assert sum(halves) == whole
        assert quarters == [whole // 4] * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_summed_has_the_dtype_of_the_state(dtype: str) -> None:
    wide = np.dtype(np.float64 if dtype == "float64" else np.float32)

    dtypes = {
        name: found
        for payload in Payload
        for name, _, found in shape_of(dtype).tensors(Part(payload, 0), 2)
    }

    narrow = {name for name, found in dtypes.items() if found == np.dtype(DTYPES[dtype])}
    assert narrow >= {"q", "k", "v", "dout", "out"}
    summed = ("acc", "row_max", "row_sum", "lse", "delta", "dq", "dk", "dv")
    assert {name: dtypes[name] for name in summed} == dict.fromkeys(summed, wide)
    assert set(dtypes) == {"q", "k", "v", "dout", "out", *summed}


def test_shapes_are_those_of_the_glossary() -> None:
    shape = shape_of(batch=3)

    shapes = {
        name: found for payload in Payload for name, found, _ in shape.tensors(Part(payload, 0), 5)
    }

    of_queries, of_keys, of_rows = (3, 6, 5, 3), (3, 2, 5, 3), (3, 6, 5)
    wide = ("q", "dout", "out", "dq", "acc")
    assert shapes == {
        **dict.fromkeys(wide, of_queries),
        **dict.fromkeys(("k", "v", "dk", "dv"), of_keys),
        **dict.fromkeys(("lse", "delta", "row_max", "row_sum"), of_rows),
    }


#: Query heads, KV heads and ranks that share them; among them shares that end amid the readers of a KV head.
SHARED = [
    (1, 1, 1),
    (8, 8, 4),
    (8, 2, 2),
    (8, 2, 4),
    (8, 1, 8),
    (9, 3, 2),
    (9, 3, 4),
    (9, 9, 4),
    (12, 4, 5),
    (12, 2, 8),
    (7, 7, 3),
    (6, 2, 6),
]


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), SHARED, ids=str)
class TestSharesOfHeads:
    def test_every_head_is_on_one_rank(self, heads: int, kv_heads: int, ranks: int) -> None:
        shape = shape_of(num_heads=heads, num_kv_heads=kv_heads)

        shares = [shape.heads(Part(Payload.Q, 0, heads=Share(at, ranks))) for at in range(ranks)]

        assert [head for share in shares for head in share] == list(range(heads))
        assert all(shares)

    def test_a_rank_has_the_kv_heads_that_its_heads_read_and_no_more(
        self, heads: int, kv_heads: int, ranks: int
    ) -> None:
        shape = shape_of(num_heads=heads, num_kv_heads=kv_heads)

        for at in range(ranks):
            share = Share(at, ranks)
            read = {h * kv_heads // heads for h in shape.heads(Part(Payload.Q, 0, heads=share))}
            assert set(shape.heads(Part(Payload.KV, 0, heads=share))) == read
            assert set(shape.heads(Part(Payload.DKV, 0, heads=share))) == read

    def test_every_query_head_meets_its_kv_head_once(
        self, heads: int, kv_heads: int, ranks: int
    ) -> None:
        shape = shape_of(num_heads=heads, num_kv_heads=kv_heads)
        met = []

        for at in range(ranks):
            share = Share(at, ranks)
            of_queries = list(shape.heads(Part(Payload.Q, 0, heads=share)))
            of_keys = list(shape.heads(Part(Payload.KV, 0, heads=share)))
            for queries, keys in shape.groups(Part(Payload.Q, 0, heads=share)):
                readers, read = of_queries[queries], of_keys[keys]
                # The device takes as many readers for each KV head, in order.
                assert len(readers) % len(read) == 0
                group = len(readers) // len(read)
                met += [(head, read[index // group]) for index, head in enumerate(readers)]

        assert met == [(head, head * kv_heads // heads) for head in range(heads)]


def test_whole_groups_are_attended_at_once() -> None:
    shape = shape_of(num_heads=8, num_kv_heads=4)

    assert list(shape.groups(Part(Payload.Q, 0))) == [(slice(0, 8), slice(0, 4))]
    halves = [list(shape.groups(Part(Payload.Q, 0, heads=Share(at, 2)))) for at in range(2)]
    assert halves == [[(slice(0, 4), slice(0, 2))]] * 2


def test_shares_that_cut_a_group_are_attended_kv_head_by_kv_head() -> None:
    shape = shape_of(num_heads=9, num_kv_heads=3)

    groups = [list(shape.groups(Part(Payload.Q, 0, heads=Share(at, 2)))) for at in range(2)]

    # Heads 0 to 4 read KV heads 0 and 1; heads 5 to 8 read 1 and 2.
    assert groups[0] == [(slice(0, 3), slice(0, 1)), (slice(3, 5), slice(1, 2))]
    assert groups[1] == [(slice(0, 1), slice(0, 1)), (slice(1, 4), slice(1, 2))]


def test_nbytes_is_what_the_views_need() -> None:
    for payload in Payload:
        for pieces in (1, 2, 4):
            for at in range(pieces):
                part = Part(payload, 0, heads=Share(at, pieces))
                found: list[tuple[str, tuple[int, ...], Any]] = list(
                    shape_of().tensors(part, len(SHARDS.tokens(part)))
                )

                needed = sum(prod(shape) * dtype.itemsize for _, shape, dtype in found)

                assert shape_of().nbytes(part, SHARDS) == needed
