"""What must hold of thresholds, memory and predictions whatever the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmpi.encoding import numpy_dtype
from ringmpi.layout import LAYOUTS, Layout
from ringmpi.model.costs import hop_nbytes, least_queries
from ringmpi.model.machine import INTER, INTRA, Compute, Connection, Curve, Machine, constant
from ringmpi.model.memory import ARCHITECTURES, Setting
from ringmpi.model.predict import predict
from ringmpi.model.prices import Task
from ringmpi.model.transformer import plain
from ringmpi.schedule import METHODS, Pass
from ringmpi.softmax import DTYPES
from ringmpi.tensors import Shape

rates = st.floats(1e9, 1e16)
widths = st.floats(1e6, 1e13)
passes = st.sampled_from(Pass)


@st.composite
def shapes(draw: st.DrawFn, heads_at_least: int = 1) -> Shape:
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads = max(kv_heads * group, heads_at_least)
    kv_heads = kv_heads if heads % kv_heads == 0 else 1
    dtype = numpy_dtype(draw(st.sampled_from(DTYPES)))
    return Shape(draw(st.integers(1, 3)), heads, kv_heads, draw(st.integers(1, 128)), dtype)


@given(st.integers(1, 64), st.integers(1, 256), st.integers(1, 8), rates, widths)
def test_the_paper_s_condition_is_f_over_b(
    heads: int, width: int, batch: int, flops: float, speed: float
) -> None:
    shape = Shape(batch, heads, heads, width, numpy_dtype("bfloat16"))

    assert least_queries(shape, Pass.FORWARD, flops, speed) == pytest.approx(flops / speed, rel=1e-9)


@given(shapes(), passes, rates, widths, st.floats(0.01, 1), st.floats(0, 1e-2), st.floats(1.01, 100))
def test_a_faster_link_never_raises_the_threshold_and_a_faster_rank_never_lowers_it(
    shape: Shape, way: Pass, flops: float, speed: float, share: float, latency: float, factor: float
) -> None:
    def least(flops: float, speed: float, latency: float) -> float:
        return least_queries(shape, way, flops, speed, share=share, latency=latency)

    here = least(flops, speed, latency)
    assert least(flops, speed * factor, latency) <= here * (1 + 1e-9)
    assert least(flops * factor, speed, latency) >= here * (1 - 1e-9)
    assert least(flops, speed, latency * factor) >= here * (1 - 1e-9)
    assert least(flops, speed, 0) <= here * (1 + 1e-9)


@given(shapes(), st.integers(1, 4096))
def test_the_way_back_carries_more(shape: Shape, tokens: int) -> None:
    forth, back = (hop_nbytes(shape, tokens, way) for way in (Pass.FORWARD, Pass.BACKWARD))

    assert forth * 2 <= back <= forth * 3


@given(
    st.lists(
        st.tuples(st.floats(1, 1e9), st.floats(1e3, 1e15)),
        min_size=1,
        max_size=6,
        unique_by=lambda p: p[0],
    ),
    st.floats(0, 1e10),
)
def test_a_curve_stays_between_its_points(points: list[tuple[float, float]], size: float) -> None:
    curve = Curve(tuple(sorted(points)))
    values = [value for _, value in points]

    assert min(values) * (1 - 1e-9) <= curve.at(size) <= max(values) * (1 + 1e-9)
    for at, value in points:
        assert curve.at(at) == pytest.approx(value, rel=1e-9)


@given(
    st.sampled_from(ARCHITECTURES),
    st.integers(1, 64),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 10**6),
    st.floats(1e6, 1e13),
)
def test_memory_grows_with_the_context_and_the_longest_fits(
    architecture: str, ranks: int, layers: int, training: bool, seq_len: int, memory: float
) -> None:
    setting = Setting(plain(layers, 256, 4, 2, 64), ranks, 1, 2, training)

    assert setting.held_nbytes(architecture, seq_len) <= setting.held_nbytes(architecture, seq_len + 1)
    longest = setting.longest_context(architecture, memory)
    assert longest == 0 or setting.held_nbytes(architecture, longest) <= memory
    assert setting.held_nbytes(architecture, longest + 1) > memory
    assert setting.longest_context(architecture, 2 * memory) >= longest


def machine(per_node: int, flops: float, speed: float, latency: float) -> Machine:
    fast = Connection(constant(latency), constant(4 * speed), 4 * speed)
    slow = Connection(constant(latency), constant(speed), speed)
    compute = Compute(constant(flops), constant(flops))
    return Machine("made", "", 1e12, per_node, {"float32": compute}, {INTRA: fast, INTER: slow})


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(METHODS)),
    st.sampled_from(sorted(LAYOUTS)),
    st.booleans(),
    st.integers(1, 6),
    st.integers(1, 300),
    passes,
    shapes(heads_at_least=6),
    st.floats(1e8, 1e13),
    st.floats(1e6, 1e12),
    st.floats(1.5, 50),
)
def test_predictions_are_between_what_must_be_and_what_is_done_one_after_the_other(
    method: str,
    layout: str,
    causal: bool,
    ranks: int,
    seq_len: int,
    way: Pass,
    shape: Shape,
    flops: float,
    speed: float,
    factor: float,
) -> None:
    keys = Layout(layout, seq_len, ranks)
    task = Task(shape, keys, keys, causal)
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    inner = ranks if method == "ulysses" else divisors[len(divisors) // 2]

    def found(flops: float, speed: float) -> float:
        on = machine(2, flops, speed, 1e-6)
        return predict(task, method, inner, on, constant(flops), way).seconds

    on = machine(2, flops, speed, 1e-6)
    here = predict(task, method, inner, on, constant(flops), way)

    # No rank does less than the mean, and none can be faster than its own compute.
    mean = task.pairs * shape.batch * shape.num_heads * shape.head_dim
    mean *= (4 if way is Pass.FORWARD else 10) / flops / ranks
    assert here.compute >= mean * (1 - 1e-9)
    assert here.seconds >= here.compute * (1 - 1e-9)
    assert found(flops, speed * factor) <= here.seconds * (1 + 1e-9)
    assert found(flops * factor, speed) <= here.seconds * (1 + 1e-9)
    # Half of everything takes half of the time, apart from latency.
    doubled = replace(task, shape=replace(shape, batch=2 * shape.batch))
    twice = predict(doubled, method, inner, on, constant(flops), way)
    assert here.seconds <= twice.seconds * (1 + 1e-9) <= 2 * here.seconds * (1 + 1e-8)
