from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ringmpi.model.travel import Prompt

#: Llama-3 405B on four ranks: 128 query heads, 8 KV heads, 16 bits; 10 % of 128000 tokens are new.
LLAMA = Prompt(new=12_800, cached=115_200, ranks=4, heads=128, kv_heads=8, itemsize=2)

#: What was measured there: FLOP/s and bytes a second of a rank.
FLOPS, BANDWIDTH = 520e12, 26e9

NAN = math.nan


def prompt(new: int, total: int = 128_000) -> Prompt:
    return replace(LLAMA, new=new, cached=total - new)


def test_compute_hides_keys_from_as_many_new_tokens_as_was_measured() -> None:
    assert LLAMA.hidden_from(FLOPS, BANDWIDTH) == pytest.approx(5000, rel=1e-12)
    # At the peaks of the same machine: 800 TFLOP/s and 50 GB/s.
    assert LLAMA.hidden_from(800e12, 50e9) == pytest.approx(4000, rel=1e-12)


def test_what_is_cached_does_not_matter_for_what_is_hidden() -> None:
    assert prompt(100).hidden_from(FLOPS, BANDWIDTH) == LLAMA.hidden_from(FLOPS, BANDWIDTH)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({"ranks": 8}, 2),
        ({"kv_heads": 16}, 2),
        ({"heads": 256}, 0.5),
        ({"itemsize": 4}, 2),
        ({"kv_heads": 128}, 16),
    ],
    ids=str,
)
def test_the_limit_grows_with_what_has_to_move(change: dict[str, int], factor: float) -> None:
    changed = replace(LLAMA, **change).hidden_from(FLOPS, BANDWIDTH)

    assert changed == pytest.approx(5000 * factor, rel=1e-12)


def test_the_limit_is_where_a_step_computes_as_long_as_it_sends() -> None:
    """From sizes alone: T/N queries of all heads meet a block of keys while one is sent."""
    width, block = 16_384 // 128, 128_000 // 4
    limit = LLAMA.hidden_from(FLOPS, BANDWIDTH)
    computing = 4 * (limit / 4) * block * width * 128 / FLOPS
    sending = 2 * block * width * 8 * 2 / BANDWIDTH

    assert computing == pytest.approx(sending, rel=1e-12)


def test_shares_are_of_all_tokens_and_of_both_keys_and_values() -> None:
    assert LLAMA.share == 0.1
    assert LLAMA.largest_share == 2 * 8 / 128
    assert replace(LLAMA, kv_heads=128).largest_share == 2


@pytest.mark.parametrize(
    ("new", "queries"),
    [(1, True), (3_200, True), (4_999, True), (5_001, False), (12_800, False), (128_000, False)],
)
def test_queries_travel_below_the_limit(new: int, queries: bool) -> None:
    """Measured: keys hide behind 10 % new tokens, and queries win at 2.5 %."""
    assert prompt(new).queries_should_travel(FLOPS, BANDWIDTH) is queries


@pytest.mark.parametrize(("new", "queries"), [(15_999, True), (16_000, False), (16_001, False)])
def test_queries_as_large_as_keys_never_travel(new: int, queries: bool) -> None:
    """On a link so slow that nothing is hidden, sizes decide: an eighth of the tokens."""
    assert prompt(new).queries_should_travel(FLOPS, 1.0) is queries


@pytest.mark.parametrize(
    ("flops", "bandwidth"),
    [(NAN, BANDWIDTH), (FLOPS, NAN), (NAN, NAN), (FLOPS, 0.0), (math.inf, BANDWIDTH)],
    ids=str,
)
def test_without_rates_the_sizes_alone_decide(flops: float, bandwidth: float) -> None:
    assert prompt(12_800).queries_should_travel(flops, bandwidth)
    assert not prompt(16_000).queries_should_travel(flops, bandwidth)
