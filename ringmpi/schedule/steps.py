"""The words that every schedule is written in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from ringmpi.layout import Layout, piece_of

#: The slot of a rank's own tensors, which are there before the first step and after the last.
HOME = -1


class Pass(Enum):
    """Which way through the attention."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Payload(Enum):
    """Which tensors lie together in one buffer."""

    KV = "kv"
    """k and v."""
    Q = "q"
    """q."""
    QDOUT = "q+dout"
    """q, dout, lse and delta: what a query needs in the backward pass."""
    STATE = "state"
    """acc, row_max and row_sum over some of the keys."""
    OUT = "out"
    """out and lse."""
    DQ = "dq"
    """dq summed over some of the keys, in the dtype of the state."""
    DKV = "dkv"
    """dk and dv summed over some of the queries, in the dtype of the state."""


#: Payloads that hold what was computed so far; the others are inputs, and never change on their way.
RESULTS = (Payload.STATE, Payload.OUT, Payload.DQ, Payload.DKV)

#: Payloads that go with the positions of keys; the others go with those of queries.
OF_KEYS = (Payload.KV, Payload.DKV)


@dataclass(frozen=True)
class Share:
    """Piece `index` of `pieces` nearly equal ones."""

    index: int
    pieces: int


WHOLE = Share(0, 1)


@dataclass(frozen=True)
class Part:
    """Some tokens and some heads of what one rank owns; in flight, one contiguous buffer.

    Attributes
    ----------
    payload : Payload
    owner : int
        The rank whose shard it is; its positions follow from the layout.
    tokens : Share
        Of the shard's tokens.
    heads : Share
        Of the query heads, and of the KV heads that these read.
    """

    payload: Payload
    owner: int
    tokens: Share = WHOLE
    heads: Share = WHOLE

    def __str__(self) -> str:
        shares = [
            f"{name} {share.index + 1}/{share.pieces}"
            for name, share in (("tokens", self.tokens), ("heads", self.heads))
            if share.pieces > 1
        ]
        return f"{self.payload.value} of {self.owner}" + (f" ({', '.join(shares)})" if shares else "")

    def as_payload(self, payload: Payload) -> Part:
        """Return the same tokens and heads of other tensors."""
        return replace(self, payload=payload)


@dataclass(frozen=True)
class Held:
    """A part in a slot: a buffer that parts arrive in and leave from, or `HOME`."""

    part: Part
    slot: int = HOME


class Direction(Enum):
    """Which way a part moves, seen from the rank whose schedule it is."""

    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True)
class Transfer:
    """One hop of one part, in flight while attends run.

    Attributes
    ----------
    direction : Direction
    peer : int
        The other rank.
    part : Part
    slot : int
        The buffer that it leaves from or arrives in; never `HOME`, which need not be contiguous.
    steps : int
        In how many steps, this one included, it may take its time: it is waited for in the last.
    """

    direction: Direction
    peer: int
    part: Part
    slot: int
    steps: int = 1


@dataclass(frozen=True)
class Attend:
    """Attend queries to keys, adding to what was computed before.

    Attributes
    ----------
    queries : Held
        `Payload.Q` in the forward pass, `Payload.QDOUT` in the backward pass.
    keys : Held
        `Payload.KV`.
    into : tuple of Held
        The state of the queries in the forward pass; dq and dkv in the backward pass.
    """

    queries: Held
    keys: Held
    into: tuple[Held, ...]


@dataclass(frozen=True)
class Clear:
    """Make a result one over nothing: zeros, or the identity of states."""

    held: Held


@dataclass(frozen=True)
class Copy:
    """Put a part into another place."""

    source: Held
    into: Held


@dataclass(frozen=True)
class Merge:
    """Add a result to another one over other keys or queries."""

    source: Held
    into: Held


@dataclass(frozen=True)
class Finish:
    """Normalise a state into out and lse; the state is used up."""

    state: Held
    into: Held


#: What a rank does by itself, in no time that counts beside an attend.
Chore = Clear | Copy | Merge | Finish


@dataclass(frozen=True)
class Step:
    """Transfers that overlap with attends; the step ends when those due and the attends are done.

    Attributes
    ----------
    before : tuple of Chore
        Done before the transfers are posted, in this order.
    transfers : tuple of Transfer
        Posted in this order.
    attends : tuple of Attend
    after : tuple of Chore
        Done once the transfers due in this step are, in this order.
    """

    transfers: tuple[Transfer, ...] = ()
    attends: tuple[Attend, ...] = ()
    before: tuple[Chore, ...] = ()
    after: tuple[Chore, ...] = ()


@dataclass(frozen=True)
class Shards:
    """What a method is told: who owns what, and whose schedule to make.

    Attributes
    ----------
    keys, queries : Layout
        Of k and v, and of q, over the same ranks.
    rank : int
        The rank whose schedule it is.
    inner : int
        Ranks of an inner group, for methods that have one; divides the number of ranks.
    """

    keys: Layout
    queries: Layout
    rank: int
    inner: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.keys.size

    def tokens(self, part: Part) -> range:
        """Return the indices of a part's tokens in its owner's shard."""
        layout = self.keys if part.payload in OF_KEYS else self.queries
        return piece_of(layout.shard_len(part.owner), part.tokens.pieces, part.tokens.index)


def parts_held(steps: Iterable[Step]) -> Iterator[Held]:
    """Yield every part that a schedule puts into a slot, or reads from one. Local."""
    for step in steps:
        for transfer in step.transfers:
            yield Held(transfer.part, transfer.slot)
        for doing in (*step.before, *step.attends, *step.after):
            for value in vars(doing).values():
                yield from (
                    h for h in (value if isinstance(value, tuple) else (value,)) if h.slot != HOME
                )
