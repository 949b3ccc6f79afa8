"""Report on result files that exist."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringmpi.errors import ConfigError, MissingCapabilityError
from ringmpi.report.tables import make_console, report
from ringmpi.store import ResultFile


def report_files(paths: Sequence[str], plot: str | None) -> None:
    """Print the tables of each file, and draw its timeline if asked to. Local.

    Parameters
    ----------
    paths : sequence of str
    plot : str or None
        None for no picture, an empty text for one beside each file, else where the picture goes.

    Raises
    ------
    StoreError
        If a file is not a complete result.
    ConfigError
        If one picture is named for several files.
    """
    if plot and len(paths) > 1:
        raise ConfigError(f"plot={plot}: one name for {len(paths)} files; leave the name away")
    console = make_console()
    for path in paths:
        with ResultFile(path) as result:
            report(result, console)
            if plot is not None:
                picture = Path(plot) if plot else result.path.with_suffix(".png")
                _draw(result, picture)
                console.print(f"# timeline: {picture}", soft_wrap=True)


def _draw(result: ResultFile, picture: Path) -> None:
    try:
        from ringmpi.report.plots import timeline
    except ModuleNotFoundError as error:
        raise MissingCapabilityError(
            f"plot: {error.name} is not installed; pip install 'ringmpi[plot]'"
        ) from error
    if not len(result.timings().records):
        raise ConfigError(f"plot={picture}: {result.path} has no timed repeat to draw")
    timeline(result, picture)
