"""Rings of several ranks on the GPUs that there are, as people run them."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringmpi.comm.launcher import find_launcher
from ringmpi.metrics import by_rank
from ringmpi.store import ResultFile

#: Seconds for one ring.
LIMIT = 600

Row = dict[str, Any]


def ring(ranks: int, transport: str, options: Sequence[str], folder: Path) -> Row:
    """Run a ring, verified, and return what its file says; of ranks the median."""
    path = folder / f"ring-{ranks}-{transport}.h5"
    command = [sys.executable, "-m", "ringmpi", "run", "--device", "cuda", "--transport", transport]
    command += [*options, "--output", str(path)]
    launched = find_launcher("auto").command(ranks, command)
    told: Row = {"ranks": ranks, "transport": transport, "command": " ".join(command[1:])}
    try:
        done = subprocess.run(launched, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return told | {"failed": f"not done in {LIMIT} s"}
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return told | {"failed": lines[-1] if lines else f"exit code {done.returncode}"}
    with ResultFile(path) as result:
        timings = result.timings()
        machine = result.facts("machine")
        everyone = by_rank(timings)
        sharing = int(result.column("ranks/gpu_sharing").max())
        alone = timings.alone["step_end"] - timings.alone["started"]
    overlaps = [rank.overlap for rank in everyone if rank.overlap == rank.overlap]
    return told | {
        "gpu_sharing": sharing,
        "took": str(machine["transport"]),
        "reason": str(machine["transport_reason"]),
        "compute_s": statistics.median(rank.compute for rank in everyone),
        "stall_s": statistics.median(rank.stall for rank in everyone),
        "transfer_s": float(alone.sum(axis=-1).max()) if alone.size else 0.0,
        "overlap": statistics.median(overlaps) if overlaps else None,
    }
