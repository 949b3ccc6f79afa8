from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dense import DTYPES, attend_dense, pairs_between
from numpy.typing import NDArray

from ringmpi.config import Experiment, experiment_from
from ringmpi.layout import Runs
from ringmpi.problem import Generated
from ringmpi.verify import verify

from .judging import (
    CONTROL_DTYPES,
    GIVEN,
    LAYOUT,
    MASKS,
    NARROW,
    SIZE,
    TOKENS,
    WAYS,
    Arrays,
    Held,
    control,
    judge,
    ring_result,
    scale_of,
    tensors_of,
)

Array = NDArray[Any]


@pytest.mark.parametrize(("dtype", "weights"), WAYS)
@pytest.mark.parametrize("given", MASKS.values(), ids=MASKS.keys())
def test_a_right_result_passes(given: dict[str, Any], dtype: str, weights: str) -> None:
    experiment = control(dtype, weights=weights, **given)

    verdicts = judge(experiment, ring_result(experiment))

    rows = experiment.batch * experiment.heads * experiment.num_queries
    assert list(verdicts) == ["out", "lse"]
    for verdict in verdicts.values():
        assert verdict.passed, verdict.failure()
        assert verdict.rows == rows


@pytest.mark.parametrize("size", [1, 2, 7, 16])
@pytest.mark.parametrize(("dtype", "weights"), WAYS)
def test_a_right_result_passes_whatever_the_number_of_ranks(
    dtype: str, weights: str, size: int
) -> None:
    experiment = control(dtype, weights=weights)

    for verdict in judge(experiment, ring_result(experiment, size)).values():
        assert verdict.passed, verdict.failure()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("seed", range(40))
def test_rounded_weights_of_few_keys_pass(seed: int, dtype: str) -> None:
    """By chance a single pass makes hardly an error here, and a ring, which knows other maxima, makes one."""
    few = {"heads": 1, "kv_heads": 1, "batch": 1, "head_dim": 1, "seq_len": 5, "causal": False}
    experiment = control(dtype, weights="rounded", layout="contiguous", seed=seed, **few)

    for verdict in judge(experiment, ring_result(experiment)).values():
        assert verdict.passed, verdict.failure()


Damage = Callable[[Experiment, Held], Held]


def zeros(experiment: Experiment, held: Held) -> Held:
    return Held(np.zeros_like(held.out), held.lse)


def zero_lse(experiment: Experiment, held: Held) -> Held:
    return Held(held.out, np.zeros_like(held.lse))


def rank_order(experiment: Experiment, held: Held) -> Held:
    order = np.concatenate([LAYOUT.positions(rank) for rank in range(SIZE)])
    return Held(held.out[:, :, order], held.lse[:, :, order])


def two_rows_swapped(experiment: Experiment, held: Held) -> Held:
    order = np.arange(TOKENS)
    order[[40, 41]] = 41, 40
    return Held(held.out[:, :, order], held.lse)


def heads_swapped(experiment: Experiment, held: Held) -> Held:
    return Held(held.out[:, [0, 2, 1, 3]], held.lse)


def sequences_swapped(experiment: Experiment, held: Held) -> Held:
    return Held(held.out[::-1], held.lse)


def scale_off(experiment: Experiment, held: Held) -> Held:
    other = replace(experiment, softmax_scale=1.01 * experiment.head_dim**-0.5)
    return Held(ring_result(other).out, held.lse)


def scale_off_in_lse(experiment: Experiment, held: Held) -> Held:
    other = replace(experiment, softmax_scale=1.01 * experiment.head_dim**-0.5)
    return Held(held.out, ring_result(other).lse)


def key_lost(experiment: Experiment, held: Held) -> Held:
    """Lose one key of one row: what a window or a tile that is off by one does."""
    queries = np.arange(TOKENS)
    allowed = pairs_between(queries, queries, causal=True)
    allowed[64, 20] = False
    out, _ = attend_dense(*tensors_of(experiment), allowed, scale_of(experiment), np.float64)
    damaged = held.copy()
    damaged.out[:, :, 64] = out[:, :, 64].astype(held.out.dtype)
    return damaged


def own_key_lost(experiment: Experiment, held: Held) -> Held:
    queries = np.arange(TOKENS)
    allowed = pairs_between(queries, queries, causal=True) & (queries[:, None] != queries)
    out, _ = attend_dense(*tensors_of(experiment), allowed, scale_of(experiment), np.float64)
    return Held(out.astype(held.out.dtype), held.lse)


def key_seen_twice(experiment: Experiment, held: Held) -> Held:
    """Count one key of the last row double, as a block that is attended twice does."""
    damaged = held.copy()
    damaged.lse[:, :, 64] = np.log(np.exp(held.lse[:, :, 64]) * (1 + 1 / TOKENS))
    return damaged


def lse_in_base_2(experiment: Experiment, held: Held) -> Held:
    return Held(held.out, (held.lse / np.log(2)).astype(held.lse.dtype))


def lse_of_a_part(experiment: Experiment, held: Held) -> Held:
    damaged = held.copy()
    damaged.lse[1, 3, 33] += np.float32(1e-4)
    return damaged


def nan_in_out(experiment: Experiment, held: Held) -> Held:
    damaged = held.copy()
    damaged.out[1, 2, 40, 5] = np.nan
    return damaged


def nan_everywhere(experiment: Experiment, held: Held) -> Held:
    return Held(np.full_like(held.out, np.nan), held.lse)


def nan_in_lse(experiment: Experiment, held: Held) -> Held:
    damaged = held.copy()
    damaged.lse[0, 1, 64] = np.nan
    return damaged


def infinity_in_out(experiment: Experiment, held: Held) -> Held:
    damaged = held.copy()
    damaged.out[0, 0, 0, 0] = np.inf
    return damaged


def infinity_in_lse(experiment: Experiment, held: Held) -> Held:
    damaged = held.copy()
    damaged.lse[1, 3, 64] = np.inf
    return damaged


def row_without_keys(experiment: Experiment, held: Held) -> Held:
    damaged = held.copy()
    damaged.lse[1, 3, 64] = -np.inf
    return damaged


def other_seed(experiment: Experiment, held: Held) -> Held:
    return ring_result(replace(experiment, seed=experiment.seed + 1))


def no_mask(experiment: Experiment, held: Held) -> Held:
    return ring_result(replace(experiment, causal=False))


def wrong_kv_head(experiment: Experiment, held: Held) -> Held:
    q, k, v = tensors_of(experiment)
    order = [0, 1, 0, 1]  # Heads interleaved over KV heads instead of grouped.
    problem = Arrays(q, k[:, order], v[:, order])
    return ring_result(replace(experiment, kv_heads=4), problem=problem)


DAMAGES: dict[str, tuple[str, Damage]] = {
    "zeros": ("out", zeros),
    "zeros in lse": ("lse", zero_lse),
    "shards one after the other": ("out", rank_order),
    "shards one after the other in lse": ("lse", rank_order),
    "two rows swapped": ("out", two_rows_swapped),
    "heads swapped": ("out", heads_swapped),
    "sequences swapped": ("out", sequences_swapped),
    "scale off by 1 %": ("out", scale_off),
    "scale off by 1 % in lse": ("lse", scale_off_in_lse),
    "a lost key": ("out", key_lost),
    "own key lost": ("out", own_key_lost),
    "a key seen twice": ("lse", key_seen_twice),
    "lse in base 2": ("lse", lse_in_base_2),
    "one wrong lse": ("lse", lse_of_a_part),
    "NaN in out": ("out", nan_in_out),
    "NaN everywhere": ("out", nan_everywhere),
    "NaN in lse": ("lse", nan_in_lse),
    "infinity in out": ("out", infinity_in_out),
    "infinity in lse": ("lse", infinity_in_lse),
    "a row without keys": ("lse", row_without_keys),
    "another seed": ("out", other_seed),
    "another seed in lse": ("lse", other_seed),
    "no mask": ("out", no_mask),
    "wrong KV head": ("out", wrong_kv_head),
}


@pytest.mark.parametrize(("dtype", "weights"), WAYS)
@pytest.mark.parametrize(("tensor", "damage"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_wrong_result_fails(tensor: str, damage: Damage, dtype: str, weights: str) -> None:
    experiment = control(dtype, weights=weights)
    with np.errstate(divide="ignore"):
        damaged = damage(experiment, ring_result(experiment))

    verdict = judge(experiment, damaged)[tensor]

    assert not verdict.passed
    assert not verdict.beyond <= verdict.bound


def nudged(value: Any) -> Any:
    """Return a value off by two units in its last place, or by 1e-4 where it is wider than 16 bits."""
    if value.dtype.itemsize > 2:
        return value + np.float32(1e-4)
    bits = value.reshape(1).view(np.int16) + 2
    return bits.view(value.dtype)[0]


@pytest.mark.parametrize("dtype", CONTROL_DTYPES)
@pytest.mark.parametrize(
    "place",
    [(0, 0, 0), (0, 0, 64), (0, 3, 1), (1, 0, 17), (1, 2, 31), (1, 3, 63), (1, 3, 64)],
    ids=str,
)
def test_one_wrong_element_anywhere_fails_and_is_named(place: tuple[int, int, int], dtype: str) -> None:
    experiment = control(dtype)
    held = ring_result(experiment)
    # Two units of the largest element of a row are more than the error of float32 sums; the smallest
    # elements may be so close to 0 that their units are finer than that.
    column = int(np.abs(held.out[place].astype(np.float64)).argmax())
    at = (*place, column)
    right = float(held.out[at])
    held.out[at] = nudged(held.out[at])

    verdicts = judge(experiment, held)

    out = verdicts["out"]
    assert not out.passed
    assert verdicts["lse"].passed
    assert out.index == list(at)
    assert out.rank == LAYOUT.owner(place[2])[0]
    assert out.found == float(held.out[at])
    assert abs(out.expected - right) < abs(out.expected - out.found)


def test_a_failure_names_tensor_index_rank_and_both_values() -> None:
    experiment = control("float32")
    held = ring_result(experiment)
    held.out[1, 2, 40, 5] = 17.25

    verdict = judge(experiment, held)["out"]

    rank = LAYOUT.owner(40)[0]
    start = f"out[1, 2, 40, 5] of rank {rank}: found 17.25, expected {verdict.expected:.9g}; element"
    assert rank == 2
    assert verdict.failure().startswith(start)
    assert "\n" not in verdict.failure()


def test_a_failed_lse_is_named_by_batch_head_and_token() -> None:
    experiment = control("float32")
    held = ring_result(experiment)
    held.lse[1, 2, 0] = -3.5

    verdict = judge(experiment, held)["lse"]

    assert verdict.failure().startswith("lse[1, 2, 0] of rank 0: found -3.5, expected ")


@pytest.mark.parametrize("dtype", NARROW)
def test_a_16_bit_accumulator_fails_by_its_mean(dtype: str) -> None:
    experiment = control(dtype)

    def coarse(acc: Array) -> None:
        acc[...] = acc.astype(DTYPES[dtype])

    verdict = judge(experiment, ring_result(experiment, 16, after_block=coarse))["out"]

    assert not verdict.passed
    assert verdict.mean_abs > verdict.mean_bound


def test_an_error_within_bounds_everywhere_fails_by_its_mean() -> None:
    experiment = control("float32")
    held = ring_result(experiment)
    queries = np.arange(TOKENS)
    allowed = pairs_between(queries, queries, causal=True)
    exact, _ = attend_dense(*tensors_of(experiment), allowed, scale_of(experiment), np.float64)
    bound = judge(experiment, held)["out"].bound

    verdict = judge(experiment, Held((exact + 0.9 * bound).astype(np.float32), held.lse))["out"]

    assert verdict.beyond <= verdict.bound
    assert not verdict.passed
    assert "mean out of bounds" in verdict.failure()


class TestRowsWithoutKeys:
    """Scores of minus infinity weigh nothing, so a row that sees only such keys has seen none."""

    @pytest.fixture
    def experiment(self) -> Experiment:
        return experiment_from({"seq_len": 7, "heads": 1, "head_dim": 1, "causal": True})

    @pytest.fixture
    def problem(self) -> Arrays:
        rng = np.random.default_rng(0)
        q, k, v = (rng.uniform(1, 2, size=(1, 1, 7, 1)).astype(np.float32) for _ in range(3))
        k[:, :, :2] = -np.inf
        return Arrays(q, k, v)

    def test_they_pass_as_zero_with_minus_infinity(
        self, experiment: Experiment, problem: Arrays
    ) -> None:
        held = ring_result(experiment, problem=problem)

        verdicts = judge(experiment, held, problem)

        assert np.isneginf(held.lse[0, 0]).tolist() == [True, True, *[False] * 5]
        for verdict in verdicts.values():
            assert verdict.passed, verdict.failure()

    @pytest.mark.parametrize(
        ("tensor", "value"),
        [
            ("out", 1e-3),
            ("out", np.nan),
            ("lse", 0.0),
            ("lse", np.inf),
            ("lse", np.nan),
            ("lse", -1e30),
        ],
    )
    def test_they_fail_as_anything_else(
        self, experiment: Experiment, problem: Arrays, tensor: str, value: float
    ) -> None:
        held = ring_result(experiment, problem=problem)
        getattr(held, tensor)[0, 0, 1] = value

        assert not judge(experiment, held, problem)[tensor].passed


@pytest.mark.parametrize("tensor", ["out", "lse"])
@pytest.mark.parametrize("cause", ["scores overflow", "a visible key is NaN"])
def test_nan_never_passes_even_where_a_single_pass_gives_nan_too(cause: str, tensor: str) -> None:
    experiment = experiment_from({"seq_len": 7, "heads": 1, "head_dim": 1, "causal": True})
    q, k, v = (np.ones((1, 1, 7, 1), np.float32) for _ in range(3))
    if cause == "scores overflow":
        q *= np.float32(1e30)
        k *= np.float32(1e30)
    else:
        k[:, :, 3] = np.nan
    held = Held(
        np.full((1, 1, 7, 1), np.nan, np.float32), np.full((1, 1, 7), np.nan, np.float32), seq_len=7
    )

    assert not judge(experiment, held, Arrays(q, k, v))[tensor].passed


class TestSample:
    """Only some rows are compared, the first and the last among them."""

    @staticmethod
    def rows_read(experiment: Experiment) -> list[int]:
        held, read = ring_result(experiment), set()

        class Spy(Held):
            def rows(self, tensor: str, batch: int, head: int, runs: Runs) -> Array:
                read.update(position for run in runs for position in run)
                return super().rows(tensor, batch, head, runs)

        judge(experiment, Spy(held.out, held.lse))
        return sorted(read)

    @pytest.mark.parametrize("rows", [1, 3, 17])
    def test_as_many_rows_are_read_as_asked_for_and_the_ends(self, rows: int) -> None:
        experiment = experiment_from(GIVEN | {"verify": f"sample:{rows}"})

        read = self.rows_read(experiment)

        assert {0, TOKENS - 1} <= set(read)
        assert rows <= len(read) <= rows + 2

    @pytest.mark.parametrize("rows", [65, 1000])
    def test_a_sample_of_all_rows_is_all_rows(self, rows: int) -> None:
        experiment = experiment_from(GIVEN | {"verify": f"sample:{rows}"})

        assert self.rows_read(experiment) == list(range(TOKENS))

    def test_another_seed_reads_other_rows(self) -> None:
        one, other = (
            self.rows_read(experiment_from(GIVEN | {"verify": "sample:17", "seed": seed}))
            for seed in (1, 2)
        )

        assert one != other

    @pytest.mark.parametrize("dtype", CONTROL_DTYPES)
    def test_an_error_in_any_sampled_row_is_found(self, dtype: str) -> None:
        experiment = experiment_from(GIVEN | {"verify": "sample:5", "dtype": dtype})
        read = self.rows_read(experiment)

        for row in read:
            held = ring_result(experiment)
            held.out[1, 3, row] = 0
            verdict = judge(experiment, held)["out"]
            assert not verdict.passed
            assert verdict.index[:3] == [1, 3, row]
            assert verdict.rows == experiment.batch * experiment.heads * len(read)

    def test_a_right_result_passes(self) -> None:
        experiment = experiment_from(GIVEN | {"verify": "sample:5"})

        assert all(verdict.passed for verdict in judge(experiment, ring_result(experiment)).values())


def test_progress_counts_heads_up_to_all_of_them() -> None:
    experiment = control("float32")
    told: list[tuple[int, int]] = []

    verify(
        ring_result(experiment),
        Generated(experiment),
        experiment,
        LAYOUT,
        lambda done, total: told.append((done, total)),
    )

    assert told[-1] == (4, 4)
    assert told == sorted(told)


def test_progress_may_give_up_and_the_threads_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = experiment_from({"seq_len": 530, "heads": 1, "head_dim": 5})
    events: list[threading.Event] = []
    read: list[Runs] = []

    class Kept(threading.Event):
        def __init__(self) -> None:
            super().__init__()
            events.append(self)

    class Slow(Held):
        def rows(self, tensor: str, batch: int, head: int, runs: Runs) -> Array:
            read.append(runs)
            # The first event is made before any thread; it is what tells them to stop.
            assert events[0].wait(timeout=10)
            return super().rows(tensor, batch, head, runs)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    held = ring_result(experiment)
    monkeypatch.setattr(threading, "Event", Kept)
    with pytest.raises(KeyboardInterrupt):
        verify(Slow(held.out, held.lse, seq_len=530), Generated(experiment), experiment, LAYOUT, stop)

    # Out and lse of the block of rows that was under way, and none of the two that follow.
    assert read == [(range(256),)] * 2


def test_the_same_result_gives_the_same_verdict_to_the_bit() -> None:
    experiment = control("bfloat16")
    held = ring_result(experiment)

    assert judge(experiment, held) == judge(experiment, held)
