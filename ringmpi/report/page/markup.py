"""The text of a page: what the terminal says, in HTML, around the places where scripts draw.

All that comes from files is escaped here. The policy in the head lets a browser run this very script and load
nothing, from the network or elsewhere.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import ringmpi
from ringmpi.metrics import by_rank, makespans
from ringmpi.report.tables import report
from ringmpi.report.text import milliseconds, percent
from ringmpi.schedule import Pass
from ringmpi.store import ResultFile

#: In the order in which they need each other.
SCRIPTS = ("words.js", "tip.js", "timeline.js", "steps.js", "charts.js", "page.js")

#: Lines of the terminal that a page has a place of its own for.
VERDICT = re.compile("# verdict: (.*)", re.DOTALL)
FACT = re.compile(r"# (\w+)  +(.*)", re.DOTALL)

#: With more results than this a page shows them folded up.
MOST_OPEN = 2


def page_text(results: Sequence[ResultFile], data: dict[str, Any]) -> str:
    """Return a page. Local.

    Parameters
    ----------
    results : sequence of ResultFile
    data : dict
        As `page_data` gives it.
    """
    style = _asset("style.css")
    script = "\n".join(map(_asset, SCRIPTS))
    title = escape(results[0].path.name if len(results) == 1 else f"{len(results)} results")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hashed(style)}; script-src {_hashed(script)}"
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title} - ringmpi</title>",
            '<link rel="icon" href="data:,">',
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<header><h1>ringmpi report</h1><p>{title}, by ringmpi {ringmpi.__version__}</p></header>",
            "<noscript><p class=note>Without scripts this page shows tables only.</p></noscript>",
            *_charts(data["charts"]),
            *(
                line
                for number, result in enumerate(results)
                for line in _result(result, number, opened=len(results) <= MOST_OPEN)
            ),
            "</main>",
            f'<script type="application/json" id="data">{embedded(data)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def embedded(data: Any) -> str:
    r"""Return JSON that cannot end the element around it, whatever texts are in it. Local.

    Only ASCII, as a line separator that JSON allows ends a line of a script.

    >>> embedded("</script>")
    '"\\u003c/script\\u003e"'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return files("ringmpi.report.page").joinpath(name).read_text("utf-8")


def _hashed(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


class _Listener(Console):
    """Takes what is said in a terminal, so that a page says the same."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str | Table] = []

    def print(self, *objects: Any, **how: Any) -> None:
        """Keep what is to be printed."""
        del how
        self.said += objects


def _result(result: ResultFile, number: int, opened: bool) -> Iterator[str]:
    listener = _Listener()
    report(result, listener)
    lines = [said for said in listener.said[1:] if isinstance(said, str)]  # The first one is the name.
    verdict = next((v[1] for v in map(VERDICT.fullmatch, lines) if v), "")
    facts = [(fact[1], fact[2]) for fact in map(FACT.fullmatch, lines) if fact]
    yield f'<details class="result"{" open" if opened else ""}>'
    passed = {"OK": " good", "FAILED": " bad"}.get(verdict, "")
    yield (
        f"<summary><h2>{escape(result.path.name)}</h2>"
        f'<span class="badge{passed}">verdict: {escape(verdict)}</span>'
        f'<span class="badge">{escape(result.kind)}</span></summary>'
    )
    yield from _cards(result)
    label = escape(f"timeline of {result.path.name}")
    yield f'<section class="timeline" data-file="{number}" aria-label="{label}"></section>'
    for said in listener.said[1:]:
        if isinstance(said, Table):
            yield from _table(said)
        elif not (VERDICT.fullmatch(said) or FACT.fullmatch(said)):
            yield f"<p class=said>{escape(said.removeprefix('# '))}</p>"
    yield "<h3>What was run</h3><dl class=facts>"
    for label, text in (*facts, ("created", result.created)):
        yield f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>"
    yield "</dl></details>"


def _cards(result: ResultFile) -> Iterator[str]:
    """Yield the few numbers that a person looks for first."""
    yield "<div class=cards>"
    for direction in result.directions:
        timings = result.timings(direction)
        ranks = by_rank(timings)
        if not ranks:
            continue
        whole = float(np.median(makespans(timings)))
        stall = float(np.mean([rank.stall / rank.total if rank.total else 0.0 for rank in ranks]))
        overlaps = [rank.overlap for rank in ranks if np.isfinite(rank.overlap)]
        hidden = float(np.median(overlaps)) if overlaps else float("nan")
        flops = sum(rank.flops for rank in ranks)
        way = (
            "" if direction is Pass.FORWARD and len(result.directions) == 1 else f", {direction.value}"
        )
        for label, value, unit in (
            (f"time{way}", milliseconds(whole), "ms"),
            (f"stalled{way}", percent(stall), "of a rank's time"),
            (f"overlap{way}", percent(hidden), "median rank"),
            (f"speed{way}", *_speed(flops / whole if whole else float("nan"))),
        ):
            yield (
                f"<div class=card><span>{escape(label)}</span><strong>{escape(value)}</strong>"
                f"<span>{escape(unit)}</span></div>"
            )
    yield "</div>"


def _speed(rate: float) -> tuple[str, str]:
    """Return FLOP/s as a number with a unit, such that it has few digits.

    >>> _speed(4.07e17)
    ('407.00', 'PFLOP/s')
    """
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T")):
        if rate >= factor:
            return f"{rate / factor:.2f}", f"{prefix}FLOP/s"
    return "-" if np.isnan(rate) else f"{rate / 1e9:.2f}", "GFLOP/s"


def _table(table: Table) -> Iterator[str]:
    """Yield a table of the terminal as one of a page."""
    columns = [[escape(str(cell)) for cell in column.cells] for column in table.columns]
    yield "<div class=wide><table>"
    if table.title:
        yield f"<caption>{escape(str(table.title))}</caption>"
    heads = (f"<th scope=col>{escape(str(column.header))}</th>" for column in table.columns)
    yield f"<thead><tr>{''.join(heads)}</tr></thead><tbody>"
    for row in zip(*columns, strict=True):
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
    yield "</tbody></table></div>"


def _charts(charts: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not charts:
        return
    yield '<section class="charts" aria-label="All results together">'
    for number, chart in enumerate(charts):
        yield f'<figure data-chart="{number}"><figcaption>{escape(chart["title"])}</figcaption>'
        yield "<div class=picture></div>"
        yield (
            "<ul class=notes>"
            + "".join(f"<li>{escape(note)}</li>" for note in chart["notes"])
            + "</ul>"
        )
        yield "<details><summary>As a table</summary><div class=wide><table><thead><tr>"
        heads = ("series", chart["x"]["label"], chart["y"]["label"], "from", "to")
        yield "".join(f"<th scope=col>{escape(head)}</th>" for head in heads) + "</tr></thead><tbody>"
        for series in chart["series"]:
            for point in series["points"]:
                at = chart["categories"][point["x"]] if chart["categories"] else f"{point['x']:g}"
                numbers = "".join(f"<td>{point[name]:.4g}</td>" for name in ("y", "low", "high"))
                yield f"<tr><td>{escape(series['name'])}</td><td>{escape(at)}</td>{numbers}</tr>"
        yield "</tbody></table></div></details></figure>"
    yield "</section>"
