"""What cannot be run is refused at once: exit code 2, one line for the whole job, no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from running import CONSOLE, Ended, Running, Scenario, launcher, under_open_mpi

RUN = "run --seq-len 32 --heads 2 --head-dim 4"


def inputs(work: Path) -> None:
    """Make an input, one that lacks /v, and things that are no input at all."""
    with h5py.File(work / "input.h5", "w") as file, h5py.File(work / "no_v.h5", "w") as lacking:
        for name in "qkv":
            file[name] = np.ones((1, 2, 32, 4), np.float32)
            if name != "v":
                lacking[name] = np.ones((1, 2, 32, 4), np.float32)
    for name, tensor, shape in (
        ("long_q.h5", "q", (1, 2, 33, 4)),
        ("short_q.h5", "q", (1, 2, 5, 4)),
        ("wrong_dout.h5", "dout", (1, 2, 32, 3)),
    ):
        with h5py.File(work / name, "w") as file:
            shapes = {**dict.fromkeys("qkv", (1, 2, 32, 4)), tensor: shape}
            for tensor_name, size in shapes.items():
                file[tensor_name] = np.ones(size, np.float32)
    (work / "text.h5").write_text("not HDF5")
    (work / "folder").mkdir()
    (work / "unknown.toml").write_text("seq_len = 32\nlayot = 'zigzag'\n")
    (work / "wrong_type.toml").write_text("seq_len = 'many'\n")
    (work / "broken.toml").write_text("seq_len = = 3\n")


GIVEN = [
    "broken.toml",
    "input.h5",
    "long_q.h5",
    "no_v.h5",
    "short_q.h5",
    "text.h5",
    "unknown.toml",
    "wrong_dout.h5",
    "wrong_type.toml",
]

#: Command line, and what its one line must name: what was given, and what would work.
REFUSED = {
    "unknown layout": (f"{RUN} --layout zigzga", ["layout='zigzga'", "zigzag"]),
    "unknown method": (f"{RUN} --method rings", ["method='rings'", "ring"]),
    "nearly a method": (f"{RUN} --method ulyses", ["method='ulyses'", "did you mean 'ulysses'"]),
    "two methods": (f"{RUN} --method ring,passq", ["method='ring,passq'", "ring", "passq"]),
    "all methods in one run": (f"{RUN} --method all", ["method='all'", "allgather"]),
    "more ranks than heads": (
        "run --seq-len 32 --heads 1 --head-dim 4 --method ulysses",
        ["method=ulysses", "1 heads", "2 ranks", "at most 1 ranks"],
    ),
    "more ranks of a group than heads": (
        "run --seq-len 32 --heads 1 --head-dim 4 --method hybrid --ulysses-degree 2",
        ["method=hybrid", "1 heads", "2 ranks"],
    ),
    "more ranks of a node than heads": (
        "run --seq-len 32 --heads 1 --head-dim 4 --method hybrid",
        ["method=hybrid", "1 heads", "2 ranks", "--ulysses-degree"],
    ),
    "inner ring that does not divide the ranks": (
        f"{RUN} --method double-ring --inner 3",
        ["inner=3", "number of ranks, 2", "one of 1, 2"],
    ),
    "degree that does not divide the ranks": (
        f"{RUN} --method hybrid --ulysses-degree 4",
        ["ulysses_degree=4", "number of ranks, 2", "one of 1, 2"],
    ),
    "no rank in an inner ring": (f"{RUN} --method double-ring --inner 0", ["inner=0", "1 or more"]),
    "more queries than keys": (f"{RUN} --query-len 33", ["query_len=33", "32 positions"]),
    "no query": (f"{RUN} --query-len 0", ["query_len=0", "1 or more"]),
    "more queries in the input than keys": (
        "run --input long_q.h5",
        ["long_q.h5", "/q (1, 2, 33, 4)", "at most as many tokens as /k"],
    ),
    "queries that contradict the input": (
        "run --input short_q.h5 --query-len 4",
        ["query_len=4", "query_len=5"],
    ),
    "dout unlike q in the input": (
        "run --input wrong_dout.h5 --backward",
        ["/dout (1, 2, 32, 3)", "(1, 2, 32, 4)"],
    ),
    "more than a node holds": (
        "run --seq-len 1000000000000",
        ["seq_len=1000000000000", "GB", "shorter sequence"],
    ),
    "options without an end": ("run --seq-len 8 --config /dev/zero", ["config=/dev/zero", "no file"]),
    "link without latency": (f"{RUN} --link 1Gbit/s", ["link='1Gbit/s'", "RATE,LATENCY"]),
    "link in bytes": (f"{RUN} --link 1GB/s,1ms", ["link='1GB/s,1ms'", "100Mbit/s,1ms"]),
    "link that moves nothing": (f"{RUN} --link 0bit/s,1ms", ["link='0bit/s,1ms'", "above 0"]),
    "map of links in bytes": (
        f"{RUN} --link-map 2:1GB/s,1ms:1Gbit/s,1ms",
        ["link_map='2:1GB/s,1ms:1Gbit/s,1ms'", "100Mbit/s,1ms"],
    ),
    "link and map": (
        f"{RUN} --link 1Gbit/s,1ms --link-map 2:1Gbit/s,1ms:1Gbit/s,1ms",
        ["link=1Gbit/s,1ms", "link_map=2:", "give one"],
    ),
    "map with a rank that there is not": (
        f"{RUN} --link-map 2:1Gbit/s,1ms:1Gbit/s,1ms:0-2=1Gbit/s,1ms",
        ["0-2 is no way", "2 ranks, 0 to 1"],
    ),
    "paced without a pace": (f"{RUN} --device paced", ["device=paced", "--flops 50e12"]),
    "a pace without pacing": (f"{RUN} --flops 50e12", ["flops=50000000000000.0", "--device paced"]),
    "a verdict on nothing": (
        f"{RUN} --device paced --flops 50e12 --verify full",
        ["verify=full", "device=paced", "none"],
    ),
    "slow rank that there is not": (
        f"{RUN} --device paced --flops 50e12 --slow 2:1.5",
        ["slow=2:1.5", "rank 2", "2, 0 to 1"],
    ),
    "slow rank that computes": (f"{RUN} --slow 1:1.5", ["slow=1:1.5", "--device paced"]),
    "unknown device": (f"{RUN} --device gpu", ["device='gpu'", "numpy"]),
    "threads of NumPy": (f"{RUN} --device numpy --threads 2", ["threads=2", "--device native"]),
    "no thread": (f"{RUN} --threads 0", ["threads=0", "from 1"]),
    "matrix unit of NumPy": (f"{RUN} --device numpy --matrix-unit on", ["matrix_unit=on", "native"]),
    "unknown use of a matrix unit": (
        f"{RUN} --matrix-unit yes",
        ["matrix_unit='yes'", "auto, off, on"],
    ),
    "weights with nothing to be rounded to": (
        f"{RUN} --weights rounded",
        ["weights=rounded", "dtype=float32", "use exact"],
    ),
    "unknown weights": (f"{RUN} --weights half", ["weights='half'", "exact, rounded"]),
    "weights of nothing": (
        f"{RUN} --device paced --flops 50e12 --weights rounded --dtype bfloat16",
        ["weights=rounded", "device=paced"],
    ),
    "unknown progress": (f"{RUN} --progress pol", ["progress='pol'", "poll"]),
    "unknown dtype": (f"{RUN} --dtype float23", ["dtype='float23'", "float32"]),
    "unknown verify": (f"{RUN} --verify some", ["verify='some'", "sample:"]),
    "unknown io": (f"{RUN} --io disk", ["io='disk'", "gather"]),
    "no sampled rows": (f"{RUN} --verify sample:0", ["sample:0"]),
    "KV heads that do not divide heads": (f"{RUN} --heads 6 --kv-heads 4", ["heads=6", "kv_heads=4"]),
    "documents that end early": (f"{RUN} --documents 0,8,31", ["0,8,31", "32"]),
    "documents that fall": (f"{RUN} --documents 0,9,8,32", ["documents", "0"]),
    "negative window": (f"{RUN} --causal --window -1", ["window=-1"]),
    "not a number": (f"{RUN} --batch two", ["batch='two'"]),
    "too wide a head": (f"{RUN} --head-dim 257", ["head_dim=257", "256"]),
    "no repeat": (f"{RUN} --repeats 0", ["repeats=0"]),
    "no time": (f"{RUN} --timeout nan", ["timeout=nan"]),
    "unknown option": (f"{RUN} --colour red", ["--colour", "--help"]),
    "abbreviated option": (f"{RUN} --lay zigzag", ["--lay"]),
    "no value": (f"{RUN} --layout", ["--layout"]),
    "neither length nor input": ("run --heads 2", ["--seq-len", "--input"]),
    "length that contradicts the input": ("run --input input.h5 --seq-len 31", ["seq_len=31", "32"]),
    "heads that contradict the input": ("run --input input.h5 --heads 3", ["heads=3", "heads=2"]),
    "missing input": ("run --input nowhere.h5", ["nowhere.h5"]),
    "input that is not HDF5": ("run --input text.h5", ["text.h5"]),
    "input without values": ("run --input no_v.h5", ["/v", "no_v.h5"]),
    "input is a folder": ("run --input folder", ["folder"]),
    "unknown key in TOML": ("run --config unknown.toml", ["layot", "layout"]),
    "wrong type in TOML": ("run --config wrong_type.toml", ["seq_len", "many"]),
    "broken TOML": ("run --config broken.toml", ["broken.toml"]),
    "missing TOML": ("run --config nowhere.toml", ["nowhere.toml"]),
    "another number of ranks": (f"{RUN} --ranks 5", ["ranks=5", "2", "-n 5"]),
    "output in a file": (f"{RUN} --output text.h5/r.h5", ["text.h5/r.h5"]),
    "output that nobody can write": (f"{RUN} --output /proc/r.h5", ["/proc/r.h5"]),
    "output with too long a name": (f"{RUN} --output {'x' * 300}.h5", ["xxx"]),
    "output is a folder": (f"{RUN} --output folder", ["folder", "directory"]),
    "no command": ("", ["COMMAND"]),
    "unknown command": ("runn", ["runn"]),
}


def assert_refused(ended: Ended, words: list[str]) -> None:
    assert ended.returncode == 2, ended.told()
    assert len(ended.complaints()) == 1, ended.told()
    assert "Traceback" not in ended.stderr, ended.told()
    assert all(word in ended.complaints()[0] for word in words), ended.told()
    assert ended.files() in (GIVEN, []), ended.told()


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        pytest.param(Scenario(2, args, files=inputs), words, id=name)
        for name, (args, words) in REFUSED.items()
    ],
    indirect=["ended"],
)
def test_job_is_refused_with_one_line(ended: Ended, words: list[str]) -> None:
    assert_refused(ended, words)


@pytest.mark.parametrize("fault", ["funneled:rank=all", "funneled:rank=1"], ids=["all", "one rank"])
def test_thread_is_refused_where_mpi_lets_one_thread_call_it(
    fault: str, launch: Callable[..., Ended]
) -> None:
    """MPI is initialised for less than the library could give, on one rank or on all."""
    ended = launch(3, *RUN.split(), "--progress", "thread", fault=fault)
    words = ["progress=thread: needs MPI_THREAD_MULTIPLE", "thread level 'funneled'", "progress=poll"]
    assert_refused(ended, words)
    assert ended.stdout == "", ended.told()  # Before anything ran.


@pytest.mark.parametrize("ranks", [0, 3])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param("--query-len 33", ["query_len=33", "32 positions"], id="queries"),
        pytest.param("--method double-ring --inner 2", ["inner=2: must divide"], id="inner"),
    ],
)
def test_job_of_any_size_is_refused_with_one_line(
    ranks: int, options: str, words: list[str], launch: Callable[..., Ended]
) -> None:
    assert_refused(launch(ranks, *RUN.split(), *options.split()), words)


FILE_COMMANDS = {
    "verify without a file": ("verify nowhere.h5", ["nowhere.h5"]),
    "verify what is no result": ("verify input.h5", ["input.h5", "not a complete result"]),
    "verify what is not HDF5": ("verify text.h5", ["text.h5"]),
    "report on a folder": ("report folder", ["folder"]),
    "report on what is not HDF5": ("report text.h5", ["text.h5"]),
    "sweep over a method that a rank count does not allow": (
        "sweep --ranks 1,2,3 --seq-len 8 --heads 2 --vary method=ring,ulysses",
        ["method=ulysses", "2 heads", "3 ranks"],
    ),
    "sweep with groups that a rank count does not allow": (
        "sweep --ranks 2,3 --seq-len 8 --method double-ring --inner 2",
        ["inner=2", "number of ranks, 3"],
    ),
    "sweep over a method that is none": (
        "sweep --ranks 1 --seq-len 8 --vary method=ring,rings",
        ["method='rings'", "did you mean 'ring'"],
    ),
    "sweep over all methods and some again": (
        "sweep --ranks 1 --seq-len 8 --method all --vary method=ring,passq",
        ["vary=method", "--method all"],
    ),
    "sweep over all methods and one that is none": (
        "sweep --ranks 1 --seq-len 8 --vary method=all,ring",
        ["method='all'"],
    ),
    "sweep over nothing": ("sweep --ranks 0 --seq-len 8", ["ranks='0'"]),
    "sweep over more ranks than there are": ("sweep --ranks 10000001 --seq-len 8", ["to 10000000"]),
    "sweep over more digits than Python reads": (f"sweep --ranks {'9' * 5000} --seq-len 8", ["ranks="]),
    "sweep with an unknown option": ("sweep --ranks 1 --seq-len 8 --vary size=1,2", ["size=1,2"]),
    "sweep with a bad point": ("sweep --ranks 1 --seq-len 8 --vary heads=2,0", ["heads", "0"]),
    "sweep with a launcher that is not there": (
        "sweep --ranks 1 --seq-len 8 --launcher nowhere",
        ["launcher=nowhere"],
    ),
}


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        pytest.param(Scenario(0, args, files=inputs), words, id=name)
        for name, (args, words) in FILE_COMMANDS.items()
    ],
    indirect=["ended"],
)
def test_command_outside_of_a_job_is_refused_with_one_line(ended: Ended, words: list[str]) -> None:
    assert_refused(ended, words)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--window 3", "--window 4"], id="mask"),
        pytest.param(["--output a.h5", "--output b.h5"], id="output"),
        pytest.param(["--repeats 2", "--repeats 3"], id="repeats"),
    ],
)
def test_ranks_with_different_options_are_refused(options: list[str], tmp_path: Path) -> None:
    flags = launcher().command(2, [])[1:-2]
    words: list[str] = []
    for at, option in enumerate(options):
        words += [*[":"] * at, "-n", "1", str(CONSOLE), *RUN.split(), *option.split()]
    ended = Running([launcher().path, *flags, *words], tmp_path, {}).wait(60)
    assert_refused(ended, ["different"])


@pytest.mark.parametrize("command", ["", "run", "verify", "sweep", "report", "doctor"])
def test_help_needs_no_mpi(command: str, launch: Callable[..., Ended]) -> None:
    ended = launch(0, *command.split(), "--help", env={"RINGMPI_TEST_FORBID": "mpi4py,mpi4py.MPI"})
    assert ended.returncode == 0, ended.told()
    assert ended.stdout.startswith("usage: ringmpi")
    assert not ended.stderr


def test_forbidden_imports_are_seen(launch: Callable[..., Ended]) -> None:
    ended = launch(0, *RUN.split(), env={"RINGMPI_TEST_FORBID": "mpi4py"})
    assert ended.returncode != 0
    assert "mpi4py was imported" in ended.stderr


def variables_of_the_other_library() -> dict[str, str]:
    """Return what four processes of the other library's launcher would find."""
    if under_open_mpi():
        return {"PMI_SIZE": "4", "PMI_RANK": "0"}
    return {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}


SLURM_STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("foreign", "size"),
    [
        pytest.param(variables_of_the_other_library(), "4", id="the other library's launcher"),
        pytest.param(SLURM_STEP, "6", id="srun without a plugin"),
    ],
)
def test_process_that_wrongly_believes_to_be_alone_is_refused(
    foreign: dict[str, str], size: str, launch: Callable[..., Ended]
) -> None:
    ended = launch(0, *RUN.split(), env=foreign)
    assert_refused(ended, [size, "1"])
    assert f"{size} processes" in ended.complaints()[0]


def test_only_the_first_of_the_wrongly_launched_processes_speaks(launch: Callable[..., Ended]) -> None:
    foreign = {
        name: "2" if name.endswith("RANK") else value
        for name, value in variables_of_the_other_library().items()
    }
    ended = launch(0, *RUN.split(), env=foreign)
    assert ended.returncode == 2, ended.told()
    assert ended.complaints() == [], ended.told()


#: What Slurm sets in the batch script itself, which is one process.
SLURM_BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "4",
    "SLURM_CPUS_ON_NODE": "4",
}


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(Scenario(0, f"{RUN} --output r.h5", env=SLURM_BATCH), id="alone"),
        pytest.param(
            Scenario(2, f"{RUN} --output r.h5", env={"SLURM_STEP_NUM_TASKS": "9", "SLURM_PROCID": "0"}),
            id="below a launcher",
        ),
    ],
    indirect=True,
)
def test_variables_of_slurm_that_tell_of_something_else_do_not_matter(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    assert ended.files() == ["r.h5"]


def test_both_length_and_input_are_fine_where_they_agree(launch: Callable[..., Ended]) -> Any:
    data = Path(__file__).parent.parent / "data" / "minilm_2heads.h5"
    options = ["--seq-len", "2048", "--verify", "sample:4", "--repeats", "1", "--output", "r.h5"]
    ended = launch(0, "run", "--input", data, *options)
    assert ended.returncode == 0, ended.told()
