"""Results side by side: the same problem by several methods, each pass of each file a row."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from ringmpi.errors import ConfigError
from ringmpi.report.cases import COUNTS, ERRORS, MARKS, TIMES, Row, cases_of
from ringmpi.report.text import make_console, plain_table
from ringmpi.store import ResultFile

#: What a row begins with; the options in which the results differ follow.
NAMES = ("method", "ranks", "pass")

#: Columns that only the CSV file has.
UNSHOWN = ("min ms", "max ms", "compute ms", "tensor", "mean error", "single mean", "oversubscribed")

#: Characters that the table needs where there is no terminal.
TABLE_WIDTH = 200


def compare(results: Sequence[ResultFile], path: str | None) -> None:
    """Print results side by side, and name the fastest method of each case. Local.

    A case is all that is alike but the method: problem, layout, ranks, link. Sent bytes, messages, hops and
    held bytes are of the rank with the most.

    Parameters
    ----------
    results : sequence of ResultFile
    path : str or None
        Where the table goes as CSV.

    Raises
    ------
    ConfigError
        If the table cannot be written.
    """
    console = make_console(TABLE_WIDTH)
    cases = cases_of(results)
    rows = cases.rows
    columns = [*NAMES, *cases.differing, *TIMES, *COUNTS, *ERRORS, *MARKS]
    shown = [name for name in columns if name not in UNSHOWN]
    console.print(plain_table("methods side by side", shown, [_told(row, shown) for row in rows]))
    if any(row["oversubscribed"] for row in rows):
        console.print("* more ranks or threads than cores: the time shows correctness, not speed")
    for case in cases.by_case():
        fastest = next((row for row in case if row["fastest"]), None)
        if fastest is not None and len(case) > 1:
            words = cases.words(fastest)
            console.print(f"# fastest {fastest['pass']} ({words}): {fastest['method']}")
    if path is not None:
        _write(rows, columns, Path(path))
        console.print(f"# table: {path}", soft_wrap=True)


def _told(row: Row, columns: Sequence[str]) -> list[str]:
    starred = row | {"time ms": row["time ms"] + ("*" if row["oversubscribed"] else "")}
    return [starred[name] for name in columns]


def _write(rows: Sequence[Row], columns: Sequence[str], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError(
            f"csv={path}: cannot be written: {error.strerror}; use another name"
        ) from error
