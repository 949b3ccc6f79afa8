"""Every method, forward and back, from the run to the file, to verify, and to the table of them all."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from dense import (
    attend_dense_backward,
    dense_attention,
    pairs_between,
    uniform_answer,
    uniform_inputs,
)
from numpy.typing import NDArray
from running import Ended, Here, Queue, Scenario

from ringmpi.comm.link import parse_link
from ringmpi.schedule import METHODS

pytestmark = pytest.mark.any_mpi

Array = NDArray[Any]

P, BATCH, HEADS, KV_HEADS, TOKENS, WIDTH = 4, 2, 4, 2, 40, 6

TENSORS = ("out", "lse", "dq", "dk", "dv")

#: Groups of two, so that methods of groups differ from those without.
GROUPS = {"hybrid": "--ulysses-degree 2", "double-ring": "--inner 2"}

PROBLEM = (
    f"run --seq-len {TOKENS} --heads {HEADS} --kv-heads {KV_HEADS} --head-dim {WIDTH} --batch {BATCH} "
    "--causal --layout zigzag --backward --repeats 2"
)


def method_run(method: str, options: str = "") -> Scenario:
    groups = GROUPS.get(method, "")
    return Scenario(P, f"{PROBLEM} --method {method} {groups} {options} --output r.h5")


RUNS = {method: method_run(method) for method in METHODS}
EVERY = [pytest.param(scenario, id=method) for method, scenario in RUNS.items()]


@dataclass(frozen=True)
class Sizes:
    """Bytes of parts of the problem above, of a shard each: float32, and so is the state."""

    heads: int = HEADS
    kv_heads: int = KV_HEADS

    @property
    def row(self) -> int:
        """Bytes of one number for every token."""
        return BATCH * TOKENS // P * 4

    @property
    def kv(self) -> int:
        return 2 * self.kv_heads * WIDTH * self.row

    @property
    def dkv(self) -> int:
        return self.kv

    @property
    def q(self) -> int:
        return self.heads * WIDTH * self.row

    @property
    def dq(self) -> int:
        return self.q

    @property
    def state(self) -> int:
        """Numerator, maximum and sum."""
        return self.heads * (WIDTH + 2) * self.row

    @property
    def qdout(self) -> int:
        """Queries and dout, lse and delta."""
        return self.heads * (2 * WIDTH + 2) * self.row

    @property
    def out(self) -> int:
        return self.heads * (WIDTH + 1) * self.row


S = Sizes()
#: What one rank of four, or of two, gets of the heads: four query heads read two KV heads.
QUARTER, HALF = Sizes(1, 1), Sizes(2, 1)

#: Bytes that every rank sends, forward and back. A block makes P - 1 hops; sums make one more, home.
SENT = {
    "ring": ((P - 1) * S.kv, (P - 1) * S.kv + P * S.dkv),
    "bidirectional": ((P - 1) * S.kv, (P - 1) * S.kv + P * S.dkv),
    # Sums go round each inner ring of two as a whole, and through both groups.
    "double-ring": ((P - 1) * S.kv, (P - 1) * S.kv + (P + P // 2) * S.dkv),
    "passq": ((P - 1) * S.q + P * S.state, (P - 1) * S.qdout + P * S.dq),
    "allgather": ((P - 1) * S.kv, (P - 1) * (S.kv + S.dkv)),
    "ulysses": (
        (P - 1) * (QUARTER.q + QUARTER.kv + QUARTER.out),
        (P - 1) * (QUARTER.qdout + QUARTER.kv + QUARTER.dq + QUARTER.dkv),
    ),
    # One other member; and a ring of two groups, which carries the blocks of two members.
    "hybrid": (
        HALF.q + HALF.kv + HALF.out + 2 * HALF.kv,
        HALF.qdout + HALF.kv + HALF.dq + HALF.dkv + 2 * HALF.kv + 2 * 2 * HALF.dkv,
    ),
}

#: Parts that were sent.
HOPS = {
    "ring": (P - 1, 2 * P - 1),
    "bidirectional": (2 * (P - 1), 2 * (2 * P - 1)),
    "double-ring": (P - 1, P - 1 + P + P // 2),
    "passq": (2 * P - 1, 2 * P - 1),
    "allgather": (P - 1, 2 * (P - 1)),
    "ulysses": (3 * (P - 1), 4 * (P - 1)),
    "hybrid": (3 + 2, 4 + 2 + 4),
}

#: Buffers beside a rank's own tensors: of blocks, one to attend to and one to receive; of sums, two in turn
#: to compute into and one to receive.
HELD = {
    "ring": (2 * S.kv, 2 * S.kv + 3 * S.dkv),
    "bidirectional": (2 * S.kv, 2 * S.kv + 3 * S.dkv),
    # Blocks that begin a turn, two in turn, and in a ring of two one that is received; sums that are
    # computed, two in turn, that come from the neighbour and from the group before, and that leave.
    "double-ring": (3 * S.kv, 3 * S.kv + 5 * S.dkv),
    "passq": (2 * S.q + 3 * S.state, 2 * S.qdout + 3 * S.dq),
    "allgather": (P * S.kv, P * S.kv + P * S.dkv),
}


@pytest.mark.parametrize("ended", EVERY, indirect=True)
def test_every_method_gives_verified_results_and_gradients(ended: Ended, here: Here) -> None:
    assert ended.returncode == 0, ended.told()
    assert ended.stdout.rstrip().endswith("# verdict: OK"), ended.told()
    assert "…" not in ended.stdout
    for heading in ("forward, per rank", "backward, per rank"):
        assert heading in ended.stdout
    code, told = here("verify", ended.work / "r.h5")
    assert (code, told.splitlines()[-1]) == (0, "# verdict: OK"), told
    with h5py.File(ended.work / "r.h5") as file:
        assert set(file["verification"]) == set(file["outputs"]) == set(TENSORS)
        assert all(found.attrs["passed"] for found in file["verification"].values())
        for name, heads in (("out", HEADS), ("dq", HEADS), ("dk", KV_HEADS), ("dv", KV_HEADS)):
            assert file[f"outputs/{name}"].shape == (BATCH, heads, TOKENS, WIDTH)
            assert file[f"outputs/{name}"].attrs["first_token"] == 0
        assert file["outputs/lse"].shape == (BATCH, HEADS, TOKENS)


@pytest.mark.parametrize(
    ("ended", "method"),
    [pytest.param(scenario, method, id=method) for method, scenario in RUNS.items()],
    indirect=["ended"],
)
def test_file_holds_what_each_pass_of_a_method_did(ended: Ended, method: str) -> None:
    with h5py.File(ended.work / "r.h5") as file:
        pairs = BATCH * HEADS * TOKENS * (TOKENS + 1) // 2
        for at, (group, products) in enumerate((("timings", 4), ("timings/backward", 10))):
            timings = file[group]
            repeats, ranks, steps = timings["started"].shape
            assert (repeats, ranks) == (2, P)
            assert timings["warmup/started"].shape == (1, P, steps)
            assert timings["alone/started"].shape == (2, P, steps)
            assert timings["barrier"].shape == (2, P)
            assert (timings["step_end"][:] >= timings["started"][:]).all()
            assert timings["pairs"][:].sum(axis=(1, 2)).tolist() == [pairs, pairs]
            assert timings["flops"][:].sum(axis=(1, 2)).tolist() == [pairs * products * WIDTH] * 2
            assert (timings["bytes_sent"][:].sum(axis=2) == SENT[method][at]).all()
            assert (timings["hops"][:].sum(axis=2) == HOPS[method][at]).all()
            assert (timings["alone/bytes_sent"][:].sum(axis=2) == SENT[method][at]).all()
            assert not timings["alone/pairs"][:].any()
            held = file[f"ranks/held_{'backward' if at else 'forward'}_nbytes"][:]
            assert set(held) == {HELD[method][at]} if method in HELD else (held > 0).all()
        inner = {"ulysses": P, "hybrid": 2, "double-ring": 2}
        assert file["machine"].attrs["inner_ranks"] == inner.get(method, 1)
        assert ("# groups   " in ended.stdout) == (method in GROUPS)


def test_all_methods_give_one_result(queue: Queue) -> None:
    found = {}
    for method, scenario in RUNS.items():
        with h5py.File(queue.result(scenario).work / "r.h5") as file:
            found[method] = {name: file[f"outputs/{name}"][:] for name in TENSORS}
            assert dict(file["inputs"].attrs).keys() == {f"{n}_sha256" for n in ("q", "k", "v", "dout")}
    for name in TENSORS:
        for method in METHODS:
            # Each is verified to a few units of float32 by itself.
            np.testing.assert_allclose(found[method][name], found["ring"][name], rtol=1e-4, atol=1e-5)


Rows = list[dict[str, str]]


@pytest.fixture
def compared(queue: Queue, tmp_path: Path, here: Here) -> tuple[Rows, str]:
    """The rows of a table of all methods, and what was printed."""
    paths = [queue.result(scenario).work / "r.h5" for scenario in RUNS.values()]
    path = tmp_path / "tables" / "methods.csv"
    code, told = here("report", "--compare", *paths, "--csv", path)
    assert code == 0, told
    assert f"# table: {path}" in told
    with path.open(newline="") as file:
        return list(csv.DictReader(file)), told


def test_comparison_has_the_numbers_of_every_pass(compared: tuple[Rows, str]) -> None:
    rows, told = compared
    label = {"hybrid": "hybrid:2", "double-ring": "double-ring:2"}
    passes = ("forward", "backward")
    assert [(row["method"], row["pass"]) for row in rows] == [
        (label.get(method, method), which) for method in METHODS for which in passes
    ]
    for row in rows:
        method, at = row["method"].partition(":")[0], passes.index(row["pass"])
        assert row["ranks"] == str(P)
        assert row["sent MB"] == f"{SENT[method][at] / 1e6:.3f}"
        assert row["hops"] == row["messages"] == str(HOPS[method][at])
        if method in HELD:
            assert row["held MB"] == f"{HELD[method][at] / 1e6:.3f}"
        assert row["verdict"] == "OK"
        assert row["tensor"] in (("dq", "dk", "dv") if at else ("out",))
        assert 0 < float(row["max error"]) < 1e-5
        assert float(row["min ms"]) <= float(row["time ms"]) <= float(row["max ms"])
    assert "…" not in told


def test_comparison_names_the_fastest_of_each_pass_once(compared: tuple[Rows, str]) -> None:
    rows, told = compared
    for which in ("forward", "backward"):
        case = [row for row in rows if row["pass"] == which]
        (fastest,) = (row for row in case if row["fastest"])
        assert float(fastest["time ms"]) == min(float(row["time ms"]) for row in case)
        assert f"# fastest {which} (ranks {P}): {fastest['method']}" in told.splitlines()
    # Printed is the same table, with fewer columns: a heading, then a row for each.
    assert sum(line.split()[-1:] == ["<"] for line in told.splitlines()) == 2


def test_comparison_that_cannot_be_written_is_refused(
    queue: Queue, tmp_path: Path, launch: Callable[..., Ended]
) -> None:
    (tmp_path / "file").touch()
    ended = launch(
        0, "report", queue.result(RUNS["ring"]).work / "r.h5", "--csv", tmp_path / "file" / "a.csv"
    )
    assert ended.returncode == 2, ended.told()
    assert len(ended.complaints()) == 1, ended.told()
    assert "a.csv: cannot be written" in ended.complaints()[0]
    assert "Traceback" not in ended.stderr


FAILING = Scenario(P, RUNS["passq"].args, fault="scale:rank=2")


@pytest.mark.parametrize("ended", [pytest.param(FAILING, id="passq")], indirect=True)
def test_comparison_shows_a_failure_and_never_as_the_fastest(
    ended: Ended, queue: Queue, here: Here
) -> None:
    assert ended.returncode == 1, ended.told()
    good = queue.result(RUNS["allgather"]).work / "r.h5"
    code, told = here("report", "--compare", ended.work / "r.h5", good)
    assert code == 0, told
    rows = [line.split() for line in told.splitlines() if not line.startswith(("#", "*"))]
    assert [row[-1] for row in rows if row[0] == "passq"] == ["FAILED", "FAILED"], told
    assert "(ranks 4): allgather" in told
    assert "): passq" not in told


def few_queries(work: Path, dout: bool = False) -> None:
    """Write uniform inputs of whose queries only the last seven are there."""
    q, k, v = uniform_inputs(BATCH, HEADS, KV_HEADS, TOKENS, WIDTH)
    with h5py.File(work / "few.h5", "w") as file:
        file["q"], file["k"], file["v"] = q[:, :, -FEW:], k, v
        if dout:
            file["dout"] = np.ones_like(file["q"])


FEW = 7
FROM_FILE = {
    method: Scenario(
        3,
        f"run --input few.h5 --method {method} --layout striped --causal --backward --repeats 1 "
        "--output r.h5",
        files=lambda work: few_queries(work, dout=True),
    )
    for method in ("ring", "passq")
}


@pytest.mark.parametrize(
    "ended",
    [pytest.param(scenario, id=method) for method, scenario in FROM_FILE.items()],
    indirect=True,
)
def test_the_last_queries_of_a_file_have_the_closed_form(ended: Ended, here: Here) -> None:
    assert ended.returncode == 0, ended.told()
    code, told = here("verify", ended.work / "r.h5")
    assert code == 0, told
    first = TOKENS - FEW
    positions = np.arange(TOKENS)
    allowed = pairs_between(positions, positions, causal=True)
    out, lse = uniform_answer(allowed, BATCH, HEADS, KV_HEADS)
    # With dout of ones, a query gives each key that it sees its weight: 1 / (number of keys seen).
    seen = positions[first:] + 1
    dv = HEADS // KV_HEADS * (allowed[first:] / seen[:, None]).sum(axis=0)
    with h5py.File(ended.work / "r.h5") as file:
        assert json.loads(file.attrs["config"])["query_len"] == FEW
        assert sum(file["ranks/query_shard_len"][:]) == FEW
        assert sum(file["ranks/shard_len"][:]) == TOKENS
        for name in ("out", "lse", "dq"):
            assert file[f"outputs/{name}"].shape[2] == FEW
            assert file[f"outputs/{name}"].attrs["first_token"] == first
        # Means of at most 40 integers below 20000: a few roundings of numbers of that size.
        found = file["outputs/out"][:]
        np.testing.assert_allclose(found, np.stack([out[..., first:]] * WIDTH, -1), rtol=1e-13)
        np.testing.assert_allclose(file["outputs/lse"][:], lse[..., first:], rtol=1e-13)
        found = file["outputs/dv"][:]
        assert found.shape == (BATCH, KV_HEADS, TOKENS, WIDTH)
        np.testing.assert_allclose(found, np.broadcast_to(dv[:, None], found.shape), rtol=1e-13)
        # Keys are all alike, so no query gains by looking elsewhere; q is 0, so no key can change a score.
        # What is left are differences of sums of sizes below WIDTH * 20000, times keys of 7.
        rounding = 40 * np.finfo(np.float64).eps * WIDTH * 20000 * 7
        assert np.abs(file["outputs/dq"][:]).max() <= rounding
        assert not file["outputs/dk"][:].any()


STORED = {
    method: Scenario(
        3,
        f"run --seq-len 41 --query-len {FEW} --heads 4 --kv-heads 2 --head-dim 12 --causal --backward "
        f"--method {method} --store-inputs --dtype float64 --repeats 1 --output r.h5",
    )
    for method in ("passq", "ulysses")
}


@pytest.mark.parametrize(
    "ended", [pytest.param(scenario, id=method) for method, scenario in STORED.items()], indirect=True
)
def test_the_last_queries_of_generated_inputs_attend_to_all_keys(ended: Ended, here: Here) -> None:
    assert ended.returncode == 0, ended.told()
    assert "who should travel: " in ended.stdout
    assert f"new of all tokens {FEW}/41 = 0.171" in ended.stdout
    assert "2 kv_heads / heads = 1" in ended.stdout
    with h5py.File(ended.work / "r.h5") as file:
        q, k, v, dout = (file[f"inputs/{name}"][:] for name in ("q", "k", "v", "dout"))
        assert q.shape == dout.shape == (1, 4, FEW, 12)
        assert file["inputs/q"].attrs["first_token"] == file["inputs/dout"].attrs["first_token"] == 34
        allowed = pairs_between(np.arange(34, 41), np.arange(41), causal=True)
        expected = [
            *dense_attention(q, k, v, allowed),
            *attend_dense_backward((q, k, v, dout), allowed, 12**-0.5, np.float64),
        ]
        for name, answer in zip(TENSORS, expected, strict=True):
            np.testing.assert_allclose(file[f"outputs/{name}"][:], answer, rtol=1e-11, atol=1e-13)
    # From now on the inputs are those in the file, for whatever they are.
    code, told = here("verify", ended.work / "r.h5")
    assert code == 0, told


def test_stored_inputs_of_a_backward_pass_are_what_is_verified(
    queue: Queue, tmp_path: Path, launch: Callable[..., Ended]
) -> None:
    copy = tmp_path / "copy.h5"
    copy.write_bytes((queue.result(STORED["passq"]).work / "r.h5").read_bytes())
    with h5py.File(copy, "a") as file:
        file["inputs/dout"][0, 2, 3, 5] += 1
    ended = launch(0, "verify", copy)
    assert ended.returncode == 2, ended.told()
    assert "dout is not what it was" in ended.complaints()[0], ended.told()


LINK = "1Mbit/s,4ms"
LINKED = method_run("ring", f"--link {LINK}")


@pytest.mark.parametrize("ended", [pytest.param(LINKED, id=LINK)], indirect=True)
def test_emulated_link_changes_the_times_and_not_a_bit(ended: Ended, queue: Queue, here: Here) -> None:
    assert ended.returncode == 0, ended.told()
    assert f"# link     {LINK} is emulated: times are those of another machine" in ended.stdout
    code, told = here("report", ended.work / "r.h5")
    assert code == 0
    assert f"# link     {LINK}" in told
    link = parse_link(LINK)
    with (
        h5py.File(ended.work / "r.h5") as slow,
        h5py.File(queue.result(RUNS["ring"]).work / "r.h5") as fast,
    ):
        assert json.loads(slow.attrs["config"])["link"] == LINK
        for name in TENSORS:
            assert np.array_equal(slow[f"outputs/{name}"][:], fast[f"outputs/{name}"][:])
        # A part arrives at a moment of its sender's clock, which is known to within this.
        off = 2 * slow["clocks/error_bound"][:].max()
        # Forward each of three hops needs the one before it; back a rank's link carries all that it sends.
        least = {
            "timings": (P - 1) * (S.kv / link.bandwidth + link.latency - off),
            "timings/backward": SENT["ring"][1] / link.bandwidth + link.latency - off,
        }
        for group, seconds in least.items():
            # All ranks are on one machine, and their clocks one.
            span = slow[f"{group}/step_end"][:].max(axis=(1, 2)) - slow[f"{group}/started"][:].min(
                axis=(1, 2)
            )
            assert (span >= seconds).all(), (group, span, seconds)


AUTOMATIC = {
    method: Scenario(
        3,
        f"run --seq-len 30 --heads 3 --head-dim 4 --backward --repeats 1 --method {method} --output r.h5",
    )
    for method in GROUPS
}


@pytest.mark.parametrize(
    ("ended", "method"),
    [pytest.param(scenario, method, id=method) for method, scenario in AUTOMATIC.items()],
    indirect=["ended"],
)
def test_groups_are_the_ranks_of_a_node_by_themselves(ended: Ended, method: str) -> None:
    assert ended.returncode == 0, ended.told()
    assert f"# groups   {method}: 3 ranks each" in ended.stdout
    with h5py.File(ended.work / "r.h5") as file:
        assert file["machine"].attrs["inner_ranks"] == 3
        config = json.loads(file.attrs["config"])
        assert (config["inner"], config["ulysses_degree"]) == (None, None)


#: The dtype, method and options, and how many rows (and keys) are judged.
NARROW = {
    "bfloat16, passq": ("bfloat16", "passq --query-len 11", 2 * 11),
    "float16, ring, checked, sampled": ("float16", "ring --check-transfers --verify sample:16", 2 * 16),
    "bfloat16, ulysses, checked": ("bfloat16", "ulysses --check-transfers", 2 * 33),
}


@pytest.mark.parametrize(
    ("ended", "dtype", "rows"),
    [
        pytest.param(
            Scenario(
                3,
                f"run --seq-len 33 --heads 4 --kv-heads 1 --batch 2 --head-dim 8 --causal --layout striped "
                f"--backward --repeats 2 --dtype {dtype} --method {options} --output r.h5",
            ),
            dtype,
            rows,
            id=name,
        )
        for name, (dtype, options, rows) in NARROW.items()
    ],
    indirect=["ended"],
)
def test_gradients_of_16_bits_are_verified_and_stored(
    ended: Ended, dtype: str, rows: int, here: Here
) -> None:
    assert ended.returncode == 0, ended.told()
    with h5py.File(ended.work / "r.h5") as file:
        for name in ("out", "dq", "dk", "dv"):
            dataset = file[f"outputs/{name}"]
            stored = (dataset.dtype.name, dataset.attrs.get("dtype", ""))
            assert stored == (("uint16", "bfloat16") if dtype == "bfloat16" else (dtype, ""))
        assert file["outputs/lse"].dtype == np.float32
        judged = {name: int(found.attrs["rows"]) for name, found in file["verification"].items()}
        assert judged["out"] == judged["lse"] == judged["dq"] == 4 * rows
        assert {judged["dk"], judged["dv"]} == ({2 * 16} if "sample:16" in ended.args else {2 * 33})
        assert {len(file[f"timings{back}/started"]) for back in ("", "/backward")} == {2}
    code, told = here("verify", ended.work / "r.h5")
    assert code == 0, told
