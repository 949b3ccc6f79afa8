#!/usr/bin/env bash
# The main job: exact ring attention on 4 ranks, verified, timed, written to HDF5 and drawn.
#
# Does all set-up by itself, without root. First q, k and v of a real transformer with its packed documents, then
# a causal problem of 8192 tokens and 8 heads in the balanced zigzag layout. About a minute on 2 cores, plus
# the installation.
#
# Usage:  bash jobs/demo.sh            RINGMPI_MPI=openmpi for Open MPI instead of MPICH
#         RANKS=2 OUT=/tmp/demo bash jobs/demo.sh
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
RINGMPI_EXTRAS=plot
# shellcheck source=jobs/environment.sh
source "$root/jobs/environment.sh"

ranks=${RANKS:-4}
out=${OUT:-$root/results}
mkdir -p "$out"

show() {
    echo
    echo "\$ $*"
    "$@"
}

show mpiexec -n "$ranks" ringmpi run --input "$root/tests/data/minilm_2heads.h5" --output "$out/demo_text.h5"
show mpiexec -n "$ranks" ringmpi run --seq-len 8192 --heads 8 --causal --layout zigzag --output "$out/demo_causal.h5"
for name in demo_text demo_causal; do
    ringmpi report "$out/$name.h5" --plot "$out/$name.png" >/dev/null
done

cat <<END

Both results are verified. They are in
  $out/demo_text.h5    $out/demo_text.png
  $out/demo_causal.h5  $out/demo_causal.png
Try next:
  source $root/.venv-$ringmpi_mpi/bin/activate
  ringmpi report $out/demo_causal.h5        the tables again
  ringmpi verify $out/demo_causal.h5        against the reference again
  ringmpi sweep --ranks 1,2,4 --seq-len 4096 --causal --vary layout=contiguous,striped,zigzag
  ringmpi run --help
END
