#!/usr/bin/env bash
# Stands in for ssh where jobs/netlab.sh starts MPI: runs a command on a host of the lab, that is in its network
# namespace and under its name. Called by MPICH's launcher as ssh is: [-OPTION]... HOST COMMAND...
set -euo pipefail

while [[ $1 == -* ]]; do shift; done
host=$1
shift
# The command may come as one word, as ssh takes it.
# shellcheck disable=SC2016 # expanded inside
exec ip netns exec "$RINGMPI_NETLAB-$host" unshare --uts bash -c 'hostname "$0" && eval "exec $*"' "$host" "$@"
