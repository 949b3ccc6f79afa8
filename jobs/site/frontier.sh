# Frontier, OLCF: nodes of 4 MI250X (8 devices), 64 cores of which 56 are given out, 7 a device, and 4 Slingshot network cards,
# one a NUMA domain. Give ACCOUNT. There is no device for AMD's GPUs: this runs on the CPU, a rank an L3 region.
#
# Source: https://docs.olcf.ornl.gov/systems/frontier_user_guide.html, "Low-noise Mode Layout", "NIC Mapping" (by default the card of
#         the rank's NUMA domain), "MPICH_GPU_SUPPORT_ENABLED" (off for programs that pass no GPU buffers to MPI)
#         https://docs.olcf.ornl.gov/software/python/parallel_h5py.html (mpi4py with MPICC="cc -shared")
# jobs/site.sh says what each variable means; each may be set from outside. Not tried there yet.
# shellcheck shell=bash

: "${PARTITION=batch}"
: "${RANKS_PER_NODE:=8}" "${CORES_PER_RANK:=7}" "${GPUS_PER_NODE:=0}"
: "${MODULES=PrgEnv-gnu cray-python}"
: "${RINGMPI_MPI:=site}" "${MPICC:=cc -shared}" "${DEVICE:=native}"
: "${LAUNCHER:=srun --mpi=cray_shasta --cpu-bind=cores --threads-per-core=1}"
export MPICC MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-0} MPICH_OFI_NIC_POLICY=${MPICH_OFI_NIC_POLICY:-NUMA}
