#!/usr/bin/env bash
# Errors against the reference over rank counts, for every dtype and layout, with the single-pass error beside them.
# About 6 minutes on 2 cores; resumes when it is started again.
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

ringmpi sweep --ranks "$ranks" --seq-len "$seq_len" --causal --repeats 1 \
    --vary dtype=float64,float32,float16,bfloat16 --vary layout=contiguous,striped,zigzag --output "$work"
# Times of so small a problem, on more ranks than cores, say nothing: they stay out of what is kept.
python - "$work/sweep.csv" "$out/exactness.csv" <<'END'
import csv
import sys

kept = ("dtype", "layout", "ranks", "max error", "single pass", "mean error", "single mean", "verdict")
with open(sys.argv[1], newline="") as source, open(sys.argv[2], "w", newline="") as target:
    writer = csv.DictWriter(target, kept, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(csv.DictReader(source))
END
