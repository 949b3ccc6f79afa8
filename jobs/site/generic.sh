# A machine with Slurm of which nothing is known: the wheels from PyPI, whatever launcher goes with them, default partition.
# Begin one's own with a copy. jobs/site.sh says what each variable means; each may be set from outside.
# shellcheck shell=bash

: "${RANKS_PER_NODE:=2}" "${CORES_PER_RANK:=1}"
# The mpiexec that came with the MPI library, if there is one, else srun; say `srun --mpi=...` for a library of the site.
: "${LAUNCHER:=auto}" "${DEVICE:=auto}"
