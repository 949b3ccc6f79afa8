#!/usr/bin/env bash
# Is it right on this GPU, and how fast? One command on a machine with one.
#
# Runs the GPU tests, then rings of several ranks on the GPUs there are, then our kernels beside torch's
# scaled_dot_product_attention (flash and cuDNN in 16 bits, efficient and math in float32), forward and backward, in
# turns on the same GPU, results held against a float64 reference. Installs CuPy, and torch beside it, from PyPI.
#
# Usage:  bash jobs/gpu_check.sh                     writes results/gpu/<name of the GPU>.json
#         CUDA=13 bash jobs/gpu_check.sh             for drivers of CUDA 13 [12]
#         RINGMPI_MPI=site bash jobs/gpu_check.sh    with the MPI library that is here, such as one that takes device pointers
#         QUICK=1 bash jobs/gpu_check.sh             whether all of it runs here, in some minutes
#
# NAME DTYPES HEAD_DIMS LENGTHS HEADS ALTERNATIONS RANKS TRANSPORTS    less or more of it
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
export RINGMPI_EXTRAS=cuda${CUDA:-12},test
if ! command -v nvidia-smi >/dev/null; then
    echo "gpu_check: no nvidia-smi here, so no GPU to check; run it on a node with one, such as by srun --gpus=1" >&2
    exit 3
fi
# shellcheck source=jobs/environment.sh
source "$root/jobs/environment.sh"
if ! python -c "import torch" 2>/dev/null; then
    echo "# installing torch"
    pip install --quiet --disable-pip-version-check torch || echo "# without torch: our times stand alone"
fi

if [ -n "${QUICK:-}" ]; then
    LENGTHS=${LENGTHS:-4096} DTYPES=${DTYPES:-bfloat16} HEAD_DIMS=${HEAD_DIMS:-128} ALTERNATIONS=${ALTERNATIONS:-3}
fi
name=${NAME:-$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr -cs '[:alnum:]\n' '-' | tr '[:upper:]' '[:lower:]')}

export PYTHONPATH=$root/jobs/bench_cpu${PYTHONPATH:+:$PYTHONPATH} # What a case is stands there.
# shellcheck disable=SC2086 # lists of words
python "$root/jobs/gpu_check/check.py" --out "${OUT:-$root/results}/gpu/$name.json" --commit "$(python "$root/jobs/origin/origin.py")" \
    --dtypes ${DTYPES:-float32 float16 bfloat16} --head-dims ${HEAD_DIMS:-64 128} \
    --lengths ${LENGTHS:-4096 8192 16384 32768} --heads "${HEADS:-16}" --alternations "${ALTERNATIONS:-7}" \
    --ranks ${RANKS:-1 2 3} --transports ${TRANSPORTS:-auto staged}
