"""Simulated passes: closed forms, progress, eager messages, shared capacities, disturbances."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulating import (
    BLOCK_FLOPS,
    BLOCK_NBYTES,
    SHAPE,
    ByHand,
    Message,
    by_events,
    machine,
    simulation,
    task,
    work,
)

from ringmpi.errors import ConfigError, ScheduleError
from ringmpi.metrics import stall_time
from ringmpi.model.machine import (
    DRAGONFLY,
    FAT_TREE,
    INTER,
    Curve,
    Topology,
    constant,
)
from ringmpi.schedule import METHODS, Pass, Shards
from ringmpi.simulator import passes, record
from ringmpi.simulator.disturbance import (
    Disturbance,
    parse_delays,
    parse_noise,
    parse_stragglers,
)
from ringmpi.simulator.network import Shared, max_min_rates
from ringmpi.simulator.turn import check_turned

Array = np.ndarray[Any, np.dtype[Any]]

#: 16 MiB at 100 Gbit/s and 5 us. With bits read as bytes it would be 0.17 ms.
X = 1.34717728e-3


@pytest.mark.parametrize(
    ("compute", "progress", "whole", "stall"),
    [
        (0.5e-3, "poll", 4.541e-3, 2.541e-3),
        (3e-3, "poll", 12.000e-3, 0.0),
        (0.5e-3, "wait", 6.041e-3, 4.041e-3),
        (3e-3, "wait", 16.041e-3, 4.041e-3),
    ],
    ids=str,
)
def test_the_example_of_four_ranks(compute: float, progress: str, whole: float, stall: float) -> None:
    """c + 3 max(c, x) where transfers go on beside the compute, 4 c + 3 x where they don't."""
    on = machine(flops=BLOCK_FLOPS / compute)

    records = simulation(task(4), on, progress=progress).run().records

    assert records["step_end"].max() == pytest.approx(whole, abs=1e-6)  # As printed: to the us.
    assert stall_time(records).sum(axis=1) == pytest.approx(stall, abs=1e-6)
    hidden = progress == "poll"
    exact = compute + 3 * max(compute, X) if hidden else 4 * compute + 3 * X
    assert records["step_end"].max() == pytest.approx(exact, rel=1e-9)
    assert stall_time(records).sum(axis=1) == pytest.approx(
        3 * max(0.0, X - compute) if hidden else 3 * X, rel=1e-9, abs=1e-18
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("direction", Pass)
def test_one_rank_only_computes(method: str, direction: Pass) -> None:
    records = simulation(task(1), machine(flops=1e12), method, direction=direction).run().records

    seconds = BLOCK_FLOPS * (1.0 if direction is Pass.FORWARD else 2.5) / 1e12
    assert records["step_end"].max() == pytest.approx(seconds, rel=1e-9)
    assert not stall_time(records).any()
    assert not records["bytes_sent"].any()


@pytest.mark.parametrize("events", [False, True], ids=["recurrence", "events"])
@pytest.mark.parametrize("eager", [False, True], ids=["rendezvous", "eager"])
def test_a_message_of_no_bytes_costs_the_latency(events: bool, eager: bool) -> None:
    message = Message(0, 1, 0.0, latency=0.25, eager=eager, nbytes=0.0)
    made = ByHand([[0.0, 0.0]], [message]).simulation()

    records = (by_events(made) if events else made).run().records

    assert records["received"][1].tolist() == [0.25]
    assert records["step_end"][:, 0].tolist() == [0.0 if eager else 0.25, 0.25]


def test_the_same_answer_twice_whatever_clocks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, with noise and contention."""

    def run() -> Array:
        on = machine(4, node_total=12.5e9)
        uneven = Disturbance(noise=0.1, seed=3, slow={2: 1.5})
        made = simulation(task(6, causal=True), on, "bidirectional", disturbance=uneven)
        assert not made.by_recurrence
        return made.run().records

    first = run()
    for clock in ("time", "perf_counter", "monotonic", "process_time"):
        monkeypatch.delattr(time, clock)

    assert first.tobytes() == run().tobytes()


# ---- Lateness on its way round


def lateness(eager: bool, events: bool, seconds: float = 1e-3, slack: float = 0.0) -> Array:
    """Return by how much each step of 8 ranks ends later if step 2 of rank 3 computes longer."""
    compute = X + slack
    on = machine(flops=BLOCK_FLOPS / compute, eager_limit=1e9 if eager else 0.0)
    ends = []
    for delays in ({}, {(3, 2): seconds}):
        made = simulation(task(8), on, disturbance=Disturbance(delays=delays))
        ends.append((by_events(made) if events else made).run().records["step_end"])
    return np.asarray(ends[1] - ends[0])


@pytest.mark.parametrize("events", [False, True], ids=["recurrence", "events"])
def test_a_delay_reaches_rank_r_plus_k_by_step_s_plus_k(events: bool) -> None:
    """Eager messages leave without their receivers, so lateness goes one way round, a rank a step."""
    late = lateness(eager=True, events=events)

    for rank in range(8):
        since = 2 + (rank - 3) % 8
        since = since if since < 7 else 8  # Nothing moves in the last step.
        # Moments near 11 ms are sums of tens of numbers, each rounded to 1e-18.
        assert (np.abs(late[rank, :since]) < 1e-15).all()
        assert late[rank, since:] == pytest.approx(1e-3, rel=1e-9)


@pytest.mark.parametrize("events", [False, True], ids=["recurrence", "events"])
def test_with_rendezvous_the_sender_waits_for_a_late_receiver_too(events: bool) -> None:
    late = lateness(eager=False, events=events)

    for rank in range(8):
        away = min((rank - 3) % 8, (3 - rank) % 8)
        assert (np.abs(late[rank, : 2 + away]) < 1e-15).all()
        assert late[rank, 2 + away :] == pytest.approx(1e-3, rel=1e-9)


def test_slack_takes_a_delay_up() -> None:
    """Compute outlasts each transfer by 0.4 ms: what begins 1 ms late is late by 0.6, by 0.2, by 0."""
    late = lateness(eager=True, events=False, slack=0.4e-3)

    assert [late[rank, 7] for rank in (3, 4, 5, 6, 7)] == pytest.approx(
        [1e-3, 0.6e-3, 0.2e-3, 0.0, 0.0], abs=1e-15
    )


# ---- Progress and eager messages, by hand


@pytest.mark.parametrize("events", [False, True], ids=["recurrence", "events"])
@pytest.mark.parametrize(
    ("progress", "eager", "received", "sent"),
    [
        ("poll", False, 3.0, 3.0),  # From 1, when the receiver posts.
        ("poll", True, 2.0, 0.0),  # From 0; the sender is done at once.
        ("wait", False, 6.0, 6.0),  # From 4, when both wait.
        ("wait", True, 2.0, 0.0),
    ],
)
def test_when_a_transfer_of_two_seconds_begins(
    events: bool, progress: str, eager: bool, received: float, sent: float
) -> None:
    """Rank 1 computes for 1 s before it posts the receive, and for 3 s after that."""
    compute = [[0.0, 1.0], [0.5, 3.0]]
    # The sender posts at 0 too: its step 0 takes no time.
    made = ByHand(compute, [Message(0, 1, 2.0, step=1, due=1, eager=eager)]).simulation(progress)

    records = (by_events(made) if events else made).run().records

    assert records["received"][1, 1] == received
    assert records["sent"][0, 1] == sent
    assert records["step_end"][1, 1] == max(4.0, received)


def test_an_eager_message_that_is_early_is_seen_when_its_receive_is_posted() -> None:
    for events in (False, True):
        made = ByHand(
            [[0.0, 5.0], [0.0, 0.0]], [Message(0, 1, 2.0, step=1, due=1, eager=True)]
        ).simulation()
        records = (by_events(made) if events else made).run().records
        assert records["received"][1, 1] == records["started"][1, 1] == 5.0


def test_under_wait_a_transfer_of_several_steps_moves_while_both_wait() -> None:
    """A hop of 0.5 s in each step; the long one of 1.2 s moves meanwhile, and then for 0.2 s."""
    hops = [Message(r, (r + 1) % 4, 0.5, step, step) for r in range(4) for step in range(2)]
    long = [Message(r, (r + 2) % 4, 1.2, 0, 2) for r in range(4)]
    made = ByHand([[1.0] * 4] * 3, [*hops, *long]).simulation("wait")

    records = made.run().records

    assert made.way == "events"  # The recurrence does not know pieces.
    assert records["step_end"].tolist() == [pytest.approx([1.5, 3.0, 4.2])] * 4


def test_flows_of_a_connection_leave_one_after_the_other() -> None:
    for events in (False, True):
        messages = [Message(0, 1, 2.0, 0, 2, latency=0.5), Message(0, 1, 1.0, 1, 2, latency=0.5)]
        made = ByHand([[0.5, 0.5]] * 3, messages).simulation()
        records = (by_events(made) if events else made).run().records
        assert records["received"][1, 2] == 3.5  # From 0 to 2, then to 3, and on its way for 0.5.


# ---- Shared capacities


def test_a_capacity_is_shared_equally_and_what_one_cannot_use_is_left_to_others() -> None:
    """Three connections over 12: one can use 2, one has 3 elsewhere, so the other one has 7."""
    shared = Shared(np.array([12.0, 3.0, np.inf]), np.array([[0, 2], [0, 2], [0, 1]]))

    rates = max_min_rates(shared, np.arange(3), np.array([2.0, 100.0, 100.0]))

    assert rates.tolist() == [2.0, 7.0, 3.0]


def test_speeds_change_when_a_flow_begins_or_ends() -> None:
    """Over one card: alone for 1 s, by halves until the second has moved, alone again."""
    shared = Shared(
        np.array([1.0, np.inf]), np.array([[1]] * 3 + [[0]] + [[1]] * 2 + [[0]] + [[1]] * 2)
    )
    messages = [Message(0, 1, 3.0, 0, 1, nbytes=3.0), Message(0, 2, 1.0, 1, 1, nbytes=1.0)]
    # Ways 1 and 2 of 3 ranks; connections 3 and 6 are those out of rank 0.
    records = (
        ByHand([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], messages).simulation(shared=shared).run().records
    )

    assert records["received"][2, 1] == 3.0
    assert records["received"][1, 1] == 4.0


@pytest.mark.parametrize(
    ("node_total", "seconds"), [(4 * 12.5e9, 1.0), (2 * 12.5e9, 2.0), (12.5e9, 4.0)], ids=str
)
def test_ranks_of_a_node_share_its_cards(node_total: float, seconds: float) -> None:
    """An outer ring of two nodes of four: all four ranks send to the other node at once."""
    on = machine(4, flops=1e20, latency=0.0, node_total=node_total, bandwidth=1e15, inter=12.5e9)
    on = replace(on, links=on.links | {"intra": replace(on.links["intra"], node_total=np.inf)})

    whole = simulation(task(8), on, "double-ring", 4).run().records["step_end"].max()

    assert whole == pytest.approx(seconds * BLOCK_NBYTES / 12.5e9, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "groups", "slower"),
    [(FAT_TREE, 2, 4.0), (DRAGONFLY, 2, 4.0), (DRAGONFLY, 5, 16.0)],
    ids=str,
)
def test_what_leaves_a_group_is_tapered(kind: str, groups: int, slower: float) -> None:
    """Groups of four nodes of one rank with a taper of 1/16: at once four ranks send to the other group.

    A dragonfly of five groups has a fourth of that between each two.
    """
    topology = Topology(kind, 4, 1 / 16, groups=groups)
    on = machine(1, flops=1e20, latency=0.0, topology=topology)
    plain = simulation(task(8), replace(on, topology=None), "double-ring", 4).run()
    inner = 6 * BLOCK_NBYTES / 12.5e9  # Two inner rings beside and after the outer hop.

    whole = simulation(task(8), on, "double-ring", 4).run().records["step_end"].max()

    hop = slower * 4 * BLOCK_NBYTES / 12.5e9  # Four flows share a sixteenth of four cards.
    assert plain.records["step_end"].max() < 1.4 * inner
    assert whole == pytest.approx(hop + inner / 2, rel=2e-2)


def test_between_groups_a_message_takes_longer() -> None:
    topology = Topology(FAT_TREE, 2, 1.0, latency=1.0)
    on = machine(1, flops=1e20, latency=0.0, topology=topology)

    whole = simulation(task(4), on).run().records["step_end"].max()

    assert whole == pytest.approx(3 + 3 * BLOCK_NBYTES / 12.5e9, rel=1e-6)


def test_rates_follow_the_size_of_blocks_and_messages() -> None:
    on = machine()
    rates = Curve(((1024.0, 1e12), (16_384.0, 5e12)))  # 3e12 at 4096.
    bandwidth = Curve(((2.0**20, 1e9), (2.0**28, 9e9)))  # 5e9 at 16 MiB.
    links = {kind: replace(link, bandwidth=bandwidth, total=9e9) for kind, link in on.links.items()}
    on = replace(on, compute={"float16": replace(on.compute["float16"], forward=rates)}, links=links)

    records = simulation(task(2), on).run().records

    assert records["compute_done"][0, 0] == pytest.approx(BLOCK_FLOPS / 3e12, rel=1e-12)
    alone = simulation(task(2), on).run(computing=False).records
    assert alone["step_end"].max() == pytest.approx(5e-6 + BLOCK_NBYTES / 5e9, rel=1e-12)


# ---- Disturbances


def test_noise_has_the_mean_and_the_deviation_that_are_asked_for() -> None:
    calm = np.full(20_000, 2.0)

    noisy = Disturbance(noise=0.1, seed=5).of(calm, repeat=0, step=3)

    # Standard errors: of the mean 0.2 / sqrt(20000) = 1.4e-3, of the deviation a share of 1 / sqrt(40000).
    assert abs(noisy.mean() - 2.0) < 5 * 1.5e-3
    assert abs(noisy.std() - 0.2) < 5 * 0.2 / 200
    assert (noisy > 0).all()


def test_noise_depends_on_seed_repeat_step_and_rank_alone() -> None:
    def noise(seed: int, repeat: int, step: int, ranks: int = 5) -> list[float]:
        return Disturbance(noise=0.1, seed=seed).of(np.ones(ranks), repeat, step).tolist()

    known = noise(1, 0, 7)
    assert noise(1, 0, 7, ranks=9)[:5] == known
    others = [noise(2, 0, 7), noise(1, 1, 7), noise(1, 0, 8)]
    assert len({tuple(values) for values in (known, *others)}) == 4
    assert len(set(known)) == 5


def test_repeats_have_noise_of_their_own() -> None:
    made = simulation(task(4), machine(), disturbance=Disturbance(noise=0.1))

    assert made.run(0).records.tobytes() == made.run(0).records.tobytes()
    assert made.run(0).records.tobytes() != made.run(1).records.tobytes()


def test_transfers_alone_are_not_disturbed() -> None:
    uneven = Disturbance(noise=0.5, slow={1: 9.0}, delays={(0, 0): 1.0})

    alone = simulation(task(4), machine(), disturbance=uneven).run(computing=False).records

    assert alone["step_end"].max() == pytest.approx(3 * X, rel=1e-9)
    assert not (alone["compute_done"] - alone["launched"]).any()


def test_options_of_disturbances_are_read() -> None:
    assert parse_delays("0:3:2e-3,1:0:1") == {(0, 3): 2e-3, (1, 0): 1.0}
    assert parse_noise("0.02") == 0.02
    chosen = parse_stragglers("3:1.5", size=100, seed=4)
    assert list(chosen.values()) == [1.5] * 3
    assert chosen == parse_stragglers("3:1.5", size=100, seed=4)
    assert chosen != parse_stragglers("3:1.5", size=100, seed=5)


def four_stragglers(text: str) -> dict[int, float]:
    return parse_stragglers(text, 4, 0)


@pytest.mark.parametrize(
    ("read", "text", "rule"),
    [
        (parse_delays, "1:2", "delay='1:2': use RANK:STEP:SECONDS"),
        (parse_delays, "1:2:-1", "not below 0"),
        (parse_noise, "5%", "noise='5%': use a share"),
        (four_stragglers, "5:2", "only 4 ranks"),
        (four_stragglers, "2", "stragglers='2': use N:FACTOR"),
    ],
)
def test_wrong_disturbances_are_refused(read: Any, text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        read(text)


def test_ranks_that_there_are_not_cannot_be_slow() -> None:
    Disturbance(slow={3: 2.0}).check(4)
    for uneven in (Disturbance(slow={4: 2.0}), Disturbance(delays={(4, 0): 1.0})):
        with pytest.raises(ConfigError, match="there are 4, 0 to 3"):
            uneven.check(4)


# ---- Many ranks


@pytest.mark.parametrize("method", ["ring", "bidirectional"])
@pytest.mark.parametrize("more", [0, 5], ids=["even", "uneven"])
def test_a_condensed_trace_has_the_sums_of_the_whole_one(
    method: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways of going through a pass; the second shares a card between two directions."""
    uneven = Disturbance(noise=0.1, slow={5: 2.0})
    given = task(12, seq_len=12 * 64 + more, causal=True)

    def run() -> passes.Simulated:
        return simulation(given, machine(flops=1e9, bandwidth=1e9), method, disturbance=uneven).run()

    whole = run()
    monkeypatch.setattr(record, "MOST_ENTRIES", 100)
    condensed = run()

    assert not whole.condensed
    assert condensed.condensed
    assert condensed.records.shape == (12, 1)
    assert {0, 5, 11} <= set(condensed.watched.tolist())
    assert len(condensed.watched) < 12
    assert condensed.steps.tobytes() == whole.records[condensed.watched].tobytes()
    full, sums = whole.records, condensed.records[:, 0]
    for name in ("bytes_sent", "messages", "hops", "pairs", "computed_pairs", "flops"):
        assert sums[name].tolist() == full[name].sum(axis=1).tolist()
    compute = (full["compute_done"] - full["launched"]).sum(axis=1)
    assert sums["compute_done"] - sums["launched"] == pytest.approx(compute, rel=1e-12)
    # A stall is a difference of moments that have been added up in another order.
    error = 100 * np.finfo(np.float64).eps * full["step_end"].max()
    assert stall_time(sums) == pytest.approx(stall_time(full).sum(axis=1), abs=error)
    assert sums["step_end"].tolist() == full["step_end"][:, -1].tolist()
    assert np.isnan(sums["tiles"]).all()


def test_a_schedule_that_does_not_turn_is_refused() -> None:
    made = work(task(4), machine())
    first = made._schedules[0]
    given = made._task
    other = METHODS["ring"](Shards(given.keys, given.queries, 1), Pass.FORWARD)
    check_turned(first, other, made._turn, 1)
    other[2] = replace(other[2], transfers=())

    with pytest.raises(ScheduleError, match="step 2: rank 1 does not do"):
        check_turned(first, other, made._turn, 1)


def test_without_tokens_for_all_every_schedule_is_made() -> None:
    made = work(task(5, seq_len=3), machine())

    assert not made.by_turning
    assert (
        sum(made.load(step).sent["hops"].sum() for step in range(5)) == 4 * 3
    )  # Three blocks, four hops.


def test_too_many_schedules_are_refused() -> None:
    with pytest.raises(ConfigError, match="use at least 8192 tokens"):
        work(task(2048, seq_len=2000), machine())


def test_a_window_over_many_tokens_is_refused_and_a_small_one_priced() -> None:
    with pytest.raises(ConfigError, match="at most 512 ranks"):
        work(task(1024, window=5), machine())
    with pytest.raises(ConfigError, match="use fewer ranks or at most"):
        work(task(512, seq_len=2**23, window=5), machine())

    given = task(3, seq_len=50, causal=True, window=5, documents=(0, 20, 50))
    loads = [work(given, machine()).load(step) for step in range(3)]
    assert sum(load.pairs.sum() for load in loads) == 8 * given.pairs
    assert (
        given.pairs == 50 * 6 - 2 * 15
    )  # Each of 50 sees 5 before itself, but for the first 5 of each.


def test_with_noise_and_contention_many_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MOST_EVENTS", 30)
    made = simulation(task(6), machine(), "bidirectional", disturbance=Disturbance(noise=0.1))

    with pytest.raises(ConfigError, match="ranks=6: with noise the 36 steps"):
        made.run()
    simulation(task(6), machine(), "bidirectional").run()


def test_heads_are_shared_as_in_the_schedules() -> None:
    """Ten query heads and five KV heads among four ranks of a group: nobody has as many as the others."""
    shape = replace(SHAPE, num_heads=10, num_kv_heads=5)
    given = task(8, seq_len=8 * 16, causal=True, shape=shape)
    made = work(given, machine(), "hybrid", 4)

    assert made.by_turning
    total = sum(made.load(step).pairs.sum() for step in range(made.steps))
    assert total == 10 * given.pairs


def test_links_between_nodes_hold_up_the_ring() -> None:
    on = machine(2, flops=1e20, bandwidth=1e15, inter=1e9, latency=0.0)

    whole = simulation(task(4), on).run().records["step_end"].max()

    assert whole == pytest.approx(3 * BLOCK_NBYTES / 1e9, rel=1e-3)
    assert on.links[INTER].bandwidth == constant(1e9)
