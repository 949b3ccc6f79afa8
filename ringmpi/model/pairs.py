"""Exact counts of causal pairs from runs of positions, without a table of positions.

A plan is made for millions of tokens, so pairs are counted by formula. `Mask.pairs` counts them from
positions; the tests hold one against the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ringmpi.layout import Layout


def runs_of(layout: Layout, rank: int, tokens: range) -> tuple[range, ...]:
    """Return the runs of positions of some tokens of a rank's shard. Local.

    Parameters
    ----------
    layout : Layout
    rank : int
    tokens : range
        Their indices in the shard.
    """

    def cut() -> Iterator[range]:
        before = 0
        for run in layout.runs(rank):
            yield run[max(0, tokens.start - before) : max(0, tokens.stop - before)]
            before += len(run)

    return tuple(run for run in cut() if run)


def causal_pairs(queries: Sequence[range], keys: Sequence[range]) -> int:
    """Count the pairs in which the key is not after the query. Local.

    Parameters
    ----------
    queries, keys : sequence of range
        Runs of positions, all with one step.

    Examples
    --------
    >>> causal_pairs([range(4)], [range(4)]), causal_pairs([range(4, 8)], [range(4)])
    (10, 16)
    """
    return sum(_between(asking, asked) for asking, asked in product(queries, keys))


def _between(queries: range, keys: range) -> int:
    """Count the causal pairs of two runs.

    Query ``i`` sees the first ``min(max(i + seen, 0), len(keys))`` keys, with ``seen`` those of query 0.
    """
    seen = (queries.start - keys.start) // keys.step + 1
    return _ramp(seen + len(queries) - 1, len(keys)) - _ramp(seen - 1, len(keys))


def _ramp(last: int, top: int) -> int:
    """Sum ``min(max(u, 0), top)`` over all ``u <= last``."""
    rising = min(max(last, 0), top)
    return rising * (rising + 1) // 2 + max(last - top, 0) * top
