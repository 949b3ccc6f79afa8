# Sourced by jobs/*.sbatch: what the jobs have in common. Enters the site's environment, says where results go, and
# runs sweeps so that nothing that is finished is lost when Slurm wants the nodes back.
#
#   SITE            a file in jobs/site, generic by default: all that is known of the machine. Every variable in it
#                   may be set from outside
#   OUT             folder of the results: results/<job name>-<job id>, which no two jobs share. To go on with what
#                   an earlier job has left, give its folder
#   RANKS           rank counts: 1, 2, 4 and so on up to all tasks of the job
#   VENV            an environment that is there already; else jobs/environment.sh makes one, which needs a network
#   REQUEUE         yes: when its time is nearly up, the job goes back into the queue to go on later
#   MAX_RESTARTS    how often at most (5)
#
# The tasks of a job array (sbatch --array=0-3) share the points of a sweep. What Slurm requeues, after a preemption or
# because a node has failed, goes on where it stopped, and says so in the same log, below what is there.
# shellcheck shell=bash

if [ -z "${SLURM_JOB_ID:-}" ]; then
    name=${0##*/}
    echo "this is a job for Slurm: bash jobs/submit.sh SITE ${name%.sbatch}; jobs/README.md has those that need none" >&2
    exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=jobs/site.sh
source "$root/jobs/site.sh"
load_modules
if [ -n "${VENV:-}" ]; then
    export PATH=$VENV/bin:$PATH
else
    # shellcheck source=jobs/environment.sh
    source "$root/jobs/environment.sh"
fi

job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
results=${OUT:-$root/results/${SLURM_JOB_NAME%.sbatch}-$job}
mkdir -p "$results"
attempt=$((${SLURM_RESTART_COUNT:-0} + 1))
ranks=$((SLURM_JOB_NUM_NODES * ${SLURM_NTASKS_PER_NODE:-$RANKS_PER_NODE}))

echo "# job $job, task ${SLURM_ARRAY_TASK_ID:-none}, attempt $attempt on $SLURM_JOB_NODELIST, $(date --iso-8601=seconds)"
echo "# site $SITE: launcher $LAUNCHER, device $DEVICE, transport $TRANSPORT, $RANKS_PER_NODE rank(s) a node"
echo "# results: $results"

# doubling_ranks: 1,2,4 and so on up to all.
doubling_ranks() {
    local count list=""
    for ((count = 1; count < ranks; count *= 2)); do list+=$count,; done
    echo "$list$ranks"
}

# Slurm's warning (--signal) comes to this shell, and its other signals to each process of the job. They are passed
# on; ringmpi has what is finished on disk within 5 s or one step.
child="" heard=""
# shellcheck disable=SC2329 # called by traps
pass_on() {
    heard=$1
    echo "# $1 at $(date --iso-8601=seconds)"
    [ -z "$child" ] || kill -s "$1" "$child" 2>/dev/null || true
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM

# heeding COMMAND...: runs it beside a `wait`, which a signal ends at once, and returns its exit code.
heeding() {
    local code=0 ended signal=""
    if [ -n "$heard" ]; then
        echo "# nothing is begun any more after $heard"
        exit $((128 + $(kill -l "$heard")))
    fi
    "$@" &
    child=$!
    while :; do
        heard="" ended=0
        wait "$child" || ended=$?
        # 127: it had ended as the signal came.
        [ "$ended" -eq 127 ] || code=$ended
        [ -n "$heard" ] || break
        signal=$heard
    done
    child=""
    if [ -n "$signal" ] && [ "$code" -gt 128 ]; then
        echo "# stopped by $signal; OUT=$results goes on from here"
        if [ "$signal" = USR1 ] && [ "${REQUEUE:-no}" = yes ] && [ "$attempt" -le "${MAX_RESTARTS:-5}" ]; then
            scontrol requeue "$SLURM_JOB_ID"
        fi
    fi
    return "$code"
}

# sweep OPTIONS...: `ringmpi sweep` with what the site says.
sweep() {
    local given=(--launcher "$LAUNCHER" --device "$DEVICE" --transport "$TRANSPORT" --output "$results")
    case $DEVICE in
        auto | native) given+=(--threads "$THREADS") ;;
    esac
    if [ "${SLURM_ARRAY_TASK_COUNT:-1}" -gt 1 ]; then given+=(--share array); fi
    heeding ringmpi sweep "${given[@]}" "$@"
}

# draw FIGURE: a picture of all results that are there. Nothing depends on it, and it can be drawn later.
draw() {
    local picture
    picture=$results/$1-$job-${SLURM_ARRAY_TASK_ID:-0}-$attempt.png
    # What it says where it draws nothing, such as that there is no matplotlib, or one rank count alone, is in the log.
    ringmpi report "$results"/*.h5 --plot "$picture" --figure "$1" || echo "# no picture $1"
}
