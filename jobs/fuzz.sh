#!/usr/bin/env bash
# What does ringmpi make of nonsense? Odd command lines, TOML and HDF5 files, thousands of them.
#
# Each must be taken or refused: exit code 2 (3 where this machine lacks something) with one line that says why, no
# traceback, within bounds of memory and time. Of results, `verify` may say 1. Cases are drawn by seed and number
# and run in worker processes that live on; one of many is run by a process of its own, as a user would.
# About 10 minutes. The exit code is 1 if anything was found.
#
# Usage:  bash jobs/fuzz.sh                    writes results/fuzz.md
#         CASES=100 SECONDS_AT_MOST=60 bash jobs/fuzz.sh
#         ONLY=results/17 SEED=0 bash jobs/fuzz.sh      one case again, with all that it says
#
# CASES               of each kind
# SECONDS_AT_MOST     after which no new case begins
# SEED ONLY OUT       of the draws; one case; folder of the table
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
export RINGMPI_EXTRAS=${RINGMPI_EXTRAS:-plot}
# shellcheck source=jobs/environment.sh
source "$root/jobs/environment.sh"

export PYTHONPATH=$root/jobs/origin${PYTHONPATH:+:$PYTHONPATH}
exec python "$root/jobs/fuzz/fuzz.py" --cases "${CASES:-1000}" --seconds "${SECONDS_AT_MOST:-1200}" \
    --seed "${SEED:-0}" --out "${OUT:-$root/results}" ${ONLY:+--only "$ONLY"}
