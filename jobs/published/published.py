"""Published measurements beside what ringmpi simulates. Needs no MPI and no GPU; some minutes.

Usage:  python jobs/published/published.py [FOLDER]      writes published.csv and published.md [results/lab]
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from claims import Claim, claims
from scenarios import ROOT

#: Up to this difference nothing needs to be said.
NEAR = 0.15

COLUMNS = (
    "source",
    "what",
    "unit",
    "published",
    "simulated",
    "difference %",
    "what the model lacks",
    "command",
)

Row = dict[str, str]


def row(claim: Claim) -> Row:
    """Return a claim beside its simulation."""
    simulated, known = claim.simulate(), claim.published
    low, high = known if isinstance(known, tuple) else (known, known)
    difference = simulated / min(max(simulated, low), high) - 1
    told = (
        claim.source,
        claim.what,
        claim.unit,
        f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}",
        f"{simulated:.4g}",
        f"{100 * difference:+.1f}",
        claim.lacks if abs(difference) > NEAR else "",
        claim.of.command,
    )
    return dict(zip(COLUMNS, told, strict=True))


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write the rows as a table for programs, and as one for people."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "published.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    shown = COLUMNS[1:6]
    lines = [
        "# Published against simulated",
        "",
        "Made by `python jobs/published/published.py`, which says where every number comes from and "
        "what is assumed.",
        "The commands are in `published.csv`. What the model lacks is told where it misses by more "
        "than 15 %.",
    ]
    for source, of_source in groupby(rows, lambda one: one["source"]):
        group = list(of_source)
        lines += ["", f"## {source}", "", "| " + " | ".join(shown) + " |", "|---|---|" + "---:|" * 3]
        lines += ["| " + " | ".join(one[name] for name in shown) + " |" for one in group]
        lacks = dict.fromkeys(
            one["what the model lacks"] for one in group if one["what the model lacks"]
        )
        lines += ["", *(f"The model lacks: {lack}." for lack in lacks)]
    near = sum(not one["what the model lacks"] for one in rows)
    lines += ["", f"{near} of {len(rows)} within {100 * NEAR:.0f} %."]
    (folder / "published.md").write_text("\n".join(lines) + "\n")


def main(arguments: Sequence[str]) -> None:
    """Simulate all claims and write the tables."""
    folder = Path(arguments[0]) if arguments else ROOT / "results/lab"
    rows = []
    for claim in claims():
        rows.append(row(claim))
        print(*(rows[-1][name] for name in COLUMNS[1:6]), sep="  ", flush=True)
    write(rows, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
