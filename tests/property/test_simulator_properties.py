"""Simulated passes, drawn: closed forms, two ways to one answer, work as in the schedules."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from simulating import BLOCK_FLOPS, SHAPE, TOKENS, by_events, machine, simulation, task

from ringmpi.metrics import overhead_time, stall_time
from ringmpi.model.machine import Machine
from ringmpi.model.prices import Prices, Task, held_nbytes
from ringmpi.schedule import GROUP_OPTIONS, METHODS, Pass, Shards
from ringmpi.schedule.hops import hops
from ringmpi.simulator.disturbance import Disturbance
from ringmpi.simulator.network import Shared, max_min_rates
from ringmpi.simulator.passes import Simulation
from ringmpi.simulator.record import AWAITED
from ringmpi.simulator.work import Work
from ringmpi.trace import MOMENTS, QUANTITIES

Array = np.ndarray[Any, np.dtype[Any]]

SECONDS = st.floats(1e-6, 10.0)


@given(
    ranks=st.integers(1, 9),
    compute=SECONDS,
    latency=st.floats(0.0, 1e-2),
    moving=SECONDS,
    eager=st.booleans(),
    events=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_equal_ranks_take_the_closed_form(
    ranks: int, compute: float, latency: float, moving: float, eager: bool, events: bool
) -> None:
    """``c + (P-1) max(c, x)`` with progress, ``P c + (P-1) x`` without; P = 1 takes c."""
    nbytes = 2 * 2 * 8 * 128 * TOKENS
    on = machine(
        flops=BLOCK_FLOPS / compute,
        latency=latency,
        bandwidth=max(nbytes / moving, 1e3),
        eager_limit=1e12 if eager else 0.0,
    )
    x = on.links["intra"].seconds(nbytes)
    for progress in ("poll", "wait"):
        made = simulation(task(ranks), on, progress=progress)
        records = (by_events(made) if events else made).run().records
        hidden = progress == "poll" or eager
        whole = compute + (ranks - 1) * max(compute, x) if hidden else ranks * compute + (ranks - 1) * x
        stall = (ranks - 1) * (max(0.0, x - compute) if hidden else x)

        # 1e-9 is asked for; moments are sums of at most 2 P numbers.
        assert abs(records["step_end"].max() - whole) <= 1e-12 * whole
        assert np.allclose(stall_time(records).sum(axis=1), stall, rtol=1e-9, atol=1e-12 * whole)
        assert np.abs(overhead_time(records)).max() <= 1e-12 * whole


@st.composite
def works(draw: st.DrawFn) -> tuple[Task, str, int, Pass]:
    method = draw(st.sampled_from(sorted(METHODS)))
    size = draw(st.integers(1, 9))
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    groups = divisors if method in GROUP_OPTIONS else [size if method == "ulysses" else 1]
    inner = draw(st.sampled_from(groups))
    seq_len = draw(st.integers(1, 60))
    query_len = draw(st.sampled_from([None, None, draw(st.integers(1, seq_len))]))
    kv_heads = draw(st.sampled_from([3, 9]))
    shape = replace(SHAPE, num_heads=9, num_kv_heads=kv_heads, head_dim=4)
    mask: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.integers(0, 3)) == 0:
        mask["window"] = draw(st.integers(0, 20))
    layout = draw(st.sampled_from(["contiguous", "striped", "zigzag"]))
    made = task(size, seq_len=seq_len, query_len=query_len, layout=layout, shape=shape, **mask)
    return made, method, inner, draw(st.sampled_from(list(Pass)))


def small_machine(draw: st.DrawFn, *, shared: bool) -> Machine:
    """Links so slow that hops of a few kB take as long as attends; shared ones now and then."""
    per_node = draw(st.integers(1, 4))
    return machine(
        per_node,
        flops=draw(st.sampled_from([1e6, 1e7, 1e8])),
        latency=draw(st.sampled_from([0.0, 1e-4])),
        bandwidth=1e6,
        inter=draw(st.sampled_from([3e5, 1e6])),
        total=1e6 if shared else 1e12,
        eager_limit=draw(st.sampled_from([0.0, 2e2, 1e9])),
    )


@given(works())
@settings(deadline=None, max_examples=60)
def test_work_is_what_the_schedules_say(drawn: tuple[Task, str, int, Pass]) -> None:
    """Attends, bytes, hops, ends and buffers of every rank and step, turned round or not."""
    given_task, method, inner, direction = drawn
    on = machine(3, flops=1e9)
    made = Work(given_task, method, inner, on, "float16", direction, 100)
    size, shape = given_task.size, given_task.shape
    schedules = [
        METHODS[method](Shards(given_task.keys, given_task.queries, rank, inner), direction)
        for rank in range(size)
    ]
    prices = Prices(given_task, on.rates("float16").of(direction), direction)
    told: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for hop in hops(schedules):
        told[hop.step, hop.due, hop.sender, hop.receiver].append(prices.nbytes(hop.part))

    assert made.steps == len(schedules[0])
    assert made.held_nbytes.tolist() == [held_nbytes(steps, prices) for steps in schedules]
    flown = {}
    for number in range(made.steps):
        load = made.load(number)
        for rank, steps in enumerate(schedules):
            attends = [(a.queries.part, a.keys.part) for a in steps[number].attends]
            pairs = sum(prices.attended(*a)[0] * len(shape.heads(a[0])) * shape.batch for a in attends)
            seconds = sum(prices.attended(*a)[1] for a in attends)
            assert load.pairs[rank] == pairs
            assert abs(load.compute[rank] - seconds) <= 1e-14 * seconds
        sent: Counter[int] = Counter()
        for flows, due in load.flows:
            rows = zip(
                flows.senders, flows.receivers, flows.nbytes, flows.parts, flows.messages, strict=True
            )
            for sender, receiver, *counts in rows:
                flown[number, due, int(sender), int(receiver)] = counts
                sent[int(sender)] += counts[0]
        assert load.sent["bytes_sent"].tolist() == [sent[rank] for rank in range(size)]
    assert flown == {
        key: [sum(sizes), len(sizes), sum(-(-nbytes // 100) for nbytes in sizes)]
        for key, sizes in told.items()
    }


@given(works(), st.data())
@settings(deadline=None, max_examples=60)
def test_recurrence_and_events_are_one_model(
    drawn: tuple[Task, str, int, Pass], data: st.DataObject
) -> None:
    given_task, method, inner, direction = drawn
    on = small_machine(data.draw, shared=False)
    uneven = Disturbance(
        noise=data.draw(st.sampled_from([0.0, 0.3])),
        seed=data.draw(st.integers(0, 9)),
        slow={data.draw(st.integers(0, given_task.size - 1)): 3.0},
    )
    made = simulation(
        given_task,
        on,
        method,
        inner,
        direction,
        progress=data.draw(st.sampled_from(["poll", "wait"])),
        disturbance=uneven,
    )
    assert made.by_recurrence
    assert_alike(made)


def test_which_of_two_transfers_was_the_last_does_not_hang_on_rounding() -> None:
    """Rank 5 waits for ranks 4 and 0, whose transfers end at once but for the last digits of their sums."""
    four_tokens = task(6, seq_len=4, shape=replace(SHAPE, num_heads=9, num_kv_heads=9, head_dim=4))
    on = machine(2, flops=1e6, latency=1e-4, bandwidth=1e6, inter=3e5, total=1e12)

    assert_alike(simulation(four_tokens, on, "allgather", disturbance=Disturbance(slow={0: 3.0})))


def assert_alike(made: Simulation) -> None:
    """Hold a recurrence against events, where flows do not overtake each other, nor move in pieces."""
    quick = made.run()
    if not made.by_recurrence:
        return
    told = by_events(made).run()

    whole = quick.records["step_end"].max()
    # Columns that say what was waited for are compared where traces have them.
    for name in (*MOMENTS, *(name for name in AWAITED if name in QUANTITIES)):
        # The same sums and maxima, of which the second kind may add in another order.
        assert np.allclose(
            quick.records[name], told.records[name], rtol=1e-12, atol=1e-12 * whole, equal_nan=True
        )
    for name in ("bytes_sent", "hops", "pairs"):
        assert quick.records[name].tolist() == told.records[name].tolist()


@given(works(), st.data())
@settings(deadline=None, max_examples=40)
def test_a_pass_is_never_shorter_than_its_compute_nor_than_its_transfers(
    drawn: tuple[Task, str, int, Pass], data: st.DataObject
) -> None:
    """With shared links too; without progress it takes as least as long; moments come in order."""
    given_task, method, inner, direction = drawn
    on = small_machine(data.draw, shared=True)
    spans = {}
    for progress in ("poll", "wait"):
        made = simulation(given_task, on, method, inner, direction, progress=progress)
        records, alone = made.run().records, made.run(computing=False).records
        compute = (records["compute_done"] - records["launched"]).sum(axis=1)
        whole = spans[progress] = records["step_end"].max()
        slack = 1e-12 * whole
        assert whole >= compute.max() - slack
        assert whole >= alone["step_end"].max() - slack
        ends = np.fmax(np.fmax(records["received"], records["sent"]), records["compute_done"])
        assert (records["step_end"] >= ends - slack).all()
        assert (records["started"][:, 1:] == records["step_end"][:, :-1]).all()
    # Eager flows may meet others that begin later without progress, and all finish earlier for it.
    if not given_task.size > 1 or on.links["intra"].eager_limit == 0.0:
        assert spans["wait"] >= spans["poll"] * (1 - 1e-12) or method in (
            "ulysses",
            "hybrid",
            "double-ring",
        )


@given(works())
@settings(deadline=None, max_examples=40)
def test_a_schedule_turned_round_gives_what_all_schedules_give(
    drawn: tuple[Task, str, int, Pass],
) -> None:
    given_task, method, inner, direction = drawn
    on = machine(2, flops=1e8, bandwidth=1e6)
    turned = simulation(given_task, on, method, inner, direction).run().records
    with patch.object(Work, "_alike", return_value=False):
        listed = simulation(given_task, on, method, inner, direction).run().records

    for name in (*MOMENTS, "bytes_sent", "messages", "hops", "pairs"):
        assert np.allclose(turned[name], listed[name], rtol=1e-12, atol=1e-15, equal_nan=True)


@given(
    capacity=st.lists(st.floats(0.5, 20.0), min_size=1, max_size=5),
    fastest=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8),
    data=st.data(),
)
@settings(deadline=None, max_examples=100)
def test_rates_are_max_min_fair(
    capacity: list[float], fastest: list[float], data: st.DataObject
) -> None:
    """No capacity is overdrawn, and who has less than it could use is on a full one where none has more."""
    none = len(capacity)
    uses = np.array(
        [
            (data.draw(st.lists(st.integers(0, none - 1), max_size=3, unique=True)) + [none] * 3)[:3]
            for _ in fastest
        ]
    )
    rates = max_min_rates(
        Shared(np.array([*capacity, np.inf]), uses), np.arange(len(fastest)), np.array(fastest)
    )

    near = 1e-9
    load = np.zeros(none + 1)
    np.add.at(load, uses.ravel(), np.repeat(rates, 3))
    assert (load[:none] <= np.array(capacity) * (1 + near)).all()
    for flow, rate in enumerate(rates):
        assert 0 < rate <= fastest[flow] * (1 + near)
        if rate < fastest[flow] * (1 - near):
            assert any(
                load[place] >= capacity[place] * (1 - near)
                and rate >= rates[(uses == place).any(axis=1)].max() * (1 - near)
                for place in uses[flow]
                if place < none
            )
