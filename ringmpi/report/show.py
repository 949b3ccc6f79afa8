"""Report on result files that exist."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from ringmpi.errors import ConfigError, MissingCapabilityError
from ringmpi.report.compare import compare
from ringmpi.report.tables import report
from ringmpi.report.text import make_console
from ringmpi.store import ResultFile


def report_files(
    paths: Sequence[str], plot: str | None, side_by_side: bool = False, csv: str | None = None
) -> None:
    """Print the tables of each file, or one of all, and draw timelines if asked to. Local.

    Parameters
    ----------
    paths : sequence of str
    plot : str or None
        None for no picture, an empty text for one beside each file, else where one picture of all goes.
    side_by_side : bool
        One table, of all files.
    csv : str or None
        Where that table goes as CSV.

    Raises
    ------
    StoreError
        If a file is not a complete result.
    ConfigError
        If there is nothing to draw, or the table cannot be written.
    MissingCapabilityError
        If matplotlib is not installed.
    """
    console = make_console()
    with ExitStack() as stack:
        results = [stack.enter_context(ResultFile(path)) for path in paths]
        if side_by_side or csv:
            compare(results, csv)
        else:
            for result in results:
                report(result, console)
        if plot:
            _draw(results, Path(plot), console)
        elif plot is not None:
            for result in results:
                _draw([result], result.path.with_suffix(".png"), console)


def _draw(results: Sequence[ResultFile], picture: Path, console: Console) -> None:
    try:
        from ringmpi.report.plots import timelines
    except ModuleNotFoundError as error:
        raise MissingCapabilityError(
            f"plot: {error.name} is not installed; pip install 'ringmpi[plot]'"
        ) from error
    for result in results:
        if not all(len(result.timings(direction).records) for direction in result.directions):
            raise ConfigError(f"plot={picture}: {result.path} has no timed repeat to draw")
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        timelines(results, picture)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot={picture}: cannot be drawn: {error}") from error
    console.print(f"# timeline: {picture}", soft_wrap=True)
