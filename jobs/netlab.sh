#!/usr/bin/env bash
# A cluster with a slow interconnect on one machine: runs an MPI program on hosts that are network namespaces, each
# with a network card of a given rate, joined by a switch. Real TCP, real contention. Needs root, Linux, iproute2.
#
# A host is a namespace with a name of its own; its card is one end of a veth pair whose other end is a port of a
# bridge, which is in a namespace too; `tc tbf` limits what leaves the card and what leaves the port. MPICH goes
# over UCX and TCP between hosts, and over shared memory within one. Latency is that of the kernel, some ten
# microseconds; `ringmpi run --link` adds more. Nothing is made outside of these namespaces, and they are removed
# at the end, also after an error, SIGINT or SIGTERM.
#
# Usage:  bash jobs/netlab.sh [--hosts 2] [--rate 1gbit] [--ranks-per-host 1] -- COMMAND...
#         bash jobs/netlab.sh --hosts 3 --rate 500mbit -- ringmpi run --seq-len 8192 --device paced --flops 1e12
#
# The exit code is that of the command; 2 where no lab can be made here.
set -euo pipefail

refuse() {
    echo "netlab: $*" >&2
    exit 2
}

hosts=2 rate=1gbit ranks_per_host=1
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    [ $# -gt 1 ] || refuse "$1: give a value, and the command after --"
    case $1 in
        --hosts) hosts=$2 ;;
        --rate) rate=$2 ;;
        --ranks-per-host) ranks_per_host=$2 ;;
        *) refuse "$1: not one of --hosts, --rate, --ranks-per-host; the command comes after --" ;;
    esac
    shift 2
done
[ $# -gt 1 ] || refuse "give a command after --, such as -- ringmpi run --seq-len 8192"
shift
[[ $hosts =~ ^[1-9][0-9]{0,2}$ ]] && [ "$hosts" -le 250 ] || refuse "--hosts $hosts: from 1 to 250"
[[ $ranks_per_host =~ ^[1-9][0-9]{0,2}$ ]] || refuse "--ranks-per-host $ranks_per_host: from 1 to 999"
[ "${RINGMPI_MPI:-mpich}" = mpich ] || refuse "RINGMPI_MPI=$RINGMPI_MPI: the lab starts MPICH; leave it away"
[ "$(id -u)" = 0 ] || refuse "needs root, for network namespaces and tc; run it as root"
for tool in ip tc unshare; do
    command -v "$tool" >/dev/null || refuse "$tool is missing; on Debian it is in iproute2, unshare in util-linux"
done

root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=jobs/environment.sh
source "$root/jobs/environment.sh"

# Two labs may run side by side: a process id is of one of them.
export RINGMPI_NETLAB=ringmpi-lab-$$
switch=$RINGMPI_NETLAB-switch
declare -a made=()
job=""

# The job runs beside a `wait`, which a signal ends at once.
# shellcheck disable=SC2329 # called by traps
stop() {
    local number=$1 tenths
    trap '' INT TERM HUP
    if [ -n "$job" ]; then
        kill -TERM "$job" 2>/dev/null || true
        # A ringmpi job has its finished work on disk within 5 s; what is left then is killed below.
        for ((tenths = 0; tenths < 80; tenths++)); do
            [ -n "$(jobs -rp)" ] || break
            sleep 0.1
        done
    fi
    exit $((128 + number))
}

# shellcheck disable=SC2329 # called by a trap
remove() {
    local code=$? namespace pids
    trap '' INT TERM HUP
    for namespace in "${made[@]}"; do
        # Nobody but this lab has processes in there. New ones may be born meanwhile.
        while pids=$(ip netns pids "$namespace" 2>/dev/null) && [ -n "$pids" ]; do
            # shellcheck disable=SC2086 # process ids, a word each
            kill -KILL $pids 2>/dev/null || true
            sleep 0.05
        done
        ip netns del "$namespace" 2>/dev/null || true
    done
    exit "$code"
}

namespace() {
    # Noted first: a signal may come once it is there.
    made+=("$1")
    ip netns add "$1" || refuse "no network namespace can be made here (are you root in a container?)"
    ip -n "$1" link set lo up
}

trap remove EXIT
trap 'stop 1' HUP
trap 'stop 2' INT
trap 'stop 15' TERM

# The queue holds 20 ms, beyond which TCP sees a loss and slows down. A burst is short beside a block, and long
# beside what the kernel hands to a card at once, 64 KB.
limit() {
    tc -n "$1" qdisc add dev "$2" root tbf rate "$rate" burst 256kb latency 20ms ||
        refuse "--rate $rate: tc takes none; use one such as 1gbit or 500mbit"
}

namespace "$switch"
ip -n "$switch" link add switch type bridge
ip -n "$switch" link set switch up
names=""
for ((number = 1; number <= hosts; number++)); do
    host=host$number
    namespace "$RINGMPI_NETLAB-$host"
    ip -n "$switch" link add "port$number" type veth peer name eth0 netns "$RINGMPI_NETLAB-$host"
    ip -n "$switch" link set "port$number" master switch up
    ip -n "$RINGMPI_NETLAB-$host" address add "10.0.0.$number/24" dev eth0
    ip -n "$RINGMPI_NETLAB-$host" link set eth0 up
    limit "$switch" "port$number"
    limit "$RINGMPI_NETLAB-$host" eth0
    names+=${names:+,}$host:$ranks_per_host
done

echo "# netlab: $hosts host(s) with $ranks_per_host rank(s) each, $rate"
ip netns exec "$RINGMPI_NETLAB-host1" mpiexec -launcher ssh -launcher-exec "$root/jobs/netlab/enter.sh" \
    -iface eth0 -hosts "$names" -n $((hosts * ranks_per_host)) \
    -genv UCX_TLS tcp,self -genv UCX_NET_DEVICES eth0 "$@" &
job=$!
code=0
wait "$job" || code=$?
job=""
exit "$code"
