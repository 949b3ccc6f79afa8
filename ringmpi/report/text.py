"""What every table is made of: a console, columns, numbers as text. Knows no files."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from rich.console import Console
from rich.table import Table

from ringmpi.comm.launcher import launch_from_environment

#: Columns that the widest table needs.
WIDTH = 140


def make_console(width: int = WIDTH) -> Console:
    """Return a console as wide as the terminal, and wide enough where there is none. Local.

    A launcher may give its ranks a terminal of some width that nobody looks at.
    """
    # No markup: file names may contain brackets.
    console = Console(highlight=False, markup=False)
    watched = console.is_terminal and not launch_from_environment().variable
    if watched:
        return console
    return Console(highlight=False, markup=False, width=width, force_terminal=False)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of texts, numbers to the right."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def milliseconds(seconds: float) -> str:
    """Return a time as text in ms.

    >>> milliseconds(0.0123)
    '12.30'
    """
    return f"{seconds * 1e3:.2f}"


def rate(flops: float, seconds: float) -> str:
    """Return GFLOP/s as text; a dash where no time passed, or FLOPs are not known."""
    return f"{flops / seconds / 1e9:.1f}" if seconds and not isnan(flops) else "-"


def megabytes(nbytes: int) -> str:
    """Return bytes as text in MB of 1e6 bytes."""
    return f"{nbytes / 1e6:.3f}"


def percent(fraction: float) -> str:
    """Return a fraction as text; a dash where it does not exist."""
    return "-" if isnan(fraction) else f"{fraction * 100:.0f}%"
