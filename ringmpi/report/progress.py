"""How far long work has come: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

#: Seconds between two lines where there is no terminal: a log should stay short.
LINE_INTERVAL = 10.0


@contextmanager
def track(what: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """Give a function that is to be told how many of how many parts are done. Local."""
    if console.is_terminal:
        with Progress(console=console, transient=True) as bars:
            task = bars.add_task(what)
            yield lambda done, total: bars.update(task, completed=done, total=total)
        return

    last = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_INTERVAL:
            last = time.monotonic()
            console.print(f"{what}: {done} of {total}")

    yield line
