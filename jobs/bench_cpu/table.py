"""The table: what a row holds, how it is written as it comes, and read again."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from case import Case

#: Columns that name a case.
CASE = ("part", "dtype", "pass", "mask", "seq_len", "head_dim", "heads")
COLUMNS = (
    *CASE,
    "contender",
    "layout",
    "ranks",
    "threads",
    "median_s",
    "min_s",
    "max_s",
    "alternations",
    "gflops",
    "share_of_peak",
    "against",
    "ratio_median",
    "ratio_min",
    "ratio_max",
    "aim",
    "met",
    "max_abs_difference",
    "row_error",
    "verdict",
    "others_busy",
    "samples_s",
)

Row = dict[str, str]


def case_columns(case: Case) -> Row:
    """Return the columns that name a case."""
    values = (case.part, case.dtype, case.direction, case.mask, case.seq_len, case.head_dim, case.heads)
    return dict(zip(CASE, map(str, values), strict=True))


def times(case: Case, seconds: Sequence[float]) -> Row:
    """Return the columns of measured times."""
    return {
        "median_s": f"{statistics.median(seconds):.6g}",
        "min_s": f"{min(seconds):.6g}",
        "max_s": f"{max(seconds):.6g}",
        "alternations": str(len(seconds)),
        "gflops": f"{case.flops / statistics.median(seconds) * 1e-9:.4g}",
        "samples_s": " ".join(f"{second:.6g}" for second in seconds),
    }


def ratios(seconds: Sequence[float], base: Sequence[float], aim: float | None) -> Row:
    """Return the columns of ratios: a contender's time over that of the base in the same alternation."""
    found = [mine / other for mine, other in zip(seconds, base, strict=True)]
    median = statistics.median(found)
    row = {
        "ratio_median": f"{median:.3f}",
        "ratio_min": f"{min(found):.3f}",
        "ratio_max": f"{max(found):.3f}",
    }
    if aim is not None:
        row |= {"aim": f"{aim:.3f}", "met": "yes" if median >= aim else "no"}
    return row


class Table:
    """A CSV file that grows case by case.

    Parameters
    ----------
    path : Path
        Continued if it exists.
    header : mapping
        What the file says about itself, in lines that begin with ``#``.

    Raises
    ------
    ValueError
        If what exists was measured under another header.
    """

    def __init__(self, path: Path, header: Mapping[str, str]) -> None:
        self.path = path
        lines = [f"# {name}: {value}" for name, value in header.items()]
        self.rows: list[Row] = []
        if path.exists():
            found, self.rows = read(path)
            for name, value in header.items():
                if found.get(name) != value:
                    raise ValueError(
                        f"{path} was measured with {name}: {found.get(name)}, and now it is {value}; "
                        f"move it away, or set OUT to another folder"
                    )
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*lines, ",".join(COLUMNS), ""]))

    def has(self, case: Case) -> bool:
        """Return whether a case was measured before."""
        wanted = case_columns(case)
        return any(wanted.items() <= row.items() for row in self.rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Write all rows of a case at once, so that a case is there or not."""
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writerows(rows)
        self.rows += rows


def read(path: Path) -> tuple[dict[str, str], list[Row]]:
    """Return the header and the rows of a table."""
    with path.open(newline="") as file:
        lines = file.read().splitlines()
    header = [line[2:].split(": ", 1) for line in lines if line.startswith("# ")]
    return dict(header), list(csv.DictReader(line for line in lines if not line.startswith("#")))
