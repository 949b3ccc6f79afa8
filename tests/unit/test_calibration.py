"""What was measured is what a machine file says, and what a plan reads in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ringmpi.calibrate import ranks_per_node, refusal, write
from ringmpi.errors import ConfigError
from ringmpi.model.calibration import (
    FIRST_WORDS,
    Calibration,
    LinkRates,
    Noise,
    bandwidths,
    machine_toml,
    parse_lengths,
)
from ringmpi.model.machine import EAGER_LIMIT, INTER, INTRA, Curve, Machine, read_machine
from ringmpi.schedule import Pass

ALONE = Calibration(
    header=["ringmpi calibrate --dtype float32", "2031-01-01, 1 rank(s) on somewhere", "MPICH 5"],
    about='a "node" \\ of one kind\n',
    memory=12.345678e9,
    ranks_per_node=2,
    compute={
        "float32": {Pass.FORWARD: [(256, 1.5e9), (1024, 3.25e9)], Pass.BACKWARD: [(256, 1e9)]},
        "bfloat16": {Pass.FORWARD: [(256, 1.23456789e12)], Pass.BACKWARD: [(256, 2e12)]},
    },
    compute_how="8 heads",
    noise=Noise(0.0123, 1.75, "30 blocks"),
)

FOUND = replace(
    ALONE,
    links={
        INTRA: LinkRates(1e-6, [(4096, 1e9), (65536, 4e9)], 3e9, 8192, "ranks 0 and 1"),
        INTER: LinkRates(2.5e-5, [(65536, 1.25e9)], None, None, "ranks 0 and 2"),
    },
    overlap={"poll": 0.98765, "wait": 0.0},
    overlap_how="as OSU has it",
)


def read(tmp_path: Path, found: Calibration) -> Machine:
    path = tmp_path / "mine.toml"
    path.write_text(machine_toml(found))
    return read_machine(str(path))


def test_a_machine_file_holds_what_was_measured(tmp_path: Path) -> None:
    machine = read(tmp_path, FOUND)

    assert (machine.about, machine.ranks_per_node) == (FOUND.about, 2)
    # Four digits of memory and latency, five of rates.
    assert machine.memory == 12.35e9
    assert machine.compute["float32"].forward == Curve(((256, 1.5e9), (1024, 3.25e9)))
    assert machine.compute["float32"].backward == Curve(((256, 1e9),))
    assert machine.compute["bfloat16"].forward == Curve(((256, 1.2346e12),))
    assert machine.links[INTER].latency.last == 2.5e-5
    assert machine.links[INTRA].bandwidth == Curve(((4096, 1e9), (65536, 4e9)))
    assert machine.links[INTRA].eager_limit == 8192
    assert machine.links[INTER].eager_limit == EAGER_LIMIT  # It could not be seen.
    assert (machine.noise, machine.overlap) == (0.0123, {"poll": 0.988, "wait": 0.0})


def test_all_others_together_take_no_less_than_one(tmp_path: Path) -> None:
    """What was measured less stays beside it, as a comment."""
    assert read(tmp_path, FOUND).links[INTRA].total == 4e9
    assert "total = 4e+09  # measured 3e+09, less than to one" in machine_toml(FOUND)
    assert read(tmp_path, FOUND).links[INTER].total == 1.25e9


def test_one_rank_has_no_links_and_can_be_planned_for(tmp_path: Path) -> None:
    machine = read(tmp_path, ALONE)

    assert (machine.links, machine.overlap) == ({}, {})
    replace(machine, ranks_per_node=1).check_ranks(1)
    with pytest.raises(ConfigError, match=r"has no \[links.intra\]"):
        machine.check_ranks(2)


def test_a_file_says_how_its_numbers_were_measured() -> None:
    lines = machine_toml(FOUND).splitlines()

    assert lines[0] == f"{FIRST_WORDS}: ringmpi calibrate --dtype float32"
    for told in (
        "2031-01-01, 1 rank(s)",
        "8 heads",
        "ranks 0 and 1",
        "30 blocks; the worst took 1.75",
        "OSU",
    ):
        assert any(line.startswith("#") and told in line for line in lines)


def test_nothing_measured_of_a_dtype_is_refused() -> None:
    empty = replace(ALONE, compute={"float64": {Pass.FORWARD: [(256, 1e9)], Pass.BACKWARD: []}})
    with pytest.raises(ConfigError, match="dtype=float64: no length was measured; give more --seconds"):
        machine_toml(empty)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(8, 1.0), (512, 2.0), (4096, 5.0)], ((512, 512.0), (4096, 1024.0))),
        ([(8, 1.0), (512, 1.99)], ((512, 512 / 1.99),)),
        ([(8, 0.5)], ((8, 16.0),)),
        ([(8, 7.0), (512, 9.0), (1024, 5.0)], ((8, 2.0), (512, 128.0), (1024, 256.0))),
    ],
    ids=["large ones", "none is large", "faster than the latency", "held up"],
)
def test_bandwidth_is_what_a_message_takes_beyond_the_latency(
    times: list[tuple[float, float]], expected: tuple[tuple[float, float], ...]
) -> None:
    assert bandwidths(1.0, times) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "256,", "many", "1.5", str(2**24 + 1), "²"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="use tokens from 1 to 16777216, such as 256,1024,4096"):
        parse_lengths(text)


def test_unlike_nodes_are_refused() -> None:
    assert ranks_per_node(["a", "a", "a"]) == 3
    for nodes in (["a", "a", "b"], ["a", "b", "a", "b"]):
        with pytest.raises(ConfigError, match="start as many ranks on each node, neighbours together"):
            ranks_per_node(nodes)


def test_only_what_calibrate_wrote_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "mine.toml"
    assert refusal(path) is None
    write(path, machine_toml(FOUND))
    assert path.read_text() == machine_toml(FOUND)
    assert [file.name for file in path.parent.iterdir()] == ["mine.toml"]
    assert refusal(path) is None
    path.write_text('about = "made by hand"\n')
    assert "calibrate did not write it" in str(refusal(path))
    assert "known by its .toml; use" in str(refusal(tmp_path / "mine.txt"))
    assert "cannot be written" in str(refusal(Path("/proc/mine.toml")))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[noise]\nrelative = -0.1", "noise.relative=-0.1: below 0"),
        ("[noise]\nworst = 2", "noise.worst: no such key"),
        ("[overlap]\npol = 0.5", "overlap.pol: no such key"),
        ("[overlap]\npoll = 'all'", "overlap.poll='all': must be a finite number"),
        ("noise = 0.1", "noise=0.1: must be a table"),
    ],
)
def test_wrong_tables_of_a_machine_file_are_refused(line: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    plain = "memory = 1e9\nranks_per_node = 1\n"
    compute = "[compute.float32]\nforward = 1e9\n"
    path.write_text(plain + (compute + line if line.startswith("[") else line + "\n" + compute))

    with pytest.raises(ConfigError) as refused:
        read_machine(str(path))

    assert told in str(refused.value)
