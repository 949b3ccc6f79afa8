"""What compilers make of the GPU's kernels, for all architectures, dtypes and head sizes. Needs no GPU."""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import nvrtc
from occupancy import MULTIPROCESSORS, occupancy
from ringmpi.devices.launch import (
    BACKWARD,
    BOUNDS,
    BOUNDS_THREADS,
    CHORE_THREADS,
    CHORES,
    FORWARD,
    HEAD_SIZES,
    Variant,
    unit,
)
from ringmpi.softmax import DTYPES

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels"
COLUMNS = (
    *("cuda", "arch", "dtype", "head_size", "unit", "weights", "kernel", "threads"),
    *(
        "registers",
        "stack",
        "spill_stores",
        "spill_loads",
        "shared_nbytes",
        "blocks_per_sm",
        "occupancy",
    ),
    "limited_by",
)

Row = dict[str, str]


@dataclass(frozen=True)
class Module:
    """One compilation."""

    cuda: str
    arch: str
    variant: Variant

    def rows(self) -> list[Row]:
        """Compile, and return a row for each kernel."""
        source = (KERNELS / "attention.cu").read_text()
        options = (f"-arch={self.arch}", f"-I{KERNELS}", *self.variant.options)
        found = nvrtc.compile_source(self.cuda, source, "attention.cu", options)
        return [self._row(kernel, found[kernel]) for kernel in self.kernels]

    @property
    def kernels(self) -> tuple[str, ...]:
        """Those that have rows: chores once a dtype, as they depend on neither size of heads nor weights."""
        once = self.variant.head_size == HEAD_SIZES[-1] and not self.variant.rounds_weights
        chores = CHORES if once else ()
        return BOUNDS, FORWARD, *BACKWARD, *chores

    def _row(self, kernel: str, figures: nvrtc.Figures) -> Row:
        threads = BOUNDS_THREADS if kernel == BOUNDS else self.variant.threads
        shared = figures.static_shared
        if kernel in CHORES:
            threads = CHORE_THREADS
        else:
            shared += self.variant.shared_nbytes(kernel)
        fits = occupancy(self.arch, threads, figures.registers, shared)
        values = (
            *(self.cuda, self.arch, self.variant.dtype, self.variant.head_size, self.variant.unit),
            "rounded" if self.variant.rounds_weights else "exact",
            *(kernel, threads, figures.registers, figures.stack),
            *(figures.spill_stores, figures.spill_loads, shared),
            *(fits.blocks, f"{fits.share:.3f}", fits.limit),
        )
        return dict(zip(COLUMNS, map(str, values), strict=True))


def capability(arch: str) -> tuple[int, int]:
    """Return (8, 0) for sm_80."""
    number = int(arch.removeprefix("sm_"))
    return number // 10, number % 10


def modules() -> Iterator[Module]:
    """Yield the whole matrix: all with CUDA 12; with 13 the widest heads, which need most registers."""
    for cuda, arch, dtype, size in product(nvrtc.WHEELS, MULTIPROCESSORS, DTYPES, HEAD_SIZES):
        if cuda == "12" or size == HEAD_SIZES[-1]:
            chosen = unit(dtype, capability(arch))
            for rounds in (False, True) if chosen == "Tensor" else (False,):
                yield Module(cuda, arch, Variant(dtype, size, chosen, rounds_weights=rounds))


def sample() -> list[Module]:
    """Return a few of them: every architecture with each CUDA, and among them every dtype and head size."""
    groups: dict[tuple[str, str], list[Module]] = {}
    for module in modules():
        groups.setdefault((module.cuda, module.arch), []).append(module)
    # 5 has no factor in common with the 12 or 18 modules of a group, or the 4 or 6: its multiples meet all.
    return [group[i * 5 % len(group)] for i, group in enumerate(groups.values())]


def digest() -> str:
    """Return what tells this matrix, and its sources apart from comments, from others."""
    told = hashlib.sha256(repr([nvrtc.WHEELS, *modules()]).encode())
    told.update(repr([module.variant.options for module in modules()]).encode())
    for source in sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")]):
        told.update(re.sub(r"\s*//.*", "", source.read_text()).encode())
    return told.hexdigest()[:16]


def compiled(wanted: list[Module], jobs: int) -> Iterator[Row]:
    """Compile all, several at once; tells how far it is."""
    started = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        for done, rows in enumerate(pool.map(Module.rows, wanted), 1):
            yield from rows
            if done % 10 == 0 or done == len(wanted):
                print(
                    f"# {done} of {len(wanted)} modules after {time.monotonic() - started:.0f} s",
                    flush=True,
                )


def faults(row: Row) -> Iterator[str]:
    """Yield what breaks what must hold: no spills, and shared memory that the architecture has."""
    name = " ".join(list(row.values())[:7])
    if row["spill_stores"] != "0" or row["spill_loads"] != "0":
        yield f"{name}: spills {row['spill_stores']} bytes"
    limit = MULTIPROCESSORS[row["arch"]].shared_block
    if int(row["shared_nbytes"]) > limit:
        yield f"{name}: {row['shared_nbytes']} bytes of shared memory, and {limit} are there"
    if row["blocks_per_sm"] == "0":
        yield f"{name}: does not fit for want of {row['limited_by']}"


def differences(rows: list[Row], path: Path) -> list[str]:
    """Return where a file tells otherwise than some rows, or belongs to other sources."""
    first, *lines = path.read_text().splitlines()
    if digest() not in first.split():
        return [
            f"{path} belongs to other sources or compilers; run bash jobs/kernels.sh, and look at its diff"
        ]
    kept = list(csv.DictReader(lines))
    return [f"{path} lacks {','.join(row.values())}" for row in rows if row not in kept]


def write(rows: list[Row], path: Path) -> None:
    """Write the file."""
    versions = ", ".join(f"{wheel} {version}" for wheel, version in nvrtc.WHEELS.values())
    with path.open("w", newline="") as file:
        file.write(f"# bash jobs/kernels.sh; {versions}; sources {digest()}\n")
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def main() -> int:
    """Compile and write, or compile a few and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=ROOT / "results/kernels.csv")
    parser.add_argument("--check", action="store_true", help="compile a few, and compare with the file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    rows, broken = [], 0
    for row in compiled(sample() if given.check else list(modules()), given.jobs):
        rows.append(row)
        broken += sum(complain(line) for line in faults(row))
    if given.check:
        broken += sum(complain(line) for line in differences(rows, given.csv))
    else:
        write(rows, given.csv)
    return 1 if broken else 0


def complain(line: str) -> int:
    """Print what is wrong, and count it."""
    print(f"FAILED: {line}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
