#!/usr/bin/env bash
# Is what we predict what happens? Block lengths across the overlap threshold, measured beside predicted and simulated.
#
# On two interconnects: the network lab (namespaces joined by a rate-limited bridge; needs root) and the emulated
# link; at three bandwidths each; on 2 ranks with real compute, on more with paced compute, so that ranks need not
# have a core each. For each setting `calibrate` measures the machine, `plan` and `simulate` predict from what it
# wrote, and `run` measures, with polling and without. About 40 minutes; goes on where it was interrupted.
#
# Usage:  bash jobs/lab.sh                 writes results/lab/overlap.csv and results/lab/settings.csv
#         MEDIA=link bash jobs/lab.sh      without root
#         QUICK=1 bash jobs/lab.sh         whether all of it runs here, in two minutes, into a new folder
#
# MEDIA     of: netlab link
# RANKS     of: 2 3 4
# RATES     bandwidths in Mbit/s
# REPEATS   of every run
# OUT WORK  where tables go, and result files
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=jobs/environment.sh
source "$root/jobs/environment.sh"

if [ -n "${QUICK:-}" ]; then
    RANKS=${RANKS:-2 3} RATES=${RATES:-600} REPEATS=${REPEATS:-1} OUT=${OUT:-$(mktemp -d)}
    FACTORS=${FACTORS:-0.5 1.5}
fi
out=${OUT:-$root/results}
media=${MEDIA:-netlab link}
if [ "$(id -u)" != 0 ] && [[ " $media " == *" netlab "* ]]; then
    echo "MEDIA=$media: the network lab needs root; run it as root, or with MEDIA=link" >&2
    exit 2
fi

# shellcheck disable=SC2086 # lists of words
python "$root/jobs/lab/validate.py" --commit "$(python "$root/jobs/origin/origin.py")" --out "$out" --work "${WORK:-$out/sweep-lab}" --media $media \
    --ranks ${RANKS:-2 3 4} --rates ${RATES:-300 600 1000} --repeats "${REPEATS:-3}" \
    --factors ${FACTORS:-0.5 0.7 0.85 1.0 1.15 1.25 1.6}
