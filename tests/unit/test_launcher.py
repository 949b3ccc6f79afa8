from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ringmpi.comm import launcher as room
from ringmpi.comm.launcher import (
    Launch,
    Launcher,
    check_library,
    check_size,
    cpus_per_task,
    family_of,
    find_launcher,
    launch_from_environment,
    shown,
    step_nodes,
    version_of,
)
from ringmpi.errors import BAD_PARAMETER, ConfigError, LaunchError

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "3"}
SLURM_STEP = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "7", "SLURM_NTASKS": "8"}
SLURM_SCRIPT = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "17"}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch(1, 0, "")),
        (OPEN_MPI, Launch(3, 2, "OMPI_COMM_WORLD_SIZE")),
        (HYDRA, Launch(4, 3, "PMI_SIZE")),
        (SLURM_STEP, Launch(8, 7, "SLURM_STEP_NUM_TASKS")),
        (SLURM_SCRIPT, Launch(1, 0, "")),
        (SLURM_STEP | HYDRA, Launch(4, 3, "PMI_SIZE")),
        (SLURM_STEP | OPEN_MPI, Launch(3, 2, "OMPI_COMM_WORLD_SIZE")),
        (SLURM_SCRIPT | OPEN_MPI, Launch(3, 2, "OMPI_COMM_WORLD_SIZE")),
        (HYDRA | OPEN_MPI, Launch(3, 2, "OMPI_COMM_WORLD_SIZE")),
        ({"PMI_SIZE": "4"}, Launch(4, 0, "PMI_SIZE")),
        ({"PMI_SIZE": "", "SLURM_STEP_NUM_TASKS": "8"}, Launch(8, 0, "SLURM_STEP_NUM_TASKS")),
        ({"PMI_SIZE": "many"}, Launch(1, 0, "")),
        ({"PMI_SIZE": "4", "PMI_RANK": "-1"}, Launch(4, 0, "PMI_SIZE")),
    ],
    ids=[
        "none",
        "Open MPI",
        "Hydra",
        "srun",
        "batch script",
        "Hydra in a Slurm step",
        "Open MPI in a Slurm step",
        "Open MPI in a batch script",
        "Open MPI under Hydra",
        "no rank",
        "empty",
        "no number",
        "no rank number",
    ],
)
def test_the_most_specific_launcher_is_believed(environment: dict[str, str], launch: Launch) -> None:
    assert launch_from_environment(environment) == launch


def test_a_library_under_another_launcher_is_refused_with_both_names_and_numbers() -> None:
    with pytest.raises(LaunchError) as refusal:
        check_library(Launch(3, 0, "OMPI_COMM_WORLD_SIZE"), "MPICH")

    told = ["3 processes", "OMPI_COMM_WORLD_SIZE=3", "linked to MPICH", "1 process", "MPICH's mpiexec"]
    assert [part for part in told if part not in str(refusal.value)] == []
    assert refusal.value.exit_code == BAD_PARAMETER


@pytest.mark.parametrize(
    ("launch", "library"),
    [
        (Launch(3, 0, "OMPI_COMM_WORLD_SIZE"), "Open MPI"),
        (Launch(3, 0, "PMI_SIZE"), "MPICH"),
        (Launch(3, 0, "PMI_SIZE"), "Intel MPI"),
        (Launch(3, 0, "SLURM_STEP_NUM_TASKS"), "Open MPI"),
        (Launch(1, 0, ""), "MPICH"),
    ],
    ids=str,
)
def test_a_library_under_its_own_launcher_is_taken(launch: Launch, library: str) -> None:
    check_library(launch, library)


def test_processes_that_each_believe_to_be_alone_are_refused_with_both_numbers() -> None:
    with pytest.raises(LaunchError) as refusal:
        check_size(Launch(4, 3, "PMI_SIZE"), "Open MPI", 1)

    told = ["4 processes", "PMI_SIZE=4", "Open MPI sees 1", "Open MPI's mpiexec", "srun --mpi=pmix"]
    assert [part for part in told if part not in str(refusal.value)] == []
    assert refusal.value.exit_code == BAD_PARAMETER


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("MPICH", "srun --mpi=pmi2 ("),
        ("Open MPI", "srun --mpi=pmix ("),
        ("Intel MPI", "I_MPI_PMI_LIBRARY"),
        ("Somebody's MPI", "plugin that Somebody's MPI was built for"),
    ],
    ids=lambda value: value.split()[0],
)
def test_the_plugin_of_srun_depends_on_the_library(library: str, words: str) -> None:
    with pytest.raises(LaunchError) as refusal:
        check_size(Launch(4, 3, "SLURM_STEP_NUM_TASKS"), library, 1)

    assert words in str(refusal.value)
    assert "srun --mpi=list" in str(refusal.value)


@pytest.mark.parametrize(("told", "seen"), [(1, 1), (4, 4), (1, 4), (3, 2)])
def test_a_size_that_mpi_knows_is_taken(told: int, seen: int) -> None:
    check_size(Launch(told, 0, "PMI_SIZE"), "MPICH", seen)


@pytest.mark.parametrize(
    ("environment", "cores"),
    [({}, None), ({"SLURM_CPUS_PER_TASK": "8"}, 8)]
    + [({"SLURM_CPUS_PER_TASK": text}, None) for text in ("all", "0", "")],
    ids=["alone", "Slurm", "no number", "none", "empty"],
)
def test_slurm_tells_the_cores_of_a_task(environment: dict[str, str], cores: int | None) -> None:
    assert cpus_per_task(environment) == cores


@pytest.mark.parametrize("family", ["openmpi", "hydra", "slurm"])
@pytest.mark.parametrize("root", [True, False], ids=["root", "user"])
@pytest.mark.parametrize("crowded", [True, False], ids=["more ranks than cores", "enough cores"])
def test_flags_are_added_only_for_open_mpi_and_only_when_needed(
    monkeypatch: pytest.MonkeyPatch, family: str, root: bool, crowded: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2 if crowded else 3)))
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)

    command = Launcher("/mpi/start", family).command(3, ["ringmpi", "run", "--seq-len", "7"])

    flags = {
        "openmpi": ["--allow-run-as-root"] * root + ["--oversubscribe"] * crowded + ["-n", "3"],
        "hydra": ["-n", "3"],
        "slurm": ["--ntasks", "3", "--cpus-per-task", "1"],
    }
    assert command == ["/mpi/start", *flags[family], "ringmpi", "run", "--seq-len", "7"]


def test_srun_passes_the_cores_of_a_task_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)

    command = Launcher("/slurm/srun", "slurm").command(2, ["program"])

    assert command == ["/slurm/srun", "--ntasks", "2", "--cpus-per-task", "8", "program"]


@pytest.mark.parametrize(
    ("ranks", "environment", "nodes"),
    [
        (3, {}, None),
        (3, {"SLURM_NTASKS_PER_NODE": "4"}, None),
        (1, {"SLURM_JOB_NUM_NODES": "2"}, 1),
        (5, {"SLURM_JOB_NUM_NODES": "2"}, 2),
        (4, {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "4"}, 1),
        (5, {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "4"}, 2),
        # Slurm says itself that these are too many.
        (13, {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "4"}, 3),
    ],
)
def test_a_step_fills_one_node_after_the_other(
    ranks: int, environment: dict[str, str], nodes: int | None
) -> None:
    assert step_nodes(ranks, environment) == nodes


@pytest.mark.parametrize("family", ["openmpi", "hydra", "slurm"])
def test_options_of_a_launcher_come_first(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")

    command = Launcher("/mpi/start", family, ("--one", "a b")).command(2, ["program"])

    assert command[:3] == ["/mpi/start", "--one", "a b"]
    assert command[-1] == "program"
    assert ("--nodes" in command) == (family == "slurm")


@pytest.mark.parametrize("word", ["a b", "$HOME", "it's", "größe"])
def test_a_command_is_shown_as_one_would_type_it(word: str) -> None:
    import shlex

    assert shlex.split(shown(["run", word])) == ["run", word]


VERSIONS = {
    "openmpi": "mpiexec (OpenRTE) 4.1.4",
    "openmpi 5": "mpiexec (Open MPI) 5.0.3",
    "prrte": "prterun (PRRTE) 3.0.2",
    "hydra": "HYDRA build details:\n    Version: 4.2.0",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.9",
    "slurm": "slurm 23.02.7",
    "silent": "",
}
FAMILIES = {
    "openmpi": "openmpi",
    "openmpi 5": "openmpi",
    "prrte": "openmpi",
    "hydra": "hydra",
    "intel": "hydra",
    "slurm": "slurm",
    "silent": "hydra",
}


class TestFind:
    """Launchers are scripts that tell their version, in folders of their own."""

    @pytest.fixture(autouse=True)
    def nothing_else(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for folder in ("env", "path"):
            (tmp_path / folder).mkdir()
        monkeypatch.setattr(room.sys, "executable", str(tmp_path / "env" / "python"))
        monkeypatch.setenv("PATH", str(tmp_path / "path"))
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    @staticmethod
    def put(folder: Path, name: str, version: str = "hydra", stream: str = "") -> str:
        path = folder / name
        path.write_text(f"#!/bin/sh\necho '{VERSIONS[version]}' {stream}\n")
        path.chmod(0o755)
        return str(path)

    @pytest.mark.parametrize("stream", ["", ">&2"], ids=["stdout", "stderr"])
    @pytest.mark.parametrize("version", VERSIONS)
    def test_the_family_is_read_from_the_version(
        self, tmp_path: Path, version: str, stream: str
    ) -> None:
        path = self.put(tmp_path / "path", "mpiexec", version, stream)

        assert find_launcher() == Launcher(path, FAMILIES[version])

    def test_the_one_beside_python_comes_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        beside = self.put(tmp_path / "env", "mpiexec", "openmpi")
        self.put(tmp_path / "path", "mpiexec")
        self.put(tmp_path / "path", "srun", "slurm")

        assert find_launcher() == Launcher(beside, "openmpi")

    def test_srun_comes_before_the_path_inside_an_allocation(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        self.put(tmp_path / "path", "mpiexec")
        srun = self.put(tmp_path / "path", "srun", "slurm")

        assert find_launcher() == Launcher(srun, "slurm")

    def test_srun_is_not_taken_outside_an_allocation(self, tmp_path: Path) -> None:
        mpiexec = self.put(tmp_path / "path", "mpiexec")
        self.put(tmp_path / "path", "srun", "slurm")

        assert find_launcher() == Launcher(mpiexec, "hydra")

    def test_mpiexec_asked_for_by_name_is_not_srun(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        mpiexec = self.put(tmp_path / "path", "mpiexec")
        self.put(tmp_path / "path", "srun", "slurm")

        assert find_launcher("mpiexec") == Launcher(mpiexec, "hydra")

    def test_mpirun_will_do_where_there_is_no_mpiexec(self, tmp_path: Path) -> None:
        mpirun = self.put(tmp_path / "path", "mpirun", "openmpi")

        assert find_launcher() == Launcher(mpirun, "openmpi")

    def test_a_path_is_taken_as_it_is(self, tmp_path: Path) -> None:
        path = self.put(tmp_path, "my own launcher", "openmpi")
        self.put(tmp_path / "path", "mpiexec")

        assert find_launcher(path) == Launcher(path, "openmpi")

    def test_options_follow_the_name(self, tmp_path: Path) -> None:
        srun = self.put(tmp_path / "path", "srun", "slurm")
        path = self.put(tmp_path, "my own launcher", "openmpi")

        given = find_launcher("srun --mpi=pmi2 --comment 'of two words'")
        assert given == Launcher(srun, "slurm", ("--mpi=pmi2", "--comment", "of two words"))
        assert find_launcher(f"'{path}' -x") == Launcher(path, "openmpi", ("-x",))

    @pytest.mark.parametrize("text", ["srun --comment 'open", ""])
    def test_what_a_shell_could_not_read_is_refused(self, tmp_path: Path, text: str) -> None:
        self.put(tmp_path / "path", "srun", "slurm")

        with pytest.raises(ConfigError, match="launcher="):
            find_launcher(text)

    def test_srun_that_tells_nothing_is_known_by_its_name(self, tmp_path: Path) -> None:
        srun = self.put(tmp_path / "path", "srun", "silent")

        assert find_launcher("srun") == Launcher(srun, "slurm")

    @pytest.mark.parametrize("name", ["auto", "mpiexec", "srun", "/no/such/mpiexec"])
    def test_none_at_all_is_refused_with_what_would_work(self, name: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            find_launcher(name)

        assert f"launcher={name}" in str(refusal.value)
        assert "pip install mpich" in str(refusal.value)


@pytest.mark.parametrize("text", ["", "sleep 60", "false"], ids=["nothing", "hangs", "fails"])
def test_a_launcher_that_does_not_answer_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(room, "VERSION_LIMIT", 0.3)
    path = tmp_path / "mpiexec"
    path.write_text(f"#!/bin/sh\nexec {text}\n" if text else "no program")
    path.chmod(0o755)

    assert version_of(str(path)) == ""
    assert family_of(str(path)) == "hydra"


def test_importing_the_launcher_loads_no_mpi() -> None:
    import subprocess

    rooms = "ringmpi.comm.threads, ringmpi.comm.node, ringmpi.comm.policy"
    program = f"import sys, {rooms}; print('mpi4py' in sys.modules)"

    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert answer.stdout.strip() == "False"
