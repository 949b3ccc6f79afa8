# Sourced by jobs/slurm.sh, on the nodes, and by jobs/submit.sh, where jobs are submitted: reads the site file that SITE
# names, gives a value to what it leaves open, and can load its modules.
#
#   PARTITION ACCOUNT QOS CONSTRAINT    options of sbatch of these names
#   SBATCH_WORDS      further ones, as words
#   RANKS_PER_NODE    one a GPU, or a NUMA domain where there is none
#   CORES_PER_RANK    what Slurm calls --cpus-per-task: hardware threads where it counts these
#   GPUS_PER_NODE     0 for none
#   MODULES           words for `module load`
#   LAUNCHER          for ringmpi sweep --launcher, with the options that bind ranks to cores
#   DEVICE TRANSPORT  for ringmpi run
#   THREADS           of the native device, a rank
#   RINGMPI_MPI       for jobs/environment.sh: mpich, openmpi, or site for the MPI library of the modules
# shellcheck shell=bash

SITE=${SITE:-generic}
# shellcheck source=jobs/site/generic.sh
source "$(dirname "${BASH_SOURCE[0]}")/site/$SITE.sh" || {
    echo "SITE=$SITE: no such file in jobs/site; copy generic.sh to begin one" >&2
    exit 2
}
: "${PARTITION=}" "${ACCOUNT=}" "${QOS=}" "${CONSTRAINT=}" "${SBATCH_WORDS=}" "${MODULES=}"
: "${RANKS_PER_NODE:=1}" "${CORES_PER_RANK:=1}" "${GPUS_PER_NODE:=0}" "${THREADS:=$CORES_PER_RANK}"
: "${LAUNCHER:=auto}" "${DEVICE:=auto}" "${TRANSPORT:=auto}" "${RINGMPI_MPI:=mpich}" "${RINGMPI_EXTRAS:=plot}"

# Neither login files nor module commands are written for shells that stop at errors and at unset names.
load_modules() {
    [ -n "$MODULES" ] || return 0
    set +eu
    if ! command -v module >/dev/null; then source /etc/profile; fi
    # shellcheck disable=SC2086 # a list of words
    module load $MODULES || {
        echo "SITE=$SITE: module load $MODULES failed; set MODULES to what module avail shows, or to nothing" >&2
        exit 2
    }
    set -eu
}
