"""Report on result files that exist: tables in the terminal; pictures, a page or a trace in files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ringmpi.errors import ConfigError, MissingCapabilityError, check_choice
from ringmpi.report.across import FIGURES, LEFT_OUT, NEEDS
from ringmpi.report.compare import compare
from ringmpi.report.page import write_page
from ringmpi.report.perfetto import write_trace
from ringmpi.report.tables import report
from ringmpi.report.text import make_console
from ringmpi.store import ResultFile

#: The picture that is drawn unless another one is asked for.
TIMELINE = "timeline"

#: Puts results into a file.
Write = Callable[[Sequence[ResultFile], Path], None]


@dataclass(frozen=True)
class Asked:
    """What is asked for beside the tables in the terminal.

    Of `plot`, `html` and `perfetto` each is None for nothing, an empty text for a file beside each result,
    else where one file of all results goes.

    Attributes
    ----------
    compare : bool
        One table, of all files.
    csv : str or None
        Where that table goes as CSV.
    plot : str or None
        Picture: PNG, SVG or PDF by its ending.
    figure : str
        What it shows: `TIMELINE`, or one of `FIGURES`, which are about all results together.
    html : str or None
        Page that shows everything.
    perfetto : str or None
        Trace.
    """

    compare: bool = False
    csv: str | None = None
    plot: str | None = None
    figure: str = TIMELINE
    html: str | None = None
    perfetto: str | None = None

    def __post_init__(self) -> None:
        check_choice("figure", self.figure, (TIMELINE, *FIGURES))
        if self.figure != TIMELINE and not self.plot:
            raise ConfigError(
                f"figure={self.figure}: is one picture of all files; give --plot PICTURE a name"
            )
        for name, given, ending in (("html", self.html, ".html"), ("perfetto", self.perfetto, ".json")):
            # Else a result that was meant to be read might be written over.
            if given and Path(given).suffix != ending:
                raise ConfigError(f"{name}={given}: must be a file name that ends with {ending}")


def report_files(paths: Sequence[str], asked: Asked) -> None:
    """Print the tables of each file, or one of all, and write what else is asked for. Local.

    Parameters
    ----------
    paths : sequence of str
    asked : Asked

    Raises
    ------
    StoreError
        If a file is not a complete result.
    ConfigError
        If there is nothing to draw, or something cannot be written.
    MissingCapabilityError
        If matplotlib is not installed, and a picture is asked for.
    """
    console = make_console()
    with ExitStack() as stack:
        results = [stack.enter_context(ResultFile(path)) for path in paths]
        if asked.compare or asked.csv:
            compare(results, asked.csv)
        else:
            for result in results:
                report(result, console)
        for option, given, what, ending, write in (
            ("plot", asked.plot, asked.figure, ".png", _drawing(asked.figure)),
            ("html", asked.html, "page", ".html", write_page),
            ("perfetto", asked.perfetto, "trace for ui.perfetto.dev", ".perfetto.json", write_trace),
        ):
            if given is None:
                continue
            groups = (
                [(results, Path(given))]
                if given
                else [([result], result.path.with_suffix(ending)) for result in results]
            )
            for group, path in groups:
                _write(write, group, path, option)
                console.print(f"# {what}: {path}", soft_wrap=True)
        if asked.plot and asked.figure in LEFT_OUT and (left_out := LEFT_OUT[asked.figure](results)):
            console.print(f"# {left_out}", soft_wrap=True)


def _write(write: Write, results: Sequence[ResultFile], path: Path, option: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(results, path)
    except ConfigError as error:
        raise ConfigError(f"{option}={path}: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}={path}: cannot be written: {error}") from error


def _drawing(figure: str) -> Write:
    """Return what draws a figure; matplotlib is loaded once it is called."""

    def draw(results: Sequence[ResultFile], path: Path) -> None:
        try:
            from ringmpi.report.plots.charts import draw_charts
            from ringmpi.report.plots.timeline import timelines
        except ModuleNotFoundError as error:
            raise MissingCapabilityError(
                f"plot: {error.name} is not installed; pip install 'ringmpi[plot]'"
            ) from error
        if figure == TIMELINE:
            for result in results:
                if not all(result.repeats(direction) for direction in result.directions):
                    raise ConfigError(f"{result.path} has no timed repeat to draw")
            timelines(results, path)
            return
        charts = FIGURES[figure](results)
        if not charts:
            left_out = LEFT_OUT[figure](results) if figure in LEFT_OUT else ""
            told = f". {left_out}" if left_out else ""
            raise ConfigError(f"figure={figure} needs {NEEDS[figure]}{told}")
        draw_charts(charts, path)

    return draw
