"""Gradients, held against differences, and against what only some rows can give."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from dense import differences
from mpi4py import MPI
from sharded import (
    GRADIENTS,
    OTHER_WAYS,
    SOME_WAYS,
    Check,
    Problem,
    Tensors,
    Way,
    answers_for,
    attend,
    both_passes,
    gradients_of,
    make,
    random_tensors,
    spread,
    too_far,
)

pytestmark = [pytest.mark.mpi, pytest.mark.every_device]

SMALL = [
    Problem(6, 0, "contiguous", "causal", heads=8, kv_heads=2, head_dim=2),
    Problem(6, 4, "zigzag", "causal-window-documents", heads=8, kv_heads=1, head_dim=2),
]


@lru_cache
def slopes(problem: Problem) -> Tensors:
    """Return dq, dk and dv as central differences of ``sum(out * dout)``."""
    tensors = tuple(random_tensors(problem)[name] for name in ("q", "k", "v", "dout"))
    found = differences(tensors, problem.allowed(), problem.scale, 1e-4)
    return dict(zip(GRADIENTS, found, strict=True))


@pytest.mark.parametrize("way", OTHER_WAYS, ids=str)
def test_gradients_are_the_slopes_of_the_loss(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """A second witness, which knows nothing of how a softmax is differentiated."""
    for problem in SMALL[: 1 if comm.size > 4 else 2]:
        found = attend(comm, way, problem, random_tensors(problem))
        exact = problem.shards(comm, slopes(problem))
        # The loss is below 200: rounding gives 200 * 2**-53 / 1e-4 = 2e-10, and more in sums of 96 terms; the
        # third derivatives, below 50, give 1e-8 * 50 / 6.
        wrong = list(too_far(found, exact, 1e-7))
        collective_assert(not wrong, f"{problem}: {wrong}")


@pytest.mark.parametrize("way", SOME_WAYS, ids=str)
def test_rows_of_one_rank_give_to_the_keys_that_they_see(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """dout is 0 but on the rows of one rank: keys get what those rows give, others nothing."""
    wrong: list[str] = []
    problem = Problem(24, 0, "contiguous", "causal-window-10")
    whole = random_tensors(problem)
    with make(comm, way, problem) as attention:
        mine = problem.shards(comm, whole)
        out, lse = attention.forward(mine["q"], mine["k"], mine["v"])
        for source in spread(list(range(comm.size)), way, {4: 4, 5: 2, 8: 1}):
            rows = comm.bcast(problem.mine(comm, "q"), source)
            dout = np.zeros_like(whole["dout"])
            dout[:, :, rows] = whole["dout"][:, :, rows]
            exact = answers_for(problem, whole | {"dout": dout}, np.float64)
            given = problem.shards(comm, {name: exact[name] for name in GRADIENTS})
            mine["dout"] = dout[:, :, problem.mine(comm, "q")]
            found = gradients_of(attention, mine, out, lse)
            # As with all rows, in test_methods.py.
            wrong += [f"rows of rank {source}: {text}" for text in too_far(found, given, 3e-13)]
            blind = ~problem.allowed()[rows].any(axis=0)[problem.mine(comm, "k")]
            for name in ("dk", "dv"):
                if found[name][:, :, blind].any():
                    wrong.append(f"rows of rank {source}: {name} of keys that none of them sees")
            if comm.rank != source and found["dq"].any():
                wrong.append(f"rows of rank {source}: dq of other rows")
    collective_assert(not wrong, wrong)


@pytest.mark.parametrize("way", SOME_WAYS, ids=str)
def test_gradients_add_up_over_losses(comm: MPI.Comm, collective_assert: Check, way: Way) -> None:
    """They are linear in dout, and 0 where dout is; v that is one everywhere has out = 1, and dq = dk = 0."""
    problem = Problem(20, 0, "striped", "causal", kv_heads=1)
    whole = random_tensors(problem)
    whole = whole | {"v": np.ones_like(whole["v"])}
    with make(comm, way, problem) as attention:
        mine = problem.shards(comm, whole)
        flat = both_passes(attention, mine)
        out, lse = flat["out"], flat["lse"]
        nothing = gradients_of(attention, mine | {"dout": 0 * mine["dout"]}, out, lse)
    # delta and dout . v are both the sum of 5 numbers below 5, in another order; p, q and k are below 5, and
    # 20 rows of 8 heads may add up.
    wrong = [
        name
        for name in ("dq", "dk")
        if not np.abs(flat[name]).max(initial=0) <= 160 * 5 * 25 * 2.0**-53
    ]
    collective_assert(not wrong, {name: flat[name] for name in wrong})
    collective_assert(not any(nothing[name].any() for name in GRADIENTS), "dout = 0")
    # Every row gives away its whole dout: 5 sums of 160 numbers below 5.
    given = comm.allreduce(flat["dv"].sum(axis=(1, 2)))
    collective_assert(np.allclose(given, whole["dout"].sum(axis=(1, 2)), rtol=0, atol=160 * 5 * 1e-15))
