"""What all pictures are drawn of: pieces of time that fill every step, and hops between ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from synthetic import AFTER, POSTING, Rule, write_result

from ringmpi.blame import Blame, Cause
from ringmpi.metrics import compute_time, overhead_time, stall_time
from ringmpi.report.kinds import COMPUTE, INDEX, KINDS, OVERHEAD, UNBLAMED
from ringmpi.report.view import View, Views, make_view
from ringmpi.schedule import METHODS, Pass
from ringmpi.store import ResultFile
from ringmpi.timeline import timeline_of

#: Moments lie around 100 s, where float64 has 1.4e-14 s; sums of a few hundred of them are right to this.
EXACT = 1e-11


def views(path: Path, direction: Pass = Pass.FORWARD, **most: int) -> Views:
    with ResultFile(path) as result:
        return Views(result, direction, **most)


def seconds(view: View, *kinds: str) -> np.ndarray:
    """Return how long each step was of some kinds, shape (ranks shown, steps)."""
    found = np.zeros(view.records.shape)
    for piece in view.pieces():
        if KINDS[piece["kind"]].name in kinds:
            found[np.searchsorted(view.ranks, piece["rank"]), piece["step"]] += (
                piece["end"] - piece["begin"]
            )
    return found


STALLS = [kind.name for kind in KINDS if kind.name not in (COMPUTE, OVERHEAD)]


@pytest.mark.parametrize("direction", Pass)
@pytest.mark.parametrize("method", METHODS)
def test_pieces_fill_every_step_with_what_the_metrics_say(
    tmp_path: Path, method: str, direction: Pass
) -> None:
    path = write_result(
        tmp_path / "a.h5",
        4,
        rule=Rule(lambda rank, step: 0.002 * (rank + 1)),
        inner=2 if method in ("hybrid", "double-ring") else 1,
        method=method,
        backward=True,
        seq_len=50,
        heads=4,
    )
    made = views(path, direction)
    view, records = made.view(2), made.timings.records[2]

    assert np.abs(seconds(view, COMPUTE) - compute_time(records)).max() < EXACT
    assert np.abs(seconds(view, *STALLS) - stall_time(records)).max() < EXACT
    assert np.abs(seconds(view, OVERHEAD) - overhead_time(records)).max() < EXACT
    assert stall_time(records).max() > 0
    for rank, step in itertools.product(range(4), range(view.steps)):
        pieces = view.pieces()
        mine = np.sort(pieces[(pieces["rank"] == rank) & (pieces["step"] == step)], order="begin")
        assert (mine["end"][:-1] <= mine["begin"][1:] + EXACT).all()


def test_a_stall_is_blamed_as_it_was_found_and_the_rest_is_unblamed(tmp_path: Path) -> None:
    path = write_result(
        tmp_path / "a.h5", 2, rule=Rule(lambda rank, step: 0.001, transfer=0.009), alone=False
    )
    made = views(path)
    timeline = timeline_of(made.timings, 0, [[], []])
    stall = float(timeline.records["compute_done"][1, 0])
    blames = [
        Blame(1, 0, stall + 0.002, stall + 0.003, Cause.LATE_SENDER, (0,)),
        Blame(1, 0, stall - 1.0, stall + 0.002, Cause.IMBALANCE, (0,)),
        Blame(1, 0, stall + 0.005, stall + 9.0, Cause.LINK, (0, 1)),
        Blame(0, 0, stall, stall + 0.003, Cause.PROGRESS, (0,)),
    ]
    view = make_view(Pass.FORWARD, 0, timeline, {0: 0, 1: 1}, blames, lambda hop: 0)

    pieces = view.pieces()
    mine = np.sort(
        pieces[(pieces["rank"] == 1) & (pieces["step"] == 0) & (pieces["kind"] > 1)], order="begin"
    )
    names = [KINDS[kind].name for kind in mine["kind"]]
    assert names == ["imbalance", "late sender", UNBLAMED, "link"]
    # Posted by both at once, so the stall of 8 ms goes on for what the transfer takes beyond the compute.
    assert np.abs((mine["end"] - mine["begin"]) - [0.002, 0.001, 0.002, 0.003]).max() < EXACT
    assert mine["blame"].tolist() == [1, 0, -1, 2]
    others = np.sort(pieces[(pieces["rank"] == 0) & (pieces["kind"] > 1)], order="begin")
    assert others["kind"].tolist() == [INDEX["progress"], INDEX[UNBLAMED]]
    assert np.abs((others["end"] - others["begin"]) - [0.003, 0.005]).max() < EXACT


def test_ranks_whose_clocks_differ_are_shown_on_one(tmp_path: Path) -> None:
    alike, apart = (
        views(write_result(tmp_path / f"{len(offsets)}.h5", 3, offsets=offsets)).view()
        for offsets in ((), (0.0, 5.0, -7.0))
    )
    for name in ("started", "posted", "received", "step_end"):
        difference = apart.records[name] - alike.records[name]
        assert np.nanmax(np.abs(difference)) < EXACT
    assert alike.records["started"].min() == apart.records["started"].min() == 0
    assert apart.blames == [] or all(0 <= blame.begin <= apart.makespan for blame in apart.blames)


def test_arrows_go_from_posting_to_receiving_with_the_bytes_of_a_block(tmp_path: Path) -> None:
    # 50 tokens on 3 ranks: blocks of 17 or 16; k and v of 2 heads of 4 float32 each.
    rule = Rule(lambda rank, step: 0.01 * (rank + 1))
    view = views(write_result(tmp_path / "a.h5", 3, seq_len=50, rule=rule)).view(0)
    found = {(a.hop.sender, a.hop.step): a for a in view.arrows}
    assert set(found) == {(rank, step) for rank in range(3) for step in range(2)}
    first = found[0, 0]
    assert (first.hop.receiver, first.hop.due) == (1, 0)
    assert first.posted == pytest.approx(POSTING, abs=EXACT)
    assert first.received == pytest.approx(POSTING + 0.004, abs=EXACT)
    assert first.nbytes == 2 * 2 * 4 * 4 * 17
    assert found[0, 1].nbytes == 2 * 2 * 4 * 4 * 16  # Of rank 2, handed on.
    for rank in range(3):  # Each posts its second hop after its own first step.
        begins = POSTING + 0.01 * (rank + 1) + AFTER
        assert found[rank, 1].posted == pytest.approx(begins + POSTING, abs=EXACT)


def test_arrows_come_with_the_longest_stall_first(tmp_path: Path) -> None:
    slow_first = views(
        write_result(tmp_path / "a.h5", 4, rule=Rule(lambda rank, step: 0.03 if rank == 1 else 0.001))
    ).view()
    stalls = [arrow.stall for arrow in slow_first.arrows]
    assert stalls == sorted(stalls, reverse=True)
    assert slow_first.arrows[0].hop.receiver == 2  # It waits for rank 1.


def test_the_repeat_of_median_length_is_shown_first(tmp_path: Path) -> None:
    made = views(write_result(tmp_path / "a.h5", 2, repeats=5))
    assert made.by_length() == [2, 0, 4, 1, 3]  # Repeat i takes i % longer.
    assert made.view().repeat == 2


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        ({}, range(9)),
        ({"most_ranks": 3}, [0, 4, 8]),
        ({"most_steps": 20}, [0, 8]),  # Of 9 steps each.
        ({"most_steps": 1}, [0]),
    ],
)
def test_where_there_are_too_many_ranks_some_are_shown(
    tmp_path: Path, most: dict[str, int], expected: list[int]
) -> None:
    view = views(write_result(tmp_path / "a.h5", 9), **most).view()
    assert view.ranks.tolist() == list(expected)
    assert view.size == 9
    assert set(view.pieces()["rank"]) == set(expected)
    shown = {a.hop.sender for a in view.arrows} | {a.hop.receiver for a in view.arrows}
    assert shown <= set(expected)


def test_one_rank_has_neither_stall_nor_arrows(tmp_path: Path) -> None:
    view = views(write_result(tmp_path / "a.h5", 1, alone=False)).view()
    assert view.arrows == view.blames == []
    assert set(view.pieces()["kind"]) == {INDEX[COMPUTE], INDEX[OVERHEAD]}


#: Linear RGB as people without one kind of cone see it, from Machado, Oliveira and Fernandes (2009), table of
#: severity 1.0.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


def lab(colour: str, seen: np.ndarray) -> np.ndarray:
    """Return CIE L*a*b* of ``#rrggbb`` (sRGB, white D65) as somebody sees it."""
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(seen @ linear, 0, 1) / [0.95047, 1.0, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colours_can_be_told_apart_by_everybody(deficiency: str) -> None:
    papers = ["#ffffff", "#1c2027"]  # Of pictures, and of dark pages.
    seen = [
        lab(colour, DEFICIENCIES[deficiency]) for colour in [*papers, *(kind.colour for kind in KINDS)]
    ]
    distances = [np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)]
    # A difference of about 2.3 can just be noticed side by side (Mahy et al. 1994).
    assert min(distances) > 15
