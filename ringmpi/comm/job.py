"""An MPI job from its first call into MPI to its exit code.

Nobody may be left waiting: an error that every rank raises alike ends the job in order; any other
error ends it at once, for all ranks, with the traceback of the rank that raised.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ringmpi.comm.launcher import Launch, check_library, check_size
from ringmpi.comm.probe import library_name, load_mpi, thread_level
from ringmpi.comm.segments import release_segments
from ringmpi.comm.signals import Signals
from ringmpi.errors import (
    BROKEN,
    Interrupted,
    LaunchError,
    RingMPIError,
    StalledRingError,
    StoreError,
    WriteError,
)

T = TypeVar("T")

#: Seconds between the last words of a rank and its abort: the launcher drops what it has not yet forwarded.
LAST_WORDS = 0.3

#: Seconds that ranks wait for the abort of another rank before they leave by themselves.
ABORT_GRACE = 5.0


class Job:
    """The ranks of a job, for as long as it lasts. Collective.

    Attributes
    ----------
    comm : MPI.Comm
        All ranks.
    team : Team
        For doing things together.
    closing : Team
        For the orderly end after an interruption, when a collective of `team` may be half done.
    watch : Watch
        Heeds signals; shared by everything that waits.
    library : str
        Version of the MPI library.
    thread_level : str
    local_rank : int
        Rank among those of its node.
    unfinished : Path or None
        A file that some rank is writing and that must not stay if the job is aborted, whoever aborts it.
    """

    def __init__(self, mpi: Any, timeout: float, signals: Signals) -> None:
        from ringmpi.comm.team import Team
        from ringmpi.comm.watch import Watch

        self.comm = mpi.COMM_WORLD
        self.watch = Watch(self.comm.Dup(), timeout, signals)
        self.closing = Team(self.comm.Dup(), self.watch)
        self.team = Team(self.comm.Dup(), self.watch, self.closing)
        self.library = library_name(mpi)
        self.thread_level = thread_level(mpi)
        node = self.comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_rank = node.rank
        node.Free()
        self.unfinished: Path | None = None
        # All ranks of the node are through MPI_Init: they have met in the collectives above.
        if self.local_rank == 0:
            release_segments()

    def all_or_none(self, begin: Callable[[], T]) -> T:
        """Do what every rank must have done before any goes on, and return what it gives. Collective.

        A rank that heeds a signal in it would leave, and one that is through already would wait for it, in
        its own orderly end, until the launcher kills it.

        Raises
        ------
        Interrupted
            On every rank, if any heeded a signal.
        RingMPIError
            On every rank, if `begin` raises it on every rank.
        """
        stop: Interrupted | None = None
        refused: RingMPIError | None = None
        try:
            made = begin()
        except Interrupted as met:
            stop = met
        except RingMPIError as error:
            if not error.everywhere:
                raise
            refused = error
        with self.watch.held():  # Or this rank would not hear what the others met.
            stop = self.closing.agreed_stop(stop)
        if stop is not None:
            raise stop
        if refused is not None:
            raise refused
        return made


def start_mpi(launch: Launch) -> Any:
    """Initialise MPI if it is not yet, and return the module. Collective.

    Raises
    ------
    LaunchError
        If the launcher does not belong to the MPI library.
    """
    mpi = load_mpi()
    vendor = mpi.get_vendor()[0]
    if not mpi.Is_initialized():
        check_library(launch, vendor)  # First of all: a wrong library dies while it initialises.
        mpi.Init_thread()
    check_size(launch, vendor, mpi.COMM_WORLD.size)
    return mpi


def refused_by_any(comm: Any, error: RingMPIError | None) -> tuple[str, int] | None:
    """Return the complaint and exit code of the lowest rank that refuses to start, if one does. Collective.

    The first thing that ranks do together: what one of them refuses, such as a file that only its node
    lacks, must not leave the others waiting.
    """
    found = comm.allgather((str(error), error.exit_code) if error else None)
    return next((refusal for refusal in found if refusal), None)


def run_job(launch: Launch, timeout: float, signals: Signals, work: Callable[[Job], int]) -> int:
    """Do `work` as one rank of a job and return its exit code. Collective.

    Parameters
    ----------
    launch : Launch
    timeout : float
        Seconds without progress of a transfer.
    signals : Signals
        Heeded already.
    work : callable
        Gets the job, returns the exit code.
    """
    try:
        mpi = start_mpi(launch)
    except LaunchError as error:
        complain(str(error), launch.rank == 0)
        return error.exit_code
    comm = mpi.COMM_WORLD
    refusal = refused_by_any(comm, None)
    if refusal is not None:
        complain(refusal[0], comm.rank == 0)
        signals.ignore()
        mpi.Finalize()
        return refusal[1]
    job = None
    try:
        job = Job(mpi, timeout, signals)
        code = work(job)
    except Interrupted as stop:
        complain(str(stop), comm.rank == 0)
        _leave(comm, stop.exit_code)
    except RingMPIError as error:
        if not error.everywhere:
            _abort(comm, job, error, error.exit_code)
        complain(str(error), comm.rank == 0)
        code = error.exit_code
    except BaseException as error:  # Whatever it is, the other ranks must not wait.
        _abort(comm, job, error, BROKEN)
    signals.ignore()
    mpi.Finalize()
    return code


def refuse(launch: Launch, error: RingMPIError) -> int:
    """Print one line for all ranks of a refused job, and return the exit code. Collective.

    The line is out before the ranks meet, and none leaves before all have met; so no launcher, seeing
    one rank gone, ends the rank that prints before it has printed.
    """
    complain(str(error), launch.rank == 0)
    if launch.size > 1:
        with contextlib.suppress(LaunchError):
            mpi = start_mpi(launch)
            refused_by_any(mpi.COMM_WORLD, error)
            mpi.Finalize()
    return error.exit_code


def complain(message: str, speaks: bool = True) -> None:
    """Print an error for a person, in one line, whatever was given. Local."""
    message = message.replace("\r", "\\r").replace("\n", "\\n")
    if speaks:
        print(f"ringmpi: {message}", file=sys.stderr, flush=True)


def _abort(comm: Any, job: Job | None, error: BaseException, code: int) -> NoReturn:
    """End all ranks now; say which rank raised, and where."""
    if job is not None and job.unfinished is not None:
        # The rank that writes it is killed without another word.
        with contextlib.suppress(OSError):
            job.unfinished.unlink()
    name = f"rank {comm.rank} of {comm.size}"
    if isinstance(error, StalledRingError | StoreError | WriteError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    prefixed = "\n".join(f"ringmpi: {name}: {line}" for line in text.rstrip().splitlines())
    # One write, so that lines of several ranks do not mix.
    sys.stdout.flush()
    os.write(sys.stderr.fileno(), (prefixed + "\n").encode())
    time.sleep(LAST_WORDS)
    comm.Abort(code)
    _wait_for_the_end(code)


def _leave(comm: Any, code: int) -> NoReturn:
    """End after an interruption: transfers may be under way, so MPI cannot be finalised."""
    sys.stdout.flush()
    sys.stderr.flush()
    if comm.rank == 0:
        time.sleep(LAST_WORDS)
        comm.Abort(code)
    _wait_for_the_end(code)


def _wait_for_the_end(code: int) -> NoReturn:
    """Let the launcher end this process; an abort may return before it has."""
    time.sleep(ABORT_GRACE)
    os._exit(code)
