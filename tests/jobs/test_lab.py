"""The validation across the overlap threshold: what it makes of measured curves. No time is judged here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

LAB = Path(__file__).parents[2] / "jobs/lab"


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LAB))


@pytest.mark.parametrize(
    ("overlaps", "expected"),
    [
        ([0.5, 0.9, 1.0], 250.0),
        ([0.97, 0.9, 1.0], 250.0),  # It must stay hidden: an early peak does not count.
        ([0.5, 0.9, 0.94], None),
        ([1.0, 1.0, 1.0], None),  # Where it vanishes was not measured.
    ],
)
def test_a_stall_vanishes_where_the_overlap_stays_above_the_level(
    overlaps: list[float], expected: float | None
) -> None:
    from crossing import vanishes_at

    found = vanishes_at([100, 200, 300], overlaps)
    assert found == (None if expected is None else pytest.approx(expected))


def point(tokens: int, progress: str, overlap: float, ratio: float) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "progress": progress,
        "predicted_threshold": 1000,
        "measured_overlap": overlap,
        "simulated_overlap": overlap,
        "time_ratio": ratio,
    }


@pytest.mark.parametrize(("ratio", "within"), [(1.09, True), (1.11, False), (0.89, False)])
def test_a_verdict_tells_how_far_the_predictions_are_off(ratio: float, within: bool) -> None:
    from setting import Setting
    from validate import verdict

    points = [
        point(500, "poll", 0.5, 1.0),
        point(1000, "poll", 0.9, ratio),
        point(1200, "poll", 1.0, ratio),
        point(1250, "poll", 0.97, ratio),
        point(1250, "wait", 0.03, 9.0),  # Of runs that poll alone the time is held against the model.
    ]
    found = verdict(Setting("link", 4, 100), points)

    assert found["measured_vanishing"] == pytest.approx(1100)
    assert found["length_within"]
    assert found["time_within"] == within
    assert (found["overlap_poll_min"], found["overlap_wait_max"]) == (0.97, 0.03)
