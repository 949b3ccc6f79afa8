"""The largest simulation: one full ring of 16384 ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringmpi.metrics import makespans
from ringmpi.store import ResultFile


def test_16384_ranks_fit_into_little_memory(tmp_path: Path) -> None:
    """One full ring, in a process of its own: 4 GB is the limit that is asked for."""
    program = (
        "import resource, sys; from ringmpi.cli import main; code = main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
    )
    words = f"simulate --machine h100-measured --ranks 16384 --seq-len {16384 * 4096}".split()
    words += ["--heads", "32", "--kv-heads", "8", "--head-dim", "128"]
    words += ["--causal", "--layout", "zigzag", "--output", str(tmp_path / "made.h5")]

    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) * 1024 < 4e9
    with ResultFile(tmp_path / "made.h5") as result:
        records = result.timings().records
        assert records.shape == (1, 16384, 1)
        # Links between nodes set the pace; all blocks pass each of them.
        hop = 55e-6 + 4096 * 2 * 8 * 128 * 2 / 28.1e9
        assert makespans(result.timings())[0] == pytest.approx(16383 * hop, rel=2e-2)
        assert np.unique(records["hops"]).tolist() == [16383.0]
        assert records["pairs"].sum() == pytest.approx(32 * (16384 * 4096) ** 2 / 2, rel=1e-6)
