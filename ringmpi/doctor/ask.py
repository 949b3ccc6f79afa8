"""Programs that are asked. Starts processes, so before MPI is initialised."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

#: Seconds for a program to answer: it may have to come over a network, or ask a daemon that is not there.
LIMIT = 20.0


#: Seconds for a process that initialises MPI.
INITIALISE_LIMIT = 60.0


def answer(command: Sequence[str], environment: Mapping[str, str], limit: float = LIMIT) -> str:
    """Return all that a command prints, or why there is nothing. Local; starts a process."""
    try:
        told = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            timeout=limit,
            check=False,
        )
    except OSError as error:
        return error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return f"no answer in {limit:g} s"
    text = (told.stdout + told.stderr).strip()
    return text or f"exit code {told.returncode}"


def first_line(text: str) -> str:
    """Return the first line that says something.

    >>> first_line("  ")
    ''
    """
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
