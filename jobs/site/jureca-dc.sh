# JURECA-DC, JSC: GPU nodes of 4 A100, two CPUs of 64 cores in 4 NUMA domains each, and InfiniBand HDR. Give ACCOUNT.
#
# Sources: https://apps.fz-juelich.de/jsc/hps/jureca/affinity.html (Slurm's own default binding, --cpu-bind=cores is refused,
#          --threads-per-core=1 unless hardware threads are wanted, --cpus-per-task again for srun)
#          https://co-design.pop-coe.eu/experiments/gpu-affinity/juwels-booster.html (that binding is the one next to the GPUs)
#          https://github.com/FZJ-JSC/tutorial-multi-gpu, .etc (partition dc-gpu; modules GCC, CUDA, an MPI, MPI-settings/CUDA)
# jobs/site.sh says what each variable means; each may be set from outside. Not tried there yet.
# shellcheck shell=bash

: "${PARTITION=dc-gpu}"
: "${RANKS_PER_NODE:=4}" "${CORES_PER_RANK:=32}" "${GPUS_PER_NODE:=4}"
: "${MODULES=GCC OpenMPI CUDA MPI-settings/CUDA Python}"
: "${RINGMPI_MPI:=site}" "${DEVICE:=cuda}" "${TRANSPORT:=auto}"
: "${LAUNCHER:=srun --mpi=pmix --threads-per-core=1}"
# UCX takes the card that is next to a rank's cores and, unless told otherwise, a second one for large messages.
export UCX_MAX_RNDV_RAILS=${UCX_MAX_RNDV_RAILS:-1}
