"""Whatever happens in a run, the pieces of a stall make up the stall."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from walked import World, walked

from ringmpi.blame import Blame, Cause, blame, least_stall
from ringmpi.metrics import stall_time
from ringmpi.schedule import METHODS, Pass
from ringmpi.timeline import Timeline

#: Seconds of up to some thousand, each the sum of some hundred others.
ROUNDING = 1e-9


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    size = draw(st.integers(2, 6))
    method = draw(st.sampled_from(sorted(METHODS)))
    inner = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    options: dict[str, Any] = {
        "seq_len": draw(st.integers(1, 80)),
        "heads": 8,
        "kv_heads": draw(st.sampled_from([8, 2])),
        "method": method,
        "causal": draw(st.booleans()),
        "layout": draw(st.sampled_from(["contiguous", "zigzag", "striped"])),
    }
    ranks = st.integers(0, size - 1)
    seed = draw(st.integers(0, 2**16))
    noise = np.random.default_rng(seed).uniform(
        1, 1 + draw(st.sampled_from([0.0, 0.1, 2.0])), (size, 64)
    )
    world = World(
        pair=draw(st.floats(1e-4, 1e-2)),
        way=draw(st.floats(0.0, 2.0)),
        slow=draw(st.dictionaries(ranks, st.floats(0.3, 4.0), max_size=2)),
        ways=draw(st.dictionaries(st.tuples(ranks, ranks), st.floats(0.0, 5.0), max_size=3)),
        polls=draw(st.booleans()),
        rendezvous=draw(st.booleans()),
        late=draw(st.dictionaries(ranks, st.floats(0.0, 3.0), max_size=2)),
        noise=lambda rank, step: float(noise[rank, step]),
    )
    return walked(options, size, world, inner, draw(st.sampled_from(Pass)))


def by_stall(pieces: list[Blame]) -> dict[tuple[int, int], list[Blame]]:
    found: dict[tuple[int, int], list[Blame]] = defaultdict(list)
    for piece in pieces:
        found[piece.rank, piece.step].append(piece)
    return found


@settings(deadline=None, max_examples=60)
@given(timelines())
def test_pieces_lie_end_to_end_over_every_stall_that_means_something(timeline: Timeline) -> None:
    records, stalls = timeline.records, stall_time(timeline.records)
    told = by_stall(blame(timeline))
    for (rank, step), seconds in np.ndenumerate(stalls):
        if not seconds > 0:
            assert (rank, step) not in told
            continue
        least = least_stall(timeline, rank, int(records["waited_for"][rank, step]))
        if abs(seconds - least) > ROUNDING:
            assert ((rank, step) in told) is bool(seconds > least)
        pieces = told.get((rank, step), [])
        for before, after in pairwise(pieces):
            assert before.end == after.begin
            assert (before.cause, before.culprit) != (after.cause, after.culprit)
        for piece in pieces:
            assert len(pieces) == 1 or piece.seconds >= least - ROUNDING
        if pieces:
            assert pieces[0].begin == records["compute_done"][rank, step]
            assert pieces[-1].end == timeline.ends[rank, step]


@settings(deadline=None, max_examples=60)
@given(timelines())
def test_culprits_are_such_as_could_have_done_it(timeline: Timeline) -> None:
    links = {(hop.sender, hop.receiver) for hop in timeline.hops}
    for piece in blame(timeline):
        if piece.cause is Cause.LINK:
            assert piece.culprit in links
        elif piece.cause is Cause.PROGRESS:
            (rank,) = piece.culprit
            assert 0 <= rank < len(timeline.records)
        else:
            # Nobody waits for itself.
            assert piece.culprit != (piece.rank,)
            assert piece.culprit[0] < len(timeline.records)
