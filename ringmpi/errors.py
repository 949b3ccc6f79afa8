"""What can go wrong, and the exit code that says so.

Every message has one form: what was given, which rule it breaks, what would work.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

OK = 0
FAILED_VERIFICATION = 1
BAD_PARAMETER = 2
MISSING_CAPABILITY = 3
BROKEN = 4

#: What HDF5 and NumPy make of a damaged file.
DAMAGE = (
    *(OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, IndexError),
    *(MemoryError, ArithmeticError),
)


class RingMPIError(Exception):
    """Base of every error that ringmpi raises on purpose.

    Attributes
    ----------
    exit_code : int
        What the command line ends with.
    everywhere : bool
        True where every rank raises the same error at the same place, so that the job can
        end in order; False where other ranks may be waiting for this one.
    """

    exit_code = BROKEN
    everywhere = False


class ConfigError(RingMPIError, ValueError):
    """A parameter breaks a rule that can be checked without communication."""

    exit_code = BAD_PARAMETER
    everywhere = True


class ShapeError(RingMPIError, ValueError):
    """Arrays whose shapes, dtypes or lengths do not belong together."""

    exit_code = BAD_PARAMETER


class MissingCapabilityError(RingMPIError, RuntimeError):
    """Something was asked for that this machine does not have."""

    exit_code = MISSING_CAPABILITY


class LaunchError(RingMPIError, RuntimeError):
    """The processes were not started as one MPI job."""

    exit_code = BAD_PARAMETER


class ScheduleError(RingMPIError):
    """Schedules that would deadlock, overwrite a block in use, or miss a pair."""


class TransportError(RingMPIError, RuntimeError):
    """A block arrived damaged, or a transfer could not be made."""


class StalledRingError(TransportError):
    """No transfer made progress within the time limit."""


class StoreError(RingMPIError, OSError):
    """A file that cannot be written, or that is not a complete result file."""

    exit_code = BAD_PARAMETER


class WriteError(RingMPIError, OSError):
    """A result could no longer be written, such as on a full disk."""


class Interrupted(RingMPIError):  # noqa: N818 - nothing went wrong
    """A signal asked the job to end.

    Parameters
    ----------
    signal_number : int
        The signal that some rank received.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"interrupted by signal {signal_number}")
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


def check_choice(name: str, given: str, choices: Iterable[str]) -> None:
    """Refuse a name that is not one of `choices`, with the nearest one that is.

    Raises
    ------
    ConfigError
        If `given` is not among `choices`.
    """
    choices = sorted(choices)
    if given not in choices:
        nearest = get_close_matches(given, choices, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"{name}={given!r}: not one of {', '.join(choices)}{hint}")
