"""`ringmpi plan`: everything about a problem on a machine, without MPI, and refusals in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Ended, Here

from ringmpi.cli import main
from ringmpi.model.machine import built_in, machine_text

pytestmark = pytest.mark.any_mpi

PLAN = "plan --machine h100 --model llama-3-8b --causal --layout zigzag --ranks 32 --backward"


def test_a_plan_tells_thresholds_memory_flops_and_the_best_method(here: Here) -> None:
    code, told = here(*PLAN.split())

    assert code == 0
    lines = [line.split() for line in told.splitlines()]
    # F / B = 989e12 / 50e9, a quarter of KV heads, half of the pairs; backward 1.2 times that.
    assert [line[:5] for line in lines if line[:2] == ["forward", "inter"]] == [
        ["forward", "inter", "19780", "0.5", "9890"]
    ]
    assert [line[:5] for line in lines if line[:2] == ["backward", "inter"]] == [
        ["backward", "inter", "19780", "0.6", "11868"]
    ]
    for architecture in ("vanilla", "memory-efficient", "blockwise", "ring"):
        assert any(line[:1] == [architecture] for line in lines)
    for unit in ("GB", "FLOPs", "ms", "TFLOP/s", "tokens"):
        assert unit in told
    assert "fit into 80.000 GB" in told
    # A rank of the best method is nearly as fast as the machine, and no rank is faster.
    (best,) = (line for line in lines if line[0] == "double-ring:8")
    assert 900 < float(best[5]) <= 989
    assert told.splitlines()[-1].startswith("# best: double-ring:8, ")


def test_a_plan_as_json_has_the_same_numbers(here: Here) -> None:
    code, told = here(*PLAN.split(), "--json")

    record = json.loads(told)
    assert code == 0
    assert record["ranks"] == 32
    assert record["best"] == "double-ring"
    (row,) = (
        row for row in record["thresholds"] if (row["link"], row["direction"]) == ("inter", "forward")
    )
    assert row["tokens"] == pytest.approx(9890)


def test_all_built_in_machines_are_listed(here: Here) -> None:
    code, told = here("plan", "--list")

    assert code == 0
    assert {line.split()[0] for line in told.splitlines()} >= set(built_in())


def test_a_machine_s_file_is_shown_to_begin_one_s_own_with(here: Here, tmp_path: Path) -> None:
    code, told = here("plan", "--machine", "frontier", "--show-machine")
    mine = tmp_path / "mine.toml"
    mine.write_text(told)

    assert code == 0
    assert told == machine_text("frontier")
    code, told = here("plan", "--machine", mine, "--ranks", "16")
    assert code == 0
    assert "# machine  mine: Frontier" in told


def test_the_paper_s_tables_are_told_with_their_misprints(here: Here) -> None:
    code, told = here("plan", "--paper")

    assert code == 0
    for cell in (
        "24.5 != 25.0",
        "149.5 != 149.8",
        "2bhs^2 != 2bns^2",
        "6bch != 12bch",
        "8192 != 16384",
        "4682.0 = 4682.0",
    ):
        assert cell in told
    for words in ("5140", "5120", "843 times", "204.8 GB", "89 of 102 cells agree"):
        assert words in told
    code, told = here("plan", "--paper", "--json")
    assert code == 0
    record = json.loads(told)
    assert sum(not cell["agrees"] for cell in record["cells"]) == 13
    assert len(record["findings"]) == 14


def test_options_may_come_from_a_file(here: Here, tmp_path: Path) -> None:
    config = tmp_path / "options.toml"
    config.write_text('seq_len = 1000\nheads = 4\ncausal = true\ndevice = "numpy"\n')

    code, told = here("plan", "--machine", "h100", "--config", config, "--json")

    assert code == 0
    assert json.loads(told)["pairs"] == 500_500


def test_neither_mpi_nor_hdf5_is_loaded() -> None:
    program = (
        "import sys\nfrom ringmpi.cli import main\n"
        f"assert main({PLAN.split()!r}) == 0\nassert main(['plan', '--paper']) == 0\n"
        "assert main(['plan', '--machine', 'nothing']) == 2\n"
        "print({'mpi4py', 'mpi4py.MPI', 'h5py', 'matplotlib'} & set(sys.modules))"
    )

    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )

    assert ended.stdout.splitlines()[-1] == "set()"


def broken(folder: Path) -> None:
    good = machine_text("h100")
    (folder / "broken.toml").write_text("memory = = 3")
    (folder / "unknown.toml").write_text(good.replace("bandwidth", "bandwidths"))
    (folder / "units.toml").write_text(good.replace("= 50e9", "= 50"))
    (folder / "alone.toml").write_text(good.partition("[links.inter]")[0])


REFUSED = {
    "no machine": ("plan", ["--machine", "--list"]),
    "an unknown machine": ("plan --machine h10", ["machine='h10'", "did you mean 'h100'"]),
    "no such file": ("plan --machine mine.toml", ["machine=mine.toml", "cannot be read"]),
    "not TOML": ("plan --machine broken.toml", ["machine=broken.toml", "not TOML"]),
    "an unknown key": (
        "plan --machine unknown.toml",
        ["machine=unknown.toml", "links.intra.bandwidths", "did you mean bandwidth?"],
    ),
    "GB/s for bytes a second": (
        "plan --machine units.toml",
        ["machine=units.toml", "links.inter.bandwidth=50", "bytes a second"],
    ),
    "no link between nodes": (
        "plan --machine alone.toml --ranks 9",
        ["ranks=9", "[links.inter]", "at most 8"],
    ),
    "a dtype without rates": ("plan --machine h100 --dtype float32", ["dtype=float32", "use bfloat16"]),
    "an unknown model": ("plan --machine h100 --model gpt", ["model='gpt'", "llama-7b"]),
    "a shape twice": ("plan --machine h100 --model llama-7b --layers 3", ["layers=3", "llama-7b"]),
    "no whole number": ("plan --machine h100 --layers many", ["--layers", "many"]),
    "no ranks": ("plan --machine h100 --ranks 0", ["ranks=0"]),
    "a wrong group": ("plan --machine h100 --layout zigzga", ["layout='zigzga'", "zigzag"]),
    "heads that do not divide": (
        "plan --machine h100 --heads 6 --kv-heads 4",
        ["kv_heads must divide"],
    ),
    "a window": ("plan --machine h100 --window 3", ["--window"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # The command line sets thread counts.
    monkeypatch.chdir(tmp_path)
    command, told = REFUSED[name]

    code = main(command.split())

    out, complaints = capfd.readouterr()
    assert code == 2
    assert out == ""
    assert len(complaints.splitlines()) == 1
    assert "Traceback" not in complaints
    for words in told:
        assert words in complaints


def test_a_refusal_ends_the_command_with_2(launch: Callable[..., Ended]) -> None:
    ended = launch(0, "plan", "--machine", "h10")

    assert ended.returncode == 2
    assert len(ended.complaints()) == 1
    assert "Traceback" not in ended.stderr
