"""The processor beside the contenders: what it can do at most, and how busy others keep it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

#: Times of all CPUs since the start: user nice system idle iowait irq softirq steal.
STAT = Path("/proc/stat")


class Peak:
    """The processor at its best: its time for a case is the work at the measured peak.

    Parameters
    ----------
    program : Path
        peak.cpp, compiled.
    unit : str
        As the program knows it.
    threads : int
    """

    #: Long enough for the clock of the cores to settle.
    SECONDS = 0.1

    def __init__(self, program: Path, unit: str, threads: int) -> None:
        self.name, self.unit, self.threads = f"peak-{unit}", unit, threads
        self._command = [str(program), unit, str(threads), str(self.SECONDS)]

    def gflops(self) -> float:
        """Measure."""
        told = subprocess.run(self._command, check=True, capture_output=True, text=True, timeout=60)
        return float(told.stdout)


def build_peaks(threads: int, folder: Path) -> list[Peak]:
    """Compile the program that measures the processor; return its units at all threads and at one."""
    source, program = Path(__file__).with_name("peak.cpp"), folder / "peak"
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        print("# left out: the peak of the processor, for which there is no C++ compiler", flush=True)
        return []
    built = subprocess.run(
        [compiler, "-O3", "-march=native", "-pthread", str(source), "-o", str(program)],
        capture_output=True,
        text=True,
    )
    if built.returncode:
        print("# left out: the peak of the processor, which does not compile:", flush=True)
        print(built.stderr, flush=True)
        return []
    told = subprocess.run([str(program), "unit"], check=True, capture_output=True, text=True)
    units = dict.fromkeys(("fma", told.stdout.strip()))
    return [Peak(program, unit, count) for unit in units for count in sorted({threads, 1})]


def keep_to_cores(threads: int) -> int:
    """Keep this process and all that it starts to as many cores as there are threads; return how many."""
    cores: dict[tuple[str, ...], int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            names = ("physical_package_id", "core_id")
            core = tuple((topology / name).read_text().strip() for name in names)
        except OSError:
            core = (str(cpu),)
        cores.setdefault(core, cpu)
    if len(cores) < threads:
        print(f"# {threads} threads share {len(cores)} cores: these times prove nothing", flush=True)
    os.sched_setaffinity(0, list(cores.values())[:threads])
    return min(threads, len(cores))


class Others:
    """How busy other programs keep the CPUs, seen while all contenders sleep."""

    #: Seconds of a look: the kernel counts hundredths.
    SECONDS = 0.1

    def __init__(self) -> None:
        self._busy = self._all = 0

    def look(self) -> None:
        """Look once more."""
        before = _ticks()
        time.sleep(self.SECONDS)
        after = _ticks()
        self._busy += after[0] - before[0]
        self._all += after[1] - before[1]

    @property
    def share(self) -> float | None:
        """Of the CPUs' time, that of others in all looks; None where the kernel does not tell."""
        return self._busy / self._all if self._all else None


def _ticks() -> tuple[int, int]:
    """Return the hundredths of a second that CPUs of this process were busy, and that they were there."""
    try:
        lines = STAT.read_text().splitlines()
    except OSError:
        return 0, 0
    mine = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    busy = there = 0
    for line in lines:
        name, *counts = line.split()
        if name in mine:
            times = [int(count) for count in counts[:8]]
            there += sum(times)
            busy += sum(times) - times[3] - times[4]
    return busy, there
