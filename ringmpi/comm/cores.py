"""The cores that a node lets this process run on. Imports no MPI, and starts no process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cores:
    """What a process may run on.

    Attributes
    ----------
    own : tuple of int
        Its affinity: cores by the kernel's numbers.
    given : tuple of int
        That of the process that started it. A launcher that binds its ranks has more than each of them.
    quota : float
        Cores' worth of time that its control group has, all its processes together; 0 for no limit.
    """

    own: tuple[int, ...]
    given: tuple[int, ...] = ()
    quota: float = 0.0

    @property
    def of_job(self) -> int:
        """The cores that all ranks of a job have on this node, as far as one of them can see."""
        return _limited(max(len(self.own), len(self.given)), self.quota)

    @property
    def usable(self) -> int:
        """The cores that this process can keep busy."""
        return _limited(len(self.own), self.quota)


def cores_here() -> Cores:
    """Return the cores of this process. Local."""
    own = affinity()
    given: tuple[int, ...] = ()
    with suppress(OSError):  # Who started us may be gone.
        given = tuple(sorted(os.sched_getaffinity(os.getppid())))
    # A starter that may not run where we do says nothing about what we share with other ranks.
    return Cores(own, given if set(own) <= set(given) else (), cpu_quota())


def affinity() -> tuple[int, ...]:
    """Return the cores that this process may run on, by the kernel's numbers. Local."""
    return tuple(sorted(os.sched_getaffinity(0)))


def available_cores() -> int:
    """Return the number of cores that this process may run on. Local."""
    return len(affinity())


def cpu_quota(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> float:
    """Return the cores' worth of time that control groups allow; 0 for no limit. Local.

    The least of the group and those around it: ``cpu.max`` of version 2, ``cpu.cfs_quota_us`` of version 1
    (the kernel's documentation, cgroup-v2.rst and sched-bwc.rst).

    Parameters
    ----------
    groups : Path
        Tells the groups of this process, a hierarchy a line.
    mounted : Path
        Where the hierarchies are.
    """
    return min(_quotas(groups, mounted), default=0.0)


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, runs of them in short. Local.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _limited(cores: int, quota: float) -> int:
    return max(1, min(cores, int(quota))) if quota else max(1, cores)


def _quotas(groups: Path, mounted: Path) -> Iterator[float]:
    try:
        lines = groups.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        # A container may be told a path that is not there inside: so all the way up.
        place = mounted / controllers if controllers else mounted
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            with suppress(OSError, ValueError, ZeroDivisionError):
                yield from _quota(place / folder, bool(controllers))


def _quota(folder: Path, first_version: bool) -> Iterator[float]:
    if first_version:
        told = [(folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
    else:
        told = (folder / "cpu.max").read_text().split()
    quota, period = told
    if quota.strip() not in ("max", "-1"):
        yield int(quota) / int(period)
