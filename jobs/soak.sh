#!/usr/bin/env bash
# Does a run ever hang, lose a file or leave something behind? Many short runs on 4 ranks, most of them disturbed.
#
# Options are mixed from a seed: methods, masks, dtypes, layouts, progress policies, links, backward, outputs. Four
# of five runs are disturbed: one rank is killed at a random moment, the launcher gets SIGTERM, the disk is full,
# or two jobs write to one file. After each it is looked for processes, shared memory, temporary files, files
# that are not whole, and exit codes that were not promised; then the next one starts, in the same folder.
# Where the system allows it, all of it has mounts of its own: a full disk is a small tmpfs, and shared memory of
# other jobs does not disturb. About 20 minutes for 200 runs. The exit code is 1 if anything was found.
#
# Usage:  bash jobs/soak.sh                        writes results/soak.md
#         RINGMPI_MPI=openmpi RUNS=40 bash jobs/soak.sh    writes results/soak_openmpi.md
#         SEED=1 RUNS=1 FIRST=17 bash jobs/soak.sh the 17th run of that seed alone
#
# RUNS FIRST SEED     how many, from which number on, of which seed
# OUT                 folder of the table
# LATE=1              disturb no earlier than when the ranks are past the start of MPI
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=jobs/environment.sh
source "$root/jobs/environment.sh"

# Mounts of its own, which vanish with the soak: as root, or as root of a user namespace.
apart=()
for way in "unshare --mount" "unshare --user --map-root-user --mount"; do
    if $way mount -t tmpfs soak /dev/shm 2>/dev/null; then
        read -ra apart <<<"$way"
        break
    fi
done
export PYTHONPATH=$root/jobs/origin${PYTHONPATH:+:$PYTHONPATH}
page=soak.md
[ "$ringmpi_mpi" = mpich ] || page=soak_$ringmpi_mpi.md
soak=(python "$root/jobs/soak/soak.py" --runs "${RUNS:-200}" --first "${FIRST:-1}" --seed "${SEED:-0}" --page "${OUT:-$root/results}/$page" ${LATE:+--late})
if [ "${#apart[@]}" -eq 0 ]; then
    echo "# no mounts of its own are allowed here: no full disk is tried" >&2
    exec "${soak[@]}"
fi
# shellcheck disable=SC2016 # expanded by the inner shell
exec "${apart[@]}" bash -c 'mount -t tmpfs soak /dev/shm && exec "$@" --mounts' soak "${soak[@]}"
