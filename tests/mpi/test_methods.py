"""Every method gives what dense attention gives, forward and backward, whatever the problem."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
import pytest
from dense import (
    DTYPES,
    allowed_pairs,
    attend_dense,
    attend_dense_backward,
    half_a_unit,
    uniform_answer,
    uniform_inputs,
)
from mpi4py import MPI
from sharded import (
    ALL_WAYS,
    GRADIENTS,
    MASKS,
    OTHER_WAYS,
    PROBLEMS,
    SAME_WAYS,
    SOME_WAYS,
    WAYS,
    Array,
    Check,
    Problem,
    Tensors,
    Way,
    attend,
    both_passes,
    dense_answers,
    error_of,
    gradients_of,
    make,
    random_tensors,
    spread,
    too_far,
    ways,
)

from ringmpi import RingAttention
from ringmpi.layout import LAYOUTS

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("way", SAME_WAYS, ids=str)
def test_groups_of_one_rank_or_of_all_are_simpler_methods(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """So that what follows need not go through them too."""
    problem = PROBLEMS[0]
    with make(comm, way, problem) as grouped, make(comm, SAME_WAYS[way], problem) as simple:
        collective_assert(grouped.schedules == simple.schedules, SAME_WAYS[way])


@pytest.mark.every_device
@pytest.mark.parametrize("way", ALL_WAYS, ids=str)
def test_random_inputs_agree_with_dense_attention(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """All masks and layouts, grouped heads, two batches, empty shards, few queries."""
    wrong: list[str] = []
    for problem in spread(PROBLEMS, way, {1: 27, 3: 14, 5: 8, 8: 2}):
        found = attend(comm, way, problem, random_tensors(problem))
        exact = problem.shards(comm, dense_answers(problem))
        # Scores and values are below 10, dout . v below 50. A gradient is a sum of weights p times that, and
        # the p of 61 queries and 10 heads add up to less than 40 for any key: below 20 000 with q or k. Most
        # terms are far smaller; 50 roundings of 2**-53 of sums of 50 are 3e-13.
        wrong += [f"{problem}: {text}" for text in too_far(found, exact, 3e-13)]
    collective_assert(not wrong, wrong)


#: Every layout and mask at every length, as many for all ways together.
UNIFORM = [
    Problem(seq_len, query_len, layout, mask, batch=2, heads=8, kv_heads=2, head_dim=3)
    for mask in MASKS
    for layout in LAYOUTS
    for seq_len, query_len in ((1, 0), (3, 0), (7, 3), (32, 0), (113, 0))
]


@pytest.mark.every_device
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_uniform_weights_give_means_of_positions(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """A closed form that needs no reference, blind to nothing that concerns positions."""
    wrong: list[str] = []
    for number, problem in enumerate(spread(UNIFORM, way, {3: 15, 5: 8, 8: 2})):
        tensors, exact = uniform_problem(problem, bool(number % 2))
        found = attend(comm, way, problem, tensors)
        # Sums of at most 113 terms of at most 10312 in float64: 113 * 2**-53 * 10312 is below 2e-10. In the
        # gradients dout is 1, so terms are three times as large; times q or k, which are below 113, and
        # with 4 heads. But only the differences of v add up, after it was rounded at 3 * 10312.
        tolerances = {"out": 2e-10, "lse": 1e-13, "dq": 1e-7, "dk": 1e-7, "dv": 1e-12}
        for name, answer in problem.shards(comm, exact).items():
            error = error_of(found[name], answer)
            if not error <= tolerances[name]:
                wrong.append(f"{problem}: {name}: {error:.1e}")
    collective_assert(not wrong, wrong)


def uniform_problem(problem: Problem, of_keys: bool) -> tuple[Tensors, Tensors]:
    r"""Return inputs for which every allowed key weighs the same, and the answers in closed form.

    Equal scores need q = 0, whatever k, or all k alike, whatever q. With :math:`n` allowed keys, which are
    neighbours, at positions of mean :math:`m`, :math:`v_j = j` up to a constant and dout = 1 in all of D
    dimensions, :math:`p_{ij} = 1/n_i` and :math:`ds_{ij} = D (j - m_i) / n_i`. So

    * :math:`dv_j = \sum_i 1/n_i` over the queries that see j;
    * with q = 0 and :math:`k_j = j`: dk = 0 and :math:`dq_i = scale\, D\, (n_i^2 - 1) / 12`, the variance
      of n neighbouring positions;
    * with k = 7: dq = 0 and :math:`dk_j = scale\, D \sum_i q_i (j - m_i) / n_i`; lse grows by the score.
    """
    seen = problem.allowed()
    batch, heads, kv_heads, dim = problem.batch, problem.heads, problem.kv_heads, problem.head_dim
    whole = uniform_inputs(batch, heads, kv_heads, problem.seq_len, dim)
    tensors = {"q": whole[0][:, :, problem.first_query :], "k": whole[1], "v": whole[2]}
    tensors["dout"] = np.ones(problem.shape("q"))
    out, lse = (
        answer[:, :, problem.first_query :].copy()
        for answer in uniform_answer(
            allowed_pairs(problem.seq_len, **problem.mask_options), batch, heads, kv_heads
        )
    )
    positions, count = np.arange(problem.seq_len), seen.sum(axis=1)
    mean, group = seen @ positions / count, heads // kv_heads
    exact = {name: np.zeros(problem.shape(name)) for name in GRADIENTS}
    exact["dv"] += (group * (seen.T @ (1 / count)))[:, None]
    if of_keys:
        q = np.arange(problem.num_queries) % 5 - 2.0
        tensors["q"] += q[:, None]
        lse += problem.scale * dim * 7 * q
        weights = seen * (positions[None] - mean[:, None]) / count[:, None]
        exact["dk"] += (group * problem.scale * dim * (weights.T @ q))[:, None]
    else:
        tensors["k"] = tensors["k"] * 0 + positions[:, None]
        exact["dq"] += (problem.scale * dim * (count**2 - 1) / 12)[:, None]
    return tensors, exact | {"out": np.repeat(out[..., None], dim, axis=3), "lse": lse}


@pytest.mark.parametrize("way", SOME_WAYS, ids=str)
def test_a_few_last_queries_see_all_keys_before_them(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """Three queries and five keys: the last query is the last key, so they see 3, 4 and 5 keys."""
    for layout in spread(list(LAYOUTS), way, {3: 3, 8: 1}):
        problem = Problem(5, 3, layout, "causal", head_dim=1)
        found = attend(comm, way, problem, uniform_problem(problem, False)[0])
        mine = problem.mine(comm, "q")
        out = found["out"] - 100 * (np.arange(8) // 4)[:, None, None]
        # Means of at most 5 numbers below 105.
        collective_assert(
            error_of(out, np.broadcast_to((2 + mine)[:, None] / 2, out.shape)) < 1e-12, layout
        )
        collective_assert(
            error_of(found["lse"], np.broadcast_to(np.log(3.0 + mine), found["lse"].shape)) < 1e-14
        )


SWAPPED_AXES = [
    Problem(12, 0, "contiguous", "causal", batch=2, heads=9, kv_heads=3, head_dim=5),
    Problem(8, 0, "zigzag", "causal", batch=8, heads=8, kv_heads=8, head_dim=8),
]


@pytest.mark.parametrize("way", OTHER_WAYS, ids=str)
def test_batch_heads_tokens_and_head_dim_are_not_confused(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """All sizes different, so that any swap changes a shape or a value; or all alike, so that none raises."""
    for problem in SWAPPED_AXES[:: 1 if comm.size < 4 else 2]:
        whole = random_tensors(problem)
        found = attend(comm, way, problem, whole)
        wrong = list(too_far(found, problem.shards(comm, dense_answers(problem)), 3e-13))
        shapes = {name: found[name].shape for name in ("out", "lse", *GRADIENTS)}
        mine = problem.shards(comm, whole)
        expected = {"out": mine["q"].shape, "lse": mine["q"].shape[:3], "dq": mine["q"].shape}
        expected |= {"dk": mine["k"].shape, "dv": mine["v"].shape}
        collective_assert(not wrong and shapes == expected, f"{problem}: {wrong} {shapes}")


def single_pass(problem: Problem) -> tuple[Tensors, Tensors]:
    """Return the dense answers in float64, and those of one pass in the dtype of the state.

    The single pass rounds out to the dtype of the inputs before its backward pass reads it, as a run does.
    """
    tensors = random_tensors(problem)
    inputs = (tensors["q"], tensors["k"], tensors["v"])
    settings = (problem.allowed(), problem.scale)
    out, lse = attend_dense(*inputs, *settings, problem.state)
    rounded = out.astype(DTYPES[problem.dtype])
    gradients = attend_dense_backward(
        (*inputs, tensors["dout"]), *settings, problem.state, (rounded, lse)
    )
    single = {"out": out, "lse": lse} | dict(zip(GRADIENTS, gradients, strict=True))
    return dense_answers(problem), single


@pytest.mark.every_device
@pytest.mark.parametrize("way", SOME_WAYS, ids=str)
def test_every_dtype_is_within_twice_a_single_pass(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """The rule of ringmpi.verify, with a single pass in NumPy as the witness."""
    wrong: list[str] = []
    dtypes = spread(list(DTYPES), way, {3: 4, 5: 2, 8: 1})
    for dtype, layout in zip(dtypes, cycle(LAYOUTS), strict=False):
        problem = Problem(150, 0, layout, "causal", head_dim=16, dtype=dtype)
        exact, single = single_pass(problem)
        mine = problem.shards(comm, exact)
        found = attend(comm, way, problem, random_tensors(problem))
        for name, tensor in found.items():
            expected = problem.state if name == "lse" else DTYPES[dtype]
            if tensor.dtype != expected:
                wrong.append(f"{dtype}: {name} is {tensor.dtype}")
            largest = float(np.abs(exact[name]).max())
            bound = 2 * error_of(single[name], exact[name]) + 4 * np.finfo(problem.state).eps * largest
            rounding = half_a_unit(mine[name], tensor.dtype)
            error = np.abs(tensor.astype(np.float64) - mine[name])
            if not (error <= bound + rounding).all():
                wrong.append(f"{dtype}: {name}: {error.max()} above {bound}")
    collective_assert(not wrong, wrong)


@pytest.mark.every_device
@pytest.mark.parametrize("way", OTHER_WAYS, ids=str)
def test_the_mean_error_of_bfloat16_is_that_of_rounding_once(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """A maximum hides what partial results in 16 bits do; the mean grows with the rank count if they are."""
    problem = Problem(256, 0, "zigzag", "causal", head_dim=8, kv_heads=1, dtype="bfloat16")
    whole = random_tensors(problem)
    found = attend(comm, way, problem, whole)
    errors = {}
    for name, exact in problem.shards(comm, rounded_once(problem)).items():
        once = np.abs(exact.astype(DTYPES["bfloat16"]).astype(np.float64) - exact).sum()
        error = np.abs(found[name].astype(np.float64) - exact).sum()
        errors[name] = comm.allreduce(error) / comm.allreduce(once)
    # Sums in float32 err by 2**-15 of a unit of bfloat16, and rounding by a quarter of one on average; 1.05
    # leaves room for the few elements that are rounded the other way.
    collective_assert(max(errors.values()) <= 1.05, errors)


def rounded_once(problem: Problem) -> Tensors:
    """Return exact answers, those of the backward pass for the out that a run hands to it."""
    tensors = random_tensors(problem)
    exact = {name: dense_answers(problem)[name] for name in ("out", "lse")}
    inputs = tuple(tensors[name] for name in ("q", "k", "v", "dout"))
    handed = (exact["out"].astype(DTYPES[problem.dtype]), exact["lse"])
    settings = (problem.allowed(), problem.scale, np.float64)
    gradients = attend_dense_backward(inputs, *settings, handed)
    return {"out": exact["out"]} | dict(zip(GRADIENTS, gradients, strict=True))


#: Where only one tensor is wild, nothing that is wild itself can hide what becomes of it.
WILD = [
    (np.nan, ("q", "k", "v", "dout")),
    (np.nan, ("v",)),
    (np.inf, ("dout",)),
    (-np.inf, ("k",)),
    (np.nan, ("dout",)),
    (np.inf, ("v",)),
    (np.nan, ("q",)),
]


@pytest.mark.every_device
@pytest.mark.parametrize("way", OTHER_WAYS, ids=str)
def test_what_is_behind_the_mask_reaches_no_row_and_no_key(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """The last document is wild; the other documents must not notice."""
    wrong: list[str] = []
    for value, names in spread(WILD, way, {4: 3, 8: 2}):
        problem = Problem(50, 0, "striped", "causal-documents")
        whole = {name: tensor.copy() for name, tensor in random_tensors(problem).items()}
        for name in names:
            whole[name][:, :, 40:] = value
        with np.errstate(invalid="ignore"):  # An infinite dout times an infinite out.
            found = attend(comm, way, problem, whole)
        for name, exact in problem.shards(comm, dense_answers(problem)).items():
            clean = problem.mine(comm, name) < 40
            # As in the test above of random inputs.
            if not error_of(found[name][:, :, clean], exact[:, :, clean]) <= 3e-13:
                wrong.append(f"{value} in {names}: {name}")
    collective_assert(not wrong, wrong)


@pytest.mark.every_device
@pytest.mark.parametrize("way", SOME_WAYS, ids=str)
def test_very_negative_scores_are_no_minus_infinity(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """Scores near -5e5, each row's best at position 0: out is v[0], and lse the score."""
    problem = Problem(16, 0, "zigzag", "causal", kv_heads=1, head_dim=4, dtype="float32")
    whole = {name: np.zeros(problem.shape(name), np.float32) for name in ("q", "k", "v", "dout")}
    whole["q"][..., 0] = 1000
    whole["k"][..., 0] = -(1000 + np.arange(16))
    whole["v"][:] = np.arange(1, 17)[:, None]
    whole["dout"][:] = 1
    found = attend(comm, way, problem, whole)
    collective_assert((found["out"] == 1).all(), found["out"])
    collective_assert(np.allclose(found["lse"], -5e5, rtol=1e-6), found["lse"])
    collective_assert(not found["dq"].any() and not found["dk"].any(), "the weights do not change")
    # All 16 rows of 8 heads have their whole weight on key 0.
    expected = np.where(problem.mine(comm, "v") == 0, 16 * 8, 0)
    collective_assert((found["dv"] == expected[:, None]).all(), found["dv"])


@pytest.mark.every_device
@pytest.mark.ranks(most=4)
@pytest.mark.parametrize("head_dim", [1, 5, 12, 80, 96, 100, 256])
def test_any_head_dim_keeps_its_own_scale(
    comm: MPI.Comm, collective_assert: Check, head_dim: int
) -> None:
    number = [1, 5, 12, 80, 96, 100, 256].index(head_dim)
    way = WAYS[number % len(WAYS)]
    problem = Problem(33, 0, "striped", head_dim=head_dim, kv_heads=4)
    found = attend(comm, way, problem, random_tensors(problem))
    exact = problem.shards(comm, dense_answers(problem))
    # dout . v grows with the root of head_dim: 3 times as large as in the test of random inputs.
    wrong = list(too_far(found, exact, 1e-12))
    collective_assert(not wrong and found["out"].shape[-1] == head_dim, f"{way}: {wrong}")


def test_a_softmax_scale_is_the_users(comm: MPI.Comm, collective_assert: Check) -> None:
    """Half the default scale is the default scale of half of q, and dq is half of what it then was."""
    problem = Problem(33, 0, "zigzag", "causal", head_dim=4)
    whole = random_tensors(problem)
    for way in WAYS if comm.size < 4 else (Way("passq"), Way("ulysses")):
        found = attend(comm, way, problem, whole, softmax_scale=0.25)
        expected = attend(comm, way, problem, whole | {"q": whole["q"] / 2})
        expected["dq"] = expected["dq"] / 2
        # Powers of two, so there is nothing to round: apart from dk, whose q is scaled before.
        wrong = list(too_far(found, expected, 0))
        collective_assert(not wrong, f"{way}: {wrong}")


@pytest.mark.parametrize("way", SOME_WAYS, ids=str)
@pytest.mark.parametrize("tokens", [128, 8192] if MPI.COMM_WORLD.size < 4 else [8192])
def test_blocks_below_and_above_the_eager_limit_come_home(
    comm: MPI.Comm, collective_assert: Check, way: Way, tokens: int
) -> None:
    """Blocks of 64 KiB and of 4 MiB, which go by rendezvous; most attend to nothing, and still pass on.

    Heads are shared by as many ranks as there are heads, so each part is of one head.
    """
    degree = {"ulysses": comm.size, "hybrid": way.inner}.get(way.method) or 1
    tokens = tokens if degree * comm.size < 16 and comm.size < 5 else min(tokens, 2048)
    seq_len = tokens * comm.size
    progress = ("poll", "wait")[(WAYS.index(way) + (tokens > 128)) % 2]
    options = {"causal": True, "window": 2, "documents": (0, 1, seq_len), "progress": progress}
    shape = (1, degree, tokens, 64)
    with RingAttention(
        comm, seq_len=seq_len, method=way.method, inner=way.inner, timeout=20.0, **options
    ) as attention:
        positions = attention.layout.positions(comm.rank)
        mine = dict.fromkeys(("q", "k"), np.zeros(shape, np.float32))
        mine |= {"v": np.empty(shape, np.float32), "dout": np.ones(shape, np.float32)}
        mine["v"][:] = (positions % 1000)[:, None]
        found = both_passes(attention, mine)
    first = np.where(positions == 0, 0, np.maximum(positions - 2, 1))
    seen = np.stack([np.where(positions - back >= first, positions - back, -1) for back in range(3)])
    count = (seen >= 0).sum(axis=0)
    out = np.where(seen >= 0, seen % 1000, 0).sum(axis=0) / count
    queries = np.stack([positions + ahead for ahead in range(3)])
    sees = (queries < seq_len) & ((positions > 0) | (queries == 0))
    counts = np.clip(queries, 1, 3)  # Position 1 sees itself, 2 two keys, all later ones three.
    dv = np.where(sees, 1 / counts, 0).sum(axis=0)
    # Three float32 numbers below 1000, or below 1.
    collective_assert(error_of(found["out"], np.broadcast_to(out[:, None], shape)) < 2e-4)
    collective_assert(error_of(found["dv"], np.broadcast_to(dv[:, None], shape)) < 1e-6)
    collective_assert(not found["dk"].any() and not found["dq"].any(), "q and k are 0")


@pytest.mark.every_device
@pytest.mark.parametrize("way", OTHER_WAYS, ids=str)
def test_same_inputs_give_the_same_bits(comm: MPI.Comm, collective_assert: Check, way: Way) -> None:
    """Whatever the size of messages, the progress, the link, and whether transfers are checked."""
    problem = Problem(200, 0, "zigzag", "causal", head_dim=8, dtype="float32")
    whole = random_tensors(problem)
    others: list[dict[str, Any]] = [
        {"progress": "wait"},
        {"chunk_limit": 1000},
        {"check_transfers": True},
        {"link": "1Gbit/s,100us"},
        {
            "link": "1Gbit/s,100us,shared",
            "progress": "wait",
            "chunk_limit": 77,
            "check_transfers": True,
        },
    ]
    with make(comm, way, problem) as attention:
        mine = problem.shards(comm, whole)
        first = as_bytes(both_passes(attention, mine))
        again = first if comm.size > 4 else as_bytes(both_passes(attention, mine))
    wrong = [f"repeated: {name}" for name in first if again[name] != first[name]]
    for options in others if comm.size < 4 else others[-1:]:
        found = as_bytes(attend(comm, way, problem, whole, **options))
        wrong += [f"{options}: {name}" for name in first if found[name] != first[name]]
    collective_assert(not wrong, wrong)


def as_bytes(tensors: dict[str, Array]) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("way", SOME_WAYS, ids=str)
def test_one_object_serves_shapes_dtypes_and_passes_in_turn(
    comm: MPI.Comm, collective_assert: Check, way: Way
) -> None:
    """What an earlier pass left in the slots, or another shape, shows nowhere."""
    shapes = [("float64", 8, 8, 4), ("float32", 9, 3, 9), ("float64", 8, 8, 4)]
    wrong: list[str] = []
    shapes = shapes if comm.size < 5 else shapes[:2]
    with make(comm, way, Problem(45, 0, "striped", "causal")) as attention:
        for turn, (dtype, heads, kv_heads, head_dim) in enumerate(shapes):
            problem = Problem(
                45,
                layout="striped",
                mask="causal",
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype,
            )
            mine = problem.shards(comm, random_tensors(problem))
            out, lse = attention.forward(mine["q"], mine["k"], mine["v"])
            attention.forward(
                mine["dout"], mine["v"], mine["k"]
            )  # Of which backward must know nothing.
            found = {"out": out, "lse": lse} | gradients_of(attention, mine, out, lse)
            # float32: a relative error of 45 * 2**-24 of gradients below 30.
            tolerance = 3e-13 if dtype == "float64" else 1e-4
            exact = problem.shards(comm, dense_answers(problem))
            wrong += [f"turn {turn}: {text}" for text in too_far(found, exact, tolerance)]
    collective_assert(not wrong, wrong)


def test_sub_communicators_attend_among_themselves(comm: MPI.Comm, collective_assert: Check) -> None:
    """Two at once, each with its ranks in reverse order."""
    part = comm.Split(color=comm.rank % 2, key=-comm.rank)
    problem = Problem(17, 0, "contiguous", "causal")
    exact = problem.shards(part, dense_answers(problem))
    wrong = [
        f"{way}: {text}"
        for way in ways(part.size)
        for text in too_far(attend(part, way, problem, random_tensors(problem)), exact, 3e-13)
    ]
    part.Free()
    collective_assert(not wrong, wrong)
