# Alps (Daint, Clariden, Santis), CSCS: nodes of 4 GH200, each with 72 cores and a Slingshot network card of its own. Give ACCOUNT
# where you are in several projects.
#
# Sources: https://docs.cscs.ch/running/slurm/ (partitions; one rank a GPU with 4 tasks a node)
#          https://docs.cscs.ch/software/communication/cray-mpich/ (MPICH_GPU_SUPPORT_ENABLED; without the GTL library a program
#          that sets it does not start, and one that passes GPU buffers without it dies)
# jobs/site.sh says what each variable means; each may be set from outside. Not tried there yet. An environment comes from
# `uenv start prgenv-gnu --view=default` before jobs/submit.sh, so that there are no modules here.
# shellcheck shell=bash

: "${PARTITION=normal}"
: "${RANKS_PER_NODE:=4}" "${CORES_PER_RANK:=72}" "${GPUS_PER_NODE:=4}"
: "${RINGMPI_MPI:=site}" "${DEVICE:=cuda}" "${TRANSPORT:=auto}"
: "${LAUNCHER:=srun --mpi=cray_shasta --gpu-bind=none --cpu-bind=cores}"
export MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-1} MPICH_OFI_NIC_POLICY=${MPICH_OFI_NIC_POLICY:-GPU}
