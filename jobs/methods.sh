#!/usr/bin/env bash
# All methods side by side, forward and backward: errors over rank counts, then times under an emulated slow link.
# About 15 minutes on 2 cores; resumes when it is started again.
#
# The link makes the interconnect the slow part, so that the times tell the methods apart also where ranks share
# cores. Once each two ranks have a link of their own, once all that a rank sends goes through one network card.
#
# Usage:  bash jobs/methods.sh      RANKS=1,2,3,4,5,8 LINK_RANKS=2,4 SEQ_LEN=512; writes results/methods.csv
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=jobs/environment.sh
source "$root/jobs/environment.sh"

ranks=${RANKS:-1,2,3,4,5,8}
link_ranks=${LINK_RANKS:-2,4}
seq_len=${SEQ_LEN:-512}
repeats=${REPEATS:-5}
link=${LINK:-100Mbit/s,1ms}
out=${OUT:-$root/results}
work=${WORK:-$root/results/sweep-methods}
mkdir -p "$out"

# Groups of two, so that hybrid and double-ring differ from ulysses and ring also on one node.
sweep() {
    local name=$1
    shift
    ringmpi sweep --method all --ulysses-degree 2 --inner 2 --backward --output "$work/$name" "$@"
}

sweep errors --ranks "$ranks" --seq-len $((seq_len - 1)) --layout zigzag --causal --repeats 1
for way in "" ,shared; do
    for problem in "--kv-heads 8" "--kv-heads 2" "--query-len $((seq_len / 16))"; do
        # shellcheck disable=SC2086 # an option and its value
        sweep "times$way${problem// /}" --ranks "$link_ranks" --seq-len "$seq_len" $problem \
            --link "$link$way" --repeats "$repeats" --verify sample:64
    done
done

ringmpi report --compare "$work"/errors/*.h5 --csv "$work/errors.csv" >/dev/null
ringmpi report --compare "$work"/times*/*.h5 --csv "$work/times.csv"
# One table: the errors, without the times of a small problem on more ranks than cores, then the times.
python - "$work/errors.csv" "$work/times.csv" "$out/methods.csv" <<'END'
import csv
import sys

untold = ("time ms", "min ms", "max ms", "stall ms", "compute ms", "fastest", "oversubscribed")
tables = []
for path in sys.argv[1:3]:
    with open(path, newline="") as file:
        tables.append(list(csv.DictReader(file)))
errors, times = tables
rows = [{"case": "errors"} | row | dict.fromkeys(untold, "") for row in errors]
rows += [{"case": "times"} | row for row in times]
with open(sys.argv[3], "w", newline="") as file:
    columns = dict.fromkeys(name for row in (rows[-1], *rows) for name in row)
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
END
echo "# table: $out/methods.csv"
