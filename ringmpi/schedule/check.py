"""Prove of the schedules of all ranks that they fit together, by going through them without any data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from ringmpi.errors import ScheduleError
from ringmpi.layout import piece_of
from ringmpi.schedule.steps import (
    HOME,
    OF_KEYS,
    RESULTS,
    WHOLE,
    Attend,
    Chore,
    Clear,
    Copy,
    Direction,
    Finish,
    Held,
    Merge,
    Part,
    Pass,
    Payload,
    Shards,
    Share,
    Step,
    Transfer,
)

#: A set of cells, each a bit. A cell is a part of the whole work that is done once: owner and piece of the
#: queries, the same of the keys, share of the heads.
Cells = int

#: Results that can be added up; out and lse cannot.
SUMS = (Payload.STATE, Payload.DQ, Payload.DKV)

ShardsOf = Callable[[int], Shards]


def check_schedule(
    shards_of: ShardsOf, schedules: Sequence[Sequence[Step]], direction: Pass = Pass.FORWARD
) -> None:
    """Raise unless the schedules of all ranks together compute the whole attention, or all its gradients.

    Checked: every send meets one receive, in the same step and order and with the same time to take;
    nothing is sent to oneself; a slot holds the part that is read from it, and is not written while it is
    in use; what is put into a slot is used before it is overwritten or the schedule ends; no result at home
    is overwritten; every pair of query and key is attended once; the results are home at the end, and over
    all keys (or all queries). Local.

    Parameters
    ----------
    shards_of : callable
        Returns what the method was told about a rank.
    schedules : sequence of sequence of Step
        One a rank.
    direction : Pass

    Raises
    ------
    ScheduleError
        Naming the rank, the step and the rule.
    """
    if len({len(schedule) for schedule in schedules}) != 1:
        raise ScheduleError("schedules differ in length: every rank takes part in every step")
    grid = _Grid(shards_of(0), schedules)
    ranks = [_Rank(shards_of(rank), grid) for rank in range(len(schedules))]
    for number, steps in enumerate(zip(*schedules, strict=True)):
        for rank, step in zip(ranks, steps, strict=True):
            rank.begin(number, step)
        messages = list(_messages(number, steps))
        contents = [ranks[sent.source].send(sent.transfer) for sent, _ in messages]
        for (_, received), cells in zip(messages, contents, strict=True):
            ranks[received.target].receive(received.transfer, cells)
        for rank, step in zip(ranks, steps, strict=True):
            rank.end(step)
    for rank in ranks:
        rank.check_end(direction)


class _Message(NamedTuple):
    """A transfer, and the two ranks that it is between."""

    source: int
    target: int
    transfer: Transfer


def _messages(number: int, steps: Sequence[Step]) -> Iterator[tuple[_Message, _Message]]:
    """Yield each send of a step with the receive that it meets, which is the first one left of its pair."""
    sent: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    received: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for rank, step in enumerate(steps):
        for transfer in step.transfers:
            if transfer.peer == rank:
                raise ScheduleError(f"step {number}: rank {rank} sends to itself")
            if transfer.direction is Direction.SEND:
                sent[rank, transfer.peer].append(_Message(rank, transfer.peer, transfer))
            else:
                received[transfer.peer, rank].append(_Message(transfer.peer, rank, transfer))
    for pair in sorted(sent.keys() | received.keys()):
        told, heard = (
            [(m.transfer.part, m.transfer.steps) for m in side[pair]] for side in (sent, received)
        )
        if told != heard:
            raise ScheduleError(
                f"step {number}: from rank {pair[0]} to rank {pair[1]} sends and receives do not match: "
                f"{_shown(told)} sent, {_shown(heard)} received"
            )
        yield from zip(sent[pair], received[pair], strict=True)


def _shown(parts: Sequence[tuple[Part, int]]) -> str:
    return ", ".join(f"{part} in {steps} step(s)" for part, steps in parts) or "nothing"


class _Grid:
    """The finest pieces that any part is cut into."""

    def __init__(self, shards: Shards, schedules: Sequence[Sequence[Step]]) -> None:
        self._size = shards.size
        layouts = shards.queries, shards.keys
        self._lens = [[layout.shard_len(rank) for rank in range(shards.size)] for layout in layouts]
        parts = {part for steps in schedules for step in steps for part in _parts(step)}
        self._tokens = self._finest("tokens", {part.tokens.pieces for part in parts})
        self._heads = self._finest("heads", {part.heads.pieces for part in parts})
        self._known: dict[tuple[bool, int, Share, Share], Cells] = {}

    def cells(self, part: Part) -> Cells:
        """Return all work that a part takes part in, which is none if it has no tokens."""
        of_keys = part.payload in OF_KEYS
        key = of_keys, part.owner, part.tokens, part.heads
        if key not in self._known:
            pieces = [self._pieces(of_keys, part.owner, part.tokens)]
            every = range(self._size)
            pieces.append([p for rank in every for p in self._pieces(not of_keys, rank, WHOLE)])
            queries, keys = reversed(pieces) if of_keys else pieces
            width = self._heads // part.heads.pieces
            heads = ((1 << width) - 1) << part.heads.index * width
            of_query = sum(heads << key * self._heads for key in keys)
            self._known[key] = sum(of_query << query * self._row for query in queries)
        return self._known[key]

    def memory(self, part: Part) -> Cells:
        """Return all work whose results lie where those of a part do, as far as heads may tell.

        Shares of query heads may read one KV head.
        """
        return self.cells(replace(part, heads=WHOLE) if part.payload in OF_KEYS else part)

    def owners(self, cells: Cells) -> str:
        """Return whose queries and keys the first of some cells is about."""
        first = (cells & -cells).bit_length() - 1
        query, rest = divmod(first, self._row)
        owners = query // self._tokens, rest // self._heads // self._tokens
        return f"the queries of {owners[0]} with the keys of {owners[1]}"

    @property
    def _row(self) -> int:
        """Cells of one piece of queries."""
        return self._size * self._tokens * self._heads

    def _pieces(self, of_keys: bool, owner: int, tokens: Share) -> list[int]:
        """Return the numbers of the pieces, among those of all ranks, that have tokens."""
        width = self._tokens // tokens.pieces
        pieces = range(tokens.index * width, (tokens.index + 1) * width)
        length = self._lens[of_keys][owner]
        return [owner * self._tokens + p for p in pieces if piece_of(length, self._tokens, p)]

    @staticmethod
    def _finest(axis: str, pieces: set[int]) -> int:
        cut = sorted(pieces - {1})
        if len(cut) > 1:
            raise ScheduleError(
                f"{axis} are cut into {cut[0]} pieces and into {cut[1]}, which do not fit"
            )
        return cut[0] if cut else 1


def _parts(step: Step) -> Iterator[Part]:
    yield from (transfer.part for transfer in step.transfers)
    for doing in (*step.before, *step.attends, *step.after):
        for value in vars(doing).values():
            yield from (held.part for held in (value if isinstance(value, tuple) else (value,)))


@dataclass(frozen=True)
class _Flight:
    """A transfer under way, until the end of step `last`; a result has `cells`."""

    transfer: Transfer
    last: int
    cells: Cells


class _Rank:
    """What lies where on one rank, as its schedule goes on."""

    def __init__(self, shards: Shards, grid: _Grid) -> None:
        self.rank = shards.rank
        self._grid = grid
        self._step = 0
        self._slots: dict[int, Part] = {}
        self._cells: dict[tuple[int, Payload], Cells] = {}  # What the results are over, by place.
        self._unread: dict[int, Part] = {}  # Received or made, and not used yet.
        self._leaving: dict[int, list[_Flight]] = defaultdict(list)
        self._coming: dict[int, _Flight] = {}

    def begin(self, number: int, step: Step) -> None:
        """Do what comes before a step's transfers."""
        self._step = number
        for chore in step.before:
            self._do(chore)

    def send(self, transfer: Transfer) -> Cells:
        """Post a send, and return what is sent, if it is a result."""
        self._refuse_home(transfer)
        if self._is_empty(transfer.part):
            self._fail(f"{transfer.part} has no tokens, and is sent")
        cells = self._content(Held(transfer.part, transfer.slot))
        last = self._step + transfer.steps - 1
        self._leaving[transfer.slot].append(_Flight(transfer, last, cells))
        return cells

    def receive(self, transfer: Transfer, cells: Cells) -> None:
        """Post a receive."""
        self._refuse_home(transfer)
        self._refuse_use(transfer.slot, transfer.part)
        self._forget(transfer.slot)
        last = self._step + transfer.steps - 1
        self._coming[transfer.slot] = _Flight(transfer, last, cells)

    def end(self, step: Step) -> None:
        """Do a step's attends, complete the transfers that are due, and do what comes after them."""
        for attend in step.attends:
            self._attend(attend)
        for slot, flight in list(self._coming.items()):
            if flight.last == self._step:
                del self._coming[slot]
                self._slots[slot] = self._unread[slot] = flight.transfer.part
                self._cells[slot, flight.transfer.part.payload] = flight.cells
        for slot, flights in self._leaving.items():
            self._leaving[slot] = [flight for flight in flights if flight.last > self._step]
        for chore in step.after:
            self._do(chore)

    def check_end(self, direction: Pass) -> None:
        """Refuse results that are not whole, and transfers that nobody needed."""
        for slot, part in self._unread.items():
            self._fail(f"{part} is in slot {slot}, and nobody needs it")
        under_way = [f.transfer for fs in (*self._leaving.values(), self._coming.values()) for f in fs]
        for transfer in under_way:
            self._fail(f"{transfer.part} is still under way to or from rank {transfer.peer}")
        forward = direction is Pass.FORWARD
        for payload in (Payload.OUT,) if forward else (Payload.DQ, Payload.DKV):
            needed = self._grid.cells(Part(payload, self.rank))
            if missing := needed & ~self._cells.get((HOME, payload), 0):
                self._fail(f"{payload.value} lacks {self._grid.owners(missing)}")

    def _attend(self, attend: Attend) -> None:
        """Add the work of an attend to what its results are over."""
        queries, keys = attend.queries.part, attend.keys.part
        for held in (attend.queries, attend.keys):
            self._content(held)
        if queries.payload not in (Payload.Q, Payload.QDOUT) or keys.payload is not Payload.KV:
            self._fail(f"{queries} meets {keys}: not queries and keys")
        if queries.heads != keys.heads:
            self._fail(f"{queries} meets {keys}: heads must be the same")
        backward = queries.payload is Payload.QDOUT
        of_queries = queries.as_payload(Payload.DQ if backward else Payload.STATE)
        expected = (of_queries, keys.as_payload(Payload.DKV)) if backward else (of_queries,)
        if tuple(held.part for held in attend.into) != expected:
            given = ", ".join(str(held.part) for held in attend.into)
            self._fail(f"{queries} meets {keys}: cannot give {given}")
        for held in attend.into:
            self._add(held, self._grid.cells(queries) & self._grid.cells(keys))

    def _do(self, chore: Chore) -> None:
        match chore:
            case Clear(held):
                self._refuse_no_sum(held)
                self._put(held, 0)
            case Copy(source, into):
                self._refuse_other(source, into, source.part.payload)
                self._put(into, self._content(source))
            case Merge(source, into):
                self._refuse_no_sum(into)
                self._refuse_other(source, into, source.part.payload)
                self._add(into, self._content(source))
            case Finish(state, into):
                self._refuse_other(state, into, Payload.OUT)
                if state.part.payload is not Payload.STATE:
                    self._fail(f"{state.part} is no state to finish")
                self._refuse_use(state.slot, state.part)
                self._put(into, self._content(state))
                self._cells.pop((state.slot, Payload.STATE), None)
                self._slots.pop(state.slot, None)

    def _content(self, held: Held) -> Cells:
        """Read a part; return what it is over, if it is a result."""
        part, slot = held.part, held.slot
        if self._is_empty(part):
            return 0  # Nothing of it is read, so nothing of it need be there.
        if slot == HOME:
            self._refuse_foreign(part)
        elif slot in self._coming:
            coming = self._coming[slot].transfer.part
            self._fail(f"slot {slot} is overwritten by {coming} while {part} is in use")
        elif self._slots.get(slot) != part:
            self._fail(f"slot {slot} holds {self._slots.get(slot)}, not {part}")
        self._unread.pop(slot, None)
        return self._cells.get((slot, part.payload), 0) & self._grid.cells(part)

    def _put(self, held: Held, cells: Cells) -> None:
        """Write a part as a whole."""
        part, slot = held.part, held.slot
        if slot == HOME:
            self._refuse_foreign(part)
            if part.payload not in RESULTS:
                self._fail(f"{part} is an input, and is written to")
            if self._cells.get((HOME, part.payload), 0) & self._grid.memory(part):
                self._fail(f"{part} at home is overwritten")
            self._add(held, cells)
            return
        self._refuse_use(slot, part)
        self._forget(slot)
        self._slots[slot] = part
        self._cells[slot, part.payload] = cells
        if not self._is_empty(part):
            self._unread[slot] = part

    def _add(self, held: Held, cells: Cells) -> None:
        """Add to a result what is over other cells."""
        part, slot = held.part, held.slot
        if self._is_empty(part):
            return
        if slot == HOME:
            self._refuse_foreign(part)
        else:
            self._refuse_use(slot, part)
            if self._slots.get(slot) != part:
                self._fail(f"slot {slot} holds {self._slots.get(slot)}, not {part}")
            self._unread[slot] = part
        place = slot, part.payload
        before = self._cells.get(place, 0)
        if twice := before & cells:
            self._fail(f"{part} is given {self._grid.owners(twice)} twice")
        self._cells[place] = before | cells

    def _is_empty(self, part: Part) -> bool:
        return not self._grid.cells(part)

    def _forget(self, slot: int) -> None:
        """Let a slot hold nothing, which what was received in vain must not come to."""
        if slot in self._unread:
            self._fail(
                f"{self._unread[slot]} is in slot {slot}, and is overwritten before anybody used it"
            )
        held = self._slots.pop(slot, None)
        if held is not None:
            self._cells.pop((slot, held.payload), None)

    def _refuse_use(self, slot: int, part: Part) -> None:
        """Refuse to write to a slot while a transfer uses it."""
        if slot in self._coming:
            self._fail(
                f"slot {slot} is written by {part} while {self._coming[slot].transfer.part} arrives"
            )
        if self._leaving[slot]:
            leaving = self._leaving[slot][0].transfer.part
            self._fail(f"slot {slot} is overwritten by {part} while {leaving} is in use")

    def _refuse_foreign(self, part: Part) -> None:
        if part.owner != self.rank:
            self._fail(f"{part} is not at home here")

    def _refuse_other(self, source: Held, into: Held, payload: Payload) -> None:
        """Refuse to make a part of what is another one."""
        if into.part != source.part.as_payload(payload):
            self._fail(f"{source.part} cannot become {into.part}")

    def _refuse_no_sum(self, held: Held) -> None:
        if held.part.payload not in SUMS:
            self._fail(f"{held.part} is no sum that begins with nothing and is added to")

    def _refuse_home(self, transfer: Transfer) -> None:
        if transfer.slot == HOME:
            self._fail(f"{transfer.part} moves from or to home, where it need not be contiguous")

    def _fail(self, rule: str) -> NoReturn:
        raise ScheduleError(f"rank {self.rank}, step {self._step}: {rule}")
