"""Many runs from one command: they resume, agree, and never hide a failure."""

from __future__ import annotations

import csv
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from running import Ended, Queue, Running, Scenario, command_line, launcher, under_open_mpi

from ringmpi.comm.cores import available_cores
from ringmpi.metrics import by_rank, makespans
from ringmpi.schedule import METHODS, Pass
from ringmpi.store import ResultFile

PROBLEM = "--seq-len 40 --heads 2 --head-dim 4 --causal --repeats 1"

#: The sweep itself, which no launcher started, must never load the MPI library.
NO_MPI = {"RINGMPI_TEST_FORBID": "mpi4py,mpi4py.MPI"}

#: Columns that differ from run to run.
TIMES = ("time ms", "min to max", "stall ms", "efficiency", "backward ms", "backward stall")


def wrapped_launcher(work: Path) -> None:
    """Make a launcher that writes down each call before it does it."""
    script = work / "mpiexec"
    real = shlex.quote(launcher().path)
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || printf "%s\\n" "$*" >>{shlex.quote(str(work / "calls"))}\n'
        f'exec {real} "$@"\n'
    )
    script.chmod(0o755)


def sweep(
    options: str, fault: str = "", meanwhile: Callable[[Running], None] | None = None
) -> Scenario:
    return Scenario(
        0,
        f"sweep {PROBLEM} --launcher ./mpiexec --output swept {options}",
        fault=fault,
        env=NO_MPI,
        files=wrapped_launcher,
        timeout=110,
        **({"meanwhile": meanwhile} if meanwhile else {}),
    )


def calls(work: Path) -> list[str]:
    path = work / "calls"
    return path.read_text().splitlines() if path.exists() else []


def table(work: Path) -> list[dict[str, str]]:
    with (work / "swept" / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def without_times(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


WHOLE = sweep("--ranks 3,1,2 --vary dtype=float32,bfloat16 --vary layout=contiguous,zigzag")


@pytest.mark.parametrize("ended", [pytest.param(WHOLE, id="")], indirect=True)
def test_sweep_runs_rank_counts_times_parameters(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    assert len(calls(ended.work)) == 12
    rows = table(ended.work)
    found = [(row["dtype"], row["layout"], row["ranks"]) for row in rows]
    assert found == [
        (dtype, layout, ranks)
        for dtype in ("float32", "bfloat16")
        for layout in ("contiguous", "zigzag")
        for ranks in "123"
    ]
    assert {row["verdict"] for row in rows} == {"OK"}
    assert all(float(row["max error"]) < 0.02 for row in rows)
    results = list((ended.work / "swept").glob("*.h5"))
    assert len(results) == 12
    for path in results:
        with h5py.File(path) as file:
            assert file.attrs["complete"]
    assert "12 points, all OK" in ended.stdout


@pytest.mark.parametrize("ended", [pytest.param(WHOLE, id="")], indirect=True)
def test_second_sweep_starts_nothing(ended: Ended) -> None:
    before, made = table(ended.work), len(calls(ended.work))
    repeated = Running(ended.args, ended.work.parent, NO_MPI).wait(60)
    assert repeated.returncode == 0, repeated.told()
    assert len(calls(ended.work)) == made
    assert table(ended.work) == before
    assert repeated.stdout.count("done before") == 12


#: All methods, of which three need what three ranks do not have: a third head, groups of two.
METHODICAL = sweep(
    "--method all --inner 2 --ulysses-degree 2 --backward --kv-heads 1 --query-len 39 --ranks 2,3"
)


@pytest.mark.parametrize("ended", [pytest.param(METHODICAL, id="")], indirect=True)
def test_sweep_over_all_methods_leaves_out_what_a_rank_count_does_not_allow(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    found = [(row["method"], int(row["ranks"])) for row in table(ended.work)]
    impossible = {("ulysses", 3), ("hybrid", 3), ("double-ring", 3)}
    assert found == [(name, n) for name in METHODS for n in (2, 3) if (name, n) not in impossible]
    assert len(calls(ended.work)) == len(found) == 11
    assert "11 points, all OK" in ended.stdout
    told = [line for line in ended.stdout.splitlines() if line.startswith("left out: ")]
    assert {(line.split()[2], int(line.split()[4])) for line in told} == impossible
    for line in told:
        reason = "2 heads cannot be shared among 3 ranks" if "ulysses on" in line else "=2: must divide"
        assert reason in line


@pytest.mark.parametrize("ended", [pytest.param(METHODICAL, id="")], indirect=True)
def test_table_of_a_sweep_tells_of_the_gradients(ended: Ended) -> None:
    for row in table(ended.work):
        with ResultFile(
            next((ended.work / "swept").glob(f"{row['method']}-*-p{row['ranks']}.h5"))
        ) as file:
            verdicts = {verdict.tensor: verdict for verdict in file.verdicts()}
            spans = makespans(file.timings(Pass.BACKWARD))
            stalls = [rank.stall for rank in by_rank(file.timings(Pass.BACKWARD))]
        gradients = [verdicts[name] for name in ("dq", "dk", "dv")]
        assert row["gradient error"] == f"{max(verdict.max_abs for verdict in gradients):.2e}"
        assert row["gradient single"] == f"{max(verdict.single_max for verdict in gradients):.2e}"
        assert row["max error"] == f"{verdicts['out'].max_abs:.2e}"
        assert float(row["backward ms"].rstrip("*")) == pytest.approx(
            np.median(spans) * 1e3, abs=0.0051
        )
        assert float(row["backward stall"]) == pytest.approx(max(stalls) * 1e3, abs=0.0051)


@pytest.mark.parametrize("ended", [pytest.param(METHODICAL, id="")], indirect=True)
def test_sweep_over_all_methods_goes_on_with_what_is_missing(ended: Ended) -> None:
    before, made = table(ended.work), len(calls(ended.work))
    (lost,) = (ended.work / "swept").glob("passq-*-p3.h5")
    lost.unlink()
    repeated = Running(ended.args, ended.work.parent, NO_MPI).wait(60)
    assert repeated.returncode == 0, repeated.told()
    assert repeated.stdout.count("done before") == 10
    again = calls(ended.work)[made:]
    assert len(again) == 1
    assert "--method passq" in again[0]
    assert without_times(table(ended.work)) == without_times(before)


CROWD = available_cores() + 1
CROWDED = sweep(f"--ranks 1,{CROWD}")


@pytest.mark.parametrize("ended", [pytest.param(CROWDED, id="")], indirect=True)
def test_more_ranks_than_cores_are_marked_and_have_no_efficiency(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    one, crowd = table(ended.work)
    assert (one["ranks"], crowd["ranks"]) == ("1", str(CROWD))
    assert not one["time ms"].endswith("*")
    assert one["efficiency"] == "100%"
    assert crowd["time ms"].endswith("*")
    assert crowd["efficiency"] == "-"
    assert "more ranks or threads than cores" in ended.stdout


@pytest.mark.skipif(available_cores() < 2, reason="needs two cores")
@pytest.mark.parametrize(
    "ended", [pytest.param(Scenario(2, f"run {PROBLEM} --output r.h5"), id="2 ranks")], indirect=True
)
def test_as_many_ranks_as_cores_are_not_marked(ended: Ended) -> None:
    # Launchers bind ranks to cores, which must not be taken for a machine of one core.
    with h5py.File(ended.work / "r.h5") as file:
        assert not file["machine"].attrs["oversubscribed"]


WRONG = sweep("--ranks 1,2", fault="scale:size=2")


@pytest.mark.parametrize("ended", [pytest.param(WRONG, id="")], indirect=True)
def test_point_that_fails_verification_has_no_times_and_sets_the_exit_code(ended: Ended) -> None:
    assert ended.returncode == 1, ended.told()
    good, bad = table(ended.work)
    assert good["verdict"] == "OK"
    assert bad["verdict"] == "FAILED"
    assert {bad[name] for name in TIMES if name in bad} == {"-"}
    assert float(bad["max error"]) > float(bad["single pass"])
    assert "1 FAILED verification" in ended.stdout
    # Once the fault is mended, that point alone is run again.
    made = len(calls(ended.work))
    repaired = Running(ended.args, ended.work.parent, NO_MPI).wait(60)
    assert repaired.returncode == 0, repaired.told()
    assert len(calls(ended.work)) == made + 1
    assert [row["verdict"] for row in table(ended.work)] == ["OK", "OK"]


@pytest.mark.parametrize(
    "ended",
    [pytest.param(sweep("--ranks 1,2", fault="raise:size=1:place=attend"), id="")],
    indirect=True,
)
def test_point_that_breaks_is_missing_and_the_others_are_run(ended: Ended) -> None:
    assert ended.returncode == 4, ended.told()
    assert [row["verdict"] for row in table(ended.work)] == ["missing", "OK"]
    assert "a fault of the test" in ended.stdout
    assert "1 without a result" in ended.stdout


STOPPED_BY = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}


def stopping(number: int) -> Callable[[Running], None]:
    def act(running: Running) -> None:
        running.await_mark("sleep-0", timeout=60)
        running.note("signalled")
        os.kill(running.process.pid, number)

    return act


RESUMED = "--ranks 1,2,3 --vary layout=striped"
UNINTERRUPTED = sweep(RESUMED)


@pytest.mark.parametrize(
    ("ended", "number"),
    [
        pytest.param(
            # The second point is the slow one: its ranks sleep a second in every attend.
            sweep(RESUMED, "sleep:size=2:place=attend:call=each:seconds=1", stopping(number)),
            number,
            id=name,
        )
        for name, number in STOPPED_BY.items()
    ],
    indirect=["ended"],
)
def test_interrupted_sweep_goes_on_where_it_stopped(ended: Ended, number: int, queue: Queue) -> None:
    assert ended.returncode == 128 + number, ended.told()
    assert ended.complaints() == [f"ringmpi: interrupted by signal {number:d}"], ended.told()
    # 5 s and a step of 1 s, and what the launcher needs to end.
    assert ended.since("signalled") < 12, ended.told()
    (finished,) = (ended.work / "swept").glob("*striped-*-p1.h5")
    before = finished.read_bytes()
    assert len(calls(ended.work)) == 2
    resumed = Running(ended.args, ended.work.parent, NO_MPI).wait(100)
    assert resumed.returncode == 0, resumed.told()
    assert len(calls(ended.work)) == 2 + 2
    assert finished.read_bytes() == before
    whole = queue.result(UNINTERRUPTED)
    assert whole.returncode == 0, whole.told()
    assert without_times(table(ended.work)) == without_times(table(whole.work))


def test_printed_commands_start_each_point_with_the_flags_of_its_launcher(
    launch: Callable[..., Ended],
) -> None:
    shown = launch(0, "sweep", *PROBLEM.split(), "--ranks", "1,2,3", "--dry-run")
    assert shown.returncode == 0, shown.told()
    commands = [shlex.split(line) for line in shown.stdout.splitlines()]
    assert len(commands) == 3
    for ranks, words in zip((1, 2, 3), commands, strict=True):
        assert words[0] == launcher().path
        assert words[words.index("-n") + 1] == str(ranks)
        flags = set(words[1 : words.index("-n")])
        assert flags <= ({"--allow-run-as-root", "--oversubscribe"} if under_open_mpi() else set())
        assert ("--oversubscribe" in flags) == (under_open_mpi() and ranks > available_cores())


VARIED = (
    "--vary dtype=float64,float16 --vary causal=true,false --vary window=0,7 --vary documents=0,10,40;0,40 "
    "--vary softmax_scale=-0.5,1e-3 --vary seed=3 --vary link=1Gbit/s,1ms"
)


def test_every_option_survives_the_way_into_a_command(tmp_path: Path) -> None:
    from ringmpi.cli import _experiment, _given, _parser

    options = [
        *PROBLEM.split(),
        "--ranks",
        "2",
        "--verify",
        "sample:3",
        "--timeout",
        "2.5",
        "--dry-run",
    ]
    command = command_line(0, "sweep", *options, *VARIED.split(), "--check-transfers", "--store-inputs")
    shown = Running(command, tmp_path, NO_MPI).wait(60)
    assert shown.returncode == 0, shown.told()
    programs = [shlex.split(line) for line in shown.stdout.splitlines()]
    assert len(programs) == 2**5
    found = []
    for words in programs:
        arguments = _parser().parse_args(words[words.index("ringmpi") + 1 :])
        experiment = _experiment(_given(arguments))
        assert (experiment.seq_len, experiment.heads, experiment.head_dim) == (40, 2, 4)
        assert (experiment.verify, experiment.timeout, experiment.ranks) == ("sample:3", 2.5, 2)
        assert experiment.check_transfers
        assert experiment.store_inputs
        found.append((experiment.dtype, experiment.causal, experiment.window, experiment.softmax_scale))
        assert experiment.documents in ((0, 10, 40), (0, 40))
        assert experiment.link == "1Gbit/s,1ms"
    assert len(set(found)) == 16
    assert len({words[words.index("--output") + 1] for words in programs}) == 2**5
    assert not (tmp_path / "work" / "results").exists()


def test_options_of_methods_survive_the_way_into_a_command(tmp_path: Path) -> None:
    from ringmpi.cli import _experiment, _given, _parser

    more = (
        "--method all --inner 2 --ulysses-degree 1 --query-len 9 --backward --link 1Gbit/s,1ms,shared"
    )
    command = command_line(0, "sweep", *PROBLEM.split(), "--ranks", "2,4", *more.split(), "--dry-run")
    shown = Running(command, tmp_path, NO_MPI).wait(60)
    assert shown.returncode == 0, shown.told()
    found = []
    for line in shown.stdout.splitlines():
        words = shlex.split(line)
        run = _parser().parse_args(words[words.index("ringmpi") + 1 :])
        experiment = _experiment(_given(run))
        assert (experiment.query_len, experiment.backward) == (9, True)
        assert (experiment.inner, experiment.ulysses_degree) == (2, 1)
        assert experiment.link == "1Gbit/s,1ms,shared"
        found.append((experiment.method, experiment.ranks))
    # Two heads are too few for four ranks.
    assert found == [(name, n) for name in METHODS for n in (2, 4) if (name, n) != ("ulysses", 4)]


def test_sweep_over_an_input_file_and_a_configuration(tmp_path: Path) -> None:
    data = Path(__file__).parent.parent / "data" / "minilm_2heads.h5"
    work = tmp_path / "work"
    work.mkdir()
    (work / "sweep.toml").write_text(f'input = "{data}"\nverify = "sample:2"\nrepeats = 1\n')
    command = command_line(0, "sweep", "--config", "sweep.toml", "--ranks", "1,2")
    ended = Running(command, tmp_path, NO_MPI).wait(90)
    assert ended.returncode == 0, ended.told()
    with (work / "results/sweep/sweep.csv").open(newline="") as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == ["OK", "OK"]
