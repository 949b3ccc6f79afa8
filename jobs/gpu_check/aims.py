"""What the measurements say about the aims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

#: Our contenders, of which the second one rounds weights to 16 bits, as torch's backends do.
OURS = ("ringmpi", "ringmpi-rounded")

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
        if row["contender"] not in OURS and "median_s" in row:
            key = _case(row)
            best[key] = min(best.get(key, row["median_s"]), row["median_s"])
    found = []
    for row in rows:
        ours = row["contender"] in OURS and "median_s" in row and _case(row) in best
        found.append(row | ({"against_torch": best[_case(row)] / row["median_s"]} if ours else {}))
    return found


def failures(rows: Sequence[Row]) -> list[str]:
    """Return what is wrong or missing of our own results: every case must have a time."""
    return [
        f"{', '.join(str(value) for value in _case(row))}: {row['absent']}"
        for row in rows
        if row["contender"] in OURS and "absent" in row
    ]


def verdicts(rows: Sequence[Row], rings: Sequence[Row]) -> dict[str, Row]:
    """Return for each aim what was found, and whether it is met; None where nothing could be measured.

    Of a case that is aimed at and in which we have no time, nobody says that it is met.
    """
    aimed = [row for row in rows if row["contender"] == OURS[1] and _is_aimed_at(row)]
    ratios = [row["against_torch"] for row in aimed if "against_torch" in row]
    overlaps = [ring["overlap"] for ring in rings if _has_time_to_hide(ring)]
    return {
        "speed": _verdict(ratios, AIM, "least part of the better torch backend", failures(aimed)),
        "overlap": _verdict(
            overlaps, OVERLAP, "least overlap of two ranks whose compute is long enough", []
        ),
    }


def _case(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in CASE)


def _is_aimed_at(row: Row) -> bool:
    kind = row["dtype"], row["direction"], row["head_dim"]
    return kind == ("bfloat16", "forward", HEAD_DIM) and row["seq_len"] >= LEAST_LEN


def _has_time_to_hide(ring: Row) -> bool:
    """Two ranks with a GPU each: on a shared one, the compute of one waits for that of the other."""
    measured = ring["ranks"] == 2 and ring.get("overlap") is not None
    return bool(measured and ring["gpu_sharing"] == 1 and ring["compute_s"] >= ring["transfer_s"])


def _verdict(found: Sequence[float], aim: float, what: str, failed: Sequence[str]) -> Row:
    least = min(found, default=None)
    met = None if least is None else least >= aim
    return {"what": what, "aim": aim, "found": least, "met": False if failed else met}
