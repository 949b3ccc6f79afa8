from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dense import DTYPES, attend_dense, attend_dense_backward
from numpy.typing import NDArray

from ringmpi import reference
from ringmpi.config import Experiment, experiment_from
from ringmpi.layout import Layout, Runs
from ringmpi.problem import Generated
from ringmpi.verify import verify

from .judging import (
    BACKWARD,
    CONTROL_DTYPES,
    FORWARD,
    LAYOUT,
    MASKS,
    NARROW,
    SIZE,
    TOKENS,
    WAYS,
    Arrays,
    Held,
    both_ways,
    control,
    judge,
    pairs_of,
    query_layout,
    ring_result,
    scale_of,
    whole,
    with_gradients,
)

Array = NDArray[Any]


@pytest.mark.parametrize(("dtype", "weights"), WAYS)
@pytest.mark.parametrize("given", MASKS.values(), ids=MASKS.keys())
def test_right_gradients_pass(given: dict[str, Any], dtype: str, weights: str) -> None:
    experiment = control(dtype, weights=weights, backward=True, **given)

    verdicts = judge(experiment, both_ways(experiment))

    queries = experiment.batch * experiment.heads * experiment.num_queries
    keys = experiment.batch * experiment.kv_heads * experiment.seq_len
    assert list(verdicts) == ["out", "lse", "dq", "dk", "dv"]
    for verdict in verdicts.values():
        assert verdict.passed, verdict.failure()
    assert [verdict.rows for verdict in verdicts.values()] == [queries, queries, queries, keys, keys]


@pytest.mark.parametrize("size", [1, 2, 7, 16])
@pytest.mark.parametrize(("dtype", "weights"), WAYS)
def test_right_gradients_pass_whatever_the_number_of_ranks(dtype: str, weights: str, size: int) -> None:
    experiment = control(dtype, weights=weights, backward=True)

    for verdict in judge(experiment, both_ways(experiment, size)).values():
        assert verdict.passed, verdict.failure()


@pytest.mark.parametrize(("dtype", "weights"), WAYS)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "given",
    [
        {"seq_len": 1},
        {"seq_len": 2},
        {"seq_len": 5, "window": 0},
        {"seq_len": 3, "documents": (0, 1, 2, 3)},
    ],
    ids=["one token", "two tokens", "own key alone", "one document each"],
)
def test_gradients_of_which_only_rounding_is_left_pass(
    given: dict[str, Any], seed: int, dtype: str, weights: str
) -> None:
    """A row that sees one key has no gradient, but each dot product in it rounds in its own way."""
    few = {
        "heads": 1,
        "kv_heads": 1,
        "batch": 1,
        "backward": True,
        "seed": seed,
        "head_dim": 1 + 9 * seed,
    }
    experiment = control(dtype, weights=weights, **few, **given)

    for verdict in judge(experiment, both_ways(experiment)).values():
        assert verdict.passed, verdict.failure()


@pytest.mark.parametrize("dtype", CONTROL_DTYPES)
def test_the_oracle_passes(dtype: str) -> None:
    experiment = control(dtype, backward=True)
    held = ring_result(experiment)

    found = oracle(experiment, held)

    for verdict in judge(experiment, found).values():
        assert verdict.passed, verdict.failure()


def oracle(experiment: Experiment, held: Held, allowed: Array | None = None) -> Held:
    """Return a result with gradients computed densely, from its own out and lse."""
    pairs = pairs_of(experiment) if allowed is None else allowed
    tensors = tuple(whole(name, experiment) for name in ("q", "k", "v", "dout"))
    forward = held.out, held.lse
    found = attend_dense_backward(tensors, pairs, scale_of(experiment), np.float64, forward)
    rounded = (gradient.astype(held.out.dtype) for gradient in found)
    return replace(held, **dict(zip(BACKWARD, rounded, strict=True)))


Damage = Callable[[Experiment, Held], Held]


def damaged(held: Held, change: Callable[[str, Array], Array]) -> Held:
    """Return a result with every gradient changed."""
    return replace(held, **{name: change(name, getattr(held, name).copy()) for name in BACKWARD})


def zeros(experiment: Experiment, held: Held) -> Held:
    return damaged(held, lambda name, array: np.zeros_like(array))


def rank_order(experiment: Experiment, held: Held) -> Held:
    order = np.concatenate([LAYOUT.positions(rank) for rank in range(SIZE)])
    return damaged(held, lambda name, array: array[:, :, order])


def one_rank_further(experiment: Experiment, held: Held) -> Held:
    """Leave every shard one hop away from its owner, where shards have one length."""
    shards = [LAYOUT.positions(rank) for rank in range(SIZE)]
    least = min(map(len, shards))

    def moved(name: str, array: Array) -> Array:
        found = array.copy()
        for rank in range(SIZE):
            found[:, :, shards[rank][:least]] = array[:, :, shards[rank - 1][:least]]
        return found

    return damaged(held, moved)


def two_rows_swapped(experiment: Experiment, held: Held) -> Held:
    order = np.arange(TOKENS)
    order[[40, 41]] = 41, 40
    return damaged(held, lambda name, array: array[:, :, order])


def heads_swapped(experiment: Experiment, held: Held) -> Held:
    return damaged(held, lambda name, array: array[:, [0, 2, 1, 3] if name == "dq" else [1, 0]])


def sequences_swapped(experiment: Experiment, held: Held) -> Held:
    return damaged(held, lambda name, array: array[::-1])


def all_off_by_1_percent(experiment: Experiment, held: Held) -> Held:
    def grown(name: str, array: Array) -> Array:
        return (array.astype(np.float64) * 1.01).astype(array.dtype)

    return damaged(held, grown)


def scale_off(experiment: Experiment, held: Held) -> Held:
    other = replace(experiment, softmax_scale=1.01 * experiment.head_dim**-0.5)
    gradients = both_ways(other)
    return replace(held, dq=gradients.dq, dk=gradients.dk, dv=gradients.dv)


def no_scale_at_the_end(experiment: Experiment, held: Held) -> Held:
    root = experiment.head_dim**0.5
    return damaged(held, lambda n, a: a if n == "dv" else (a.astype(np.float64) * root).astype(a.dtype))


def swapped(experiment: Experiment, held: Held) -> Held:
    return replace(held, dk=held.dv, dv=held.dk)


def signs(experiment: Experiment, held: Held) -> Held:
    return damaged(held, lambda name, array: -array)


def key_lost(experiment: Experiment, held: Held) -> Held:
    """Lose one pair: what a window or a tile that is off by one does."""
    allowed = pairs_of(experiment)
    allowed[64, 20] = False
    return with_gradients(experiment, held, allowed=allowed)


def own_key_lost(experiment: Experiment, held: Held) -> Held:
    return with_gradients(experiment, held, allowed=pairs_of(experiment) & ~np.eye(TOKENS, dtype=bool))


def query_lost(experiment: Experiment, held: Held) -> Held:
    """Lose what one row contributes to the keys."""
    allowed = pairs_of(experiment)
    allowed[40] = False
    partial = with_gradients(experiment, held, allowed=allowed)
    return replace(partial, dq=held.dq)


def block_lost(experiment: Experiment, held: Held) -> Held:
    allowed = pairs_of(experiment)
    allowed[np.ix_(LAYOUT.positions(2), LAYOUT.positions(0))] = False
    return with_gradients(experiment, held, allowed=allowed)


def block_twice(experiment: Experiment, held: Held) -> Held:
    less = block_lost(experiment, held)

    def doubled(name: str, array: Array) -> Array:
        right, rest = (a.astype(np.float64) for a in (array, getattr(less, name)))
        return (2 * right - rest).astype(array.dtype)

    return damaged(held, doubled)


def no_mask(experiment: Experiment, held: Held) -> Held:
    return with_gradients(replace(experiment, causal=False), held)


def block_lse(experiment: Experiment, held: Held) -> Held:
    """Normalise each block on its own."""

    def statistics(lse: Array, delta: Array, scores: Array, rise: Array, seen: Array) -> Any:
        total = np.where(seen, np.exp(scores), 0).sum(axis=-1)
        return np.where(total > 0, np.log(np.where(total > 0, total, 1)), 0), delta

    return with_gradients(experiment, held, statistics=statistics)


def block_delta(experiment: Experiment, held: Held) -> Held:
    """Take delta of the part of out that a block makes."""

    def statistics(lse: Array, delta: Array, scores: Array, rise: Array, seen: Array) -> Any:
        weights = np.where(seen, np.exp(scores - lse[..., None]), 0)
        return lse, (weights * rise).sum(axis=-1)

    return with_gradients(experiment, held, statistics=statistics)


def no_delta(experiment: Experiment, held: Held) -> Held:
    return with_gradients(experiment, held, statistics=lambda lse, delta, *_: (lse, 0 * delta))


def lse_in_base_2(experiment: Experiment, held: Held) -> Held:
    return with_gradients(experiment, held, statistics=lambda lse, delta, *_: (lse / np.log(2), delta))


def other_dout(experiment: Experiment, held: Held) -> Held:
    other = Generated(replace(experiment, seed=experiment.seed + 1))
    q, k, v = (whole(name, experiment) for name in "qkv")
    return with_gradients(experiment, held, problem=Arrays(q, k, v, whole("dout", experiment, other)))


def other_seed(experiment: Experiment, held: Held) -> Held:
    other = both_ways(replace(experiment, seed=experiment.seed + 1))
    return replace(held, dq=other.dq, dk=other.dk, dv=other.dv)


def one_head_of_a_group(experiment: Experiment, held: Held) -> Held:
    """Keep of each group what its last head gives, as a store in the place of a sum does."""
    q, k, v, dout = (whole(name, experiment).copy() for name in ("q", "k", "v", "dout"))
    dout[:, ::2] = 0
    some = with_gradients(experiment, held, problem=Arrays(q, k, v, dout))
    return replace(some, dq=held.dq)


def wrong_kv_head(experiment: Experiment, held: Held) -> Held:
    """Interleave query heads over KV heads instead of grouping them."""
    order = [0, 2, 1, 3]
    q, k, v, dout = (whole(name, experiment) for name in ("q", "k", "v", "dout"))
    other = Arrays(q[:, order], k, v, dout[:, order])
    mixed = both_ways(experiment, problem=other)
    return replace(held, dq=mixed.dq[:, order], dk=mixed.dk, dv=mixed.dv)


def filled(value: float) -> Damage:
    def one(name: str, array: Array) -> Array:
        array[1, 1, 40, 5] = value
        return array

    return lambda experiment, held: damaged(held, one)


def nan_everywhere(experiment: Experiment, held: Held) -> Held:
    return damaged(held, lambda name, array: np.full_like(array, np.nan))


ALL = BACKWARD
KEYS = ("dk", "dv")
SLOPES = ("dq", "dk")

DAMAGES: dict[str, tuple[tuple[str, ...], Damage]] = {
    "zeros": (ALL, zeros),
    "shards one after the other": (ALL, rank_order),
    "shards one rank further": (ALL, one_rank_further),
    "two rows swapped": (ALL, two_rows_swapped),
    "heads swapped": (ALL, heads_swapped),
    "sequences swapped": (ALL, sequences_swapped),
    "all off by 1 %": (ALL, all_off_by_1_percent),
    "scale off by 1 %": (ALL, scale_off),
    "no scale at the end": (SLOPES, no_scale_at_the_end),
    "dk and dv swapped": (KEYS, swapped),
    "signs": (ALL, signs),
    "a lost key": (ALL, key_lost),
    "own key lost": (ALL, own_key_lost),
    "a lost query": (KEYS, query_lost),
    "a lost block": (ALL, block_lost),
    "a block twice": (ALL, block_twice),
    "no mask": (ALL, no_mask),
    "lse of a block": (ALL, block_lse),
    "delta of a block": (SLOPES, block_delta),
    "no delta": (SLOPES, no_delta),
    "lse in base 2": (ALL, lse_in_base_2),
    "another dout": (ALL, other_dout),
    "another seed": (ALL, other_seed),
    "one head of a group": (KEYS, one_head_of_a_group),
    "wrong KV head": (ALL, wrong_kv_head),
    "NaN": (ALL, filled(np.nan)),
    "NaN everywhere": (ALL, nan_everywhere),
    "infinity": (ALL, filled(np.inf)),
}


@pytest.mark.parametrize(("dtype", "weights"), WAYS)
@pytest.mark.parametrize(("tensors", "damage"), DAMAGES.values(), ids=DAMAGES.keys())
def test_wrong_gradients_fail(
    tensors: tuple[str, ...], damage: Damage, dtype: str, weights: str
) -> None:
    experiment = control(dtype, weights=weights, backward=True)

    verdicts = judge(experiment, damage(experiment, both_ways(experiment)))

    passed = {name for name, verdict in verdicts.items() if verdict.passed}
    assert passed == {*FORWARD, *BACKWARD} - {*tensors}
    # 1 % of a gradient may be the rounding of the weights of one element, but not of all of them.
    by_mean = weights == "rounded" and damage in (all_off_by_1_percent, scale_off)
    for name in () if by_mean else tensors:
        assert not verdicts[name].beyond <= verdicts[name].bound


def nudged(value: Any) -> Any:
    """Return a value off by two units in its last place, or by 1e-4 where that is more."""
    if value.dtype.itemsize > 2 or abs(float(value)) < 1e-3:
        return (value + np.float32(1e-4)).astype(value.dtype)
    bits = value.reshape(1).view(np.int16) + 2
    return bits.view(value.dtype)[0]


@pytest.mark.parametrize("tensor", BACKWARD)
@pytest.mark.parametrize("dtype", CONTROL_DTYPES)
@pytest.mark.parametrize("place", [(0, 0, 0), (0, 1, 64), (1, 0, 31), (1, 1, 1), (1, 1, 64)], ids=str)
def test_one_wrong_element_anywhere_fails_and_is_named(
    place: tuple[int, int, int], dtype: str, tensor: str
) -> None:
    experiment = control(dtype, backward=True)
    held = both_ways(experiment)
    array = getattr(held, tensor)
    column = int(np.abs(array[place].astype(np.float64)).argmax())
    at = (*place, column)
    array[at] = nudged(array[at])

    verdicts = judge(experiment, held)

    assert [name for name, verdict in verdicts.items() if not verdict.passed] == [tensor]
    assert verdicts[tensor].index == list(at)
    assert verdicts[tensor].rank == LAYOUT.owner(place[2])[0]
    assert verdicts[tensor].found == float(array[at])


@pytest.mark.parametrize("dtype", ("float32", *NARROW))
@pytest.mark.parametrize("causal", [True, False])
def test_a_lost_pair_of_many_is_seen(causal: bool, dtype: str) -> None:
    """The rounding of out to 16 bits must not widen the bounds: a pair of 512 weighs less than that."""
    experiment = experiment_from(
        {"seq_len": 512, "heads": 1, "causal": causal, "backward": True, "dtype": dtype}
    )
    allowed = pairs_of(experiment)
    allowed[511, 20] = False
    right = both_ways(experiment)

    verdicts = judge(experiment, with_gradients(experiment, right, allowed=allowed))

    assert all(verdict.passed for verdict in judge(experiment, right).values())
    assert [name for name, verdict in verdicts.items() if not verdict.passed] == [*BACKWARD]


@pytest.mark.parametrize("dtype", NARROW)
def test_gradients_of_an_out_that_was_not_rounded_alike_fail(dtype: str) -> None:
    """A wrong out is not taken at its word: what follows from it is wrong too."""
    experiment = control(dtype, backward=True)
    held = ring_result(experiment)
    held.out[1, 2, 40, 5] += 0.25

    verdicts = judge(experiment, with_gradients(experiment, held))

    assert [name for name, verdict in verdicts.items() if not verdict.passed] == ["out", "dq", "dk"]


@pytest.mark.parametrize("dtype", NARROW)
def test_16_bit_sums_of_gradients_fail_by_their_mean(dtype: str) -> None:
    experiment = control(dtype, backward=True)

    def coarse(acc: Array) -> None:
        acc[...] = acc.astype(DTYPES[dtype])

    held = ring_result(experiment, 16)
    verdicts = judge(experiment, with_gradients(experiment, held, 16, after_block=coarse))

    for name in BACKWARD:
        assert not verdicts[name].passed
        assert verdicts[name].mean_abs > verdicts[name].mean_bound


@pytest.mark.parametrize("dtype", NARROW)
def test_the_mean_error_of_16_bit_gradients_may_hardly_grow(dtype: str) -> None:
    experiment = control(dtype, backward=True)

    verdicts = judge(experiment, both_ways(experiment, 16))

    for name in BACKWARD:
        # Beside the factor 1.05 there is one epsilon of float32, of a size of 1 against a rounding of 2**-12.
        assert verdicts[name].mean_bound <= 1.06 * verdicts[name].single_mean
        assert verdicts[name].mean_abs <= 1.01 * verdicts[name].single_mean


@pytest.mark.parametrize("tensor", BACKWARD)
def test_an_error_within_bounds_everywhere_fails_by_its_mean(tensor: str) -> None:
    experiment = control("float32", backward=True)
    held = both_ways(experiment)
    verdict = judge(experiment, held)[tensor]
    error = np.float32(0.9 * (verdict.bound - verdict.max_abs))

    verdict = judge(experiment, replace(held, **{tensor: getattr(held, tensor) + error}))[tensor]

    assert verdict.beyond <= verdict.bound
    assert not verdict.passed
    assert "mean out of bounds" in verdict.failure()


@pytest.mark.parametrize(("tensor", "token"), [("dq", 46), ("dk", 46), ("dv", 3)])
def test_a_failure_is_named_by_global_token_and_its_owner(tensor: str, token: int) -> None:
    experiment = control("float32", backward=True, query_len=20)
    held = both_ways(experiment)
    first = TOKENS - 20 if tensor == "dq" else 0
    getattr(held, tensor)[1, 1, token - first, 5] = 17.25

    verdict = judge(experiment, held)[tensor]

    rows = query_layout(experiment, SIZE)
    rank = (rows if tensor == "dq" else LAYOUT).owner(token)[0]
    assert rows.owner(46)[0] != LAYOUT.owner(46)[0]
    assert verdict.failure().startswith(f"{tensor}[1, 1, {token}, 5] of rank {rank}: found 17.25, ")


@pytest.mark.parametrize("tensor", FORWARD)
def test_last_rows_of_out_and_lse_are_judged_at_their_own_positions(tensor: str) -> None:
    experiment = control("float32", query_len=20)
    right = ring_result(experiment)
    shifted = replace(right, **{tensor: np.roll(getattr(right, tensor), 1, axis=2)})

    verdict = judge(experiment, shifted)[tensor]

    assert judge(experiment, right)[tensor].passed
    assert not verdict.passed
    assert verdict.index[2] >= TOKENS - 20
    assert verdict.rank == query_layout(experiment, SIZE).owner(verdict.index[2])[0]


class TestWithoutKeys:
    """Scores of minus infinity weigh nothing, so neither their rows nor their keys have a gradient."""

    @pytest.fixture
    def experiment(self) -> Experiment:
        return experiment_from(
            {"seq_len": 7, "heads": 1, "head_dim": 1, "causal": True, "backward": True}
        )

    @pytest.fixture
    def problem(self) -> Arrays:
        rng = np.random.default_rng(0)
        q, k, v, dout = (rng.uniform(1, 2, size=(1, 1, 7, 1)).astype(np.float32) for _ in range(4))
        k[:, :, :2] = -np.inf
        return Arrays(q, k, v, dout)

    def test_rows_and_keys_pass_as_zero(self, experiment: Experiment, problem: Arrays) -> None:
        held = both_ways(experiment, problem=problem)

        verdicts = judge(experiment, held, problem)

        assert not held.dq[0, 0, :2].any()
        assert not held.dk[0, 0, :2].any()
        for verdict in verdicts.values():
            assert verdict.passed, verdict.failure()

    @pytest.mark.parametrize("tensor", BACKWARD)
    @pytest.mark.parametrize("value", [1e-3, np.nan, np.inf])
    def test_they_fail_as_anything_else(
        self, experiment: Experiment, problem: Arrays, tensor: str, value: float
    ) -> None:
        held = both_ways(experiment, problem=problem)
        getattr(held, tensor)[0, 0, 1] = value

        assert not judge(experiment, held, problem)[tensor].passed


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_nan_never_passes_even_where_a_single_pass_gives_nan_too(name: str) -> None:
    experiment = experiment_from(
        {"seq_len": 7, "heads": 1, "head_dim": 3, "causal": True, "backward": True}
    )
    tensors = tuple(whole(tensor, experiment) for tensor in ("q", "k", "v", "dout"))
    problem = Arrays(*tensors)
    getattr(problem, name)[:, :, 3] = np.nan
    pairs, scale = pairs_of(experiment), scale_of(experiment)
    held = Held(
        *attend_dense(*tensors[:3], pairs, scale, np.float32),
        *attend_dense_backward(tensors, pairs, scale, np.float32),
        seq_len=7,
    )

    verdicts = judge(experiment, held, problem)

    reached = [tensor for tensor in FORWARD + BACKWARD if np.isnan(getattr(held, tensor)).any()]
    assert [tensor for tensor, verdict in verdicts.items() if not verdict.passed] == reached
    assert len(reached) >= 2


class TestSample:
    """Some rows of out, lse and dq are compared, and some keys of dk and dv."""

    @staticmethod
    def compared(experiment: Experiment) -> dict[str, list[int]]:
        held = both_ways(experiment)
        read: dict[str, set[int]] = {name: set() for name in FORWARD + BACKWARD}

        class Spy(Held):
            def rows(self, tensor: str, batch: int, head: int, runs: Runs) -> Array:
                read[tensor].update(position for run in runs for position in run)
                return super().rows(tensor, batch, head, runs)

        parts = {name: getattr(held, name) for name in FORWARD + BACKWARD}
        judge(experiment, Spy(**parts, seq_len=experiment.seq_len))
        return {name: sorted(positions) for name, positions in read.items()}

    @pytest.mark.parametrize("query_len", [None, 20])
    @pytest.mark.parametrize("rows", [1, 3, 17])
    def test_as_many_are_read_as_asked_for_and_the_ends(self, rows: int, query_len: int | None) -> None:
        experiment = control("float32", backward=True, verify=f"sample:{rows}", query_len=query_len)

        read = self.compared(experiment)

        first = TOKENS - experiment.num_queries
        for name, positions in read.items():
            start = 0 if name in ("dk", "dv") else first
            assert (positions[0], positions[-1]) == (start, TOKENS - 1)
            assert rows <= len(positions) <= rows + 2
        assert read["out"] == read["lse"] == read["dq"]
        assert read["dk"] == read["dv"]

    def test_a_sample_of_all_is_all(self) -> None:
        read = self.compared(control("float32", backward=True, verify="sample:64", query_len=20))

        assert read["dq"] == [*range(TOKENS - 20, TOKENS)]
        assert len(read["dk"]) in (64, 65)

    @pytest.mark.parametrize("dtype", CONTROL_DTYPES)
    @pytest.mark.parametrize("given", MASKS.values(), ids=MASKS.keys())
    def test_right_gradients_pass(self, given: dict[str, Any], dtype: str) -> None:
        experiment = control(dtype, backward=True, verify="sample:5", **given)

        for verdict in judge(experiment, both_ways(experiment)).values():
            assert verdict.passed, verdict.failure()

    @pytest.mark.parametrize("dtype", CONTROL_DTYPES)
    @pytest.mark.parametrize("tensor", BACKWARD)
    def test_an_error_in_any_sampled_row_is_found(self, tensor: str, dtype: str) -> None:
        experiment = control(dtype, backward=True, verify="sample:5")
        held = both_ways(experiment)
        read = self.compared(control("float32", backward=True, verify="sample:5"))[tensor]

        for row in read:
            wrong = held.copy()
            getattr(wrong, tensor)[1, 1, row] += 1
            verdict = judge(experiment, wrong)[tensor]
            assert not verdict.passed
            assert verdict.index[:3] == [1, 1, row]
            heads = experiment.heads if tensor == "dq" else experiment.kv_heads
            assert verdict.rows == experiment.batch * heads * len(read)

    def test_a_query_that_is_not_sampled_counts_for_the_keys(self) -> None:
        experiment = control("float32", backward=True, verify="sample:1")
        sampled = self.compared(experiment)["dq"]
        lost = next(row for row in range(40, TOKENS) if row not in sampled)
        allowed = pairs_of(experiment)
        allowed[lost] = False

        verdicts = judge(experiment, with_gradients(experiment, both_ways(experiment), allowed=allowed))

        assert [name for name, verdict in verdicts.items() if not verdict.passed] == ["dk", "dv"]


def test_several_blocks_of_rows_and_pieces_of_keys_are_summed() -> None:
    """1100 keys are three pieces, 700 rows are three blocks, of which no border is that of a shard."""
    experiment = experiment_from(
        {"seq_len": 1100, "query_len": 700, "heads": 2, "kv_heads": 1, "head_dim": 3, "backward": True}
    )
    held = both_ways(experiment)

    assert all(verdict.passed for verdict in judge(experiment, held).values())
    for tensor, token in (("dq", 0), ("dq", 256), ("dk", 511), ("dk", 1099), ("dv", 512), ("dv", 1024)):
        wrong = held.copy()
        getattr(wrong, tensor)[0, 0, token, 1] += np.float32(1e-4)
        first = 400 if tensor == "dq" else 0
        assert judge(experiment, wrong)[tensor].index == [0, 0, token + first, 1]


def test_a_single_pass_in_float64_sums_over_queries_from_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order of the reference it would make the same rounding errors, and show none."""
    experiment = experiment_from(
        {"seq_len": 530, "heads": 1, "head_dim": 5, "dtype": "float64", "backward": True}
    )
    held, original = both_ways(experiment), reference.key_gradients
    orders: list[list[int]] = []

    def recorded(piece: Any, blocks: Any, *arguments: Any) -> Any:
        blocks = list(blocks)
        orders.append([int(at) for rows in blocks for at in rows.positions])
        return original(piece, blocks, *arguments)

    monkeypatch.setattr(reference, "key_gradients", recorded)
    verify(
        held, Generated(experiment), experiment, Layout("zigzag", 530, SIZE), lambda done, total: None
    )

    assert orders == [list(range(530)), list(range(530))[::-1]] * 2


def test_the_same_gradients_give_the_same_verdict_to_the_bit() -> None:
    experiment = control("bfloat16", backward=True)
    held = both_ways(experiment)

    assert judge(experiment, held) == judge(experiment, held)


@pytest.mark.parametrize("place", ["rows", "keys"])
def test_progress_may_give_up_and_the_threads_follow(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = experiment_from({"seq_len": 1100, "heads": 1, "head_dim": 5, "backward": True})
    held = both_ways(experiment)
    layout = Layout("contiguous", 1100, SIZE)
    worked: list[str] = []
    started, stopped = threading.Event(), threading.Event()

    def waiting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            worked.append(name)
            if name == place:
                started.set()
                assert stopped.wait(timeout=30)
            return original(*arguments)

        return step

    monkeypatch.setattr(reference, "query_gradient", waiting("rows", reference.query_gradient))
    monkeypatch.setattr(reference, "key_gradients", waiting("keys", reference.key_gradients))

    def stop(done: int, total: int) -> None:
        if started.is_set():
            # The thread is let go on only after it has been told to stop.
            threading.Timer(0.5, stopped.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(held, Generated(experiment), experiment, layout, stop)

    # Both passes over the block of rows, or the piece of keys, that was under way; five blocks, three pieces.
    assert worked == (["rows"] * 2 if place == "rows" else ["rows"] * 10 + ["keys"] * 2)
