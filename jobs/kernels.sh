#!/usr/bin/env bash
# What do the compilers make of the GPU's kernels? Registers, spills, shared memory and occupancy, for every architecture, dtype
# and class of head sizes, by NVRTC of CUDA 12 and 13 from PyPI. Needs no GPU and no driver.
#
# All of it takes 6 minutes on 2 cores that are free; CHECK=1 compiles a few, in less than one.
#
# Usage:  bash jobs/kernels.sh            writes results/kernels.csv; look at its diff
#         CHECK=1 bash jobs/kernels.sh    fails where the file says otherwise than the compilers, or belongs to other sources
#
# OUT    folder of the file (results)
# JOBS   compilers at once (as many as there are cores)
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
RINGMPI_EXTRAS=nvrtc
# shellcheck source=jobs/environment.sh
source "$root/jobs/environment.sh"

given=()
if [ -n "${CHECK:-}" ]; then given+=(--check); fi
if [ -n "${JOBS:-}" ]; then given+=(--jobs "$JOBS"); fi
python "$root/jobs/kernels/matrix.py" --csv "${OUT:-$root/results}/kernels.csv" "${given[@]}"
