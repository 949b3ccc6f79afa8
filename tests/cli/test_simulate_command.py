"""`ringmpi simulate`: a file like that of a run, which all other commands take, and refusals in one line."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
from running import Ended, Here

from ringmpi.cli import main
from ringmpi.metrics import by_rank, makespans, overlap
from ringmpi.model.machine import machine_text
from ringmpi.report import tables
from ringmpi.schedule import Pass
from ringmpi.simulator import record
from ringmpi.store import ResultFile

pytestmark = pytest.mark.any_mpi

SIMULATE = (
    "simulate --machine h100-measured --ranks 12 --seq-len 98304 --heads 32 --kv-heads 8 --head-dim 128"
)

#: 16 MiB a block, 100 Gbit/s, 5 us, and FLOP/s that take 0.5 ms for a block of 4096 tokens.
EXAMPLE = f"""
memory = 80e9
ranks_per_node = 1
[compute.float16]
forward = {4 * 8 * 128 * 4096**2 / 0.5e-3}
[links.inter]
latency = 5e-6
bandwidth = 12.5e9
"""

#: Four ranks of that, 4096 tokens each.
FOUR = "--ranks 4 --seq-len 16384 --head-dim 128"


@pytest.fixture
def example(tmp_path: Path) -> str:
    path = tmp_path / "example.toml"
    path.write_text(EXAMPLE)
    return f"simulate --machine {path} {FOUR} --output {tmp_path / 'made.h5'}"


def test_a_simulation_writes_a_file_that_is_read_like_that_of_a_run(
    here: Here, tmp_path: Path, example: str
) -> None:
    code, told = here(*example.split(), "--backward")

    assert code == 0
    assert "# machine  simulated: example, 1 rank(s) a node; progress poll" in told
    assert "whole: 4.54 ms" in told
    with ResultFile(tmp_path / "made.h5") as result:
        assert (result.kind, result.size) == ("simulated", 4)
        assert result.directions == list(Pass)
        timings = result.timings()
        assert timings.records.shape == (1, 4, 4)
        # c + 3 x, 3 (x - c) of which are stalls, and 3 x alone.
        x = 5e-6 + 2**24 / 12.5e9
        assert makespans(timings) == pytest.approx(0.5e-3 + 3 * x, rel=1e-9)
        assert overlap(timings) == pytest.approx(0.5e-3 / x, rel=1e-9)
        ranks = by_rank(timings)
        assert [rank.stall for rank in ranks] == pytest.approx([3 * (x - 0.5e-3)] * 4, rel=1e-9)
        assert [rank.counts["bytes_sent"] for rank in ranks] == [3 * 2**24] * 4
        assert sum(rank.counts["pairs"] for rank in ranks) == 8 * 16384**2
        assert sum(rank.counts["flops"] for rank in ranks) == 4 * 128 * 8 * 16384**2
        assert result.facts("machine")["machine_file"] == EXAMPLE
        assert result.column("ranks/held_forward_nbytes").tolist() == [2 * 2**24] * 4
        assert not result.timings().clocks.offset.any()
        assert result.facts("verification") == {"how": "none"}


def test_every_dataset_has_a_unit_and_a_description(here: Here, tmp_path: Path, example: str) -> None:
    here(*example.split())

    bare = []

    def look(name: str, item: h5py.Dataset | h5py.Group) -> None:
        if isinstance(item, h5py.Dataset) and not {"unit", "description"} <= set(item.attrs):
            bare.append(name)

    with h5py.File(tmp_path / "made.h5") as file:
        file.visititems(look)
    assert bare == []


def test_other_commands_take_the_file(here: Here, tmp_path: Path, example: str) -> None:
    made, table = tmp_path / "made.h5", tmp_path / "table.csv"
    here(*example.split(), "--progress", "wait")

    code, told = here("report", made, "--plot", tmp_path / "timeline.png", "--compare", "--csv", table)

    assert code == 0
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    with table.open() as file:
        (row,) = csv.DictReader(file)
    assert (row["method"], row["time ms"], row["verdict"]) == ("ring", "6.04", "not verified")
    assert here("report", made)[0] == 0
    assert main(["verify", str(made)]) == 2
    assert "not verified" in told


def test_it_says_who_is_slow_and_is_the_same_twice(here: Here, tmp_path: Path) -> None:
    words = [*SIMULATE.split(), "--noise", "0.05", "--stragglers", "1:2", "--slow", "3:1.5"]
    words += ["--delay", "0:1:1e-3", "--repeats", "2", "--method", "bidirectional", "--seed", "7"]

    for name in ("a.h5", "b.h5"):
        code, told = here(*words, "--output", tmp_path / name)
        assert code == 0

    assert "# uneven   noise 0.05, slow 3:1.5, stragglers 1:2, delay 0:1:1e-3; seed 7" in told
    with ResultFile(tmp_path / "a.h5") as first, ResultFile(tmp_path / "b.h5") as second:
        a, b = first.timings().records, second.timings().records
        assert a.tobytes() == b.tobytes()
        assert len(a) == 2
        assert a[0].tobytes() != a[1].tobytes()
        # One straggler beside rank 3; both compute longer than all others.
        compute = sorted((rank.compute, rank.rank) for rank in by_rank(first.timings()))
        assert 3 in {rank for _, rank in compute[-2:]}
        assert compute[-1][0] > 1.3 * compute[-3][0]


def test_options_come_from_a_file_too(here: Here, tmp_path: Path) -> None:
    config = tmp_path / "options.toml"
    config.write_text('seq_len = 4096\nranks = 3\ncausal = true\nlayout = "zigzag"\nmethod = "passq"\n')

    code, _ = here(
        "simulate",
        "--machine",
        "alps",
        "--config",
        config,
        "--output",
        tmp_path / "made.h5",
        "--link",
        "1Gbit/s,1ms",
    )

    assert code == 0
    with ResultFile(tmp_path / "made.h5") as result:
        assert (result.size, result.experiment.method, result.experiment.dtype) == (
            3,
            "passq",
            "bfloat16",
        )
        alone = result.timings().alone
    # Two hops of q at least, each 1 ms and 8 heads of 64 in 16 bits at 125 MB/s.
    hop = 1e-3 + 4096 / 3 * 8 * 64 * 2 / 125e6
    assert alone["step_end"].max() > 2 * hop


@pytest.mark.parametrize(("way", "hops"), [("", 3 / 2), (",shared", 3)], ids=["pairs", "shared"])
def test_a_link_may_be_one_a_rank(
    here: Here, tmp_path: Path, example: str, way: str, hops: float
) -> None:
    """Half of each block goes each way round: at once, or over one card."""
    code, _ = here(*example.split(), "--method", "bidirectional", "--link", f"1Gbit/s,1us{way}")

    assert code == 0
    with ResultFile(tmp_path / "made.h5") as result:
        # The last block is attended to after the last hop; the latency is nothing beside a hop.
        whole = 0.5e-3 + hops * 2**24 / 125e6
        assert makespans(result.timings())[0] == pytest.approx(whole, rel=1e-3)


def test_inputs_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "options.toml"
    config.write_text('input = "my.h5"\nranks = 3\n')

    assert main(["simulate", "--machine", "alps", "--config", str(config)]) == 2
    assert "a simulation reads no inputs" in capsys.readouterr().err


def test_the_default_name_tells_what_was_simulated(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--noise", "0.1"], ["--machine", "alps"]):
        assert here(*SIMULATE.split(), *more)[0] == 0

    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert len(names) == 3
    assert all("-ring-n98304-b1-h32-8-d128-bfloat16-contiguous-" in name for name in names)
    assert [name.split("-ring")[0] for name in names] == [
        "simulated-alps",
        *["simulated-h100-measured"] * 2,
    ]


def test_a_table_of_many_ranks_shows_some(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a condensed file, which is drawn and compared as well."""
    monkeypatch.setattr(record, "MOST_ENTRIES", 1000)
    monkeypatch.setattr(tables, "MOST_ROWS", 10)
    made = tmp_path / "made.h5"

    code, told = here(
        *SIMULATE.replace("--ranks 12", "--ranks 48").split(), "--slow", "5:1.7", "--output", made
    )

    assert code == 0
    rows = [line.split() for line in told.splitlines() if line[:4].strip().isdecimal()]
    assert len(rows) < 12
    assert {"0", "5", "47"} <= {row[0] for row in rows}
    assert f"# {len(rows)} of 48 ranks" in told
    with ResultFile(made) as result:
        assert result.condensed()
        ranks, timings = result.watched()
        assert timings.records.shape == (1, len(ranks), 48)
        everyone = by_rank(result.timings())
        for rank, summary in zip(ranks, by_rank(timings), strict=True):
            assert summary.compute == pytest.approx(everyone[rank].compute, rel=1e-12)
            # A stall is a difference of moments, each a sum of hundreds of numbers.
            assert summary.stall == pytest.approx(everyone[rank].stall, abs=1e-12 * summary.total)
            assert summary.counts == everyone[rank].counts
            assert summary.overlap == pytest.approx(everyone[rank].overlap, rel=1e-9)
    assert here("report", made, "--plot", tmp_path / "timeline.png")[0] == 0
    assert here("report", made, "--compare")[0] == 0


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--machine h100 --seq-len 4096", "give --ranks P"),
        ("--machine h100 --ranks 16385 --seq-len 99999999", "at most 16384 are simulated"),
        ("--machine mars --ranks 2 --seq-len 4096", "machine='mars'"),
        ("--machine h100 --ranks 2 --seq-len 4096 --dtype float32", "dtype=float32: machine h100"),
        ("--machine h100 --ranks 2 --seq-len 4096 --slow 2:3", "there are 2, 0 to 1"),
        (
            "--machine h100 --ranks 2 --seq-len 4096 --slow 0.5",
            "use RANK:FACTOR,... such as 2:2.5,5:1.5",
        ),
        ("--machine h100 --ranks 2 --seq-len 4096 --stragglers 3:2", "there are only 2 ranks"),
        (
            "--machine h100 --ranks 9 --seq-len 4096 --method ulysses",
            "8 heads cannot be shared among 9",
        ),
        ("--machine h100 --ranks 2 --seq-len 4096 --device numpy", "unrecognized arguments"),
        ("--machine a100-infiniband --ranks 2 --seq-len 4096 --progress never", "progress='never'"),
        ("--ranks 2 --seq-len 4096", "--machine"),
    ],
    ids=lambda text: text.replace("--", "")[-40:],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    words: str,
    rule: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    code = main(["simulate", *words.split()])

    told = capsys.readouterr().err
    assert code == 2
    assert rule in told
    assert len(told.strip().splitlines()) == 1
    assert not (tmp_path / "results").exists()


def test_mpi_is_not_needed(launch: Callable[..., Ended], tmp_path: Path) -> None:
    """A login node may have none: a module of that name that cannot be loaded lies in the way."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no MPI here')")

    ended = launch(
        0,
        *SIMULATE.split(),
        "--output",
        tmp_path / "made.h5",
        env={"PYTHONPATH": str(tmp_path)},
        timeout=60,
    )

    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "made.h5").is_file()


def test_a_machine_that_is_built_in_is_simulated_whatever_the_folder(
    here: Here, tmp_path: Path
) -> None:
    machine = tmp_path / "mine.toml"
    machine.write_text(machine_text("h100-measured"))
    for name, path in (("h100-measured", tmp_path / "a.h5"), (str(machine), tmp_path / "b.h5")):
        words = SIMULATE.replace("h100-measured", name).split()
        assert here(*words, "--output", path)[0] == 0

    with ResultFile(tmp_path / "a.h5") as first, ResultFile(tmp_path / "b.h5") as second:
        assert first.timings().records.tobytes() == second.timings().records.tobytes()
