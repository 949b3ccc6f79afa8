"""What a report says about blame, and about what progress takes, of traces with known causes."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from walked import World, pairs_of, walk

from ringmpi.config import experiment_from
from ringmpi.report.culprits import MOST_STEPS, blame_table
from ringmpi.report.tables import cost_of_progress, share_of_device
from ringmpi.schedule import Pass
from ringmpi.store import TIMINGS, ResultFile, ResultWriter

#: Blocks of 8 by 8 pairs, of which each takes 10 ms.
PAIR = 0.01 / 64

RANKS = 4


def written(
    path: Path,
    world: World,
    offset: float = 0.0,
    polling: Any = 0.0,
    device_time: float = 0.0,
    **options: Any,
) -> ResultFile:
    """Return a result of two repeats, the second one longer; rank 1's clock is ahead by an offset."""
    given = {"seq_len": 8 * RANKS, "heads": 1, "kv_heads": 1, "head_dim": 1, **options}
    experiment = experiment_from(given)
    schedules = experiment.schedules(RANKS, 1, Pass.FORWARD)
    pairs = pairs_of(given, RANKS, 1, Pass.FORWARD)
    beside, alone = walk(schedules, pairs, world), walk(schedules, pairs, world.silent())
    beside["polling"], beside["device_time"] = polling, device_time
    with ResultWriter(path) as writer:
        writer.texts("ranks/hostname", ["node"] * RANKS, "node")
        for name, records in (("", beside), ("/alone", alone)):
            group = TIMINGS[Pass.FORWARD] + name
            writer.records(group, (2, *records.shape))
            for rank, its in enumerate(records):
                its["bytes_sent"] = 0.0  # Every run knows them; these tests do not ask.
                longer = its.copy()
                longer["step_end"][-1] += 0.001
                writer.write_records(group, rank, np.stack([its, longer]))
        zeros = np.zeros((1, RANKS))
        told = np.array([[0.0, offset, 0.0, 0.0]])
        for name, table in (("measured_at", zeros), ("offset", told), ("error_bound", zeros)):
            writer.table(f"clocks/{name}", table, "s", name)
        writer.facts("machine", {"inner_ranks": 1})
        writer.describe(experiment, "ringmpi run")
        writer.commit()
    return ResultFile(path)


def told(result: ResultFile, tell: Any = blame_table) -> str:
    text = io.StringIO()
    with result:
        tell(result, Pass.FORWARD, Console(file=text, width=140))
    return text.getvalue()


def rows(text: str) -> list[list[str]]:
    """Return the cells of the table's rows."""
    lines = text.splitlines()
    first = next(
        number for number, line in enumerate(lines) if line.split()[:2] == ["cause", "culprit"]
    )
    return [
        re.split(r" {2,}", line.strip()) for line in lines[first + 1 :] if not line.startswith("  rank")
    ]


def test_the_table_has_the_longest_first_and_its_part_of_all_time(tmp_path: Path) -> None:
    """Rank 2 waits for slow rank 1, 10 and 20 ms, and rank 3 once for the link from rank 2, 13 ms."""
    world = World(PAIR, 1e-6, slow={1: 3.0}, ways={(2, 3): 0.013})
    text = told(written(tmp_path / "a.h5", world))
    found = rows(text)
    assert [row[:2] for row in found[:2]] == [["late sender", "rank 1"], ["link", "2 -> 3"]]
    seconds = [float(row[2]) for row in found[:2]]
    assert seconds == [30.0, 13.0]
    # 4 ranks, and 4 steps of 30 ms on the slowest one; the repeat told is the longer one, by 1 ms.
    assert found[0][3] == f"{seconds[0] / (4 * 121):.1%}"
    assert "blame, forward pass, repeat 2" in text


@pytest.mark.parametrize(
    ("world", "options", "sentence"),
    [
        (
            World(PAIR, 1e-6, slow={1: 3.0}),
            {},
            "rank 1 is slow, computing at 0.33 of the median rate: ",
        ),
        (World(PAIR, 1e-6, late={1: 1.0}), {}, "rank 1 is late: "),
        (World(PAIR, 0.015), {}, "link 0 -> 1 takes longer than the compute beside it: "),
        (
            World(PAIR, 1e-6),
            {"causal": True},
            # Of 32 * 33 / 2 pairs the last rank has 3 * 64 + 36.
            "imbalance: rank 3 has 1.73 times the mean pairs: ",
        ),
        (World(PAIR, 0.005, polls=False), {"progress": "wait"}, "progress: nobody calls MPI while"),
        (World(PAIR, 0.005, polls=False), {"progress": "poll"}, "try --progress thread"),
        (World(PAIR, 0.005, polls=False), {"progress": "thread"}, "give the thread a core"),
    ],
    ids=["slow", "late", "link", "imbalance", "wait", "poll", "thread"],
)
def test_a_plain_sentence_says_what_it_is(
    tmp_path: Path, world: World, options: dict[str, Any], sentence: str
) -> None:
    text = told(written(tmp_path / "a.h5", world, **options))
    (line,) = [line for line in text.splitlines() if sentence in line]
    assert re.search(r": \d+\.\d\d ms of stalls on [1-4] rank\(s\)$", line), line


def test_those_with_little_blame_are_counted_together(tmp_path: Path) -> None:
    world = World(PAIR, 0.0135, slow={1: 15.0})
    text = told(written(tmp_path / "a.h5", world))
    (others,) = [row for row in rows(text) if row[0] == "others"]
    assert others[1] == "1 smaller"


def test_nobody_is_blamed_where_nothing_stalls(tmp_path: Path) -> None:
    text = told(written(tmp_path / "a.h5", World(PAIR, 1e-3)))
    # A twentieth of a quarter of 41 ms.
    assert text == (
        "blame, forward pass, repeat 2: nobody; all stalls together are 0.00 ms on 4 rank(s), none of them "
        "longer than 0.51 ms\n"
    )


def test_clocks_that_contradict_themselves_are_warned_of(tmp_path: Path) -> None:
    """Said to be ahead by 20 ms, which it is not, rank 1 seems to receive before rank 0 sends."""
    text = told(written(tmp_path / "a.h5", World(PAIR, 1e-3), offset=0.02))
    assert text.startswith("# warning  ")
    assert re.search(
        r"\d receive\(s\) lie before their send .* from rank 0 to 1 in step \d by 19000\.0 us", text
    )
    assert "# warning" not in told(written(tmp_path / "b.h5", World(PAIR, 1e-3)))


def test_files_of_very_many_steps_are_not_gone_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_STEPS == 2**14
    monkeypatch.setattr("ringmpi.report.culprits.MOST_STEPS", 15)
    assert told(written(tmp_path / "a.h5", World(PAIR, 0.015))).startswith(
        "blame: not told of more than 15"
    )


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            "poll",
            "progress poll: calls into MPI delay the compute by 4.00 ms a rank, 10.0% of the compute",
        ),
        (
            "thread",
            "progress thread: the helper thread takes, beside the compute, 4.00 ms a rank, 10.0%",
        ),
        ("wait", ""),
    ],
)
def test_what_progress_takes_is_told(tmp_path: Path, policy: str, words: str) -> None:
    """A millisecond in each of four steps of 10 ms."""
    result = written(tmp_path / "a.h5", World(PAIR, 1e-3), polling=1e-3, progress=policy)
    text = told(result, cost_of_progress)
    assert text.startswith(words)
    assert bool(text) is bool(words)


def test_ranks_whose_cost_is_not_known_are_left_out_of_it(tmp_path: Path) -> None:
    polling = np.array([[1e-3], [1e-3], [np.nan], [1e-3]])  # By rank.
    result = written(tmp_path / "a.h5", World(PAIR, 1e-3), polling=polling)

    assert "delay the compute by 4.00 ms a rank, 10.0% of" in told(result, cost_of_progress)


def test_a_gpu_is_told_to_be_at_work_by_its_own_clock(tmp_path: Path) -> None:
    """9 ms in each of four steps of 10 ms; nothing is told where there is no such clock."""
    with_gpu = written(tmp_path / "a.h5", World(PAIR, 1e-3), device_time=9e-3)
    without = written(tmp_path / "b.h5", World(PAIR, 1e-3))

    assert told(with_gpu, share_of_device) == (
        "device: by its own clock the GPU was at work in 90.0% of the compute, at least 90.0% on a rank\n"
    )
    assert told(without, share_of_device) == ""
