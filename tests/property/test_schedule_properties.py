from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ringmpi.layout import LAYOUTS, Layout
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
    Transfer,
)


@dataclass(frozen=True)
class Plan:
    """A method for some queries at the end of a sequence, over some ranks."""

    method: str
    layout: str
    seq_len: int
    query_len: int
    size: int
    inner: int

    def shards(self, rank: int) -> Shards:
        keys = Layout(self.layout, self.seq_len, self.size)
        first = self.seq_len - self.query_len
        return Shards(keys, Layout(self.layout, self.query_len, self.size, first), rank, self.inner)

    def schedules(self, direction: Pass) -> list[list[Step]]:
        return [METHODS[self.method](self.shards(rank), direction) for rank in range(self.size)]


@st.composite
def plans(draw: st.DrawFn, most_tokens: int, most_ranks: int) -> Plan:
    method = draw(st.sampled_from(sorted(METHODS)))
    seq_len = draw(st.integers(1, most_tokens))
    size = draw(st.integers(1, most_ranks))
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    groups = divisors if method in GROUP_OPTIONS else [size] if method == "ulysses" else [1]
    return Plan(
        method,
        draw(st.sampled_from(sorted(LAYOUTS))),
        seq_len,
        draw(st.integers(1, seq_len)),
        size,
        draw(st.sampled_from(groups)),
    )


@settings(deadline=None, max_examples=100)
@given(plans(60, 16), st.sampled_from(Pass))
def test_every_schedule_passes_its_check(plan: Plan, direction: Pass) -> None:
    assert check_schedule(plan.shards, plan.schedules(direction), direction) is None


# Schedules, interpreted without the package: a tensor says for each of its rows, which is a position and a
# head, what it has seen so far, how often. An input has seen nothing.

Row = tuple[int, int]
Rows = dict[Row, Counter[Row]]


def piece(length: int, pieces: int, index: int) -> range:
    """Return a piece of nearly equal ones, the first ones longer: as tokens dealt out in turn would be."""
    lengths = [len(range(at, length, pieces)) for at in range(pieces)]
    return range(sum(lengths[:index]), sum(lengths[: index + 1]))


class Heads:
    """Query heads and the KV heads that they read."""

    def __init__(self, query_heads: int, kv_heads: int) -> None:
        self.query_heads = query_heads
        self._group = query_heads // kv_heads

    def read_by(self, head: int) -> int:
        return head // self._group


class Rank:
    """What a rank has at home and in its slots."""

    def __init__(self, plan: Plan, rank: int, heads: Heads) -> None:
        self._shards = plan.shards(rank)
        self._heads = heads
        self._rank = rank
        self._slots: dict[int, tuple[Part, Rows]] = {}
        self.home: dict[Payload, Rows] = {
            payload: {row: Counter() for row in self.rows(Part(payload, rank))} for payload in Payload
        }

    def rows(self, part: Part) -> list[Row]:
        """Return the rows of a part."""
        of_keys = part.payload in (Payload.KV, Payload.DKV)
        layout = self._shards.keys if of_keys else self._shards.queries
        positions = layout.positions(part.owner).tolist()
        tokens = piece(len(positions), part.tokens.pieces, part.tokens.index)
        heads = list(piece(self._heads.query_heads, part.heads.pieces, part.heads.index))
        if of_keys:
            heads = sorted({self._heads.read_by(head) for head in heads})
        return [(positions[token], head) for token in tokens for head in heads]

    def read(self, held: Held) -> Rows:
        if held.slot == HOME:
            assert held.part.owner == self._rank
            return {row: self.home[held.part.payload][row] for row in self.rows(held.part)}
        if not self.rows(held.part):
            return {}
        part, rows = self._slots[held.slot]
        assert part == held.part
        return rows

    def write(self, held: Held, rows: Rows) -> None:
        assert sorted(rows) == sorted(self.rows(held.part))
        copied = {row: Counter(seen) for row, seen in rows.items()}
        if held.slot == HOME:
            assert held.part.owner == self._rank
            self.home[held.part.payload] |= copied
        else:
            self._slots[held.slot] = held.part, copied

    def lose(self, slot: int) -> None:
        """Let nobody read a slot until something came."""
        self._slots.pop(slot, None)

    def add(self, held: Held, rows: Rows) -> None:
        there = self.read(held)
        self.write(held, {row: there[row] + seen for row, seen in rows.items()})

    def do(self, chore: Any) -> None:
        match chore:
            case Clear(held):
                self.write(held, {row: Counter() for row in self.rows(held.part)})
            case Copy(source, into):
                self.write(into, self.read(source))
            case Merge(source, into):
                self.add(into, self.read(source))
            case Finish(state, into):
                self.write(into, self.read(state))
                self.write(state, {row: Counter({(-1, -1): 1}) for row in self.rows(state.part)})

    def attend(self, attend: Attend) -> None:
        queries, keys = list(self.read(attend.queries)), list(self.read(attend.keys))
        readers = [
            (query, key) for query in queries for key in keys if self._heads.read_by(query[1]) == key[1]
        ]
        seen: dict[Row, Counter[Row]] = {row: Counter() for row in queries}
        seen_by: dict[Row, Counter[Row]] = {row: Counter() for row in keys}
        for query, key in readers:
            seen[query][key] += 1
            seen_by[key][query] += 1
        for held, rows in zip(attend.into, (seen, seen_by), strict=False):
            if rows:
                self.add(held, rows)


Message = tuple[int, int, int, Transfer, Transfer]


def post(number: int, steps: Sequence[Step], ranks: Sequence[Rank]) -> list[Message]:
    """Return what is sent in a step: when it is due, from whom, to whom, and both ends of it."""
    sent: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    received: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for rank, step in enumerate(steps):
        for transfer in step.transfers:
            if transfer.direction is Direction.SEND:
                sent[rank, transfer.peer].append(transfer)
            else:
                received[transfer.peer, rank].append(transfer)
                ranks[rank].lose(transfer.slot)
    assert sent.keys() == received.keys()
    return [
        (number + send.steps - 1, *pair, send, receive)
        for pair, sends in sent.items()
        for send, receive in zip(sends, received[pair], strict=True)
    ]


def interpret(plan: Plan, direction: Pass, heads: Heads) -> list[Rank]:
    """Return the ranks as they are at the end; messages are read and written as late as they may be."""
    ranks = [Rank(plan, rank, heads) for rank in range(plan.size)]
    under_way: list[Message] = []
    for number, steps in enumerate(zip(*plan.schedules(direction), strict=True)):
        for rank, step in zip(ranks, steps, strict=True):
            for chore in step.before:
                rank.do(chore)
        under_way += post(number, steps, ranks)
        for rank, step in zip(ranks, steps, strict=True):
            for attend in step.attends:
                rank.attend(attend)
        for last, source, target, send, receive in under_way:
            if last == number:
                rows = ranks[source].read(Held(send.part, send.slot))
                ranks[target].write(Held(receive.part, receive.slot), rows)
        under_way = [message for message in under_way if message[0] > number]
        for rank, step in zip(ranks, steps, strict=True):
            for chore in step.after:
                rank.do(chore)
    assert not under_way
    return ranks


@st.composite
def heads_for(draw: st.DrawFn, inner: int) -> Heads:
    """Return at least a query head for each rank of a group."""
    group = draw(st.integers(1, 3))
    kv_heads = draw(st.integers(-(-inner // group), -(-inner // group) + 1))
    return Heads(group * kv_heads, kv_heads)


@settings(deadline=None, max_examples=150)
@given(plans(14, 6), st.data())
def test_every_query_meets_every_key_once(plan: Plan, data: st.DataObject) -> None:
    heads = data.draw(heads_for(plan.inner))

    ranks = interpret(plan, Pass.FORWARD, heads)

    found = {}
    for rank in ranks:
        found |= rank.home[Payload.OUT]
    queries = range(plan.seq_len - plan.query_len, plan.seq_len)
    assert found == {
        (query, head): Counter((key, heads.read_by(head)) for key in range(plan.seq_len))
        for query in queries
        for head in range(heads.query_heads)
    }


@settings(deadline=None, max_examples=150)
@given(plans(14, 6), st.data())
def test_every_pair_gives_once_to_the_gradients_of_both(plan: Plan, data: st.DataObject) -> None:
    heads = data.draw(heads_for(plan.inner))

    ranks = interpret(plan, Pass.BACKWARD, heads)

    of_queries, of_keys = {}, {}
    for rank in ranks:
        of_queries |= rank.home[Payload.DQ]
        of_keys |= rank.home[Payload.DKV]
    queries = range(plan.seq_len - plan.query_len, plan.seq_len)
    readers = range(heads.query_heads)
    assert of_queries == {
        (query, head): Counter((key, heads.read_by(head)) for key in range(plan.seq_len))
        for query in queries
        for head in readers
    }
    assert of_keys == {
        (key, heads.read_by(head)): Counter(
            (query, other)
            for query in queries
            for other in readers
            if heads.read_by(other) == heads.read_by(head)
        )
        for key in range(plan.seq_len)
        for head in readers
    }
