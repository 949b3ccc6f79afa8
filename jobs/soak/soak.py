"""Many short runs in a row, most of them disturbed, and what they left behind. Started by jobs/soak.sh."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from drawing import Plan, plan
from origin import origin
from remains import SHARED_MEMORY
from ringmpi.comm.launcher import find_launcher
from ringmpi.comm.segments import SETTLED
from ringmpi.devices import prepare
from tally import Tally
from trial import Outcome, Trial

#: What the script may be given.
VARIABLES = ("RINGMPI_MPI", "RUNS", "FIRST", "SEED", "LATE")


def main() -> int:
    """Make all runs, write the page, and return 1 if anything was found."""
    options = parse()
    prepare()  # Once for all runs, which are short.
    tally = Tally()
    began = time.monotonic()
    # A short name: it becomes part of socket names, which end at 108 bytes.
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        trial = Trial(Path(folder), find_launcher(), late=options.late)
        for number in range(options.first, options.first + options.runs):
            planned = plan(options.seed, number)
            if planned.fault == "full" and not options.mounts:
                planned = replace(planned, fault="none")
            outcome = trial.run(planned)
            tally.runs.append((planned, outcome))
            print(line(planned, outcome), flush=True)
        tally.staying = staying(tally, trial)
    page: Path = options.page
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(tally.page(origin("soak.sh", VARIABLES, time.monotonic() - began)))
    print(f"# {tally.findings} finding(s) in {len(tally.runs)} runs: {page}")
    return 1 if tally.findings else 0


def staying(tally: Tally, trial: Trial) -> list[str]:
    """Return what killed jobs have left and is still there after one more run, which is counted too."""
    there = [path for path in map(Path, sorted(tally.left)) if path.exists()]
    if any(path.parent == SHARED_MEMORY for path in there):
        time.sleep(SETTLED + 1)  # Younger shared memory may belong to a job that is just starting.
    if there:
        one_more = Plan(0, "none", "--seq-len 8", 0.0, 0, 0, older=True)
        tally.runs.append((one_more, trial.run(one_more)))
    return [str(path) for path in there if path.exists()]


def line(planned: Plan, outcome: Outcome) -> str:
    """Return a run in one line."""
    found = "; ".join(f"{kind.upper()}: {words}" for kind, words in outcome.found)
    strike = "" if planned.fault == "none" else " in time" if outcome.struck else " too late"
    left = f", left {len(outcome.left)}" if outcome.left else ""
    return (
        f"{planned.number:4d} {planned.fault}{strike}: {outcome.seconds:.1f} s, exit code {outcome.codes}, "
        f"file {outcome.file}{left}{'; ' + found if found else ''}"
    )


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--first", type=int, required=True, help="number of the first run")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--late", action="store_true", help="disturb after a run's first word")
    parser.add_argument("--mounts", action="store_true", help="a small file system may be mounted")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
