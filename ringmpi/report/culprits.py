"""What the stalls of a result file are blamed on: a table, and a plain sentence for each culprit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from rich.console import Console

from ringmpi.blame import Blame, Cause, blame, least_stall
from ringmpi.metrics import compute_time, stall_time, typical_repeat
from ringmpi.report.text import milliseconds, plain_table
from ringmpi.schedule import Pass
from ringmpi.store import ResultFile
from ringmpi.timeline import Timeline, timeline_of

#: Beyond so many steps of all ranks nothing is blamed: a ring of 128 ranks has them, and takes 10 s.
MOST_STEPS = 2**14

#: Below this part of all that is blamed a culprit is one of the others.
MINOR = 0.05

#: What would help, by the policy that does not.
REMEDIES = {
    "wait": "nobody calls MPI while the ranks compute; try --progress poll",
    "poll": "MPI is called too seldom, or by too few; try --progress thread, or a core more for each rank",
    "thread": "the data comes later than with no compute beside it; give the thread a core of its own",
}

#: A rank slower than this part of the median is said to be.
SLOW = 0.95

Culprit = tuple[Cause, tuple[int, ...]]


def timeline_in(result: ResultFile, direction: Pass, repeat: int) -> Timeline | None:
    """Return a repeat on one clock; None beyond `MOST_STEPS`, or where not all are told. Local."""
    timings = result.timings(direction)
    if result.condensed(direction) or timings.records[0].size > MOST_STEPS:
        return None
    return timeline_of(timings, repeat, result.schedules(direction))


def blame_table(result: ResultFile, direction: Pass, console: Console) -> None:
    """Print what the stalls of the repeat of median length are blamed on, the largest part first."""
    timings = result.timings(direction)
    if not len(timings.records) or not np.isfinite(timings.records["waited_for"]).any():
        return  # Nothing moved, or the file is of an older ringmpi.
    repeat = typical_repeat(timings)
    timeline = timeline_in(result, direction, repeat)
    if timeline is None:
        console.print(f"blame: not told of more than {MOST_STEPS} steps of all ranks")
        return
    _warn_of_contradictions(timeline, console)
    totals = _totals(blame(timeline))
    stalls = float(stall_time(timeline.records).sum())
    ranks = len(timeline.records)
    least = f"{milliseconds(max(least_stall(timeline, 0, rank) for rank in range(ranks)))} ms"
    where = f"{direction.value} pass, repeat {repeat + 1}"
    if not totals:
        console.print(
            f"blame, {where}: nobody; all stalls together are {milliseconds(stalls)} ms on {ranks} rank(s), "
            f"none of them longer than {least}"
        )
        return
    blamed = sum(seconds for seconds, _ in totals.values())
    major = {key: found for key, found in totals.items() if found[0] >= MINOR * blamed}
    others = blamed - sum(seconds for seconds, _ in major.values())

    def row(cause: str, culprit: str, seconds: float, waiting: str) -> tuple[str, ...]:
        part = f"{seconds / (ranks * timeline.makespan):.1%}"
        return cause, culprit, milliseconds(seconds), part, waiting

    rows = [
        row(cause.value, culprit_name(cause, culprit), seconds, str(len(waiting)))
        for (cause, culprit), (seconds, waiting) in major.items()
    ]
    if len(totals) > len(major):
        rows.append(row("others", f"{len(totals) - len(major)} smaller", others, ""))
    rows.append(row("nobody", f"below {least}", max(0.0, stalls - blamed), ""))
    console.print(f"blame, {where}: stalls, sums over ranks, and their part of the time of all ranks")
    console.print(plain_table("", ("cause", "culprit", "stall ms", "of all", "ranks"), rows))
    for (cause, culprit), (seconds, waiting) in major.items():
        console.print(
            f"  {_sentence(cause, culprit, timeline, result.experiment.progress)}: "
            f"{milliseconds(seconds)} ms of stalls on {len(waiting)} rank(s)",
            soft_wrap=True,
        )


def _totals(pieces: Iterable[Blame]) -> dict[Culprit, tuple[float, set[int]]]:
    """Return for each cause and culprit its seconds and the ranks that waited, the longest first."""
    found: dict[Culprit, list[Blame]] = defaultdict(list)
    for piece in pieces:
        # Progress is a policy of all ranks.
        found[piece.cause, () if piece.cause is Cause.PROGRESS else piece.culprit].append(piece)
    totals = {
        culprit: (sum(piece.seconds for piece in its), {piece.rank for piece in its})
        for culprit, its in found.items()
    }
    return dict(sorted(totals.items(), key=lambda item: -item[1][0]))


def culprit_name(cause: Cause, culprit: tuple[int, ...]) -> str:
    """Return who or what is to blame, in a few words. Local."""
    if cause is Cause.PROGRESS:
        return "all ranks"
    return " -> ".join(map(str, culprit)) if cause is Cause.LINK else f"rank {culprit[0]}"


def _sentence(cause: Cause, culprit: tuple[int, ...], timeline: Timeline, policy: str) -> str:
    match cause:
        case Cause.LINK:
            return f"link {culprit_name(cause, culprit)} takes longer than the compute beside it"
        case Cause.IMBALANCE:
            pairs = timeline.records["pairs"].sum(axis=1)
            times = pairs[culprit[0]] / pairs.mean()
            fewer = "" if times > 1 else ", those that wait for it fewer"
            return f"imbalance: rank {culprit[0]} has {times:.2f} times the mean pairs{fewer}"
        case Cause.LATE_SENDER:
            return f"rank {culprit[0]} is {_how_slow(timeline, culprit[0])}"
        case Cause.PROGRESS:
            return f"progress: {REMEDIES[policy]}"


def _how_slow(timeline: Timeline, rank: int) -> str:
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = timeline.records["pairs"].sum(axis=1) / compute_time(timeline.records).sum(axis=1)
        part = float(rates[rank] / np.nanmedian(rates))
    return f"slow, computing at {part:.2f} of the median rate" if part < SLOW else "late"


def _warn_of_contradictions(timeline: Timeline, console: Console) -> None:
    found = sorted(timeline.contradictions(), key=lambda contradiction: -contradiction.seconds)
    if not found:
        return
    hop = found[0].hop
    console.print(
        f"# warning  {len(found)} receive(s) lie before their send by more than clocks may err, that from "
        f"rank {hop.sender} to {hop.receiver} in step {hop.step} by {found[0].seconds * 1e6:.1f} us more: "
        f"moments of different ranks cannot be compared",
        soft_wrap=True,
    )
