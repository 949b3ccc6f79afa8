"""Published against simulated: the stored table is that of the claims, and is what they give."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "jobs" / "published"))

from claims import Claim, claims  # noqa: E402 (the path must be there first)
from published import NEAR, main, row, write  # noqa: E402

CLAIMS = list(claims())

with (ROOT / "results" / "lab" / "published.csv").open() as table:
    STORED = {(stored["source"], stored["what"]): stored for stored in csv.DictReader(table)}

#: Simulated in a moment: rings of a few ranks.
QUICK = [claim for claim in CLAIMS if "ring-flash" in claim.source or "prefill" in claim.what]


def test_the_stored_table_has_all_claims_and_no_others() -> None:
    assert set(STORED) == {(claim.source, claim.what) for claim in CLAIMS}
    assert len(CLAIMS) == len(STORED)


@pytest.mark.parametrize("claim", QUICK, ids=lambda claim: claim.what)
def test_the_stored_table_is_what_simulations_give(claim: Claim) -> None:
    assert row(claim) == STORED[claim.source, claim.what]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.what)
def test_where_the_model_misses_it_is_told_what_it_lacks(claim: Claim) -> None:
    stored = STORED[claim.source, claim.what]

    published = stored["published"].split(" to ")
    low, high = float(published[0]), float(published[-1])
    simulated = float(stored["simulated"])
    nearest = min(max(simulated, low), high)
    # Both are rounded to four digits.
    assert float(stored["difference %"]) == pytest.approx(100 * (simulated / nearest - 1), abs=0.2)
    if abs(simulated / nearest - 1) > NEAR + 0.002:
        assert stored["what the model lacks"] == claim.lacks
    assert stored["command"].startswith("ringmpi simulate --machine ")


def test_both_tables_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import published

    monkeypatch.setattr(published, "claims", lambda: QUICK[:2])
    main([str(tmp_path / "new")])

    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "published.csv",
        "published.md",
    ]
    told = (tmp_path / "new" / "published.md").read_text()
    assert QUICK[0].what in told
    assert told.endswith("2 of 2 within 15 %.\n")


def test_a_miss_is_not_hidden(tmp_path: Path) -> None:
    claim = QUICK[0]
    wrong: dict[str, Any] = {"published": 2 * float(claim.simulate()), "lacks": "everything"}
    missed = row(Claim(**(vars(claim) | wrong)))

    write([missed], tmp_path)

    assert missed["difference %"] == "-50.0"
    told = (tmp_path / "published.md").read_text()
    assert "The model lacks: everything." in told
    assert told.endswith("0 of 1 within 15 %.\n")
