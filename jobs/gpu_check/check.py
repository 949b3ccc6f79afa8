"""Check the GPU device on a GPU, and write what was found as one JSON file. Started by jobs/gpu_check.sh."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from aims import verdicts, with_ratios
from measure import cases, measure
from on_gpu import contenders
from ringmpi.devices import cuda
from ringmpi.provenance import package_versions, processor, system
from rings import ring

ROOT = Path(__file__).parents[2]

#: Seconds for all GPU tests, kernels compiled on the way.
TESTS_LIMIT = 1800

#: As `ringmpi` has it: what is asked for is not here.
MISSING = 3


def main() -> int:
    """Check, measure, write; return the exit code."""
    options = parse()
    missing = cuda.platform().why_missing()
    if missing is not None:
        print(f"gpu_check: device=cuda: {missing}", file=sys.stderr)
        return MISSING
    found: dict[str, Any] = {"facts": facts(options)}
    found["tests"] = tests()
    with tempfile.TemporaryDirectory() as folder:
        shape = ["--seq-len", str(max(options.lengths)), "--heads", str(options.heads)]
        shape += ["--head-dim", "128", "--dtype", "bfloat16", "--verify", "sample:16"]
        found["rings"] = [
            ring(ranks, transport, shape, Path(folder))
            for ranks in options.ranks
            for transport in options.transports
        ]
    rows = []
    for case in cases(options.dtypes, options.head_dims, options.lengths, options.heads):
        for row in measure(case, contenders(case.dtype), options.alternations):
            rows.append(row)
            print(f"# {row}", flush=True)
    found["rows"] = with_ratios(rows)
    found["aims"] = verdicts(found["rows"], [row for row in found["rings"] if "failed" not in row])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["aims"], indent=1))
    print(f"# written: {options.out}")
    failed = found["tests"]["exit_code"] or any("failed" in row for row in found["rings"])
    return 1 if failed else 0


def tests() -> dict[str, Any]:
    """Run the GPU tests; a skipped one is a failure here."""
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", str(ROOT / "tests/gpu")]
    environment = os.environ | {"RINGMPI_FORBID_SKIPS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TESTS_LIMIT, env=environment, check=False
    )
    print(done.stdout)
    lines = done.stdout.strip().splitlines()
    return {"exit_code": done.returncode, "said": lines[-1] if lines else done.stderr[-500:]}


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """Return what ran where."""
    gpus = [str(cuda.platform().gpu(index)) for index in range(cuda.platform().visible())]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        driver = told.stdout.strip()
    except OSError:
        driver = "nvidia-smi is not there"
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": options.commit,
        "command": "bash jobs/gpu_check.sh",
        "gpus": gpus,
        "driver": driver,
        "processor": processor(),
        "system": system(),
        "packages": package_versions() | {"torch": _torch_version()},
    }


def _torch_version() -> str:
    try:
        import torch
    except ImportError:
        return "not installed"
    return f"{torch.__version__}, CUDA {torch.version.cuda}"


def parse() -> argparse.Namespace:
    """Return the options that the script gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--dtypes", nargs="+", required=True)
    parser.add_argument("--head-dims", nargs="+", type=int, required=True)
    parser.add_argument("--lengths", nargs="+", type=int, required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--alternations", type=int, required=True)
    parser.add_argument("--ranks", nargs="+", type=int, required=True)
    parser.add_argument("--transports", nargs="+", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
