#!/usr/bin/env bash
# Submit one of jobs/*.sbatch with what the site file says of the machine, and make its environment first: nodes have
# no network on many machines.
#
# Usage:  bash jobs/submit.sh SITE SCRIPT [OPTION OF SBATCH...]
#         bash jobs/submit.sh perlmutter strong_scaling --account=m1234 --nodes=4
#         ACCOUNT=m1234 SEQ_LEN=65536 bash jobs/submit.sh perlmutter exactness --array=0-3
#
# SITE      a file in jobs/site, without .sh;  SCRIPT  one in jobs, without .sbatch
# DRY_RUN=1 only prints the command
# Every variable of the site file and of the script may be set before the command.
set -euo pipefail

export RINGMPI_ROOT
RINGMPI_ROOT=$(cd "$(dirname "$0")/.." && pwd)
known() { printf '%s\n' "$@" | sed -e 's|.*/||' -e 's|\..*||' | paste -s -d ' '; }

if [ $# -lt 2 ] || [ ! -f "$RINGMPI_ROOT/jobs/site/$1.sh" ] || [ ! -f "$RINGMPI_ROOT/jobs/$2.sbatch" ]; then
    echo "submit: give a site and a script: bash jobs/submit.sh SITE SCRIPT [OPTION OF SBATCH...]" >&2
    echo "  sites:   $(known "$RINGMPI_ROOT"/jobs/site/*.sh)" >&2
    echo "  scripts: $(known "$RINGMPI_ROOT"/jobs/*.sbatch)" >&2
    exit 2
fi
export SITE=$1
script=$RINGMPI_ROOT/jobs/$2.sbatch
shift 2

# shellcheck source=jobs/site.sh
source "$RINGMPI_ROOT/jobs/site.sh"
options=(--ntasks-per-node="$RANKS_PER_NODE" --cpus-per-task="$CORES_PER_RANK")
[ -z "$PARTITION" ] || options+=(--partition="$PARTITION")
[ -z "$ACCOUNT" ] || options+=(--account="$ACCOUNT")
[ -z "$QOS" ] || options+=(--qos="$QOS")
[ -z "$CONSTRAINT" ] || options+=(--constraint="$CONSTRAINT")
[ "$GPUS_PER_NODE" = 0 ] || options+=(--gpus-per-node="$GPUS_PER_NODE")
# shellcheck disable=SC2206 # a list of words
options+=($SBATCH_WORDS)

if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' sbatch "${options[@]}" "$@" "$script"
    echo
    exit
fi
load_modules
if [ -z "${VENV:-}" ]; then
    # shellcheck source=jobs/environment.sh
    (source "$RINGMPI_ROOT/jobs/environment.sh")
fi
sbatch "${options[@]}" "$@" "$script"
