from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmpi.config import experiment_from
from ringmpi.problem import TENSORS, Generated

TOKENS, HEADS, BATCH = 40, 5, 3


@st.composite
def spans(draw: st.DrawFn, length: int) -> range:
    start = draw(st.integers(0, length - 1))
    return range(start, draw(st.integers(start + 1, length)))


@st.composite
def runs(draw: st.DrawFn) -> tuple[range, ...]:
    pieces = draw(st.lists(st.tuples(spans(TOKENS), st.integers(1, 9)), max_size=3))
    return tuple(range(span.start, span.stop, step) for span, step in pieces)


@settings(deadline=None, max_examples=60)
@given(
    tensor=st.sampled_from(TENSORS),
    runs=runs(),
    heads=spans(HEADS),
    batch=spans(BATCH),
    head_dim=st.integers(1, 9),
    seed=st.integers(0, 2**40),
)
def test_any_rows_are_slices_of_the_whole(
    tensor: str, runs: tuple[range, ...], heads: range, batch: range, head_dim: int, seed: int
) -> None:
    given = {"seq_len": TOKENS, "heads": HEADS, "batch": BATCH, "head_dim": head_dim, "seed": seed}
    problem = Generated(experiment_from(given))
    whole = problem.rows(tensor, (range(TOKENS),), range(HEADS), range(BATCH))

    rows = problem.rows(tensor, runs, heads, batch)

    at = [position for run in runs for position in run]
    part = whole[batch.start : batch.stop, heads.start : heads.stop]
    assert np.array_equal(rows, part[:, :, np.array(at, np.int64)])
