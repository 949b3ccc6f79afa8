#!/usr/bin/env bash
# Errors against the reference over rank counts, for every dtype and layout, with the single-pass error beside them.
# About 5 minutes on 2 cores; resumes when it is started again.
#
# Usage:  bash jobs/exactness.sh      RANKS=1,2,3,4,5,8 SEQ_LEN=1000; writes results/exactness.csv
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=jobs/environment.sh
source "$root/jobs/environment.sh"

ranks=${RANKS:-1,2,3,4,5,8}
seq_len=${SEQ_LEN:-1000}
out=${OUT:-$root/results}
work=${WORK:-$root/results/sweep-exactness}
mkdir -p "$out"

# measure WEIGHTS DTYPES: every dtype and layout
measure() {
    ringmpi sweep --ranks "$ranks" --seq-len "$seq_len" --causal --repeats 1 --weights "$1" \
        --vary "dtype=$2" --vary layout=contiguous,striped,zigzag --output "$work/$1"
}
measure exact float64,float32,float16,bfloat16
measure rounded float16,bfloat16
# Times of so small a problem, on more ranks than cores, say nothing: they stay out of what is kept.
python - "$work" "$out/exactness.csv" <<'END'
import csv
import sys
from pathlib import Path

kept = ("dtype", "layout", "ranks", "max error", "single pass", "mean error", "single mean", "verdict")
with open(sys.argv[2], "w", newline="") as target:
    writer = csv.DictWriter(target, ("weights", *kept), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for weights in ("exact", "rounded"):
        with Path(sys.argv[1], weights, "sweep.csv").open(newline="") as source:
            writer.writerows({"weights": weights} | row for row in csv.DictReader(source))
END
