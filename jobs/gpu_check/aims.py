"""What the measurements say about the aims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

#: Of the better of torch's backends, forward in bfloat16 at this head_dim from this length on.
AIM, HEAD_DIM, LEAST_LEN = 0.60, 128, 8192

#: Of a two-rank ring whose compute is long enough for its transfers.
OVERLAP = 0.95

#: What names a case among rows.
CASE = ("dtype", "direction", "mask", "seq_len", "head_dim", "heads")


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, ours with their speed over that of the better backend of torch, if there is one."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["contender"] != "ringmpi" and "median_s" in row:
            key = tuple(row[name] for name in CASE)
            best[key] = min(best.get(key, row["median_s"]), row["median_s"])
    found = []
    for row in rows:
        key = tuple(row[name] for name in CASE)
        ours = row["contender"] == "ringmpi" and "median_s" in row and key in best
        found.append(row | ({"against_torch": best[key] / row["median_s"]} if ours else {}))
    return found


def verdicts(rows: Sequence[Row], rings: Sequence[Row]) -> dict[str, Row]:
    """Return for each aim what was found, and whether it is met; None where nothing could be measured."""
    aimed = [
        row["against_torch"]
        for row in rows
        if "against_torch" in row
        and row["dtype"] == "bfloat16"
        and row["direction"] == "forward"
        and row["head_dim"] == HEAD_DIM
        and row["seq_len"] >= LEAST_LEN
    ]
    overlaps = [
        ring["overlap"]
        for ring in rings
        if ring["ranks"] == 2
        and ring["compute_s"] >= ring["transfer_s"]
        and ring["overlap"] is not None
    ]
    return {
        "speed": _verdict(aimed, AIM, "least part of the better torch backend"),
        "overlap": _verdict(
            overlaps, OVERLAP, "least overlap of two ranks whose compute is long enough"
        ),
    }


def _verdict(found: Sequence[float], aim: float, what: str) -> Row:
    least = min(found, default=None)
    return {"what": what, "aim": aim, "found": least, "met": None if least is None else least >= aim}
