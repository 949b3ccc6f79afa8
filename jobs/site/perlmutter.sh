# Perlmutter, NERSC: GPU nodes of 4 A100, 64 cores in 4 NUMA domains, and 4 Slingshot network cards. Give ACCOUNT.
#
# Sources: https://docs.nersc.gov/systems/perlmutter/running-jobs/ (constraint, QOS, --cpus-per-task, --gpu-bind=none)
#          https://docs.nersc.gov/development/languages/python/parallel-python/ (mpi4py with MPICC="cc -shared")
#          https://github.com/ECP-WarpX/WarpX, Tools/machines/perlmutter-nersc (network card by GPU; GPUs are numbered against
#          the NUMA domains)
# jobs/site.sh says what each variable means; each may be set from outside. Not tried there yet.
# shellcheck shell=bash

: "${CONSTRAINT=gpu}" "${QOS=regular}"
: "${RANKS_PER_NODE:=4}" "${GPUS_PER_NODE:=4}"
: "${CORES_PER_RANK:=32}" "${THREADS:=16}" # Slurm counts hardware threads, of which a core has two.
: "${MODULES=PrgEnv-gnu cudatoolkit craype-accel-nvidia80 python}"
: "${RINGMPI_MPI:=site}" "${MPICC:=cc -shared}" "${DEVICE:=cuda}" "${TRANSPORT:=auto}"
# All ranks see all GPUs of a node, since they reach one another's memory by IPC; ringmpi takes one by local rank. GPU 0 is
# at NUMA domain 3, and so on.
: "${LAUNCHER:=srun --mpi=cray_shasta --gpu-bind=none --cpu-bind=map_ldom:3,2,1,0}"
export MPICC MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-1} MPICH_OFI_NIC_POLICY=${MPICH_OFI_NIC_POLICY:-GPU}
