"""Scripts that people submit: they parse, and what they run is accepted by the real parser."""

from __future__ import annotations

import csv
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ringmpi import cli
from ringmpi.config import experiment_from
from ringmpi.sweep import Sweep

ROOT = Path(__file__).parents[2]
BATCH = sorted(ROOT.glob("jobs/*.sbatch"))
SCRIPTS = sorted([*ROOT.glob("jobs/**/*.sh"), *BATCH, ROOT / "tests/run.sh", ROOT / ".ci/run"])
SITES = sorted(ROOT.glob("jobs/site/*.sh"))
#: Others source these.
SOURCED = [*SITES, *(ROOT / "jobs" / name for name in ("environment.sh", "slurm.sh", "site.sh"))]
RUNNABLE = [script for script in SCRIPTS if script not in SOURCED]
JOBS = [script for script in RUNNABLE if script.parent.name == "jobs" and script.suffix == ".sh"]
#: These give no command to ringmpi. Tests of their own run them, or what they run.
COMMANDING = [
    script
    for script in JOBS
    if script.name
    not in (
        "bench_cpu.sh",
        "fuzz.sh",
        "gpu_check.sh",
        "kernels.sh",
        "lab.sh",
        "netlab.sh",
        "soak.sh",
        "submit.sh",
    )
]


def named(script: Path) -> str:
    return script.name


@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_script_parses(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("script", RUNNABLE, ids=named)
def test_script_stops_at_the_first_error_and_at_unset_names(script: Path) -> None:
    # The test runner goes on after a failed part, on purpose, and says so in its exit code.
    expected = "set -uo pipefail" if script.name == "run.sh" else "set -euo pipefail"
    assert expected in script.read_text().splitlines()


@pytest.mark.parametrize("script", COMMANDING, ids=named)
def test_commands_of_a_job_are_accepted_by_the_parser(script: Path, tmp_path: Path) -> None:
    """The script runs with stand-ins for launcher and program, which write down what they are given."""
    written = tmp_path / "commands"
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    (stand_ins / "mpiexec").write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    (stand_ins / "ringmpi").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >>{shlex.quote(str(written))}\n'
    )
    # jobs/exactness.sh post-processes the table of a sweep, which nobody makes here.
    (stand_ins / "python").write_text("#!/bin/sh\ncat >/dev/null\n")
    for stand_in in stand_ins.iterdir():
        stand_in.chmod(0o755)
    job = tmp_path / "jobs" / script.name
    job.parent.mkdir()
    job.write_text(script.read_text())
    (job.parent / "environment.sh").write_text("ringmpi_mpi=mpich\n")
    environment = os.environ | {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "OUT": str(tmp_path / "out"),
    }
    subprocess.run(["bash", job], check=True, env=environment, timeout=60, stdout=subprocess.DEVNULL)

    commands = written.read_text().splitlines()
    assert commands
    for command in commands:
        arguments = cli._parser().parse_args(shlex.split(command))
        if command.startswith("run"):
            given = cli._given(arguments)
            found = {"seq_len": 8, "dtype": "float32"} if "input" in given else None
            experiment_from(given, found)
        if command.startswith("sweep"):
            given = cli._given(arguments, leave_out=cli.SWEPT)
            launcher = str(stand_ins / "mpiexec")
            assert Sweep(given, arguments.ranks, arguments.vary, arguments.output, launcher).points


#: Tables as `ringmpi report --compare` writes them: each has what its files differ in.
ERRORS = """method,ranks,pass,time ms,stall ms,compute ms,max error,verdict,fastest,oversubscribed
ring,5,forward,9.00,1.00,2.00,1.00e-07,OK,<,yes
"""
TIMES = """method,ranks,pass,link,time ms,stall ms,compute ms,max error,verdict,fastest,oversubscribed
passq,4,backward,"1Gbit/s,1ms",7.00,3.00,4.00,2.00e-07,OK,<,
"""


def test_table_of_methods_has_errors_without_times_and_then_times(tmp_path: Path) -> None:
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    (stand_ins / "python").symlink_to(sys.executable)
    script = ["#!/bin/sh", 'echo "$*" >>"$OUT/commands"', "for last; do :; done", 'case "$last" in']
    for name, text in (("errors", ERRORS), ("times", TIMES)):
        (tmp_path / name).write_text(text)
        script.append(f'*/{name}.csv) cp {shlex.quote(str(tmp_path / name))} "$last" ;;')
    (stand_ins / "ringmpi").write_text("\n".join([*script, "esac", ""]))
    (stand_ins / "ringmpi").chmod(0o755)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/methods.sh").write_text((ROOT / "jobs/methods.sh").read_text())
    (tmp_path / "jobs/environment.sh").write_text("")
    out = tmp_path / "out"
    out.mkdir()
    environment = os.environ | {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "OUT": str(out),
        "WORK": str(out),
        "RANKS": "1,5",
        "LINK_RANKS": "3",
        "SEQ_LEN": "32",
    }
    told = subprocess.run(
        ["bash", tmp_path / "jobs/methods.sh"],
        check=True,
        env=environment,
        timeout=60,
        capture_output=True,
        text=True,
    )

    sweeps = [line for line in (out / "commands").read_text().splitlines() if line.startswith("sweep")]
    assert all("--method all" in line and "--backward" in line for line in sweeps)
    assert "--ranks 1,5 --seq-len 31" in sweeps[0]
    assert all("--ranks 3 --seq-len 32" in line and "--link " in line for line in sweeps[1:])
    outputs = [line.split("--output ")[1].split()[0] for line in sweeps]
    assert len(set(outputs)) == len(sweeps) == 7
    with (out / "methods.csv").open(newline="") as file:
        error, time = csv.DictReader(file)
    assert (error["case"], error["max error"], error["verdict"]) == ("errors", "1.00e-07", "OK")
    assert {error[name] for name in ("time ms", "stall ms", "fastest", "link", "oversubscribed")} == {
        ""
    }
    assert (time["case"], time["time ms"], time["link"]) == ("times", "7.00", "1Gbit/s,1ms")
    assert (time["fastest"], time["method"]) == ("<", "passq")
    assert told.stdout.splitlines()[-1] == f"# table: {out}/methods.csv"


def test_open_mpi_is_told_by_environment_variables_only_where_needed() -> None:
    """MPICH's launcher must not see them, and no script passes Open MPI's flags to a launcher."""
    environment = (ROOT / "jobs/environment.sh").read_text()
    condition = 'if [ "$ringmpi_mpi" = openmpi ] || [ "$ringmpi_mpi" = debian ]; then'
    assert re.search(re.escape(condition) + r"\n    export PRTE_MCA", environment)
    for script in JOBS:
        assert "--oversubscribe" not in script.read_text()
        assert "--allow-run-as-root" not in script.read_text()


@pytest.mark.parametrize("wanted", ["cray", "MPICH", ""])
def test_an_unknown_mpi_is_refused(wanted: str) -> None:
    environment = os.environ | {"RINGMPI_MPI": wanted or "none"}
    done = subprocess.run(
        ["bash", ROOT / "jobs/demo.sh"], capture_output=True, text=True, timeout=20, env=environment
    )
    assert done.returncode == 2
    assert (
        done.stderr.strip() == f"RINGMPI_MPI={wanted or 'none'}: use mpich, openmpi, intel or debian, "
        f"or site for the MPI library that is here"
    )


@pytest.mark.parametrize("script", BATCH, ids=named)
def test_batch_script_asks_for_what_keeps_results_apart_and_safe(script: Path) -> None:
    """Slurm reads options up to the first command, and would take no notice of later ones."""
    lines = script.read_text().splitlines()
    head = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    asked = {line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH ")}

    assert {
        f"--job-name={script.stem}",
        "--output=%x-%A_%a.out",
        "--open-mode=append",  # Of a job that is requeued, what it said before stays.
        "--signal=B:USR1@120",
        "--requeue",
        "--array=0",
    } <= asked
    assert len(asked) == sum("#SBATCH" in line for line in lines)
    minutes = next(line for line in asked if line.startswith("--time=00:")).split(":")[1]
    assert int(minutes) <= 30


@pytest.mark.parametrize("site", SITES, ids=named)
def test_submitting_shows_what_the_site_asks_for(site: Path) -> None:
    told = submit(site.stem, "gpu", "--nodes=3", env={"DRY_RUN": "1"})

    assert told.returncode == 0, told.stderr
    words = shlex.split(told.stdout)
    assert words[0] == "sbatch"
    assert words[-2:] == ["--nodes=3", str(ROOT / "jobs/gpu.sbatch")]
    asked = dict(word.split("=", 1) for word in words[1:-1] if "=" in word)
    # A rank a GPU, where there are any for it, and cores for each.
    assert asked.get("--gpus-per-node", asked["--ntasks-per-node"]) == asked["--ntasks-per-node"]
    assert int(asked["--cpus-per-task"]) >= 1


@pytest.mark.parametrize("site", SITES, ids=named)
def test_every_value_of_a_site_can_be_set_from_outside(site: Path) -> None:
    names = (
        "RANKS_PER_NODE",
        "CORES_PER_RANK",
        "GPUS_PER_NODE",
        "LAUNCHER",
        "DEVICE",
        "TRANSPORT",
        "THREADS",
    )
    names += ("MODULES", "PARTITION", "ACCOUNT", "QOS", "CONSTRAINT", "RINGMPI_MPI", "SBATCH_WORDS")
    ours = {name: f"own {name}" for name in names}
    ours |= {"SITE": site.stem, "MODULES": "", "PARTITION": ""}  # Nothing is a value too.
    show = "".join(f'echo "{name}=${{{name}}}"; ' for name in ours)

    told = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source jobs/site.sh; {show}"],
        cwd=ROOT,
        env=os.environ | ours,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )

    assert dict(line.split("=", 1) for line in told.stdout.splitlines()) == ours


def test_options_of_sbatch_come_from_variables_and_last_from_the_command_line() -> None:
    ours = {"PARTITION": "short", "ACCOUNT": "m1", "QOS": "debug", "CONSTRAINT": "gpu&hbm80g"}
    told = submit("generic", "exactness", "--qos=regular", env=ours | {"DRY_RUN": "1"})

    words = shlex.split(told.stdout)
    assert {"--partition=short", "--account=m1", "--qos=debug", "--constraint=gpu&hbm80g"} <= set(words)
    assert words.index("--qos=regular") > words.index("--qos=debug")


@pytest.mark.parametrize(
    "given", [(), ("generic",), ("atlantis", "gpu"), ("generic", "nothing")], ids=str
)
def test_what_cannot_be_submitted_is_refused_with_what_can(given: tuple[str, ...]) -> None:
    told = submit(*given)

    assert told.returncode == 2
    assert f"sites:   {' '.join(site.stem for site in SITES)}" in told.stderr
    assert f"scripts: {' '.join(script.stem for script in BATCH)}" in told.stderr


@pytest.mark.parametrize("script", BATCH, ids=named)
def test_a_batch_script_is_no_shell_script_without_slurm(script: Path) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    told = subprocess.run(
        ["bash", script], cwd=ROOT, env=own, capture_output=True, text=True, timeout=20, check=False
    )

    assert told.returncode == 2
    assert f"bash jobs/submit.sh SITE {script.stem}" in told.stderr


def submit(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", ROOT / "jobs/submit.sh", *words],
        env=os.environ | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
