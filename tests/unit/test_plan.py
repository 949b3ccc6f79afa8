"""A plan puts together what the rooms of the model know; its numbers are those of closed forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringmpi.errors import ConfigError
from ringmpi.model.plan import Candidate, Plan, Threshold, plan_from
from ringmpi.schedule import METHODS, Pass

FORWARD, BACKWARD = Pass.FORWARD, Pass.BACKWARD


def plan(machine: str = "a100-nvlink", model: str | None = None, **given: Any) -> Plan:
    return plan_from(given, machine, model)


def thresholds(made: Plan) -> dict[tuple[str, Pass], Threshold]:
    return {(row.link, row.direction): row for row in made.thresholds}


def methods(made: Plan) -> dict[str, Candidate]:
    return {candidate.method: candidate for candidate in made.candidates}


def machine_file(
    tmp_path: Path, *, memory: str = "80e9", bandwidth: str = "1e9", rate: str = "1e12"
) -> str:
    path = tmp_path / "made.toml"
    path.write_text(
        f"memory = {memory}\nranks_per_node = 8\n[compute.float32]\nforward = {rate}\n"
        f"[links.intra]\nlatency = 0\nbandwidth = {bandwidth}\n"
    )
    return str(path)


@pytest.mark.parametrize(
    ("given", "forward", "backward"),
    [
        ({}, 1, 1.2),
        ({"kv_heads": 2}, 1 / 4, 1.2 / 4),
        ({"causal": True}, 1, 1.2),
        ({"causal": True, "layout": "zigzag"}, 2, 2.4),
        ({"causal": True, "layout": "striped", "kv_heads": 2}, 1 / 2, 2.4 / 4),
        ({"layout": "zigzag"}, 1, 1.2),
    ],
    ids=str,
)
def test_factors_of_the_threshold(given: dict[str, Any], forward: float, backward: float) -> None:
    """F / B of A100 is 1040 tokens over NVLink, 24960 over the paper's InfiniBand."""
    found = thresholds(plan(ranks=16, **given))

    for link, ratio in (("intra", 1040), ("inter", 24_960)):
        for direction, factor in ((FORWARD, forward), (BACKWARD, backward)):
            row = found[link, direction]
            assert row.ratio == pytest.approx(ratio)
            assert row.factor == pytest.approx(factor)
            assert row.tokens == pytest.approx(factor * ratio)


def test_a_ring_within_a_node_has_no_threshold_between_nodes() -> None:
    assert {link for link, _ in thresholds(plan(ranks=8))} == {"intra"}
    assert {link for link, _ in thresholds(plan("a100-infiniband", ranks=8))} == {"inter"}
    assert plan(ranks=1).thresholds == ()


def test_latency_raises_the_threshold_to_where_both_take_equally_long() -> None:
    """8 heads of 64: 2048 c^2 FLOPs at 312e12 and 2048 c bytes at 300e9 after 10 us."""
    row = thresholds(plan(ranks=8))["intra", FORWARD]
    squared, linear = 2048 / 312e12, 2048 / 300e9
    root = (linear + (linear**2 + 4 * squared * 10e-6) ** 0.5) / (2 * squared)

    assert row.with_latency is not None
    assert row.with_latency - 1 < root <= row.with_latency


@pytest.mark.parametrize(("tokens", "hidden"), [(1860, True), (1859, False)])
def test_whether_the_plan_s_own_length_hides_its_transfers(tokens: int, hidden: bool) -> None:
    """The root above is 1859.4 tokens."""
    assert thresholds(plan(ranks=8, seq_len=8 * tokens))["intra", FORWARD].hidden is hidden


def test_few_queries_on_many_keys_must_be_as_many_as_in_the_rule_of_who_travels(tmp_path: Path) -> None:
    """arXiv:2411.01783, eq. 2: T >= N C N_KV e / (2 N_H B), whatever the cached tokens."""
    path = machine_file(tmp_path, rate="520e12", bandwidth="26e9")
    made = plan(path, ranks=4, heads=128, kv_heads=8, head_dim=128, seq_len=128_000, query_len=12_800)

    row = thresholds(made)["intra", FORWARD]
    assert row.tokens == pytest.approx(520e12 * 8 * 4 / (2 * 128 * 26e9))
    assert row.with_latency == 2 * 1250


def test_no_length_hides_a_transfer_that_grows_faster_than_the_rate_falls(tmp_path: Path) -> None:
    slow = plan(machine_file(tmp_path, bandwidth="1e3", rate="1e25"), ranks=8)

    assert thresholds(slow)["intra", FORWARD].with_latency is None


def test_with_a_rising_rate_the_last_crossing_counts(tmp_path: Path) -> None:
    """8 float32 heads: c >= 2 F / B. Hidden at 1 GFLOP/s from 2 on, but not at 1 TFLOP/s before 2000."""
    curve = "[[64, 1e9], [128, 1e12]]"
    row = thresholds(plan(machine_file(tmp_path, rate=curve), ranks=8))["intra", FORWARD]

    assert row.tokens == pytest.approx(2000)
    assert row.with_latency == 2000


def test_flops_are_of_allowed_pairs() -> None:
    """Causal: N (N + 1) / 2 pairs."""
    made = plan(ranks=4, seq_len=1000, heads=16, kv_heads=4, head_dim=32, batch=3, causal=True)

    assert made.pairs == 500_500
    assert made.flops[FORWARD] == 4 * 500_500 * 16 * 32 * 3
    assert made.flops[BACKWARD] == 10 * 500_500 * 16 * 32 * 3


def test_queries_are_the_last_ones() -> None:
    """Positions 6 to 9 see 7, 8, 9 and 10 keys."""
    assert plan(ranks=3, seq_len=10, query_len=4, causal=True).pairs == 7 + 8 + 9 + 10


def test_a_published_model_gives_its_heads() -> None:
    made = plan("h100", "llama-3-8b", seq_len=8192)

    experiment = made.experiment
    assert (experiment.heads, experiment.kv_heads, experiment.head_dim) == (32, 8, 128)
    assert made.model.parameters == 8_030_261_248
    assert plan("h100", "llama-3-8b", seq_len=8192, kv_heads=32).experiment.kv_heads == 32


def test_a_plain_transformer_is_12_h_squared_a_layer() -> None:
    made = plan_from({"heads": 8, "head_dim": 128}, "h100", layers=3)
    assert made.model.layer_weights == 12 * 1024**2
    assert made.model.layers == 3
    assert plan_from({}, "h100", hidden=640).model.hidden == 640


def test_what_nobody_says() -> None:
    made = plan("summit")

    assert made.ranks == 8
    assert made.experiment.seq_len == 8 * 8192
    assert made.experiment.dtype == "float16"


def test_the_fastest_method_is_named() -> None:
    """Over one slow link between nodes only a hop a turn is hidden."""
    made = plan("h100", "llama-3-8b", causal=True, layout="zigzag", ranks=32)

    best = made.ranking[0]
    assert best.method == "double-ring"
    assert best.seconds == min(c.seconds for c in made.candidates if c.passes)
    assert "longer" in made.reason


def test_of_equals_the_simpler_is_named(tmp_path: Path) -> None:
    """With everything hidden ring and bidirectional take P c; one rank alone leaves no choice."""
    made = plan(machine_file(tmp_path, bandwidth="1e15"), ranks=4)

    assert made.ranking[0].method == "ring"
    assert made.reason.startswith("its compute hides all transfers; ")
    assert made.reason.endswith(" takes as long and is less simple")
    assert plan(machine_file(tmp_path), ranks=1).reason == "its compute hides all transfers"


def test_queries_travel_where_they_are_few() -> None:
    made = plan("h100-measured", "llama-3-405b", seq_len=131_072, query_len=64, causal=True, ranks=16)

    assert made.ranking[0].method == "passq"


def test_a_method_that_does_not_fit_is_not_named(tmp_path: Path) -> None:
    """Gathered keys of 8 ranks are 8 times those of one, of which a ring holds two."""
    given = {"ranks": 8, "seq_len": 8 * 4096}
    found = methods(plan(machine_file(tmp_path, memory="100e6"), **given))

    # 8 heads of 64 float32: q, out and acc 8 MiB each, k and v 16 MiB, three statistics 128 kiB each.
    own = (3 * 8 + 16) * 2**20 + 3 * 2**17
    assert found["ring"].held_nbytes == own + 2 * 16 * 2**20
    assert found["ring"].fits
    assert found["allgather"].held_nbytes == own + 8 * 16 * 2**20
    assert not found["allgather"].fits

    none = plan(machine_file(tmp_path, memory="10e6"), **given)
    assert none.ranking == []
    assert "no method fits" in none.reason
    assert none.record()["best"] is None


def test_a_method_that_cannot_share_the_heads_says_why() -> None:
    found = methods(plan(ranks=16, heads=8))

    assert not found["ulysses"].passes
    assert not found["ulysses"].fits
    assert "8 heads cannot be shared among 16 ranks" in found["ulysses"].why_not
    assert found["hybrid"].inner == 8
    assert "neighbouring ranks" in methods(plan(ranks=12))["hybrid"].why_not


def test_groups_are_as_large_as_said() -> None:
    found = methods(plan(ranks=8, ulysses_degree=2, inner=4))

    assert (found["hybrid"].inner, found["double-ring"].inner) == (2, 4)


def test_contiguous_causal_shards_are_told_what_zigzag_would_give() -> None:
    made, zigzag = (
        plan("h100", "llama-3-8b", causal=True, layout=layout, ranks=8)
        for layout in ("contiguous", "zigzag")
    )

    # Work of P - 1/2 blocks for that of P/2.
    ratio = methods(made)["ring"].seconds / methods(zigzag)["ring"].seconds
    assert ratio == pytest.approx(7.5 / 4, rel=0.02)
    assert made.balanced == zigzag.ranking[0]
    assert plan("h100", causal=True, layout="zigzag").balanced is None
    assert plan("h100").balanced is None


def test_with_a_backward_pass_both_count() -> None:
    made = methods(plan("h100", "llama-3-8b", backward=True))["ring"]

    assert set(made.passes) == {FORWARD, BACKWARD}
    assert made.seconds == sum(made.passes[way].seconds for way in Pass)


def test_the_record_is_json_with_everything_in_it() -> None:
    made = plan("h100", "llama-3-8b", causal=True, ranks=16, backward=True)

    record = json.loads(json.dumps(made.record()))

    assert record["machine"] == "h100"
    assert [method["method"] for method in record["methods"]] == list(METHODS)
    assert {"forward", "backward"} <= set(record["methods"][0])
    assert [row["architecture"] for row in record["memory"]] == [
        *("vanilla", "memory-efficient", "blockwise", "ring")
    ]
    assert record["best"] == made.ranking[0].method


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"window": 3}, "window=3"),
        ({"input": "some.h5"}, "input=some.h5"),
        ({"documents": (0, 5)}, r"documents=\(0, 5\)"),
        ({"dtype": "float64"}, "dtype=float64: machine h100 has no rates"),
        ({"ranks": 0}, "ranks=0: must be 1 or more"),
        ({"heads": 6, "kv_heads": 4}, "kv_heads must divide heads"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan("h100", **options)


def test_a_shape_is_given_once() -> None:
    with pytest.raises(ConfigError, match="layers=3: model=llama-7b says it"):
        plan_from({}, "h100", "llama-7b", layers=3)
    with pytest.raises(ConfigError, match="hidden=0: must be 1 or more"):
        plan_from({}, "h100", hidden=0)
