"""Machine files: what they say is what is read, and what breaks a rule is told by file and key."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from ringmpi.errors import ConfigError
from ringmpi.model.machine import (
    DRAGONFLY,
    INTER,
    INTRA,
    Connection,
    Curve,
    Machine,
    Topology,
    built_in,
    constant,
    machine_text,
    read_machine,
)
from ringmpi.schedule import Pass

GOOD = """
about = "two nodes"
memory = 16e9
ranks_per_node = 4

[compute.float32]
forward = [[256, 1e9], [4096, 5e9]]
backward = 2e9

[links.intra]
latency = 1e-6
bandwidth = [[1024, 1e9], [1048576, 11e9]]
total = 33e9

[links.inter]
latency = [[1024, 2e-5], [1048576, 4e-5]]
bandwidth = 12500000
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return read_machine(written(tmp_path, GOOD))


def test_a_file_is_read_as_it_is_written(machine: Machine) -> None:
    assert machine.name == "mine"
    assert machine.about == "two nodes"
    assert machine.memory == 16e9
    assert machine.ranks_per_node == 4
    assert machine.compute["float32"].of(Pass.FORWARD) == Curve(((256.0, 1e9), (4096.0, 5e9)))
    assert machine.compute["float32"].of(Pass.BACKWARD) == constant(2e9)
    assert machine.links[INTRA].total == 33e9
    assert machine.links[INTER].bandwidth == constant(12.5e6)


def test_what_is_left_away_is_as_its_neighbour(tmp_path: Path) -> None:
    text = GOOD.replace("backward = 2e9\n", "").replace("total = 33e9\n", "")

    machine = read_machine(written(tmp_path, text))

    assert machine.compute["float32"].backward == machine.compute["float32"].forward
    assert machine.links[INTRA].total == 11e9


SHARED = (
    GOOD
    + """node_total = 40e6
eager_limit = 1024

[noise]
relative = 0.02

[topology]
kind = "dragonfly"
ranks_per_group = 8
taper = 0.25
latency = 3e-6
groups = 10
"""
)


def test_what_a_simulation_needs_is_read_too(tmp_path: Path) -> None:
    machine = read_machine(written(tmp_path, SHARED))

    assert machine.links[INTER].node_total == 40e6
    assert machine.links[INTER].eager_limit == 1024
    assert machine.noise == 0.02
    assert machine.topology == Topology(DRAGONFLY, 8, 0.25, 3e-6, 10)
    assert machine.text == SHARED
    machine.check_ranks(80)
    with pytest.raises(ConfigError, match="10 groups of 8 ranks; use at most 80"):
        machine.check_ranks(81)


def test_nothing_is_shared_and_nobody_disturbed_where_a_file_does_not_say(machine: Machine) -> None:
    assert machine.links[INTER].node_total == math.inf
    assert machine.links[INTER].eager_limit == 65536
    assert (machine.noise, machine.topology) == (0.0, None)


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("relative = 0.02", "", "noise.relative is missing"),
        ("relative = 0.02", "relative = -1", "noise.relative=-1: below 0"),
        ('"dragonfly"', '"hypercube"', "must be fat-tree or dragonfly"),
        ('"dragonfly"', '"fat-tree"', "a dragonfly, and it alone, has it"),
        ("groups = 10", "", "a dragonfly, and it alone, has it"),
        ("groups = 10", "groups = 1", "must be 2 or more"),
        ("ranks_per_group = 8", "ranks_per_group = 6", "must be whole nodes of 4 ranks"),
        ("taper = 0.25", "taper = 0", "nothing leaves a group"),
        ("latency = 3e-6", "latency = 30", "more than 10 s"),
        ("node_total = 40e6", "node_total = 40", "links.inter.node_total=40: below 1000"),
        (
            "eager_limit = 1024",
            'eager_limit = "64K"',
            "links.inter.eager_limit='64K': must be a finite",
        ),
        ("taper", "tapper", "did you mean taper?"),
    ],
)
def test_wrong_topologies_and_limits_are_refused(tmp_path: Path, old: str, new: str, rule: str) -> None:
    assert old in SHARED
    with pytest.raises(ConfigError, match=re.escape(rule)):
        read_machine(written(tmp_path, SHARED.replace(old, new)))


@pytest.mark.parametrize(
    ("size", "value"),
    [(1, 1e9), (256, 1e9), (1024, 3e9), (512, 2e9), (4096, 5e9), (1e9, 5e9)],
)
def test_a_curve_is_linear_in_the_logarithm_and_flat_outside(
    machine: Machine, size: float, value: float
) -> None:
    """256 to 4096 are four doublings, in which 1e9 grows to 5e9."""
    assert machine.compute["float32"].forward.at(size) == pytest.approx(value, rel=1e-12)


def test_a_message_takes_latency_and_bytes_over_bandwidth() -> None:
    """100 Gbit/s and 5 us: 16 MiB take 1.3472 ms; nothing takes the latency."""
    link = Connection(constant(5e-6), constant(12.5e9), 12.5e9)

    assert link.seconds(16_777_216) == pytest.approx(5e-6 + 16_777_216 / 12.5e9, rel=1e-12)
    assert f"{link.seconds(16_777_216) * 1e3:.4f}" == "1.3472"
    assert link.seconds(0) == 5e-6


def test_curves_of_a_link_are_taken_at_the_size_of_the_message(machine: Machine) -> None:
    assert machine.links[INTRA].seconds(32_768) == pytest.approx(1e-6 + 32_768 / 6e9, rel=1e-12)
    assert machine.links[INTER].seconds(32_768) == pytest.approx(3e-5 + 32_768 / 12.5e6, rel=1e-12)


def test_neighbouring_ranks_share_a_node(machine: Machine) -> None:
    assert [machine.kind(3, peer) for peer in (0, 2, 4, 7)] == [INTRA, INTRA, INTER, INTER]
    assert [machine.kinds(ranks) for ranks in (1, 2, 4, 5)] == [[], [INTRA], [INTRA], [INTRA, INTER]]


WRONG = {
    "not TOML": ("memory = 16e9", "memory = = 16e9", ["not TOML"]),
    "a key that is nearly known": (
        "[links.intra]\nlatency",
        "[links.intra]\nlatencey",
        ["links.intra.latencey", "did you mean latency?"],
    ),
    "a key of the top": ("memory =", "memry =", ["memry", "did you mean memory?"]),
    "a kind of link": (
        "[links.inter]",
        "[links.internode]",
        ["links.internode", "did you mean inter?"],
    ),
    "a dtype": ("compute.float32", "compute.float23", ["compute.float23", "did you mean float32?"]),
    "a key that nothing is near to": ("about =", "xyz =", ["xyz", "no such key", "ranks_per_node"]),
    "no memory": ("memory = 16e9\n", "", ["memory is missing"]),
    "no forward rate": (
        "forward = [[256, 1e9], [4096, 5e9]]\n",
        "",
        ["compute.float32.forward is missing"],
    ),
    "no latency": ("latency = 1e-6\n", "", ["links.intra.latency is missing"]),
    "no rates": (
        "[compute.float32]\nforward = [[256, 1e9], [4096, 5e9]]\nbackward = 2e9\n",
        "[compute]\n",
        ["compute={}", "[compute.float32]"],
    ),
    "GB for bytes": ("memory = 16e9", "memory = 16", ["memory=16", "80e9"]),
    "GB/s for bytes a second": (
        "bandwidth = 12500000",
        "bandwidth = 12.5",
        ["links.inter.bandwidth=12.5", "300e9", "12.5e9"],
    ),
    "GFLOP/s for FLOP/s": ("backward = 2e9", "backward = 2", ["compute.float32.backward=2", "312e12"]),
    "us for seconds": ("latency = 1e-6", "latency = 20", ["links.intra.latency=20", "5e-6"]),
    "a text": ("memory = 16e9", 'memory = "16e9"', ["memory='16e9'", "finite number"]),
    "a truth": ("latency = 1e-6", "latency = true", ["links.intra.latency=True", "finite number"]),
    "nan": ("memory = 16e9", "memory = nan", ["memory=nan"]),
    "inf": ("backward = 2e9", "backward = inf", ["backward=inf"]),
    "below 0": ("latency = 1e-6", "latency = -1e-6", ["latency=-1e-06"]),
    "half a rank": (
        "ranks_per_node = 4",
        "ranks_per_node = 4.5",
        ["ranks_per_node=4.5", "whole number"],
    ),
    "no rank": ("ranks_per_node = 4", "ranks_per_node = 0", ["ranks_per_node=0"]),
    "true ranks": ("ranks_per_node = 4", "ranks_per_node = true", ["ranks_per_node=True"]),
    "an empty curve": ("[[256, 1e9], [4096, 5e9]]", "[]", ["compute.float32.forward=[]", "pairs"]),
    "a curve of numbers": ("[[256, 1e9], [4096, 5e9]]", "[1e9, 5e9]", ["forward=[", "pairs"]),
    "a curve of threes": ("[[256, 1e9], [4096, 5e9]]", "[[1, 2, 3]]", ["pairs"]),
    "falling sizes": ("[[256, 1e9], [4096, 5e9]]", "[[4096, 5e9], [256, 1e9]]", ["must rise"]),
    "a size twice": ("[[256, 1e9], [4096, 5e9]]", "[[256, 1e9], [256, 5e9]]", ["must rise"]),
    "a size of 0": ("[[256, 1e9], [4096, 5e9]]", "[[0, 1e9], [256, 5e9]]", ["forward=0"]),
    "a total below one link": ("total = 33e9", "total = 10e9", ["links.intra.total", "1.1e+10"]),
    "a number for a table": (
        "[compute.float32]\nforward = [[256, 1e9], [4096, 5e9]]\nbackward = 2e9\n",
        "[compute]\nfloat32 = 1e9\n",
        ["compute.float32=1000000000.0", "table"],
    ),
    "a number for about": ('about = "two nodes"', "about = 3", ["about=3", "text"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_a_rule_is_told_by_file_and_key(name: str, tmp_path: Path) -> None:
    old, new, told = WRONG[name]
    assert old in GOOD
    path = written(tmp_path, GOOD.replace(old, new, 1))

    with pytest.raises(ConfigError) as error:
        read_machine(path)

    message = str(error.value)
    assert message.startswith(f"machine={path}: ")
    assert "\n" not in message
    for words in told:
        assert words in message


@pytest.mark.parametrize("given", ["nowhere.toml", "."])
def test_a_file_that_cannot_be_read_is_told(given: str, tmp_path: Path) -> None:
    path = str(tmp_path / "folder.toml") if given == "." else str(tmp_path / given)
    if given == ".":
        Path(path).mkdir()

    with pytest.raises(ConfigError, match="cannot be read"):
        read_machine(path)


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ConfigError, match="cannot be read"):
        read_machine(str(path))


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'jupiter'"):
        read_machine("jupitre")


def test_rates_for_another_dtype_are_refused(machine: Machine) -> None:
    with pytest.raises(ConfigError, match=r"dtype=bfloat16: machine mine .* use float32"):
        machine.rates("bfloat16")


def test_more_ranks_than_links_connect_are_refused(tmp_path: Path) -> None:
    alone = read_machine(written(tmp_path, GOOD.split("[links.inter]")[0]))

    alone.check_ranks(4)
    with pytest.raises(ConfigError, match=r"ranks=5: .* no \[links.inter\].* at most 4"):
        alone.check_ranks(5)


#: What `plan` must know, as published: TFLOP/s, GB, ranks of a node, GB/s inside and between.
PUBLISHED = {
    "a100-nvlink": (312, 80, 8, 300, 12.5),
    "a100-infiniband": (312, 80, 1, None, 12.5),
    "h100": (989, 80, 8, 450, 50),
    "h200": (989, 141, 8, 450, 50),
    "gh200": (989, 96, 4, 150, 25),
    "b200": (2250, 180, 8, 900, 50),
    "mi250x": (191.5, 64, 8, 50, 12.5),
    "mi300x": (1307, 192, 8, 64, 50),
    "tpu-v3": (140, 32, 1024, 100, 25 / 8),
    "tpu-v4": (275, 32, 4096, 45, 25 / 4),
    "tpu-v5e": (197, 16, 256, 45, 25 / 8),
    "tpu-v5p": (459, 96, 8960, 90, 25 / 4),
    "tpu-v6e": (920, 32, 256, 90, 25 / 8),
    "frontier": (191.5, 64, 8, 50, 12.5),
    "perlmutter": (312, 40, 4, 100, 25),
    "leonardo": (312, 64, 4, 100, 12.5),
    "alps": (989, 96, 4, 150, 25),
    "jupiter": (989, 96, 4, 150, 25),
    "aurora": (256, 64, 12, 15, 13.3),
    "summit": (125, 16, 6, 50, 3.83),
    "a100-measured": (203, 80, 8, 274, 22.5),
    "h100-measured": (701, 80, 8, 376, 28.1),
    "b200-measured": (1297, 180, 8, 746, 45),
}


def test_every_built_in_machine_is_one_of_these() -> None:
    assert set(built_in()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_built_in_machine_has_the_published_numbers(name: str) -> None:
    flops, memory, ranks, inside, between = PUBLISHED[name]

    machine = read_machine(name)

    assert machine.about
    rates = next(iter(machine.compute.values()))
    assert rates.forward.last == pytest.approx(flops * 1e12, rel=1e-12)
    assert machine.memory == memory * 1e9
    assert machine.ranks_per_node == ranks
    given = {kind: link.bandwidth.last for kind, link in machine.links.items()}
    expected = {INTRA: inside, INTER: between}
    assert given == pytest.approx({kind: b * 1e9 for kind, b in expected.items() if b}, rel=1e-12)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_number_of_a_built_in_machine_has_a_comment(name: str) -> None:
    for table in machine_text(name).split("\n\n"):
        for line in table.splitlines():
            if "=" in line.partition("#")[0] and not line.startswith("about"):
                assert "#" in line or table.startswith("#"), line


def test_rates_fitted_to_meta_s_times_give_them_again() -> None:
    """SendRecv of a ring step: 16.38 MB in 627 to 631 us, 13.11 MB in 544 us, 3.28 MB in 166 us."""
    link = read_machine("h100-measured").links[INTER]

    for megabytes, microseconds in ((16.38, 629), (13.11, 544), (3.28, 166)):
        assert link.seconds(megabytes * 1e6) * 1e6 == pytest.approx(microseconds, rel=0.05)
    assert math.isclose(link.seconds(0), 55e-6)
