"""MPI jobs inside an allocation of two nodes, by each launcher, and by those of other libraries."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from submitting import CONSOLE, verified

from ringmpi.comm.launcher import find_launcher
from ringmpi.store import ResultFile

BESIDE = str(Path(sys.executable).parent / "mpiexec")
PROBLEM = "run --seq-len 50 --heads 2 --head-dim 4 --repeats 1 --output"
ALLOCATION = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2")


def library() -> str:
    return {"openmpi": "Open MPI", "hydra": "MPICH"}[find_launcher().family]


@pytest.mark.parametrize("launcher", ["srun --mpi=pmi2", f"{BESIDE} -n 4"], ids=["srun", "mpiexec"])
def test_mpich_runs_on_both_nodes(launcher: str, cluster: Cluster, tmp_path: Path) -> None:
    where = cluster.run(
        *ALLOCATION, *launcher.split(), "sh", "-c", "echo $SLURMD_NODENAME"
    ).stdout.split()
    assert sorted(where) == ["n1", "n1", "n2", "n2"]

    output = tmp_path / "result.h5"
    cluster.run(*ALLOCATION, *launcher.split(), CONSOLE, *PROBLEM.split(), output)

    with ResultFile(output) as result:
        assert result.size == 4
        assert result.facts("machine")["mpi_library"].startswith("MPICH")
    assert verified(output)


@pytest.mark.both_mpi
def test_srun_starts_ranks_by_the_plugin_of_the_library(cluster: Cluster, tmp_path: Path) -> None:
    """Two on one node: PMIx tells Open MPI which cores ranks have, and there are fewer than Slurm is told."""
    plugin = {"MPICH": "pmi2", "Open MPI": "pmix"}[library()]
    if plugin not in cluster.run("srun", "--mpi=list").stdout.split():
        pytest.skip(f"Slurm has no plugin {plugin}: apt-get install libpmix-dev")
    output = tmp_path / "result.h5"
    words = ("salloc", "--quiet", "--nodes=1", "--ntasks=2", "srun", f"--mpi={plugin}")
    cluster.run(*words, CONSOLE, *PROBLEM.split(), output)

    with ResultFile(output) as result:
        assert result.size == 2
        assert result.facts("machine")["mpi_library"].startswith(library())
    assert verified(output)


@pytest.mark.both_mpi
@pytest.mark.parametrize("plugin", ["none", "pmi2"])
def test_ranks_that_cannot_find_one_another_are_refused_with_what_helps(
    plugin: str, cluster: Cluster, tmp_path: Path
) -> None:
    if plugin == "pmi2" and library() == "MPICH":
        plugin = "none"  # It is MPICH's own. Nothing given is Slurm's default, which is none here.
        given = []
    else:
        given = [f"--mpi={plugin}"]
    output = tmp_path / "result.h5"
    done = cluster.run(*ALLOCATION, "srun", *given, CONSOLE, *PROBLEM.split(), output, check=False)

    assert done.returncode == 2, done.stderr
    (complaint,) = [line for line in done.stderr.splitlines() if line.startswith("ringmpi:")]
    right = {"MPICH": "pmi2", "Open MPI": "pmix"}[library()]
    for part in (
        "4 processes",
        "=4)",
        f"{library()} sees 1",
        f"{library()}'s mpiexec",
        f"srun --mpi={right}",
    ):
        assert part in complaint
    assert not list(tmp_path.iterdir())


def test_sweep_tells_what_a_launcher_said_that_slurm_does_not_know(
    cluster: Cluster, tmp_path: Path
) -> None:
    options = f"--seq-len 50 --ranks 2 --output {tmp_path} --launcher".split()
    done = cluster.run(*ALLOCATION, CONSOLE, "sweep", *options, "srun --mpi=nonsense", check=False)

    assert done.returncode == 4, done.stdout
    assert "Invalid MPI type 'nonsense'" in done.stdout
    assert "1 without a result" in done.stdout


#: How the command of a sweep begins, by what it was given as launcher; the number of ranks follows.
COMMANDS = {
    "auto": f"{BESIDE} -n",
    "mpiexec": f"{BESIDE} -n",
    "srun": "srun --nodes NODES --ntasks",
    "srun --mpi=pmi2": "srun --mpi=pmi2 --nodes NODES --ntasks",
}


@pytest.mark.both_mpi
def test_sweep_finds_the_launcher_inside_an_allocation(cluster: Cluster) -> None:
    sweeps = [
        f"{CONSOLE} sweep --seq-len 50 --ranks 2,3 --dry-run --launcher '{given}'" for given in COMMANDS
    ]
    shown = cluster.run(*ALLOCATION, "sh", "-c", "; ".join(sweeps)).stdout.splitlines()

    for number, line in enumerate(shown):
        ranks = number % 2 + 2
        words = [
            word for word in shlex.split(line) if word not in ("--allow-run-as-root", "--oversubscribe")
        ]
        # Two tasks fit on a node, three need both.
        expected = list(COMMANDS.values())[number // 2].replace("NODES", str(ranks - 1)).split()
        assert words[0].endswith(expected[0])
        assert words[1 : len(expected) + 1] == [*expected[1:], str(ranks)]
    assert len(shown) == 2 * len(COMMANDS)
