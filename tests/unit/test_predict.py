"""Predicted times, against closed forms of each method."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringmpi.encoding import numpy_dtype
from ringmpi.layout import Layout
from ringmpi.model import predict as room
from ringmpi.model.machine import INTER, INTRA, Compute, Connection, Curve, Machine, constant
from ringmpi.model.predict import Prediction, predict, watched
from ringmpi.model.prices import Task
from ringmpi.schedule import METHODS, Pass
from ringmpi.tensors import Shape

FORWARD, BACKWARD = Pass.FORWARD, Pass.BACKWARD

#: 8 heads of 128, 16 bits; 4096 tokens a rank are 16 MiB of keys and values.
SHAPE = Shape(1, 8, 8, 128, numpy_dtype("float16"))
TOKENS = 4096
BLOCK_NBYTES = 16_777_216
BLOCK_FLOPS = 4 * 8 * 128 * TOKENS**2


def task(
    ranks: int,
    *,
    tokens: int = TOKENS,
    causal: bool = False,
    layout: str = "contiguous",
    shape: Shape = SHAPE,
) -> Task:
    keys = Layout(layout, ranks * tokens, ranks)
    return Task(shape, keys, keys, causal)


def machine(
    per_node: int = 64,
    *,
    latency: float = 0.0,
    bandwidth: float = 12.5e9,
    total: float = 0.0,
    between: float = 12.5e9,
) -> Machine:
    links = {
        INTRA: Connection(constant(latency), constant(bandwidth), total or bandwidth),
        INTER: Connection(constant(latency), constant(between), between),
    }
    rates = Compute(constant(1e12), constant(1e12))
    return Machine("made", "", 80e9, per_node, {"float16": rates}, links)


def predicted(
    method: str,
    given: Task,
    on: Machine,
    flops: float | Curve,
    direction: Pass = FORWARD,
    inner: int = 1,
) -> Prediction:
    rates = flops if isinstance(flops, Curve) else constant(flops)
    return predict(given, method, inner, on, rates, direction)


@pytest.mark.parametrize(
    ("compute", "whole", "stall"), [(0.5e-3, "4.541", "2.541"), (3e-3, "12.000", "0.000")], ids=str
)
def test_the_simulator_s_example(compute: float, whole: str, stall: str) -> None:
    """16 MiB at 100 Gbit/s and 5 us: x = 1.3472 ms; c + 3 max(c, x), of which 3 max(0, x - c) waits."""
    found = predicted("ring", task(4), machine(latency=5e-6), BLOCK_FLOPS / compute)

    assert abs(found.seconds * 1e3 - float(whole)) < 1e-3
    assert abs(found.waiting * 1e3 - float(stall)) < 1e-3
    x = 5e-6 + BLOCK_NBYTES / 12.5e9
    assert found.seconds == pytest.approx(compute + 3 * max(compute, x), rel=1e-9)
    assert found.waiting == pytest.approx(3 * max(0.0, x - compute), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("direction", Pass)
def test_one_rank_only_computes(method: str, direction: Pass) -> None:
    found = predicted(method, task(1), machine(), 1e12, direction)

    work = BLOCK_FLOPS * (1.0 if direction is FORWARD else 2.5)
    assert found.seconds == found.compute == pytest.approx(work / 1e12, rel=1e-12)
    assert found.sent_nbytes == 0


@pytest.mark.parametrize("compute", [0.1e-3, 1e-3, 2e-3, 30e-3], ids=str)
def test_the_backward_ring_has_gradients_one_step_behind(compute: float) -> None:
    """Step 0 sends k and v, the last of P steps dk and dv, those between all four; one step brings home."""
    keys, gradients = (nbytes / 12.5e9 for nbytes in (BLOCK_NBYTES, 2 * BLOCK_NBYTES))

    found = predicted("ring", task(5), machine(), 2.5 * BLOCK_FLOPS / compute, BACKWARD)

    steps = [
        max(compute, keys),
        *[max(compute, keys + gradients)] * 3,
        max(compute, gradients),
        gradients,
    ]
    assert found.seconds == pytest.approx(sum(steps), rel=1e-9)


def test_contiguous_causal_shards_take_as_long_as_a_full_mask_apart_from_the_diagonal() -> None:
    """The last rank attends to P - 1 whole blocks and half of its own."""
    diagonal = 4 * 8 * 128 * TOKENS * (TOKENS + 1) // 2

    found = predicted("ring", task(4, causal=True), machine(bandwidth=1e15), 1e12)

    assert found.seconds == pytest.approx((diagonal + 3 * BLOCK_FLOPS) / 1e12, rel=1e-6)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_balanced_shards_halve_it(layout: str) -> None:
    found = predicted("ring", task(4, causal=True, layout=layout), machine(bandwidth=1e15), 1e12)

    assert found.seconds == pytest.approx(4 * BLOCK_FLOPS / 2 / 1e12, rel=1e-3)


def test_all_is_gathered_before_anybody_attends() -> None:
    found = predicted("allgather", task(4), machine(latency=5e-6), BLOCK_FLOPS / 1e-3)

    assert found.seconds == pytest.approx(3 * (5e-6 + BLOCK_NBYTES / 12.5e9) + 4e-3, rel=1e-9)
    assert found.waiting == pytest.approx(found.seconds - 4e-3, rel=1e-9)


@pytest.mark.parametrize(
    ("total", "factor"), [(12.5e9, 1.0), (25e9, 0.5)], ids=["one card", "two links"]
)
def test_both_ways_round_help_where_links_are_two(total: float, factor: float) -> None:
    found = predicted("bidirectional", task(4), machine(total=total), 1e18)

    assert found.seconds == pytest.approx(3 * factor * BLOCK_NBYTES / 12.5e9, rel=1e-3)


def test_a_ring_has_one_link_of_many() -> None:
    found = predicted("ring", task(4), machine(total=50e9), 1e18)

    assert found.seconds == pytest.approx(3 * BLOCK_NBYTES / 12.5e9, rel=1e-3)


def test_heads_are_sent_to_all_at_once() -> None:
    """A quarter of q, k, v to each of 3 others, and of out and lse back, over one card."""
    queries = BLOCK_NBYTES // 2
    lse = 8 * TOKENS * 4

    found = predicted("ulysses", task(4), machine(), BLOCK_FLOPS / 1e-3, inner=4)

    sent = 3 / 4 * (2 * queries + BLOCK_NBYTES + lse)
    assert found.sent_nbytes == sent
    assert found.seconds == pytest.approx(4e-3 + sent / 12.5e9, rel=1e-9)


def test_links_between_nodes_set_the_pace_of_a_ring() -> None:
    slow = machine(2, bandwidth=1e12, between=1e9)

    found = predicted("ring", task(4), slow, 1e18)

    assert found.seconds == pytest.approx(3 * BLOCK_NBYTES / 1e9, rel=1e-3)


def test_an_outer_ring_has_an_inner_turn_for_its_hop() -> None:
    """Two nodes of 4: the one outer hop overlaps 4 steps, and is hidden where a ring's 7 are not."""
    hop = BLOCK_NBYTES / 1e9
    on, computing = machine(4, bandwidth=1e12, between=1e9), BLOCK_FLOPS / (hop / 2)

    outer = predicted("double-ring", task(8), on, computing, inner=4)
    plain = predicted("ring", task(8), on, computing)

    assert outer.seconds == pytest.approx(8 * hop / 2, rel=1e-9)
    assert plain.seconds == pytest.approx(7 * hop + hop / 2, rel=1e-9)


def test_queries_travel_with_their_state_one_step_behind() -> None:
    """A fully exposed pass-Q: P - 1 hops of q, P of the state, over one card; in 4 steps and one home."""
    queries = BLOCK_NBYTES // 2
    state = 8 * TOKENS * (128 + 2) * 4

    found = predicted("passq", task(4), machine(), 1e20)

    assert found.sent_nbytes == 3 * queries + 4 * state
    assert found.seconds == pytest.approx((3 * queries + 4 * state) / 12.5e9, rel=1e-4)


KV, Q, LSE = BLOCK_NBYTES, BLOCK_NBYTES // 2, 8 * TOKENS * 4
DKV, DQ, STATE = 2 * KV, 2 * Q, 8 * TOKENS * (128 + 2) * 4

#: The README's table, at 4 ranks: sent forward, sent backward, buffers forward.
SENT = {
    "ring": (1, 3 * KV, 3 * KV + 4 * DKV, 2 * KV),
    "bidirectional": (1, 3 * KV, 3 * KV + 4 * DKV, 2 * KV),
    "double-ring": (
        2,
        3 * KV,
        3 * KV + (4 + 2) * DKV,
        3 * KV,
    ),  # An inner ring of two needs one slot less.
    "passq": (1, 3 * Q + 4 * STATE, 3 * (2 * Q + 2 * LSE) + 4 * DQ, 2 * Q + 3 * STATE),
    "allgather": (1, 3 * KV, 3 * KV + 3 * DKV, 4 * KV),
    "ulysses": (
        4,
        3 / 4 * (2 * Q + KV + LSE),
        3 / 4 * (2 * Q + 2 * LSE + KV + DQ + DKV),
        None,
    ),
}


@pytest.mark.parametrize("method", SENT)
def test_bytes_are_those_of_the_table_of_methods(method: str) -> None:
    inner, forward, backward, held = SENT[method]

    forth = predicted(method, task(4), machine(), 1e12, FORWARD, inner)
    back = predicted(method, task(4), machine(), 1e12, BACKWARD, inner)

    assert (forth.sent_nbytes, back.sent_nbytes) == (forward, backward)
    assert held is None or forth.held_nbytes == held


def test_the_rate_is_that_of_the_length_of_a_block() -> None:
    rates = Curve(((1024.0, 1e12), (16_384.0, 5e12)))

    found = predicted("ring", task(1), machine(), rates)

    assert found.seconds == pytest.approx(BLOCK_FLOPS / 3e12, rel=1e-12)


def test_few_queries_on_many_keys_are_as_a_block_of_their_geometric_mean() -> None:
    rates = Curve(((1024.0, 1e12), (16_384.0, 5e12)))
    few = replace(task(1, tokens=16_384), queries=Layout("contiguous", 1024, 1, 15_360))

    found = predicted("ring", few, machine(), rates)

    assert found.seconds == pytest.approx(BLOCK_FLOPS / 3e12, rel=1e-12)


def test_ranks_without_tokens_cost_nothing() -> None:
    """Five ranks for three tokens; a hop of nothing is no hop."""
    keys = Layout("contiguous", 3, 5)

    found = predicted("ring", Task(SHAPE, keys, keys, True), machine(latency=1.0), 1e12)

    assert found.sent_nbytes == 3 * 2 * 2 * 8 * 128
    assert found.seconds == pytest.approx(4, rel=1e-6)


def test_all_pairs_of_a_task_are_counted() -> None:
    keys, queries = Layout("zigzag", 10, 3), Layout("zigzag", 4, 3, 6)

    assert Task(SHAPE, keys, queries, False).pairs == 40
    assert Task(SHAPE, keys, queries, True).pairs == 7 + 8 + 9 + 10


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_few_ranks_stand_for_all(
    layout: str, method: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, num_heads=12, num_kv_heads=12)
    given = task(12, tokens=64, causal=causal, layout=layout, shape=shape)
    on, inner = machine(4, latency=1e-6, bandwidth=1e12), 12 if method == "ulysses" else 4

    for direction in Pass:
        every = predicted(method, given, on, 1e12, direction, inner)
        with monkeypatch.context() as patch:
            patch.setattr(room, "WALK_ALL", 8)
            assert watched(12) == [0, 1, 3, 6, 10, 11]
            few = predicted(method, given, on, 1e12, direction, inner)
        assert few == every


def test_an_inner_ring_and_the_outer_one_hold_two_blocks_each() -> None:
    assert predicted("double-ring", task(9), machine(3), 1e12, inner=3).held_nbytes == 4 * KV
