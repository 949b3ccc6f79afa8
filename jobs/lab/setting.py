"""What is varied: an interconnect, ranks and what computes; and how a command is started there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: One way, of the emulated link. That of the network lab is what its machine has.
LATENCY = "100us"

#: FLOP/s of paced ranks: compute hides a float32 block of 1024 tokens at 1 Gbit/s (c = 2 F / B).
PACED_FLOPS = 64e9

#: At the slowest rate, where few heads keep the runs short; the threshold does not depend on them.
HEADS = 4
SLOWEST_MBIT = 300

#: Ranks with real compute need a core each.
REAL_RANKS = 2


@dataclass(frozen=True)
class Setting:
    """An interconnect of one bandwidth, and ranks on it.

    Attributes
    ----------
    medium : str
        ``netlab`` or ``link``.
    ranks : int
    rate : int
        Bandwidth in Mbit/s.
    """

    medium: str
    ranks: int
    rate: int

    @property
    def real(self) -> bool:
        """Whether the ranks really compute."""
        return self.ranks <= REAL_RANKS

    @property
    def name(self) -> str:
        """A few words for files and tables."""
        compute = "native" if self.real else "paced"
        return f"{self.medium}-{self.ranks}-{compute}-{self.rate}"

    @property
    def shape(self) -> tuple[str, ...]:
        """The options that say what is attended to.

        The time that hides a block falls with the square of the rate. So there are more heads by as much, and
        a pass takes as long as at the slowest rate: long beside what starting it takes.
        """
        heads = HEADS * max(1, round((self.rate / SLOWEST_MBIT) ** 2))
        return "--heads", str(heads), "--head-dim", "64", "--dtype", "float32"

    @property
    def device(self) -> tuple[str, ...]:
        """The options that say what computes."""
        return (
            ("--device", "native")
            if self.real
            else ("--device", "paced", "--flops", f"{PACED_FLOPS:g}")
        )

    def launched(self, *command: str) -> list[str]:
        """Return a command of ringmpi as it is started on the ranks of this setting."""
        if self.medium == "link":
            link = ("--link", f"{self.rate}Mbit/s,{LATENCY}")
            return ["mpiexec", "-n", str(self.ranks), "ringmpi", *command, *link]
        lab = Path(__file__).parents[1] / "netlab.sh"
        hosts = ("--hosts", str(self.ranks), "--rate", f"{self.rate}mbit")
        return ["bash", str(lab), *hosts, "--", "ringmpi", *command]


def settings(media: Iterable[str], ranks: Iterable[int], rates: Iterable[int]) -> Iterator[Setting]:
    """Yield every setting; real compute only where each rank has a core."""
    for medium in media:
        for size in ranks:
            if size <= REAL_RANKS and (os.cpu_count() or 1) < size:
                print(f"# left out: {size} ranks with real compute need as many cores", flush=True)
                continue
            for rate in rates:
                yield Setting(medium, size, rate)
