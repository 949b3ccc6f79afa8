"""Where a run speaks: lines for a person, which must never cost the result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def speak(talk: Callable[[], None]) -> None:
    """Print, and go on in silence where nobody can hear, such as behind a closed pipe. Local."""
    try:
        talk()
        sys.stdout.flush()
    except OSError:
        # What is left in the buffer would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
