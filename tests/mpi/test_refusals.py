"""What cannot be computed is refused on every rank alike, whoever noticed it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from dense import DTYPES
from mpi4py import MPI
from sharded import Check, Problem, Way, attend, make, random_tensors, too_far

from ringmpi import RingAttention, ring_attention
from ringmpi.comm.team import Team
from ringmpi.devices import DEVICES, native
from ringmpi.errors import ConfigError, MissingCapabilityError, RingMPIError, ShapeError
from ringmpi.schedule import METHODS

pytestmark = pytest.mark.mpi

PROBLEM = Problem(16, 0, "contiguous", "full", heads=8, kv_heads=2, head_dim=8, dtype="float32")


def refusal(call: Callable[[], Any]) -> tuple[type[RingMPIError], str] | None:
    """Return the kind and the words of the error that a call raises."""
    try:
        call()
    except RingMPIError as error:
        return type(error), str(error)
    return None


def assert_alike(
    comm: MPI.Comm, check: Check, found: Any, kind: type[RingMPIError], words: str
) -> None:
    """Assert that all ranks raised one error of a kind, with some words in it."""
    check(found is not None and found[0] is kind and words in found[1], f"{words}: {found}")
    check(len(set(comm.allgather(found))) == 1, f"{words}: {found}")


def test_ranks_that_disagree_all_raise_alike(comm: MPI.Comm, collective_assert: Check) -> None:
    mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
    q, k, v = (mine[name] for name in ("q", "k", "v"))
    last = comm.rank == comm.size - 1
    odd: dict[str, Callable[[], Any]] = {
        "dtype": lambda: ring_attention(*((a.astype("f8") if last else a) for a in (q, k, v)), comm),
        "heads": lambda: ring_attention(*((a[:, :2] if last else a) for a in (q, k, v)), comm),
        "causal": lambda: ring_attention(q, k, v, comm, causal=last),
        "method": lambda: ring_attention(q, k, v, comm, method="passq" if last else "ring"),
        "device": lambda: ring_attention(q, k, v, comm, device="numpy" if last else "auto"),
        "matrix_unit": lambda: ring_attention(q, k, v, comm, matrix_unit="off" if last else "auto"),
        "weights": lambda: ring_attention(q, k, v, comm, weights="rounded" if last else "exact"),
        "link": lambda: ring_attention(q, k, v, comm, link="1Gbit/s,1us" if last else "2Gbit/s,1us"),
        "rank of array": lambda: RingAttention(comm, seq_len=16).forward(q[0] if last else q, k, v),
        "tokens": lambda: RingAttention(comm, seq_len=16).forward(q[:, :, 1:] if last else q, k, v),
        "integers": lambda: ring_attention(*((a.astype(int) if last else a) for a in (q, k, v)), comm),
    }
    for what, call in odd.items():
        if comm.size == 1 and what not in ("rank of array", "tokens", "integers"):
            continue  # One rank cannot disagree with itself.
        if len(q[0, 0]) == 0 and what == "tokens":
            continue
        assert_alike(comm, collective_assert, refusal(call), ShapeError, "")


def test_what_does_not_fit_the_queries_is_refused(comm: MPI.Comm, collective_assert: Check) -> None:
    """In the backward pass of any method, on one rank only."""
    mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
    q, k, v, dout = (mine[name] for name in ("q", "k", "v", "dout"))
    last = comm.rank == comm.size - 1

    def spoilt(array: Any, change: Callable[[Any], Any], here: bool) -> Any:
        return change(array) if here and last else array

    changes: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "dout of fewer heads": ("dout", lambda a: a[:, 1:]),
        "dout of another dtype": ("dout", lambda a: a.astype(np.float64)),
        "dout of wider heads": ("dout", lambda a: np.concatenate([a, a], axis=3)),
        "out without an axis": ("out", lambda a: a[..., 0]),
        "out of another dtype": ("out", lambda a: a.astype(DTYPES["bfloat16"])),
        "lse with an axis": ("lse", lambda a: a[..., None]),
        "lse of another dtype": ("lse", lambda a: a.astype(np.float64)),
        "lse of tokens first": ("lse", lambda a: a.swapaxes(1, 2).copy()),
    }
    with RingAttention(comm, seq_len=16, timeout=20.0) as attention:
        out, lse = attention.forward(q, k, v)
        for what, (name, change) in changes.items():
            if what == "lse of tokens first" and lse.shape[1] == lse.shape[2]:
                continue

            def call(name: str = name, change: Callable[[Any], Any] = change) -> Any:
                return attention.backward(
                    spoilt(dout, change, name == "dout"),
                    q,
                    k,
                    v,
                    spoilt(out, change, name == "out"),
                    spoilt(lse, change, name == "lse"),
                )

            assert_alike(comm, collective_assert, refusal(call), ShapeError, name)
        # And afterwards all is as before.
        dq, _, _ = attention.backward(dout, q, k, v, out, lse)
    collective_assert(np.isfinite(dq).all())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "zagzig"}, "zigzag"),
        ({"method": "rings"}, "did you mean 'ring'"),
        ({"device": "gpu"}, "numpy"),
        ({"progress": "never"}, "poll, thread, wait"),
        ({"window": -1}, "must be 0"),
        ({"documents": [0, 5]}, "append 16"),
        ({"chunk_limit": 0}, "at least 1 byte"),
        ({"query_len": 0}, "query_len=0: must be from 1 to seq_len, 16"),
        ({"query_len": 17}, "query_len=17: must be from 1 to seq_len, 16"),
        ({"query_len": -3}, "query_len=-3"),
        ({"link": "fast"}, "100Mbit/s,1ms"),
        ({"link": "100Mbit/s"}, "RATE,LATENCY"),
        ({"link": "0Mbit/s,1ms"}, "a rate above 0"),
        ({"link": "1MB/s,1ms"}, "link='1MB/s,1ms'"),
        ({"link": "1Gbit/s,1us,both"}, "shared"),
    ],
    ids=lambda value: "-".join(map(str, *value.items())) if isinstance(value, dict) else "",
)
def test_bad_parameters_are_refused_on_every_rank(
    comm: MPI.Comm, collective_assert: Check, options: dict[str, Any], words: str
) -> None:
    found = refusal(lambda: RingAttention(comm, **{"seq_len": 16, **options}))
    assert_alike(comm, collective_assert, found, ConfigError, words)


@pytest.mark.parametrize("method", ["hybrid", "double-ring"])
def test_groups_that_do_not_divide_the_ranks_are_refused(
    comm: MPI.Comm, collective_assert: Check, method: str
) -> None:
    divisors = [inner for inner in range(1, comm.size + 1) if comm.size % inner == 0]
    option = {"hybrid": "ulysses_degree", "double-ring": "inner"}[method]
    for inner in {comm.size + 1, 2 * comm.size, 7} - set(divisors):
        found = refusal(lambda inner=inner: RingAttention(comm, seq_len=9, method=method, inner=inner))
        words = f"{option}={inner}: must divide the number of ranks, {comm.size}; "
        assert_alike(comm, collective_assert, found, ConfigError, words)
        assert_alike(comm, collective_assert, found, ConfigError, ", ".join(map(str, divisors)))


@pytest.mark.parametrize("inner", [0, -1])
@pytest.mark.parametrize("method", ["hybrid", "double-ring"])
def test_groups_of_no_rank_are_refused(
    comm: MPI.Comm, collective_assert: Check, method: str, inner: int
) -> None:
    found = refusal(lambda: RingAttention(comm, seq_len=9, method=method, inner=inner))
    assert_alike(comm, collective_assert, found, ConfigError, f"={inner}: ")


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize("method", ["ulysses", "hybrid"])
def test_more_ranks_than_heads_are_refused_with_the_numbers(
    comm: MPI.Comm, collective_assert: Check, method: str
) -> None:
    """Before anything moves; one head a rank is enough, whatever the number of KV heads."""
    way = Way(method, comm.size if method == "hybrid" else None)
    few = Problem(16, heads=comm.size - 1, kv_heads=1)
    whole = random_tensors(few)
    with make(comm, way, few) as attention:
        mine = few.shards(comm, whole)
        found = refusal(lambda: attention.forward(mine["q"], mine["k"], mine["v"]))
        words = f"{comm.size - 1} heads cannot be shared among {comm.size} ranks"
        assert_alike(comm, collective_assert, found, ConfigError, words)
        out = np.zeros_like(mine["q"])
        inputs = (mine["dout"], mine["q"], mine["k"], mine["v"], out, out[..., 0])
        found = refusal(lambda: attention.backward(*inputs))
        assert_alike(comm, collective_assert, found, ConfigError, words)
        enough = Problem(16, heads=comm.size, kv_heads=1)
        mine = enough.shards(comm, random_tensors(enough))
        out, _ = attention.forward(mine["q"], mine["k"], mine["v"])
        collective_assert(out.shape == mine["q"].shape)


def test_groups_are_the_ranks_of_a_node_by_default(
    comm: MPI.Comm, collective_assert: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of neighbouring ranks, as many on each; anything else needs to be told the groups."""
    problem = Problem(20, 0, "zigzag", "causal")
    whole = random_tensors(problem)
    hosts: list[str] = []
    monkeypatch.setattr(Team, "hosts", lambda self: hosts)
    for method in ("hybrid", "double-ring"):
        divisors = [n for n in range(1, comm.size + 1) if comm.size % n == 0]
        for inner in divisors if comm.size < 5 else divisors[-2:-1]:
            hosts[:] = [f"node{rank // inner}" for rank in range(comm.size)]
            found = attend(comm, Way(method), problem, whole)
            given = attend(comm, Way(method, inner), problem, whole)
            collective_assert(not list(too_far(found, given, 0)), f"{method} {inner}")
            with RingAttention(comm, seq_len=20, method=method) as attention:
                collective_assert(attention.inner == inner, f"{method}: {attention.inner}")
        if comm.size > 2:
            hosts[:] = ["many"] * (comm.size - 1) + ["one"]
            found_error = refusal(lambda method=method: RingAttention(comm, seq_len=20, method=method))
            words = f"nodes have {comm.size - 1}, 1 neighbouring ranks"
            assert_alike(comm, collective_assert, found_error, ConfigError, words)
            hosts[:] = [f"node{rank % 2}" for rank in range(comm.size)]  # Dealt out in turn.
            found_error = refusal(lambda method=method: RingAttention(comm, seq_len=20, method=method))
            assert_alike(comm, collective_assert, found_error, ConfigError, "neighbours together")


def test_what_needs_a_pass_before_says_so(comm: MPI.Comm, collective_assert: Check) -> None:
    for method in METHODS:
        with RingAttention(comm, seq_len=9, method=method, inner=1) as attention:
            found = refusal(attention.transfers_alone)
            assert_alike(comm, collective_assert, found, ConfigError, "nothing has moved yet")


class TestDeviceThatOneRankLacks:
    """The last rank has no compiler; the others may have one."""

    @pytest.fixture(autouse=True)
    def lacking(self, comm: MPI.Comm, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr("ringmpi.agreed.PREFERENCE", ("native", "numpy"))
        if comm.rank == comm.size - 1:
            monkeypatch.setattr(native._Here, "library", None)
            monkeypatch.setattr(native._Here, "missing", "it has no compiler")
        return

    def test_auto_takes_one_that_all_have(self, comm: MPI.Comm, collective_assert: Check) -> None:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
            with make(comm, Way("ring"), PROBLEM) as attention:
                attention.forward(mine["q"], mine["k"], mine["v"])
        where = "" if comm.size == 1 else f" (rank {comm.size - 1} of {comm.size})"
        expected = [f"device=auto: is numpy, since it has no compiler{where}"]
        collective_assert(attention.device == "numpy", attention.device)
        collective_assert([str(w.message) for w in told] == (expected if comm.rank == 0 else []), told)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            pytest.param({"device": "native"}, "device=native: it has no compiler", id="native"),
            pytest.param({"threads": 2}, "threads=2: only the native device", id="threads"),
            pytest.param({"matrix_unit": "on"}, "matrix_unit=on: ", id="matrix unit"),
        ],
    )
    def test_what_is_asked_for_by_name_is_refused_on_all(
        self, comm: MPI.Comm, collective_assert: Check, options: dict[str, Any], words: str
    ) -> None:
        found = refusal(lambda: make(comm, Way("ring"), PROBLEM, **options))
        assert_alike(comm, collective_assert, found, MissingCapabilityError, words)
        assert_alike(comm, collective_assert, found, MissingCapabilityError, "it has no compiler")


@pytest.mark.every_device
def test_a_device_is_told_by_its_name(comm: MPI.Comm, collective_assert: Check, device: str) -> None:
    with (
        make(comm, Way("ring"), PROBLEM) as by_auto,
        make(comm, Way("ring"), PROBLEM, device=device) as own,
    ):
        collective_assert(by_auto.device == own.device == device)
        collective_assert(set(DEVICES) >= {device})


def test_a_matrix_unit_with_nothing_to_do_is_refused_on_all(
    comm: MPI.Comm, collective_assert: Check
) -> None:
    mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
    with make(comm, Way("ring"), PROBLEM, device="numpy") as attention:
        attention._device_options["matrix_unit"] = "on"
        found = refusal(lambda: attention.forward(mine["q"], mine["k"], mine["v"]))
    assert_alike(comm, collective_assert, found, ConfigError, "matrix_unit=on with dtype=float32")


def test_weights_with_nothing_to_be_rounded_to_are_refused_on_all(
    comm: MPI.Comm, collective_assert: Check
) -> None:
    mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
    with make(comm, Way("ring"), PROBLEM, device="numpy", weights="rounded") as attention:
        found = refusal(lambda: attention.forward(mine["q"], mine["k"], mine["v"]))
    assert_alike(comm, collective_assert, found, ConfigError, "weights=rounded with dtype=float32")
