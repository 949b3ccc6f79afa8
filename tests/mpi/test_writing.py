"""All ways to write tensors give one file, whoever owns how much of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from dense import DTYPES
from mpi4py import MPI
from numpy.typing import NDArray
from sharded import Check

from ringmpi.comm import team as team_module
from ringmpi.comm.signals import Signals
from ringmpi.comm.team import Team
from ringmpi.comm.watch import Watch
from ringmpi.config import IO, experiment_from
from ringmpi.errors import ConfigError, Interrupted, MissingCapabilityError
from ringmpi.layout import LAYOUTS, Layout
from ringmpi.parallel_hdf5 import parallel
from ringmpi.store import ResultFile, ResultWriter
from ringmpi.writing import WRITING, writing_refusal

pytestmark = pytest.mark.mpi

Array = NDArray[Any]

#: Those that can be had here. `test_only_mpio_may_be_refused` says which must be.
WAYS = [name for name in WRITING if writing_refusal(name) is None]

BATCH, HEADS, WIDTH = 2, 3, 5


@pytest.fixture
def folder(comm: MPI.Comm, tmp_path: Path) -> Path:
    """One folder for all ranks."""
    shared: Path = comm.bcast(tmp_path)
    return shared


def whole(tokens: int, dtype: str, seed: int = 1) -> Array:
    """Return a tensor in which no two rows are alike."""
    return np.random.default_rng(seed).normal(size=(BATCH, HEADS, tokens, WIDTH)).astype(DTYPES[dtype])


def commit(writer: ResultWriter) -> None:
    """Let the file appear, with what every result says of its run."""
    shape = {"batch": BATCH, "heads": HEADS, "head_dim": WIDTH, "seq_len": 11}
    writer.describe(experiment_from(shape), "ringmpi run")
    writer.commit()


def write(io: str, path: Path, team: Team, tensors: dict[str, tuple[Layout, Array]]) -> None:
    """Write tensors, and read each of them back on rank 0 before the file appears."""
    writer = ResultWriter(path) if team.rank == 0 else None
    try:
        writing = WRITING[io](writer, team)
        for name, (layout, tensor) in tensors.items():
            own = tensor[:, :, layout.positions(team.rank) - layout.first]
            writing.write(team, f"outputs/{name}", layout, own)
            if writer is not None:
                everything = (range(layout.first, layout.first + layout.seq_len),)
                back = writer.rows(name, 1, 2, everything)
                assert back.tobytes() == tensor[1, 2].tobytes()
        writing.finish(team)
        if writer is not None:
            commit(writer)
    finally:
        if writer is not None:
            writer.__exit__(None, None, None)
    team.barrier()


def read(path: Path, name: str, layout: Layout) -> Array:
    """Return a tensor as ringmpi reads it."""
    with ResultFile(path) as result:
        everything = (range(layout.first, layout.first + layout.seq_len),)
        heads = [result.rows(name, b, h, everything) for b in range(BATCH) for h in range(HEADS)]
    return np.stack(heads).reshape(BATCH, HEADS, layout.seq_len, -1)


def test_the_ways_are_those_that_the_option_names() -> None:
    assert tuple(WRITING) == IO


def test_only_mpio_may_be_refused_and_only_without_parallel_hdf5(collective_assert: Check) -> None:
    refused = writing_refusal("mpio")
    collective_assert(parallel() == (refused is None), str(refused))
    collective_assert([name for name in IO if name != "mpio" or parallel()] == WAYS)
    collective_assert(refused is None or isinstance(refused, MissingCapabilityError))


@pytest.mark.parametrize("io", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_length_and_dtype_keeps_its_bits(
    io: str, layout: str, team: Team, folder: Path, collective_assert: Check
) -> None:
    """Lengths below the number of ranks leave some without rows."""
    for tokens in (1, 3, 37):
        rows, later = Layout(layout, tokens, team.size), Layout(layout, tokens, team.size, first=40)
        tensors = {
            name: (later if dtype == "float16" else rows, whole(tokens, dtype))
            for name, dtype in zip(("out", "dq", "dk", "dv"), DTYPES, strict=True)
        }
        path = folder / f"{tokens}.h5"
        write(io, path, team, tensors)
        for name, (where, tensor) in tensors.items():
            found = read(path, name, where)
            alike = found.dtype == tensor.dtype and found.tobytes() == tensor.tobytes()
            collective_assert(alike, f"{tokens} tokens, {name}: {found.dtype}")


@pytest.mark.parametrize("io", WAYS)
def test_all_ways_give_datasets_alike(
    io: str, team: Team, folder: Path, collective_assert: Check
) -> None:
    """To who reads them with plain h5py."""
    layout = Layout("zigzag", 19, team.size, first=3)
    tensor = whole(19, "bfloat16")
    for way in ("gather", io):
        write(way, folder / f"{way}.h5", team, {"out": (layout, tensor)})

    seen = []
    for way in ("gather", io):
        with h5py.File(folder / f"{way}.h5", "r") as file:
            out = file["outputs/out"]
            axes = [axis.label for axis in out.dims]
            attributes = {
                name: out.attrs[name] for name in ("dtype", "unit", "description", "first_token")
            }
            seen.append((out.shape, out.dtype, out.fillvalue, axes, attributes, out[...].tobytes()))
    collective_assert(seen[0] == seen[1], str(seen))


@pytest.mark.parametrize("io", WAYS)
def test_pieces_make_one_tensor(
    io: str, team: Team, folder: Path, collective_assert: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two tokens each, so that ranks have several, and not all as many."""
    monkeypatch.setattr(team_module, "PIECE_NBYTES", BATCH * HEADS * WIDTH * 4 * 2)
    layout, tensor = Layout("zigzag", 4 * team.size + 1, team.size), whole(4 * team.size + 1, "float32")
    write(io, folder / "r.h5", team, {"out": (layout, tensor)})
    collective_assert(read(folder / "r.h5", "out", layout).tobytes() == tensor.tobytes())


@pytest.mark.parametrize("io", WAYS)
def test_a_tensor_written_again_has_its_last_values(
    io: str, team: Team, folder: Path, collective_assert: Check
) -> None:
    """As after an interruption, when some ranks had written and others had not."""
    layout, tensors = Layout("striped", 11, team.size), [whole(11, "float32", seed) for seed in (1, 2)]
    writer = ResultWriter(folder / "r.h5") if team.rank == 0 else None
    writing = WRITING[io](writer, team)
    for tensor in tensors:
        writing.write(team, "outputs/out", layout, tensor[:, :, layout.positions(team.rank)])
    writing.finish(team)
    if writer is not None:
        commit(writer)
    team.barrier()
    collective_assert(read(folder / "r.h5", "out", layout).tobytes() == tensors[1].tobytes())


@pytest.mark.ranks(least=2)
def test_a_folder_that_a_rank_does_not_see_is_refused_by_all(
    team: Team, folder: Path, collective_assert: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is local to a node."""
    if team.rank == team.size - 1:
        monkeypatch.setattr(Path, "is_dir", lambda self: False)
    writer = ResultWriter(folder / "r.h5") if team.rank == 0 else None
    told = ""
    try:
        WRITING["shards"](writer, team)
    except ConfigError as error:
        told = str(error)
    finally:
        if writer is not None:
            writer.__exit__(None, None, None)
    monkeypatch.undo()
    collective_assert(f"(rank {team.size - 1} of {team.size})" in told, told)
    team.barrier()
    collective_assert(not list(folder.iterdir()), str(list(folder.iterdir())))


@pytest.fixture
def job_teams(comm: MPI.Comm) -> Callable[[], tuple[Team, Team, Signals]]:
    """A team and the one for its end, as a job has them."""

    def make() -> tuple[Team, Team, Signals]:
        signals = Signals()
        watch = Watch(comm.Dup(), 20.0, signals)
        closing = Team(comm.Dup(), watch)
        return Team(comm.Dup(), watch, closing), closing, signals

    return make


class TestTogether:
    """What blocks inside MPI is entered by all ranks or by none."""

    def test_without_a_signal_all_enter(
        self, job_teams: Callable[[], tuple[Team, Team, Signals]], collective_assert: Check
    ) -> None:
        team, closing, _ = job_teams()
        entered = 0
        for _ in range(2):
            with team.together():
                team.comm.Barrier()
                entered += 1
        collective_assert(entered == 2)
        collective_assert(closing.agreed_stop(None) is None)

    def test_a_rank_that_was_interrupted_before_keeps_all_out(
        self, job_teams: Callable[[], tuple[Team, Team, Signals]], collective_assert: Check
    ) -> None:
        team, closing, _ = job_teams()
        entered, met = False, None
        if team.rank == team.size - 1:
            met = Interrupted(15)  # It is at its end already, where ranks agree on what they met.
        else:
            try:
                with team.together():
                    entered = True
            except Interrupted as stop:
                met = stop
        met = closing.agreed_stop(met)
        collective_assert(not entered)
        collective_assert(met is not None and met.signal_number == 15, str(met))

    def test_a_signal_within_is_heeded_after(
        self, job_teams: Callable[[], tuple[Team, Team, Signals]], collective_assert: Check
    ) -> None:
        team, closing, signals = job_teams()
        with team.together():
            if team.rank == 0:
                signals.received = 10
            until = time.monotonic() + 0.2
            while time.monotonic() < until:  # Long enough for word to come from rank 0.
                team.watch.look(lambda: "writes")
            team.comm.Barrier()
        met = None
        try:
            while met is None:
                team.watch.look(lambda: "goes on")
        except Interrupted as stop:
            met = stop
        met = closing.agreed_stop(met)
        collective_assert(met is not None and met.signal_number == 10, str(met))
