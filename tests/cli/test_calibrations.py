"""`ringmpi calibrate`: a machine file of this machine, which plan reads."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Ended, Here, Running, Scenario

from ringmpi.model.machine import INTER, INTRA, read_machine

pytestmark = pytest.mark.any_mpi

#: Compute that sleeps, and links much slower than anything that a busy machine adds.
SMALL = "calibrate --heads 1 --head-dim 8 --lengths 64,256 --seconds 5"
PACED = f"{SMALL} --device paced --flops 1e9"
MAP = "2:40Mbit/s,10ms:20Mbit/s,20ms"

ON_TWO_NODES = Scenario(
    4, f"{PACED} --dtype float32,bfloat16 --link-map {MAP} --output new/my.toml", timeout=90
)
ALONE = Scenario(1, f"{PACED} --output my.toml")
REAL = Scenario(2, f"{SMALL} --device numpy --output my.toml", env={"RINGMPI_TEST_WATCH": "processes"})


@pytest.mark.parametrize("ended", [ON_TWO_NODES], indirect=True)
def test_what_was_emulated_is_measured(ended: Ended) -> None:
    """Never better than it was given, but for what clocks err; later by what a busy machine takes."""
    assert ended.returncode == 0, ended.told()
    assert ended.files() == ["new/my.toml"]
    machine = read_machine(str(ended.work / "new/my.toml"))
    assert machine.ranks_per_node == 2
    assert list(machine.compute) == ["float32", "bfloat16"]
    for rates in machine.compute.values():
        for curve in (rates.forward, rates.backward):
            assert [tokens for tokens, _ in curve.points] == [64, 256]
            # A work may make up for a millisecond that the one before has overslept: 2 and 5 ms take the
            # blocks of 256 tokens, repeated often, of which a half at least is not late by more than that.
            assert 0.5e9 <= curve.last <= 2e9
    for kind, bandwidth, latency in ((INTRA, 5e6, 10e-3), (INTER, 2.5e6, 20e-3)):
        link = machine.links[kind]
        # The best of five or more messages is late by less than two milliseconds, of 52 and 105 that the
        # largest one takes beyond the latency.
        assert link.latency.last == pytest.approx(latency, abs=2e-3)
        assert link.bandwidth.last == pytest.approx(bandwidth, rel=0.08)
    assert machine.overlap["poll"] > machine.overlap["wait"]
    text = (ended.work / "new/my.toml").read_text()
    for told in (
        f"# links are emulated: {MAP}",
        "# compute is paced",
        "4 rank(s)",
        "ringmpi calibrate",
    ):
        assert told in text


@pytest.mark.parametrize("ended", [ON_TWO_NODES], indirect=True)
def test_a_plan_reads_it(ended: Ended, here: Here) -> None:
    path = ended.work / "new/my.toml"
    code, told = here("plan", "--machine", path, "--ranks", "4", "--seq-len", "8192", "--backward")

    assert code == 0
    assert told.splitlines()[-1].startswith("# best: ")


@pytest.mark.parametrize("ended", [ALONE], indirect=True)
def test_one_rank_measures_no_links_and_can_be_planned_for(ended: Ended, here: Here) -> None:
    assert ended.returncode == 0, ended.told()
    path = ended.work / "my.toml"
    machine = read_machine(str(path))
    assert (machine.links, machine.overlap) == ({}, {})
    assert machine.noise > 0
    code, told = here("plan", "--machine", path, "--ranks", "1", "--seq-len", "8192")
    assert code == 0, told


@pytest.mark.parametrize("ended", [REAL], indirect=True)
def test_a_real_machine_has_an_eager_limit(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    assert "eager_limit = " in (ended.work / "my.toml").read_text()
    machine = read_machine(str(ended.work / "my.toml"))
    assert machine.links[INTRA].eager_limit >= 64
    assert "numpy" in machine.about


REFUSED = {
    "no lengths": ("--lengths 64,none", ["lengths='64,none'", "256,1024,4096"]),
    "no time": ("--seconds 0", ["seconds=0", "positive"]),
    "unknown dtype": ("--dtype float32,float8", ["dtype='float8'", "bfloat16"]),
    "no machine file": ("--output my.txt", ["output=my.txt", ".toml"]),
    "what somebody wrote": ("--output old.toml", ["output=old.toml", "did not write it"]),
    "another option of run": ("--causal", ["--causal", "--help"]),
    "link of a rank that there is not": (f"--link-map {MAP}:0-2=1Gbit/s,1ms", ["0-2", "2 ranks"]),
    "a pace of what computes": ("--device numpy --flops 1e9", ["flops=", "--device paced"]),
}


def by_hand(work: Path) -> None:
    (work / "old.toml").write_text("memory = 1e9\n")


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        pytest.param(Scenario(2, f"{SMALL} {options}", files=by_hand), words, id=name)
        for name, (options, words) in REFUSED.items()
    ],
    indirect=["ended"],
)
def test_what_cannot_be_measured_is_refused_with_one_line(ended: Ended, words: list[str]) -> None:
    assert ended.returncode == 2, ended.told()
    assert len(ended.complaints()) == 1, ended.told()
    assert all(word in ended.complaints()[0] for word in words), ended.told()
    assert ended.files() == ["old.toml"]


def interrupt(running: Running) -> None:
    """Send SIGTERM once the ranks have measured their compute and go on with a link of seconds."""
    limit = time.monotonic() + 40
    while "float32 backward: 256" not in (running.folder / "stdout").read_text():
        assert time.monotonic() < limit
        time.sleep(0.05)
    running.process.send_signal(signal.SIGTERM)


def test_a_signal_leaves_no_file(launch: Callable[..., Ended], tmp_path: Path) -> None:
    """An older one stays as it is."""
    scenario = Scenario(
        2, f"{PACED} --link 100kbit/s,1s --output my.toml", files=by_hand, meanwhile=interrupt
    )

    ended = scenario.run(tmp_path / "job")

    assert ended.returncode not in (0, 2), ended.told()
    assert ended.files() == ["old.toml"], ended.told()
