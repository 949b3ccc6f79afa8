# Leonardo Booster, CINECA: nodes of 4 A100, 32 cores of one CPU, and two network cards with two ports of HDR100. Nodes are shared
# unless all of one is asked for. Give ACCOUNT.
#
# Sources: https://docs.hpc.cineca.it/hpc/leonardo.html (partition, node)
#          https://github.com/ECP-WarpX/WarpX, Tools/machines/leonardo-cineca (8 cores a GPU; modules gcc, cuda, openmpi, python)
# jobs/site.sh says what each variable means; each may be set from outside. Not tried there yet.
# shellcheck shell=bash

: "${PARTITION=boost_usr_prod}" "${SBATCH_WORDS=--exclusive}"
: "${RANKS_PER_NODE:=4}" "${CORES_PER_RANK:=8}" "${GPUS_PER_NODE:=4}"
: "${MODULES=gcc cuda openmpi python}" # With versions, where there are several: module avail.
: "${RINGMPI_MPI:=site}" "${DEVICE:=cuda}" "${TRANSPORT:=auto}"
: "${LAUNCHER:=srun --mpi=pmix --gpu-bind=none --cpu-bind=cores}"
# UCX takes the port that is next to a rank's cores and, unless told otherwise, a second one for large messages.
export UCX_MAX_RNDV_RAILS=${UCX_MAX_RNDV_RAILS:-1}
