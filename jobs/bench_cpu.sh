#!/usr/bin/env bash
# How fast is it? The native device beside the NumPy device and torch, and the ring beside other rings, on the CPU.
#
# All take turns on the same inputs and the same threads: single part, one process on THREADS threads; ring part,
# THREADS ranks of one thread. Nothing else should run on the machine. A result that is not right has no time.
# Peers are installed apart, into .venv-peers; what cannot be installed or does not start is left out, and said.
# About 100 minutes on 2 cores, a third of that with SIZES="4096 8192"; goes on where it was interrupted, when it is
# started again by the same commit with the same settings.
#
# Usage:  bash jobs/bench_cpu.sh          writes results/bench_cpu.csv and results/figures/bench_cpu.png
#         QUICK=1 bash jobs/bench_cpu.sh  whether all of it runs here, in two minutes, into a new folder
#         SIZES=4096 HEAD_DIMS=128 PEERS=torch OUT=/tmp/bench bash jobs/bench_cpu.sh      less of it
#
# SIZES HEAD_DIMS DTYPES MASKS PASSES PARTS HEADS   the cases
# THREADS          of the single part, and ranks of the ring part (2)
# ALTERNATIONS     least number of turns (7); quick cases have up to three times as many
# LEAST_SECONDS    for which a quick case goes on (4)
# SLOW_LIMIT       longest sequence for the peers that take several times as long (16384)
# PEERS            of: torch lucidrains jax; "none" for none of them
# DEVICE           native or numpy
# WEIGHTS          of ringmpi in bfloat16: exact, or rounded, as those of its peers (exact)
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
RINGMPI_EXTRAS=plot
# shellcheck source=jobs/environment.sh
source "$root/jobs/environment.sh"

if [ -n "${QUICK:-}" ]; then
    SIZES=${SIZES:-256} HEAD_DIMS=${HEAD_DIMS:-64} ALTERNATIONS=${ALTERNATIONS:-2} LEAST_SECONDS=${LEAST_SECONDS:-0}
    OUT=${OUT:-$(mktemp -d)}
fi
out=${OUT:-$root/results}
peers=${PEERS:-torch lucidrains jax}
for peer in $peers; do
    case $peer in
        torch | lucidrains | jax | none) ;;
        *)
            echo "PEERS=$peer: use some of torch lucidrains jax, or none" >&2
            exit 2
            ;;
    esac
done
venv=$root/.venv-peers
mkdir -p "$out/figures"

# OpenBLAS takes the kernels of this processor, whatever an environment says that was made for an older one.
unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE

# install PEER PACKAGE...: once; what does not install is left out.
install() {
    local peer=$1
    shift
    if [[ " $peers " != *" $peer "* ]] || grep -qsx "$*" "$venv/installed"; then
        return
    fi
    echo "# installing $* into $venv"
    if "$venv/bin/pip" install --quiet --quiet --disable-pip-version-check "$@"; then
        echo "$*" >>"$venv/installed"
    else
        echo "# left out: $peer, which cannot be installed"
    fi
}

given=()
if [ "$peers" = none ]; then
    echo "# left out: all peers"
else
    (
        flock 9
        if [ ! -x "$venv/bin/pip" ]; then
            echo "# making $venv"
            python -m venv --clear "$venv"
        fi
        # The versions that the workers in bench_cpu/ are written for: they use what no release promises to keep.
        install torch torch==2.13.0 numpy
        install lucidrains torch==2.13.0 ring-attention-pytorch==0.5.20
        install jax jax==0.10.2 ringattention==0.1.2
    ) 9>"$venv.lock"
    # shellcheck disable=SC2206 # a list of words
    given=(--python "$venv/bin/python" --peers $peers)
fi

# shellcheck disable=SC2086 # lists of words
python "$root/jobs/bench_cpu" --csv "$out/bench_cpu.csv" --figure "$out/figures/bench_cpu.png" \
    --commit "$(python "$root/jobs/origin/origin.py")" --command "bash jobs/bench_cpu.sh" "${given[@]}" \
    --device "${DEVICE:-native}" --weights "${WEIGHTS:-exact}" --heads "${HEADS:-2}" --threads "${THREADS:-2}" \
    --parts ${PARTS:-single ring} --dtypes ${DTYPES:-float32 bfloat16} --masks ${MASKS:-full causal} \
    --passes ${PASSES:-forward forward+backward} \
    --sizes ${SIZES:-4096 8192 16384} --head-dims ${HEAD_DIMS:-64 128} \
    --alternations "${ALTERNATIONS:-7}" --least-seconds "${LEAST_SECONDS:-4}" \
    --slow-limit "${SLOW_LIMIT:-16384}"
