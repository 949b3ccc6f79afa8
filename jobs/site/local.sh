# A workstation, or a Slurm of one's own on it: MPICH's wheel under srun, as the tests do. That wheel has PMI-2 in it.
# jobs/site.sh says what each variable means; each may be set from outside.
# shellcheck shell=bash

: "${RANKS_PER_NODE:=2}" "${CORES_PER_RANK:=1}"
: "${RINGMPI_MPI:=mpich}" "${DEVICE:=native}"
if [ "$RINGMPI_MPI" = openmpi ]; then
    : "${LAUNCHER:=mpiexec}" # Open MPI 5 speaks PMIx alone under srun, for which Debian's Slurm has no library without libpmix-dev.
else
    : "${LAUNCHER:=srun --mpi=pmi2}"
    # Slurm's PMI reads lines of at most 1024 bytes. What MPICH tells of UCX in them may be longer, and then ranks hang in
    # MPI_Init now and then; of libfabric it tells 67 bytes.
    export MPIR_CVAR_CH4_NETMOD=${MPIR_CVAR_CH4_NETMOD:-ofi}
fi
