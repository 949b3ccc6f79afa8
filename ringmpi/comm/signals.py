"""Signals that ask a job to end, remembered until a safe moment."""

from __future__ import annotations

import signal
from types import FrameType

#: What schedulers send before they kill: SIGTERM, and SIGUSR1 by `--signal`; and Ctrl-C.
HEEDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Signals:
    """Remembers a signal instead of dying of it. Local.

    Attributes
    ----------
    received : int or None
        The first signal that came.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    def heed(self) -> None:
        """Take over the signals that ask a job to end."""
        for number in HEEDED_SIGNALS:
            signal.signal(number, self._remember)

    def ignore(self) -> None:
        """Let signals pass from now on: nothing is left but to exit, and they would spoil only the code."""
        for number in HEEDED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.received = self.received or number
