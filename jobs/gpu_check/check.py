"""Check the GPU device on a GPU, and write what was found as one JSON file. Started by jobs/gpu_check.sh."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

from aims import failures, verdicts, with_ratios
from judge import Judge
from measure import cases, measure
from on_gpu import contenders
from ringmpi.comm.cores import available_cores
from ringmpi.devices import cuda
from ringmpi.provenance import package_versions, processor, system
from rings import ring

ROOT = Path(__file__).parents[2]

#: Seconds for all GPU tests, kernels compiled on the way.
TESTS_LIMIT = 1800

#: Heads that are held against the reference: of 32768 tokens one takes some ten seconds on 16 cores.
JUDGED_HEADS = 1

#: As `ringmpi` has it: what is asked for is not here.
MISSING = 3


def main() -> int:
    """Check, measure, write; return the exit code."""
    options = parse()
    missing = cuda.platform().why_missing()
    if missing is not None:
        print(f"gpu_check: device=cuda: {missing}", file=sys.stderr)
        return MISSING
    found: dict[str, Any] = {"facts": facts(options), "tests": tests(), "rings": [], "rows": []}
    write(options.out, found)
    with tempfile.TemporaryDirectory() as folder:
        shape = ["--seq-len", str(max(options.lengths)), "--heads", str(options.heads)]
        shape += ["--head-dim", "128", "--dtype", "bfloat16", "--verify", "sample:16"]
        for ranks, transport in product(options.ranks, options.transports):
            found["rings"].append(ring(ranks, transport, shape, Path(folder)))
            write(options.out, found)
    judge = Judge(available_cores(), JUDGED_HEADS)
    for case in cases(options.dtypes, options.head_dims, options.lengths, options.heads):
        rows = measure(case, contenders(case.dtype), judge, options.alternations)
        found["rows"] += with_ratios(rows)
        for row in found["rows"][-len(rows) :]:
            print(f"# {row}", flush=True)
        write(options.out, found)
    print(json.dumps(found["aims"], indent=1))
    print(f"# written: {options.out}")
    for line in found["failed"]:
        print(f"# FAILED: {line}")
    return 1 if found["failed"] else 0


def write(path: Path, found: dict[str, Any]) -> None:
    """Write what has been found so far: a GPU that is lent may be taken back at any moment."""
    rings = found["rings"]
    found["failed"] = [
        *([f"tests: {found['tests']['said']}"] if found["tests"]["exit_code"] else []),
        *(f"{one['command']}: {one['failed']}" for one in rings if "failed" in one),
        *failures(found["rows"]),
    ]
    found["aims"] = verdicts(found["rows"], [one for one in rings if "failed" not in one])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def tests() -> dict[str, Any]:
    """Run the GPU tests; a skipped one is a failure here."""
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", str(ROOT / "tests/gpu")]
    environment = os.environ | {"RINGMPI_FORBID_SKIPS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TESTS_LIMIT, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"exit_code": 124, "said": f"not done in {TESTS_LIMIT} s"}
    print(done.stdout)
    lines = done.stdout.strip().splitlines()
    return {"exit_code": done.returncode, "said": lines[-1] if lines else done.stderr[-500:]}


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """Return what ran where."""
    gpus = [str(cuda.platform().gpu(index)) for index in range(cuda.platform().visible())]
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": options.commit,
        "command": shlex.join(["jobs/gpu_check.sh, which ran", *sys.argv]),
        "gpus": gpus,
        "driver": _driver(),
        "processor": processor(),
        "system": system(),
        "packages": package_versions() | {"torch": _torch_version()},
    }


def _driver() -> str:
    """Return the line in which nvidia-smi tells the versions of the driver and of its CUDA."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return "nvidia-smi is not there"
    told = subprocess.run([path], capture_output=True, text=True, timeout=30, check=False)
    line = next((line for line in told.stdout.splitlines() if "CUDA Version" in line), "not told")
    return " ".join(line.strip("| ").split())


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
