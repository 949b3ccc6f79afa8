"""Runs a library that was compiled with sanitizers over odd shapes; started by test_native_sanitized.py.

The results are checked as well: what a sanitizer cannot see, such as a read of another row, changes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import numpy as np
from dense import DTYPES, attend_dense, attend_dense_backward, half_a_unit

from ringmpi.devices import Block, Gradients, NativeDevice, Outcome, Queries, native
from ringmpi.softmax import SIGNIFICANT_DIGITS, WEIGHTS, state_dtype

# The tests' own helpers ask for this process's library as they load.
native._Here.library = native.Library(Path(sys.argv[1]))

from unit.attending import Array, Backward, Case, attend, cut, striped  # noqa: E402

NAMES = ("out", "lse", "dq", "dk", "dv")

#: Below, at and above the sizes of vectors and tiles.
TOKENS = (1, 2, 3, 5, 15, 16, 17, 31, 33, 64, 65, 127, 130, 257)
HEAD_DIMS = (1, 2, 3, 5, 7, 8, 12, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 100, 128, 129, 255, 256)
HEADS = ((1, 1), (2, 2), (3, 1), (6, 2), (8, 2), (33, 1))
MASKS: tuple[dict[str, object], ...] = (
    {},
    {"causal": True},
    {"causal": True, "window": 0},
    {"causal": True, "window": 20},
    {"window": 3},
    {"documents": (0.0, 0.3, 0.3, 1.0)},
    {"causal": True, "window": 9, "documents": (0.0, 0.1, 0.8, 1.0)},
)


def cases() -> Iterator[Case]:
    """Yield every head_dim in every dtype; all else goes on in cycles of other lengths, so that all meet."""
    tokens, heads, masks, few = cycle(TOKENS), cycle(HEADS), cycle(MASKS), cycle((None, None, 1, 2))
    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            count, mask, last = next(tokens), dict(next(masks)), next(few)
            if "documents" in mask:
                mask["documents"] = tuple(int(part * count) for part in mask["documents"])  # type: ignore[attr-defined]
            of_queries, of_keys = next(heads)
            case = Case(count, None, 2, of_queries, of_keys, head_dim, dtype, **mask)  # type: ignore[arg-type]
            yield case if last is None else replace(case, queries=min(last, count))


def check(case: Case, threads: int, unit: str, weights: str) -> None:
    device = NativeDevice(case.mask, case.scale, threads, unit, weights)
    digits = SIGNIFICANT_DIGITS[case.dtype] if weights == "rounded" else None
    tensors, backward = case.tensors(), Backward.of(case)
    settings = (case.allowed, case.scale, np.float64)
    out, lse = attend_dense(*tensors, *settings)
    outcome = (backward.out, backward.lse)
    slopes = attend_dense_backward((*tensors, backward.dout), *settings, outcome)
    for blocks in (cut(case.tokens, case.tokens // 3), striped(case.tokens, 2)):
        *found, _ = attend(device, case, tensors, blocks)
        found += backward.run(device, blocks)[0]
        for name, mine, exact in zip(NAMES, found, (out, lse, *slopes), strict=True):
            assert is_close(mine, exact, digits), f"{name} is wrong"


def is_close(found: Array, exact: Array, digits: int | None) -> bool:
    """Return whether nothing is wrong but rounding; how much that may be is up to other tests.

    The longest sums are of 33 heads and 257 tokens, of terms of which the largest makes up a part; errors of
    weights that were rounded to some digits add up as their terms do, or less.
    """
    eps = 1000 * np.finfo(state_dtype(found.dtype)).eps + (0 if digits is None else 8 * 2.0**-digits)
    seen = np.isfinite(exact)
    size = max(1.0, float(np.abs(exact[seen]).max(initial=0)))
    error = np.abs(found[seen].astype(np.float64) - exact[seen])
    same = np.array_equal(np.isfinite(found.astype(np.float64)), seen)
    return same and bool((error <= eps * size + half_a_unit(exact[seen], found.dtype)).all())


def check_nan_with_a_payload() -> None:
    """A NaN that carries bits must stay one: the exponential computes with the bits of its argument."""
    case = Case(17, head_dim=5)
    q, k, v = case.tensors()
    q[:, :, 3, 0] = np.array([0x7FC00001], np.uint32).view(np.float32)[0]
    out, _, _ = attend(NativeDevice(case.mask, case.scale), case, (q, k, v), cut(17, 9))
    assert np.isnan(out).all(axis=(0, 1, 3)).tolist() == [row == 3 for row in range(17)]


def main() -> None:
    check_nan_with_a_payload()
    units = ["off", "on"] if native.library().has_matrix_unit else ["off"]
    made = 0
    for number, case in enumerate(cases()):
        ways = product(units, WEIGHTS if case.dtype in SIGNIFICANT_DIGITS else WEIGHTS[:1])
        for unit, weights in ways:
            try:
                check(case, 1 + number % 3, unit, weights)
            except AssertionError:
                told = f"{case}, {1 + number % 3} thread(s), matrix unit {unit}, weights {weights}"
                print(told, file=sys.stderr)
                raise
            made += 1
    # Given up half way, with work in the pool.
    case = Case(257, heads=8, kv_heads=8, head_dim=64)
    native.SLICE_S = 0.0
    backward = Backward.of(case)
    at = np.arange(257)
    work = NativeDevice(case.mask, case.scale, 2).attend_backward(
        Queries(backward.q, at),
        Outcome(backward.dout, backward.lse, backward.delta),
        Block(backward.k, backward.v, at),
        Gradients(*vars(backward.gradients()).values()),
    )
    work.advance()
    del work
    print(f"{made} cases")


if __name__ == "__main__":
    main()
