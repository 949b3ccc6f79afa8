"""A rank that stops is noticed, and the picture of the ring says who waits for whom."""

from __future__ import annotations

import re

import pytest
from running import Ended, Scenario

TIMEOUT = 3.0

#: Seconds from the rank's last sign of life to the end of the job: the time limit, 2 s in which the others
#: are asked, 2 s in which one of them draws the picture, and 10 s for the abort itself.
LIMIT = TIMEOUT + 2.0 + 2.0 + 10.0

RUN = f"run --seq-len 48 --heads 2 --head-dim 4 --timeout {TIMEOUT:g} --output r.h5"

#: The fault, who it strikes, the policy, and what the ring is drawn to wait for.
STALLED = {
    "stopped in the first pass": ("stop:rank=1:place=attend:call=1", 1, "wait", "kv"),
    "stopped in a later pass, first rank": ("stop:rank=0:place=attend:call=5", 0, "poll", "kv"),
    "asleep while it computes": ("sleep:seconds=90:rank=2:place=attend:call=4", 2, "thread", "kv"),
    # After the four steps of the forward pass, in the third step back.
    "stopped on the way back": ("stop:rank=1:place=attend:call=6", 1, "poll --backward", "dkv"),
}


@pytest.mark.parametrize(
    ("ended", "stopped", "part"),
    [
        pytest.param(Scenario(4, f"{RUN} --progress {options}", fault=fault), stopped, part, id=name)
        for name, (fault, stopped, options, part) in STALLED.items()
    ],
    indirect=["ended"],
)
def test_stalled_ring_is_drawn(ended: Ended, stopped: int, part: str) -> None:
    assert ended.returncode not in (0, 2), ended.told()
    assert ended.since("stop" if list(ended.marks.glob("stop-*")) else "sleep") < LIMIT, ended.told()
    assert "made progress for 3 s" in ended.stderr, ended.told()
    told = dict(re.findall(r"ringmpi: rank \d of 4:   rank (\d): (.*)", ended.stderr))
    assert set(told) == {"0", "1", "2", "3"}, ended.told()
    assert "no answer" in told[str(stopped)], ended.told()
    after = (stopped + 1) % 4
    # Its neighbour waits for a part from it; whoever waits for nothing from it says so as well.
    assert re.match(
        rf"step \d: waits for (.* and )?{part} of \d from rank {stopped}", told[str(after)]
    ), ended.told()
    assert all("waits for" in told[str(rank)] for rank in range(4) if rank != stopped), ended.told()
    assert "Traceback" not in ended.stderr, ended.told()
    assert "r.h5" not in ended.files()


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(Scenario(4, RUN, fault="stop:rank=2:place=attend:call=3"), id="in the last step"),
        pytest.param(Scenario(2, RUN, fault="stop:rank=0:place=attend:call=1"), id="rank 0 of 2"),
    ],
    indirect=True,
)
def test_stopped_rank_is_noticed_where_nothing_is_transferred_any_more(ended: Ended) -> None:
    assert ended.returncode not in (0, 2), ended.told()
    assert "no answer" in ended.stderr, ended.told()
    assert "r.h5" not in ended.files()
