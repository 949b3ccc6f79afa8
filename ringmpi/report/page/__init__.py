"""One page that shows everything, to look around in: a file of its own, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringmpi.report.page.data import page_data
from ringmpi.report.page.markup import page_text
from ringmpi.store import ResultFile


def write_page(results: Sequence[ResultFile], path: Path) -> None:
    """Write a page about results. Local.

    Parameters
    ----------
    results : sequence of ResultFile
    path : Path
        HTML.
    """
    path.write_text(page_text(results, page_data(results)), encoding="utf-8")
