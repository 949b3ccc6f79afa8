"""The network lab: hosts that are namespaces, a network of the rate asked for, and nothing left of it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import h5py
import psutil
import pytest

from ringmpi.metrics import overlap
from ringmpi.model.machine import INTER, read_machine
from ringmpi.store import ResultFile

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "jobs/netlab.sh"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make network namespaces")

#: Bits a second; 16 MiB take a quarter of a second, long beside what two cores add.
RATE = 500e6


class Lab:
    """A lab under way."""

    def __init__(self, folder: Path, *options: str, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            self.process = subprocess.Popen(
                ["bash", str(SCRIPT), *options],
                cwd=folder,
                env=dict(env) if env is not None else None,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self.name = f"ringmpi-lab-{self.process.pid}"

    def told(self) -> str:
        texts = [(self.folder / name).read_text() for name in ("stdout", "stderr")]
        return "\n--- ".join([shlex.join(map(str, self.process.args)), *texts])

    def wait(self, timeout: float = 90) -> int:
        """Wait for its end, and see that nothing is left of it; return its exit code."""
        code = self.process.wait(timeout)
        assert self.namespaces() == [], self.told()
        assert self.pids() == [], self.told()
        return code

    def namespaces(self) -> list[str]:
        """Return those of its namespaces that are there."""
        told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        names = (line.split()[0] for line in told.stdout.splitlines())
        return [name for name in names if name.startswith(f"{self.name}-")]

    def pids(self) -> list[int]:
        """Return those of its processes that are there, apart from the script itself."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RINGMPI_NETLAB") == self.name:
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def await_line(self, text: str, timeout: float = 60) -> None:
        """Wait until it has printed something."""
        limit = time.monotonic() + timeout
        while text not in (self.folder / "stdout").read_text():
            assert time.monotonic() < limit and self.process.poll() is None, self.told()
            time.sleep(0.02)

    def end(self) -> None:
        """End it and wait for its cleaning up; what is left after that is killed."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


def links() -> list[str]:
    """Return the network links outside of all labs."""
    told = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in told.stdout.splitlines()]


@pytest.fixture
def labs(tmp_path: Path) -> Iterator[list[Lab]]:
    """Labs of a test, which must leave the links outside of them as they are."""
    before = links()
    started: list[Lab] = []
    yield started
    for lab in started:
        lab.end()
    assert links() == before


@needs_root
@pytest.mark.parametrize("hosts", [2, 3])
def test_a_transfer_takes_what_the_rate_allows_and_is_hidden_only_by_polling(
    hosts: int, labs: list[Lab], tmp_path: Path
) -> None:
    """Blocks of 16 MiB; compute takes 1.3 times as long as they do at the rate."""
    tokens, nbytes = 4096, 2**24
    seconds = nbytes * 8 / RATE
    flops = 4 * tokens**2 * 64 * 8 / (1.3 * seconds)
    hidden, bandwidths = {}, []
    for progress in ("poll", "wait"):
        run = f"ringmpi run --seq-len {hosts * tokens} --device paced --flops {flops:g} --progress {progress}"
        options = f"--hosts {hosts} --rate {RATE:.0f}bit -- {run} --repeats 2 --output {progress}.h5"
        lab = Lab(tmp_path / "lab", *options.split())
        labs.append(lab)
        assert lab.wait() == 0, lab.told()
        with ResultFile(lab.folder / f"{progress}.h5") as result:
            assert result.texts("ranks/hostname") == [f"host{rank + 1}" for rank in range(hosts)]
            timings = result.timings()
            assert set(timings.records["bytes_sent"][:, :, :-1].ravel()) == {nbytes}
            hidden[progress] = overlap(timings)
            alone = (timings.alone["received"] - timings.alone["posted"])[:, :, :-1]
            bandwidths.append(8 * nbytes / alone.min())
    assert (hidden["poll"] >= 0.9).all(), f"{hidden} {lab.told()}"
    assert (hidden["wait"] <= 0.3).all(), f"{hidden} {lab.told()}"
    # Headers take 4 to 6 % with packets of 1500 bytes; a busy machine only makes it slower.
    assert 0.85 * RATE <= max(bandwidths) <= RATE, bandwidths


@needs_root
def test_ranks_of_a_host_share_it_and_two_labs_do_not_meet(labs: list[Lab], tmp_path: Path) -> None:
    run = ["ringmpi", "run", "--seq-len", "60", "--heads", "2", "--head-dim", "4", "--output", "r.h5"]
    wide = ("--hosts", "2", "--ranks-per-host", "2", "--rate", "1gbit", "--", *run)
    labs += [Lab(tmp_path / "wide", *wide), Lab(tmp_path / "plain", "--", *run)]

    assert [lab.wait() for lab in labs] == [0, 0], labs[0].told() + labs[1].told()

    with h5py.File(tmp_path / "wide/r.h5") as file:
        assert list(file["ranks/hostname"].asstr()) == ["host1", "host1", "host2", "host2"]
        assert list(file["ranks/local_rank"][:]) == [0, 1, 0, 1]
        assert file["verification/out"].attrs["passed"]
    with h5py.File(tmp_path / "plain/r.h5") as file:
        assert list(file["ranks/hostname"].asstr()) == ["host1", "host2"]


@needs_root
def test_calibrate_finds_the_rate_of_the_lab(labs: list[Lab], tmp_path: Path) -> None:
    """Hosts are nodes, so the link is one between nodes. Over TCP some part moves while nobody calls MPI."""
    run = "ringmpi calibrate --device paced --flops 1e9 --heads 1 --lengths 64 --seconds 5 --output my.toml"
    labs.append(Lab(tmp_path / "lab", "--rate", f"{RATE:.0f}bit", "--", *run.split()))
    assert labs[0].wait() == 0, labs[0].told()
    machine = read_machine(str(labs[0].folder / "my.toml"))
    assert (machine.ranks_per_node, list(machine.links)) == (1, [INTER])
    # As above; the burst that tbf lets pass, 256 KB at each end, makes small messages faster.
    assert 0.85 * RATE <= 8 * machine.links[INTER].bandwidth.last <= 1.05 * RATE, labs[0].told()
    assert machine.overlap["poll"] >= 0.8


@needs_root
def test_the_exit_code_is_that_of_the_command(labs: list[Lab], tmp_path: Path) -> None:
    labs.append(Lab(tmp_path / "lab", "--hosts", "3", "--", "bash", "-c", "exit 7"))
    assert labs[0].wait() == 7, labs[0].told()


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["setting up", "running"])
def test_nothing_is_left_after_a_signal(
    number: signal.Signals, when: str, labs: list[Lab], tmp_path: Path
) -> None:
    """The job would take hours. The work that it has finished is on disk."""
    run = "ringmpi run --seq-len 64 --device paced --flops 1e7 --repeats 100000 --output r.h5"
    lab = Lab(tmp_path / "lab", "--hosts", "8" if when == "setting up" else "2", "--", *run.split())
    labs.append(lab)
    if when == "running":
        lab.await_line("repeat 1/")
        assert len(lab.namespaces()) == 3
        assert len(lab.pids()) > 2
    else:
        limit = time.monotonic() + 60
        while not lab.namespaces():
            assert time.monotonic() < limit, lab.told()
    lab.process.send_signal(number)

    assert lab.wait() == 128 + number, lab.told()

    assert (lab.folder / "r.h5").exists() == (when == "running"), lab.told()


REFUSED = {
    "no command": ([], "give a command after --"),
    "nothing after --": (["--hosts", "2", "--"], "give a command after --"),
    "no host": (["--hosts", "0", "--", "true"], "--hosts 0: from 1 to 250"),
    "too many hosts": (["--hosts", "251", "--", "true"], "--hosts 251: from 1 to 250"),
    "no rank": (["--ranks-per-host", "none", "--", "true"], "--ranks-per-host none: from 1"),
    "unknown option": (["--host", "2", "--", "true"], "--host: not one of --hosts, --rate"),
    "no value": (["--hosts"], "--hosts: give a value"),
}


@pytest.mark.parametrize(("options", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_what_makes_no_sense_is_refused(options: list[str], told: str, tmp_path: Path) -> None:
    lab = Lab(tmp_path / "lab", *options)
    assert lab.process.wait(20) == 2, lab.told()
    assert told in lab.told()


@needs_root
def test_a_rate_that_is_none_is_refused_and_nothing_is_left(labs: list[Lab], tmp_path: Path) -> None:
    labs.append(Lab(tmp_path / "lab", "--rate", "fast", "--", "true"))
    assert labs[0].wait() == 2, labs[0].told()
    assert "--rate fast: tc takes none; use one such as 1gbit" in labs[0].told()


@pytest.mark.parametrize(
    ("stand_in", "variables", "told"),
    [
        ("id", {}, "needs root"),
        ("", {}, "ip is missing"),
        ("", {"RINGMPI_MPI": "openmpi"}, "the lab starts MPICH"),
    ],
    ids=["not root", "no iproute2", "Open MPI"],
)
def test_where_no_lab_can_be_made_it_says_so(
    stand_in: str, variables: dict[str, str], told: str, tmp_path: Path
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, answer in {"id": "1000" if stand_in else "0"}.items():
        (tools / name).write_text(f"#!/bin/sh\necho {answer}\n")
        (tools / name).chmod(0o755)
    bash = Path("/bin/bash")
    (tools / "bash").symlink_to(bash)
    (tools / "sh").symlink_to("/bin/sh")

    lab = Lab(tmp_path / "lab", "--", "true", env={"PATH": str(tools), **variables})

    assert lab.process.wait(20) == 2, lab.told()
    assert told in lab.told()
