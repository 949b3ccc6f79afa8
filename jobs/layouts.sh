#!/usr/bin/env bash
# The picture of the README: a causal problem with contiguous and with zigzag shards, side by side.
#
# Usage:  bash jobs/layouts.sh        RANKS=4 SEQ_LEN=8192; writes results/figures/layouts.png
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
RINGMPI_EXTRAS=plot
# shellcheck source=jobs/environment.sh
source "$root/jobs/environment.sh"

ranks=${RANKS:-4}
seq_len=${SEQ_LEN:-8192}
out=${OUT:-$root/results/figures}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

for layout in contiguous zigzag; do
    mpiexec -n "$ranks" ringmpi run --seq-len "$seq_len" --causal --layout "$layout" --output "$work/$layout.h5"
done
ringmpi report "$work/contiguous.h5" "$work/zigzag.h5" --plot "$out/layouts.png"
