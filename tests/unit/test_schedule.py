from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pytest

from ringmpi.errors import ScheduleError
from ringmpi.layout import Layout
from ringmpi.schedule import GROUP_OPTIONS, METHODS, Pass, Shards, Step, check_schedule
from ringmpi.schedule.steps import (
    HOME,
    Attend,
    Clear,
    Copy,
    Direction,
    Finish,
    Held,
    Merge,
    Part,
    Payload,
    Share,
    Transfer,
    parts_held,
)

Schedules = list[list[Step]]

SIZES = range(1, 17)
FORWARD, BACKWARD = Pass.FORWARD, Pass.BACKWARD


@dataclass(frozen=True)
class Case:
    """A method on some ranks; a sequence of four tokens for each and one more, unless told otherwise."""

    method: str
    size: int
    inner: int = 1
    layout: str = "contiguous"
    tokens: int | None = None
    queries: int | None = None

    def __str__(self) -> str:
        inner = f", groups of {self.inner}" if self.inner > 1 else ""
        return f"{self.method} on {self.size}{inner}"

    @property
    def seq_len(self) -> int:
        return 4 * self.size + 1 if self.tokens is None else self.tokens

    def shards(self, rank: int) -> Shards:
        queries = self.seq_len if self.queries is None else self.queries
        return Shards(
            Layout(self.layout, self.seq_len, self.size),
            Layout(self.layout, queries, self.size, self.seq_len - queries),
            rank,
            self.inner,
        )

    def schedules(self, direction: Pass) -> Schedules:
        return [METHODS[self.method](self.shards(rank), direction) for rank in range(self.size)]

    def check(self, schedules: Schedules, direction: Pass) -> None:
        check_schedule(self.shards, schedules, direction)


def groups_of(method: str, size: int) -> list[int]:
    """Return how many ranks an inner group may have."""
    if method == "ulysses":
        return [size]
    return [n for n in range(1, size + 1) if size % n == 0] if method in GROUP_OPTIONS else [1]


CASES = [
    Case(method, size, inner)
    for method in sorted(METHODS)
    for size in SIZES
    for inner in groups_of(method, size)
]

#: A layout, which decides the lengths of shards and nothing else; tokens and queries on so many ranks.
SHAPES: dict[str, Callable[[int], tuple[str, int, int]]] = {
    "halves that are empty": lambda size: ("striped", 2 * size - 1, size + 1),
    "fewer queries than ranks": lambda size: ("zigzag", 3 * size, max(1, size // 2)),
    "fewer tokens than ranks": lambda size: ("zigzag", max(1, size - 1), max(1, size // 3)),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_schedules_of_all_ranks_fit_together(case: Case) -> None:
    for direction in Pass:
        case.check(case.schedules(direction), direction)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", [case for case in CASES if case.size in (1, 2, 3, 6, 8, 13)], ids=str)
def test_schedules_fit_together_whatever_the_lengths_of_shards(case: Case, shape: str) -> None:
    layout, tokens, queries = SHAPES[shape](case.size)
    queries = min(tokens, queries)
    case = replace(case, layout=layout, tokens=tokens, queries=queries)

    for direction in Pass:
        case.check(case.schedules(direction), direction)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_schedules_fit_together_where_most_ranks_own_nothing(
    method: str, size: int, tokens: int
) -> None:
    for inner in groups_of(method, size):
        case = Case(method, size, inner, "striped", tokens, 1)

        for direction in Pass:
            case.check(case.schedules(direction), direction)


# What each method does.


def moves(steps: Schedules, *payloads: Payload) -> list[tuple[int, int, Transfer]]:
    """Return rank, step and transfer of all sends of the given payloads, of all if none is given."""
    return [
        (rank, number, transfer)
        for rank, of_rank in enumerate(steps)
        for number, step in enumerate(of_rank)
        for transfer in step.transfers
        if transfer.direction is Direction.SEND and (not payloads or transfer.part.payload in payloads)
    ]


def hops(steps: Schedules, *payloads: Payload) -> Counter[int]:
    """Return how many hops the parts of each owner make."""
    return Counter(transfer.part.owner for _, _, transfer in moves(steps, *payloads))


def everybody(size: int, number: int) -> Counter[int]:
    return Counter({rank: number for rank in range(size) if number})


def route(steps: Schedules, payload: Payload, owner: int) -> list[int]:
    """Return the ranks that the parts of an owner leave from, in order."""
    found = [
        (number, rank)
        for rank, number, transfer in moves(steps, payload)
        if transfer.part.owner == owner
    ]
    return [rank for _, rank in sorted(found)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_receives_are_posted_before_sends(case: Case) -> None:
    if case.size > 8:
        case = replace(case, tokens=case.size)
    for direction in Pass:
        for step in chain(*case.schedules(direction)):
            ways = [transfer.direction for transfer in step.transfers]

            assert ways == sorted(ways, key=lambda way: way is Direction.SEND)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_part_without_tokens_moves(method: str) -> None:
    for inner in groups_of(method, 6):
        case = Case(method, 6, inner, tokens=3, queries=2)

        for direction in Pass:
            schedules = case.schedules(direction)
            moved = [transfer.part for _, _, transfer in moves(schedules)]

            assert moved
            assert all(case.shards(0).tokens(part) for part in moved)


class TestRing:
    @pytest.mark.parametrize("direction", Pass)
    @pytest.mark.parametrize("size", [1, 3, 4, 7])
    def test_a_rank_attends_to_the_blocks_upstream_of_it_in_order(
        self, size: int, direction: Pass
    ) -> None:
        schedules = Case("ring", size).schedules(direction)

        owners = [[a.keys.part.owner for step in steps for a in step.attends] for steps in schedules]

        assert owners == [[(rank - step) % size for step in range(size)] for rank in range(size)]

    @pytest.mark.parametrize("direction", Pass)
    @pytest.mark.parametrize("size", [1, 3, 4, 7])
    def test_a_block_makes_one_hop_fewer_than_there_are_ranks(self, size: int, direction: Pass) -> None:
        schedules = Case("ring", size).schedules(direction)

        # From its owner onwards each rank sends it once, apart from the last one.
        for owner in range(size):
            ranks = [(owner + hop) % size for hop in range(size - 1)]
            assert route(schedules, Payload.KV, owner) == ranks

    @pytest.mark.parametrize("size", [2, 3, 4, 7])
    def test_gradients_follow_their_block_and_make_one_hop_more_which_brings_them_home(
        self, size: int
    ) -> None:
        schedules = Case("ring", size).schedules(BACKWARD)

        for owner in range(size):
            ranks = [(owner + hop) % size for hop in range(size)]
            assert route(schedules, Payload.DKV, owner) == ranks
        assert all(len(steps) == size + 1 for steps in schedules)
        assert all(not steps[-1].attends for steps in schedules)

    def test_nothing_moves_on_one_rank(self) -> None:
        assert moves(Case("ring", 1).schedules(FORWARD)) == []
        assert moves(Case("ring", 1).schedules(BACKWARD)) == []

    @pytest.mark.parametrize("size", [2, 3, 7])
    def test_a_step_moves_the_block_of_the_next_and_the_gradients_of_the_last(self, size: int) -> None:
        schedules = Case("ring", size).schedules(BACKWARD)

        for rank, steps in enumerate(schedules):
            for number, step in enumerate(steps[:-1]):
                received = {
                    t.part for t in step.transfers if t.direction is Direction.RECEIVE
                }  # In the order of steps, upstream is one block behind.
                sent = {t.part for t in step.transfers if t.direction is Direction.SEND}
                here, before, after = ((rank - number + d) % size for d in (0, 1, -1))
                last, first = number == size - 1, number == 0
                assert {a.keys.part.owner for a in step.attends} == {here}
                kv = {Part(Payload.KV, here)} if not last else set()
                dkv = {Part(Payload.DKV, before)} if not first else set()
                assert sent == kv | dkv
                kv = {Part(Payload.KV, after)} if not last else set()
                dkv = {Part(Payload.DKV, here)} if not first else set()
                assert received == kv | dkv

    @pytest.mark.parametrize("direction", Pass)
    def test_everything_moves_the_same_way(self, direction: Pass) -> None:
        for rank, _, transfer in moves(Case("ring", 5).schedules(direction)):
            assert transfer.peer == (rank + 1) % 5


class TestBidirectional:
    @pytest.mark.parametrize("direction", Pass)
    @pytest.mark.parametrize("size", [2, 3, 4, 7])
    def test_halves_go_opposite_ways(self, size: int, direction: Pass) -> None:
        sent = moves(Case("bidirectional", size).schedules(direction))

        assert {transfer.part.tokens for _, _, transfer in sent} == {Share(0, 2), Share(1, 2)}
        for rank, _, transfer in sent:
            way = 1 if transfer.part.tokens.index == 0 else -1
            assert transfer.peer == (rank + way) % size

    @pytest.mark.parametrize("size", [2, 3, 4, 7])
    def test_each_half_makes_the_hops_of_a_ring(self, size: int) -> None:
        forward, backward = (Case("bidirectional", size).schedules(d) for d in Pass)

        assert hops(forward, Payload.KV) == everybody(size, 2 * (size - 1))
        assert hops(backward, Payload.KV) == everybody(size, 2 * (size - 1))
        assert hops(backward, Payload.DKV) == everybody(size, 2 * size)

    @pytest.mark.parametrize("size", [2, 3, 7])
    def test_both_directions_carry_data_in_every_step_of_the_gather(self, size: int) -> None:
        for steps in Case("bidirectional", size).schedules(FORWARD):
            for step in steps[:-1]:
                halves = [t.part.tokens.index for t in step.transfers if t.direction is Direction.SEND]
                assert sorted(halves) == [0, 1]

    def test_a_half_without_tokens_stays(self) -> None:
        schedules = Case("bidirectional", 4, tokens=4).schedules(BACKWARD)

        assert {transfer.part.tokens.index for _, _, transfer in moves(schedules)} == {0}


class TestPassQ:
    @pytest.mark.parametrize("direction", Pass)
    @pytest.mark.parametrize("size", [2, 3, 7])
    def test_no_key_moves(self, size: int, direction: Pass) -> None:
        schedules = Case("passq", size).schedules(direction)

        assert moves(schedules, Payload.KV, Payload.DKV) == []
        for rank, steps in enumerate(schedules):
            owners = {attend.keys.part.owner for step in steps for attend in step.attends}
            assert owners == {rank}

    @pytest.mark.parametrize(
        ("direction", "asking", "answer"),
        [(FORWARD, Payload.Q, Payload.STATE), (BACKWARD, Payload.QDOUT, Payload.DQ)],
        ids=["forward", "backward"],
    )
    @pytest.mark.parametrize("size", [2, 3, 7])
    def test_queries_walk_the_ring_and_their_answer_comes_home(
        self, size: int, direction: Pass, asking: Payload, answer: Payload
    ) -> None:
        schedules = Case("passq", size).schedules(direction)

        assert hops(schedules, asking) == everybody(size, size - 1)
        assert hops(schedules, answer) == everybody(size, size)
        assert len(moves(schedules)) == size * (2 * size - 1)
        for owner in range(size):
            assert route(schedules, answer, owner) == [(owner + hop) % size for hop in range(size)]

    def test_ranks_without_queries_send_none(self) -> None:
        schedules = Case("passq", 5, tokens=11, queries=2).schedules(FORWARD)

        assert set(hops(schedules)) == {0, 1}


class TestAllgather:
    @pytest.mark.parametrize("direction", Pass)
    @pytest.mark.parametrize("size", [1, 2, 3, 7])
    def test_a_rank_attends_to_all_blocks_in_one_step_which_moves_nothing(
        self, size: int, direction: Pass
    ) -> None:
        for steps in Case("allgather", size).schedules(direction):
            (busy,) = [step for step in steps if step.attends]

            assert sorted(a.keys.part.owner for a in busy.attends) == list(range(size))
            assert busy.transfers == ()
            assert steps.index(busy) == size - 1

    @pytest.mark.parametrize("size", [2, 3, 7])
    def test_a_rank_holds_all_blocks_at_once(self, size: int) -> None:
        for steps in Case("allgather", size).schedules(BACKWARD):
            attends = steps[size - 1].attends

            assert len({attend.keys.slot for attend in attends} - {HOME}) == size
            assert len({attend.into[1].slot for attend in attends} - {HOME}) == size - 1

    @pytest.mark.parametrize("size", [2, 3, 7])
    def test_gather_and_reduce_make_one_hop_fewer_than_there_are_ranks(self, size: int) -> None:
        forward, backward = (Case("allgather", size).schedules(d) for d in Pass)

        assert hops(forward) == everybody(size, size - 1)
        assert hops(backward, Payload.KV) == hops(backward, Payload.DKV) == everybody(size, size - 1)
        # From the rank after its owner, and to it.
        for owner in range(size):
            ranks = [(owner + hop) % size for hop in range(1, size)]
            assert route(backward, Payload.DKV, owner) == ranks
        assert {len(steps) for steps in forward} == {size}
        assert {len(steps) for steps in backward} == {2 * size - 1}


class TestUlysses:
    @pytest.mark.parametrize("direction", Pass)
    @pytest.mark.parametrize("size", [2, 3, 7])
    def test_all_moves_are_in_the_first_and_the_last_step(self, size: int, direction: Pass) -> None:
        for steps in Case("ulysses", size, size).schedules(direction):
            assert len(steps) == 3
            assert [bool(step.transfers) for step in steps] == [True, False, True]
            assert [len(step.attends) for step in steps] == [0, size * size, 0]

    @pytest.mark.parametrize(
        ("direction", "there", "back"),
        [
            (FORWARD, [Payload.Q, Payload.KV], [Payload.OUT]),
            (BACKWARD, [Payload.QDOUT, Payload.KV], [Payload.DQ, Payload.DKV]),
        ],
        ids=["forward", "backward"],
    )
    @pytest.mark.parametrize("size", [2, 3, 7])
    def test_everyone_sends_a_share_of_heads_to_everyone_and_gets_its_own_back(
        self, size: int, direction: Pass, there: list[Payload], back: list[Payload]
    ) -> None:
        schedules = Case("ulysses", size, size).schedules(direction)

        found = {
            (rank, number, transfer.peer, transfer.part) for rank, number, transfer in moves(schedules)
        }

        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        out = {
            (a, 0, b, Part(what, a, heads=Share(b, size))) for a, b in pairs for what in there
        }  # From owners to those who have the heads.
        home = {(b, 2, a, Part(what, a, heads=Share(b, size))) for a, b in pairs for what in back}
        assert found == out | home

    def test_it_is_a_hybrid_of_one_group(self) -> None:
        for direction in Pass:
            whole = Case("ulysses", 6, 6).schedules(direction)
            assert whole == Case("hybrid", 6, 6).schedules(direction)
            assert whole == Case("ulysses", 6, 1).schedules(direction)


class TestHybrid:
    @pytest.mark.parametrize("direction", Pass)
    @pytest.mark.parametrize("size", [1, 2, 5, 6])
    def test_degree_1_is_a_ring(self, size: int, direction: Pass) -> None:
        assert Case("hybrid", size).schedules(direction) == Case("ring", size).schedules(direction)

    @pytest.mark.parametrize(("size", "inner"), [(4, 2), (6, 2), (6, 3), (12, 4)])
    def test_all_to_alls_stay_in_groups_and_rings_go_across(self, size: int, inner: int) -> None:
        schedules = Case("hybrid", size, inner).schedules(BACKWARD)
        last = len(schedules[0]) - 1

        for rank, number, transfer in moves(schedules):
            if number in (0, last):
                assert transfer.peer // inner == rank // inner
            else:
                assert transfer.peer == (rank + inner) % size
                assert transfer.part.heads == Share(rank % inner, inner)

    @pytest.mark.parametrize(("size", "inner"), [(4, 2), (6, 2), (6, 3), (12, 4)])
    def test_hops_are_those_of_the_all_to_alls_and_of_the_rings(self, size: int, inner: int) -> None:
        schedules = Case("hybrid", size, inner).schedules(BACKWARD)
        groups = size // inner

        # Each share of each block goes to the rank that has its heads, unless that is its owner, and round.
        assert hops(schedules, Payload.QDOUT) == everybody(size, inner - 1)
        assert hops(schedules, Payload.KV) == everybody(size, inner - 1 + inner * (groups - 1))
        assert hops(schedules, Payload.DQ) == everybody(size, inner - 1)
        assert hops(schedules, Payload.DKV) == everybody(size, inner - 1 + inner * groups)


class TestDoubleRing:
    @pytest.mark.parametrize("direction", Pass)
    @pytest.mark.parametrize(
        ("size", "inner"), [(1, 1), (2, 1), (2, 2), (5, 5), (6, 1), (6, 6)], ids=str
    )
    def test_a_single_turn_or_turns_of_one_are_a_ring(
        self, size: int, inner: int, direction: Pass
    ) -> None:
        ring = Case("ring", size).schedules(direction)

        assert Case("double-ring", size, inner).schedules(direction) == ring

    @pytest.mark.parametrize("direction", Pass)
    @pytest.mark.parametrize(("size", "inner"), [(4, 2), (6, 2), (6, 3), (12, 4)])
    def test_a_turn_goes_over_one_group_after_the_other(
        self, size: int, inner: int, direction: Pass
    ) -> None:
        for rank, steps in enumerate(Case("double-ring", size, inner).schedules(direction)):
            owners = [attend.keys.part.owner for step in steps for attend in step.attends]

            group, place = divmod(rank, inner)
            turns = [(group - turn) % (size // inner) for turn in range(size // inner)]
            assert owners == [g * inner + (place - p) % inner for g in turns for p in range(inner)]

    @pytest.mark.parametrize(("size", "inner"), [(4, 2), (6, 2), (6, 3), (12, 4)])
    def test_a_block_has_a_whole_turn_to_go_to_the_next_group(self, size: int, inner: int) -> None:
        for direction in Pass:
            schedules = Case("double-ring", size, inner).schedules(direction)

            outer = [m for m in moves(schedules, Payload.KV) if m[2].peer // inner != m[0] // inner]
            within = [m for m in moves(schedules, Payload.KV) if m[2].peer // inner == m[0] // inner]

            assert {transfer.steps for _, _, transfer in outer} == {inner}
            assert {number % inner for _, number, _ in outer} == {0}
            assert {transfer.steps for _, _, transfer in within} == {1}
            assert all(t.peer == (rank + inner) % size for rank, _, t in outer)
            assert Counter(t.part.owner for _, _, t in outer) == everybody(size, size // inner - 1)
            inner_hops = (inner - 1) * (size // inner)
            assert Counter(t.part.owner for _, _, t in within) == everybody(size, inner_hops)

    @pytest.mark.parametrize(("size", "inner"), [(4, 2), (6, 2), (6, 3), (12, 4)])
    def test_sums_have_a_turn_too_but_for_the_last_one_which_nothing_hides(
        self, size: int, inner: int
    ) -> None:
        schedules = Case("double-ring", size, inner).schedules(BACKWARD)

        outer = [m for m in moves(schedules, Payload.DKV) if m[2].peer // inner != m[0] // inner]

        groups = size // inner
        times = Counter((number, transfer.steps) for _, number, transfer in outer)
        late = [(turn * inner + 1, inner) for turn in range(1, groups)]
        assert times == Counter(dict.fromkeys([*late, (size + 1, 1)], size))
        assert hops(schedules, Payload.DKV) == everybody(size, groups * inner + groups)


@pytest.mark.parametrize(
    "case", [Case(m, 6, n) for m in sorted(METHODS) for n in groups_of(m, 6)], ids=str
)
def test_every_rank_has_as_many_steps_and_sends_as_much(case: Case) -> None:
    for direction in Pass:
        schedules = replace(case, tokens=24).schedules(direction)

        sent = Counter(rank for rank, _, _ in moves(schedules))

        assert len({len(steps) for steps in schedules}) == 1
        assert len(set(sent.values())) == 1
        assert len(sent) == 6


# What is caught. First of all schedules, in every place, by rule.

Damage = Iterator[tuple[str, Schedules]]

FIELDS = ("before", "transfers", "attends", "after")


#: Where rules that have many things to try do it: ranks are alike.
SOMEBODY = (1,)


Place = tuple[int, int, str, int]


def elements(schedules: Schedules, *fields: str, ranks: Sequence[int] = SOMEBODY) -> Iterator[Place]:
    for rank in ranks:
        for number, step in enumerate(schedules[rank]):
            for field in fields or FIELDS:
                for index in range(len(getattr(step, field))):
                    yield rank, number, field, index


def element(schedules: Schedules, rank: int, number: int, field: str, index: int) -> Any:
    return getattr(schedules[rank][number], field)[index]


def changed(
    schedules: Schedules, rank: int, number: int, field: str, index: int, *instead: object
) -> Schedules:
    """Return schedules in which other elements, or none, stand in the place of one."""
    others = list(getattr(schedules[rank][number], field))
    others[index : index + 1] = instead
    found = [list(steps) for steps in schedules]
    found[rank][number] = replace(found[rank][number], **{field: tuple(others)})
    return found


def other_end(schedules: Schedules, rank: int, number: int, index: int) -> Place:
    """Return where the transfer is that meets one."""
    transfer = schedules[rank][number].transfers[index]
    mine = [
        at
        for at, other in enumerate(schedules[rank][number].transfers)
        if (other.peer, other.direction) == (transfer.peer, transfer.direction)
    ]
    theirs = [
        at
        for at, other in enumerate(schedules[transfer.peer][number].transfers)
        if other.peer == rank and other.direction is not transfer.direction
    ]
    return transfer.peer, number, "transfers", theirs[mine.index(index)]


def at_both_ends(
    schedules: Schedules, rank: int, number: int, field: str, index: int, **changes: object
) -> Schedules:
    found = schedules
    for at in ((rank, number, field, index), other_end(schedules, rank, number, index)):
        found = changed(found, *at, replace(element(found, *at), **changes))
    return found


def held_in(step: Step) -> Iterator[Held]:
    """Yield what a step's attends and transfers read or write."""
    yield from (Held(transfer.part, transfer.slot) for transfer in step.transfers)
    yield from chain(*((a.queries, a.keys, *a.into) for a in step.attends))


def other_slots(schedules: Schedules, rank: int, slot: int) -> list[int]:
    """Return some slots beside one: home, a new one, and neighbours that the rank uses."""
    used = {held.slot for held in parts_held(schedules[rank])}
    near = sorted(used - {slot}, key=lambda other: abs(other - slot))[:4]
    return [number for number in (HOME, 99, *near) if number != slot]


def left_out(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, ranks=range(case.size)):
        yield f"{place}", changed(schedules, *place)


def done_twice(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, ranks=range(case.size)):
        it = element(schedules, *place)
        if not isinstance(
            it, Clear
        ):  # To clear what is clear changes nothing, but is never seen either.
            yield f"{place}", changed(schedules, *place, it, it)


def hop_left_out(schedules: Schedules, case: Case) -> Damage:
    for rank, number, field, index in elements(schedules, "transfers", ranks=range(case.size)):
        there = other_end(schedules, rank, number, index)
        yield f"{rank, number, index}", changed(changed(schedules, rank, number, field, index), *there)


def hop_made_twice(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "transfers"):
        rank, number, _, index = place
        there = other_end(schedules, rank, number, index)
        found = schedules
        for at in (place, there):
            it = element(found, *at)
            found = changed(found, *at, it, it)
        yield f"{place}", found


def another_peer(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "transfers"):
        it = element(schedules, *place)
        for peer in set(range(case.size)) - {it.peer}:
            yield f"{place} {peer}", changed(schedules, *place, replace(it, peer=peer))


def another_part(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "transfers"):
        part = element(schedules, *place).part
        others = [replace(part, owner=owner) for owner in range(case.size)]
        others += [replace(part, payload=payload) for payload in Payload]
        others += [replace(part, heads=Share(at, part.heads.pieces)) for at in range(part.heads.pieces)]
        others += [
            replace(part, tokens=Share(at, part.tokens.pieces)) for at in range(part.tokens.pieces)
        ]
        for other in set(others) - {part}:
            it = element(schedules, *place)
            yield f"{place} {other}", changed(schedules, *place, replace(it, part=other))
            yield f"{place} {other}, both ends", at_both_ends(schedules, *place, part=other)


def another_slot(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "transfers"):
        it = element(schedules, *place)
        for slot in other_slots(schedules, place[0], it.slot):
            yield f"{place} {slot}", changed(schedules, *place, replace(it, slot=slot))


def other_ends_of_the_way(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "transfers"):
        it = element(schedules, *place)
        ways = {Direction.SEND: Direction.RECEIVE, Direction.RECEIVE: Direction.SEND}
        yield f"{place}", changed(schedules, *place, replace(it, direction=ways[it.direction]))


def another_time(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "transfers"):
        it = element(schedules, *place)
        for steps in {it.steps + 1, it.steps - 1, case.size + 5}:
            yield f"{place} {steps}", changed(schedules, *place, replace(it, steps=steps))
        # At both ends less time is no fault, but none at all is, and so is too much.
        for steps in (0, -1, it.steps + 1):
            yield f"{place} {steps}, both ends", at_both_ends(schedules, *place, steps=steps)


def messages_in_another_order(schedules: Schedules, case: Case) -> Damage:
    for rank, steps in enumerate(schedules):
        for number, step in enumerate(steps):
            for i, a in enumerate(step.transfers):
                for j, b in enumerate(step.transfers[:i]):
                    if (a.peer, a.direction) == (b.peer, b.direction):
                        order = list(step.transfers)
                        order[i], order[j] = b, a
                        found = [list(steps) for steps in schedules]
                        found[rank][number] = replace(step, transfers=tuple(order))
                        yield f"{rank, number, i, j}", found


def attended_elsewhere(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "attends"):
        attend = element(schedules, *place)
        for what, held in enumerate((attend.queries, attend.keys, *attend.into)):
            for slot in other_slots(schedules, place[0], held.slot):
                if slot == HOME and held.part.owner == place[0]:
                    continue  # Own tensors are at home too: to read or sum them there would be as good.
                helds = [attend.queries, attend.keys, *attend.into]
                helds[what] = replace(held, slot=slot)
                other = Attend(helds[0], helds[1], tuple(helds[2:]))
                yield f"{place} {what} {slot}", changed(schedules, *place, other)


def results_mixed_up(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "attends"):
        attend = element(schedules, *place)
        for owner in range(case.size):
            for at, held in enumerate(attend.into):
                into = list(attend.into)
                into[at] = replace(held, part=replace(held.part, owner=owner))
                if owner != held.part.owner:
                    other = replace(attend, into=tuple(into))
                    yield f"{place} {owner}", changed(schedules, *place, other)
        yield f"{place} none", changed(schedules, *place, replace(attend, into=attend.into[:-1]))


def attended_before_it_came(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "attends"):
        rank = place[0]
        attend = element(schedules, *place)
        if {attend.queries.part.owner, attend.keys.part.owner} != {rank}:
            found = changed(schedules, *place)
            found[rank][0] = replace(found[rank][0], attends=(*found[rank][0].attends, attend))
            yield f"{place}", found


def overwritten_instead_of_added(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "before", "after"):
        it = element(schedules, *place)
        if isinstance(it, Merge):
            step = schedules[place[0]][place[1]]
            first = next(c for c in step.after if isinstance(c, Merge) and c.into.slot == it.into.slot)
            if it.into.slot != HOME or it is not first:  # At home the first one finds nothing yet.
                yield f"{place}", changed(schedules, *place, Copy(it.source, it.into))
        elif isinstance(it, Copy) and it.into.slot != HOME:  # At home there is nothing to add to yet.
            yield f"{place}", changed(schedules, *place, Merge(it.source, it.into))


def cleared_instead(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "before", "after"):
        it = element(schedules, *place)
        if not isinstance(it, Clear):
            yield f"{place}", changed(schedules, *place, Clear(it.into))


def cleared_once_more(schedules: Schedules, case: Case) -> Damage:
    for rank, number, field, index in elements(schedules, "attends"):
        for held in element(schedules, rank, number, field, index).into:
            step = schedules[rank][number]
            found = [list(steps) for steps in schedules]
            found[rank][number] = replace(step, after=(Clear(held), *step.after))
            yield f"{rank, number, index}", found


def chore_of_another_part(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "before", "after"):
        it = element(schedules, *place)
        for name, held in vars(it).items():
            for owner in set(range(case.size)) - {held.part.owner}:
                other = replace(it, **{name: replace(held, part=replace(held.part, owner=owner))})
                yield f"{place} {name} {owner}", changed(schedules, *place, other)


def chore_in_another_place(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "before", "after"):
        it = element(schedules, *place)
        step = schedules[place[0]][place[1]]
        copied = {(c.source.part, c.source.slot) for c in step.after if isinstance(c, Copy)}
        for name, held in vars(it).items():
            for slot in other_slots(schedules, place[0], held.slot):
                own = slot == HOME and held.part.owner == place[0]
                if not own and (held.part, slot) not in copied:  # There it would be as good.
                    other = replace(it, **{name: replace(held, slot=slot)})
                    yield f"{place} {name} {slot}", changed(schedules, *place, other)


def chore_on_the_other_side_of_the_step(schedules: Schedules, case: Case) -> Damage:
    for place in elements(schedules, "before", "after"):
        rank, number, field, _ = place
        other = "after" if field == "before" else "before"
        step = schedules[rank][number]
        it = element(schedules, *place)
        within = replace(step, before=(), after=())
        # Only what comes in or goes out of the slots of a chore ties it to one side.
        if {held.slot for held in vars(it).values()} & {held.slot for held in held_in(within)}:
            found = changed(schedules, *place)
            there = getattr(step, other)
            moved = (it, *there) if other == "after" else (*there, it)
            found[rank][number] = replace(found[rank][number], **{other: moved})
            yield f"{place}", found


def sent_once_more_at_the_end(schedules: Schedules, case: Case) -> Damage:
    for rank, number, transfer in moves(schedules):
        if rank not in SOMEBODY:
            continue
        found = [list(steps) for steps in schedules]
        ends = ((rank, transfer), (transfer.peer, Transfer(Direction.RECEIVE, rank, transfer.part, 98)))
        for at, end in ends:
            last = found[at][number]
            found[at][number] = replace(
                last, transfers=(*last.transfers, replace(end, steps=transfer.steps))
            )
        yield f"{rank, number}", found


RULES: dict[str, Callable[[Schedules, Case], Damage]] = {
    rule.__name__.replace("_", " "): rule
    for rule in (
        left_out,
        done_twice,
        hop_left_out,
        hop_made_twice,
        another_peer,
        another_part,
        another_slot,
        other_ends_of_the_way,
        another_time,
        messages_in_another_order,
        attended_elsewhere,
        results_mixed_up,
        attended_before_it_came,
        overwritten_instead_of_added,
        cleared_instead,
        cleared_once_more,
        chore_of_another_part,
        chore_in_another_place,
        chore_on_the_other_side_of_the_step,
        sent_once_more_at_the_end,
    )
}

#: All methods; rings of three, since two hide which way round, and meshes of more than one of everything.
DAMAGED = [
    Case("ring", 3),
    Case("bidirectional", 3),
    Case("double-ring", 4, 2),
    Case("passq", 3),
    Case("allgather", 3),
    Case("ulysses", 3, 3),
    Case("hybrid", 4, 2),
]


def is_caught(case: Case, schedules: Schedules, direction: Pass) -> bool:
    try:
        case.check(schedules, direction)
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize("direction", Pass, ids=["forward", "backward"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", DAMAGED, ids=str)
def test_damage_of_any_element_is_caught(case: Case, rule: str, direction: Pass) -> None:
    schedules = case.schedules(direction)

    missed = [what for what, bad in RULES[rule](schedules, case) if not is_caught(case, bad, direction)]

    assert missed == []


# Then one example of each kind, for what is told.


def first(schedules: Schedules, rank: int, kind: type, payload: Payload | None = None) -> Place:
    """Return where a rank first does something, to a payload."""
    for place in elements(schedules, ranks=[rank]):
        it = element(schedules, *place)
        parts = [it.part] if isinstance(it, Transfer) else [held.part for held in helds(it)]
        if isinstance(it, kind) and (payload is None or payload in {part.payload for part in parts}):
            return place
    raise AssertionError(f"rank {rank} does no such thing")


def helds(doing: object) -> list[Held]:
    values = [value if isinstance(value, tuple) else (value,) for value in vars(doing).values()]
    return list(chain(*values))


def with_chores(schedules: Schedules, rank: int, number: int, **chores: object) -> Schedules:
    """Return schedules in which a rank does something more after what it did before, or before it."""
    found = [list(steps) for steps in schedules]
    step = found[rank][number]
    more = {name: (*getattr(step, name), chore) for name, chore in chores.items()}
    found[rank][number] = replace(step, **more)
    return found


def with_hop(
    schedules: Schedules,
    number: int,
    part: Part,
    source: tuple[int, int],
    target: tuple[int, int],
    steps: int = 1,
) -> Schedules:
    """Return schedules with a transfer more, from and to a rank's slot."""
    found = schedules
    for direction, (rank, slot), (peer, _) in (
        (Direction.SEND, source, target),
        (Direction.RECEIVE, target, source),
    ):
        transfer = Transfer(direction, peer, part, slot, steps)
        found = with_chores(found, rank, number, transfers=transfer)
    return found


def swapped(
    schedules: Schedules,
    rank: int,
    number: int,
    field: str,
    index: int,
    change: Callable[[Any], object],
) -> Schedules:
    place = rank, number, field, index
    return changed(schedules, *place, change(element(schedules, *place)))


def kv(owner: int) -> Part:
    return Part(Payload.KV, owner)


Damaged = tuple[Case, Pass, Callable[[Schedules], Schedules]]

RING, DOUBLE, MESH = Case("ring", 4), Case("double-ring", 6, 3), Case("hybrid", 4, 2)


def with_attend(schedules: Schedules, rank: int, number: int, attend: Attend) -> Schedules:
    """Return schedules in which a rank attends once more, with its own queries."""
    own = Held(attend.queries.part)
    return with_chores(schedules, rank, number, attends=replace(attend, queries=own))


def with_a_sum_for_nobody(schedules: Schedules, held: Held) -> Schedules:
    """Return schedules in which rank 1 reads a sum once, and adds to it afterwards."""
    home = Held(held.part)
    found = with_chores(schedules, 1, 0, before=Clear(held))
    for chore in (Merge(held, home), Merge(home, held)):
        found = with_chores(found, 1, 0, before=chore)
    return found


#: A state that rank 1 makes beside its own.
MADE = Held(Part(Payload.STATE, 1), 99)
OTHER_HEADS = Held(Part(Payload.KV, 1, heads=Share(0, 2)), 99)


def of_ring(damage: Callable[[Schedules], Schedules], direction: Pass = FORWARD) -> Damaged:
    return RING, direction, damage


def of_double_ring(damage: Callable[[Schedules], Schedules]) -> Damaged:
    return DOUBLE, BACKWARD, damage


def of_mesh(damage: Callable[[Schedules], Schedules], direction: Pass = BACKWARD) -> Damaged:
    return MESH, direction, damage


def on_transfer(payload: Payload, **changes: object) -> Callable[[Schedules], Schedules]:
    """Return how to change both ends of the first transfer of a payload that rank 2 takes part in."""
    return lambda s: at_both_ends(s, *first(s, 2, Transfer, payload), **changes)


TOLD: dict[str, tuple[Damaged, str]] = {
    "one end left out": (
        of_ring(lambda s: changed(s, 1, 0, "transfers", 0)),
        "step 0: from rank 0 to rank 1 sends and receives do not match: "
        r"kv of 0 in 1 step\(s\) sent, nothing received",
    ),
    "a hop left out": (
        of_ring(lambda s: changed(changed(s, 1, 0, "transfers", 0), 0, 0, "transfers", 1)),
        "rank 1, step 1: slot 1 holds None, not kv of 0",
    ),
    "no rank moves anything": (
        of_ring(lambda s: [[replace(step, transfers=()) for step in steps] for steps in s]),
        "rank 0, step 1: slot 1 holds None, not kv of 3",
    ),
    "sent to oneself": (
        of_ring(lambda s: changed(s, 2, 0, "transfers", 1, replace(s[2][0].transfers[1], peer=2))),
        "step 0: rank 2 sends to itself",
    ),
    "received from oneself": (
        of_ring(lambda s: with_hop(s, 0, kv(2), (2, 0), (2, 9))),
        "step 0: rank 2 sends to itself",
    ),
    "different times at the ends": (
        of_ring(lambda s: changed(s, 2, 0, "transfers", 1, replace(s[2][0].transfers[1], steps=2))),
        r"rank 2 to rank 3 .* kv of 2 in 2 step\(s\) sent, kv of 2 in 1 step\(s\) received",
    ),
    "used before it is due": (
        of_ring(on_transfer(Payload.KV, steps=2)),
        "rank 2, step 1: slot 1 is overwritten by kv of 1 while kv of 1 is in use",
    ),
    "another part on its way": (
        of_ring(on_transfer(Payload.KV, part=kv(3))),
        "rank 1, step 0: slot 0 holds kv of 1, not kv of 3",
    ),
    "overwritten while it is attended to": (
        of_ring(lambda s: with_hop(s, 0, kv(3), (3, 0), (1, 0))),
        "rank 1, step 0: slot 0 is overwritten by kv of 3 while kv of 1 is in use",
    ),
    "overwritten while it leaves": (
        of_ring(
            lambda s: with_hop(
                changed(s, 1, 0, "attends", 0), 0, kv(3), (3, 0), (1, s[1][0].attends[0].keys.slot)
            )
        ),
        "rank 1, step 0: slot 0 is overwritten by kv of 3 while kv of 1 is in use",
    ),
    "overwritten while it leaves for several steps": (
        of_double_ring(lambda s: with_chores(s, 1, 1, before=Copy(Held(kv(1)), Held(kv(1), 0)))),
        "rank 1, step 1: slot 0 is overwritten by kv of 1 while kv of 1 is in use",
    ),
    "overwritten while it comes for several steps": (
        of_double_ring(lambda s: with_chores(s, 1, 1, before=Copy(Held(kv(1)), Held(kv(1), 1)))),
        "rank 1, step 1: slot 1 is written by kv of 1 while kv of 4 arrives",
    ),
    "read while it comes for several steps": (
        of_double_ring(lambda s: with_chores(s, 1, 1, before=Copy(Held(kv(4), 1), Held(kv(4), 99)))),
        "rank 1, step 1: slot 1 is overwritten by kv of 4 while kv of 4 is in use",
    ),
    "added to while it leaves": (
        (Case("passq", 4), FORWARD, lambda s: with_attend(s, 1, 1, s[1][0].attends[0])),
        "rank 1, step 1: slot 2 is overwritten by state of 1 while state of 1 is in use",
    ),
    "two arrive in one slot": (
        of_ring(lambda s: with_hop(s, 0, kv(3), (3, 0), (1, s[1][0].transfers[0].slot))),
        "rank 1, step 0: slot 1 is written by kv of 3 while kv of 0 arrives",
    ),
    "moved from home": (
        of_ring(lambda s: with_hop(s, 0, kv(3), (3, HOME), (1, 99))),
        "rank 3, step 0: kv of 3 moves from or to home, where it need not be contiguous",
    ),
    "moved to home": (
        of_ring(lambda s: with_hop(s, 0, kv(3), (3, 0), (1, HOME))),
        "rank 1, step 0: kv of 3 moves from or to home",
    ),
    "the last step moves what nobody needs": (
        of_ring(lambda s: with_hop(s, 3, kv(1), (0, 1), (1, 0))),
        "rank 1, step 3: kv of 1 is in slot 0, and nobody needs it",
    ),
    "moved in vain, and overwritten": (
        of_ring(lambda s: with_hop(s, 0, kv(3), (3, 0), (2, 0 + 99))),
        "rank 2, step 3: kv of 3 is in slot 99, and nobody needs it",
    ),
    "under way at the end": (
        of_ring(lambda s: with_hop(s, 3, kv(0), (3, 1), (0, 99), 2)),
        "kv of 0 is still under way to or from rank",
    ),
    "attended twice": (
        of_ring(lambda s: changed(s, 1, 2, "attends", 0, *s[1][2].attends * 2)),
        "rank 1, step 2: state of 1 is given the queries of 1 with the keys of 3 twice",
    ),
    "not attended": (
        of_ring(lambda s: changed(s, 3, 2, "attends", 0)),
        "rank 3, step 3: out lacks the queries of 3 with the keys of 1",
    ),
    "own block not attended": (
        of_ring(lambda s: changed(s, 0, 0, "attends", 0)),
        "rank 0, step 3: out lacks the queries of 0 with the keys of 0",
    ),
    "not finished": (
        of_ring(lambda s: changed(s, 0, 3, "after", 0)),
        "rank 0, step 3: out lacks the queries of 0 with the keys of 0",
    ),
    "finished twice": (
        of_ring(lambda s: with_chores(s, 0, 1, after=s[0][3].after[0])),
        "rank 0, step 3: out of 0 at home is overwritten",
    ),
    "finished while it leaves": (
        of_ring(
            lambda s: with_chores(
                with_hop(
                    with_chores(s, 1, 0, before=Clear(MADE)), 0, MADE.part, (1, 99), (2, 99), steps=2
                ),
                *(1, 0),
                after=Finish(MADE, Held(Part(Payload.OUT, 1), 98)),
            )
        ),
        "rank 1, step 0: slot 99 is overwritten by state of 1 while state of 1 is in use",
    ),
    "used after it was finished": (
        of_ring(
            lambda s: with_chores(
                with_chores(
                    with_chores(s, 1, 0, before=Clear(MADE)),
                    *(1, 0),
                    after=Finish(MADE, Held(Part(Payload.OUT, 1), 98)),
                ),
                *(1, 1),
                after=Copy(MADE, Held(MADE.part, 97)),
            )
        ),
        "rank 1, step 1: slot 99 holds None, not state of 1",
    ),
    "a sum that nobody needs": (
        of_ring(lambda s: with_a_sum_for_nobody(s, Held(Part(Payload.DKV, 1), 99)), BACKWARD),
        "rank 1, step 4: dkv of 1 is in slot 99, and nobody needs it",
    ),
    "a state finished as that of another": (
        of_ring(
            lambda s: changed(
                s, 0, 3, "after", 0, Finish(Held(Part(Payload.STATE, 0)), Held(Part(Payload.OUT, 1)))
            )
        ),
        "rank 0, step 3: state of 0 cannot become out of 1",
    ),
    "queries finished": (
        of_ring(
            lambda s: changed(
                s, 0, 3, "after", 0, Finish(Held(Part(Payload.Q, 0)), Held(Part(Payload.OUT, 0)))
            )
        ),
        "rank 0, step 3: q of 0 is no state to finish",
    ),
    "gradients not brought home": (
        of_ring(lambda s: changed(s, 2, 4, "after", 0), BACKWARD),
        "rank 2, step 4: dkv of 2 is in slot 4, and nobody needs it",
    ),
    "no homecoming": (
        of_ring(lambda s: [steps[:-1] for steps in s], BACKWARD),
        "rank 0, step 3: dkv of 1 is in slot 3, and nobody needs it",
    ),
    "a sum that does not begin with nothing": (
        of_ring(lambda s: changed(s, 2, 1, "before", 0), BACKWARD),
        "rank 2, step 1: slot 3 holds None, not dkv of 1",
    ),
    "a sum merged twice": (
        of_ring(lambda s: changed(s, 2, 1, "after", 0, *s[2][1].after * 2), BACKWARD),
        "rank 2, step 1: dkv of 1 is given the queries of 1 with the keys of 1 twice",
    ),
    "a sum not merged": (
        of_ring(lambda s: changed(s, 2, 1, "after", 0), BACKWARD),
        "dkv of 1 is in slot 4, and is overwritten before anybody used it",
    ),
    "dq not computed": (
        of_ring(lambda s: changed(s, 2, 0, "attends", 0), BACKWARD),
        "rank 2, step 4: dq lacks the queries of 2 with the keys of 2",
    ),
    "an input cleared": (
        of_ring(lambda s: with_chores(s, 2, 0, before=Clear(Held(kv(2), 0)))),
        "rank 2, step 0: kv of 2 is no sum that begins with nothing",
    ),
    "out added up": (
        of_mesh(
            lambda s: swapped(s, 1, len(s[1]) - 1, "after", 0, lambda c: Merge(c.source, c.into)),
            FORWARD,
        ),
        "rank 1, step 3: out of 1 .heads 1/2. is no sum",
    ),
    "a part made of another": (
        of_ring(lambda s: swapped(s, 2, 0, "before", 0, lambda c: Copy(c.source, Held(kv(1), 0)))),
        "rank 2, step 0: kv of 2 cannot become kv of 1",
    ),
    "a result at home overwritten": (
        of_mesh(lambda s: swapped(s, 1, len(s[1]) - 1, "after", 3, lambda c: Copy(c.source, c.into))),
        "rank 1, step 4: dkv of 1 .heads 2/2. at home is overwritten",
    ),
    "an input at home overwritten": (
        of_ring(lambda s: with_chores(s, 1, 2, after=Copy(Held(kv(1)), Held(kv(1))))),
        "rank 1, step 2: kv of 1 is an input, and is written to",
    ),
    "another rank's home": (
        of_ring(lambda s: swapped(s, 1, 0, "attends", 0, lambda a: replace(a, keys=Held(kv(2))))),
        "rank 1, step 0: kv of 2 is not at home here",
    ),
    "heads that do not meet": (
        of_mesh(
            lambda s: with_chores(
                swapped(s, 1, 1, "attends", 0, lambda a: replace(a, keys=OTHER_HEADS)),
                *(1, 1),
                before=Copy(Held(OTHER_HEADS.part), OTHER_HEADS),
            )
        ),
        r"rank 1, step 1: .* \(heads 2/2\) meets kv of 1 \(heads 1/2\): heads must be the same",
    ),
    "queries that meet queries": (
        of_ring(lambda s: swapped(s, 1, 0, "attends", 0, lambda a: replace(a, keys=a.queries))),
        "rank 1, step 0: q of 1 meets q of 1: not queries and keys",
    ),
    "no gradients of keys": (
        of_ring(
            lambda s: swapped(s, 1, 0, "attends", 0, lambda a: replace(a, into=a.into[:1])), BACKWARD
        ),
        r"rank 1, step 0: q\+dout of 1 meets kv of 1: cannot give dq of 1",
    ),
    "pieces that do not line up": (
        of_ring(on_transfer(Payload.KV, part=Part(Payload.KV, 1, Share(0, 3), Share(0, 2)))),
        "slot 0 holds kv of 1, not kv of 1 .tokens 1/3, heads 1/2.",
    ),
    "one step more": (of_ring(lambda s: [*s[:3], [*s[3], Step()]]), "differ in length"),
    "one step fewer": (of_ring(lambda s: [s[0][:-1], *s[1:]]), "differ in length"),
    "one rank fewer": (of_ring(lambda s: s[:-1]), "rank 2 to rank 3 .* do not match"),
}


@pytest.mark.parametrize(("damaged", "told"), TOLD.values(), ids=TOLD.keys())
def test_damage_is_told(damaged: Damaged, told: str) -> None:
    case, direction, damage = damaged
    schedules = damage(case.schedules(direction))

    with pytest.raises(ScheduleError, match=told):
        case.check(schedules, direction)


def test_pieces_of_two_sizes_are_refused_since_they_do_not_line_up() -> None:
    halves, thirds = Case("hybrid", 6, 2), Case("hybrid", 6, 3)
    schedules = [*halves.schedules(FORWARD)[:3], *thirds.schedules(FORWARD)[3:]]
    longest = max(map(len, schedules))
    schedules = [steps + [Step()] * (longest - len(steps)) for steps in schedules]

    with pytest.raises(ScheduleError, match="heads are cut into 2 pieces and into 3"):
        halves.check(schedules, FORWARD)


def test_a_schedule_of_the_other_pass_is_refused() -> None:
    for method in sorted(METHODS):
        case = Case(method, 3, groups_of(method, 3)[-1])
        with pytest.raises(ScheduleError, match="out lacks the queries of 0 with the keys of 0"):
            case.check(case.schedules(BACKWARD), FORWARD)
        with pytest.raises(ScheduleError, match="dq lacks the queries of 0 with the keys of 0"):
            case.check(case.schedules(FORWARD), BACKWARD)


def test_a_part_without_tokens_may_not_be_sent() -> None:
    case = Case("ring", 4, tokens=2)

    with pytest.raises(ScheduleError, match="rank 3, step 0: kv of 3 has no tokens, and is sent"):
        case.check(with_hop(case.schedules(FORWARD), 0, kv(3), (3, 0), (0, 99)), FORWARD)


def test_a_share_at_home_is_over_no_more_than_was_put_there() -> None:
    schedules = MESH.schedules(BACKWARD)
    last = len(schedules[1]) - 1
    first, second, *others = schedules[1][last].after
    share = second.into.part
    empty = (Copy(Held(share), Held(share, 99)), Merge(Held(share, 99), Held(share)))
    after = (first, *empty, second, *others)
    schedules[1][last] = replace(schedules[1][last], after=after)

    assert share == Part(Payload.DQ, 1, heads=Share(1, 2))
    assert is_caught(MESH, schedules, BACKWARD) is False
