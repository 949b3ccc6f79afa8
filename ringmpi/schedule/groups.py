"""Which ranks form the inner groups of methods that have them, and whether there are heads for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from ringmpi.errors import ConfigError

#: The option that says how many ranks an inner group has.
GROUP_OPTIONS = {"hybrid": "ulysses_degree", "double-ring": "inner"}

#: Methods whose inner groups share the heads.
SHARES_HEADS = ("hybrid", "ulysses")


def inner_ranks(method: str, size: int, given: int | None, hosts: Callable[[], Sequence[str]]) -> int:
    """Return how many ranks an inner group has; 1 for methods without groups. Local.

    Parameters
    ----------
    method : str
    size : int
        Number of ranks.
    given : int or None
        The group option of the method, if somebody gave it.
    hosts : callable
        Returns each rank's node, by rank; asked only where the groups are the ranks of a node.

    Raises
    ------
    ConfigError
        If groups of that many ranks cannot be made, or nodes do not have as many neighbouring ranks each.
    """
    if method == "ulysses":
        return size
    if method not in GROUP_OPTIONS:
        return 1
    option = GROUP_OPTIONS[method]
    flag = option.replace("_", "-")
    if given is None:
        names = hosts()
        runs = [len(list(ranks)) for _, ranks in groupby(names)]
        if len(set(runs)) > 1 or len(set(names)) < len(runs):
            raise ConfigError(
                f"{option}: nodes have {', '.join(map(str, runs))} neighbouring ranks, and all groups must "
                f"have as many; start as many ranks on each node, neighbours together, or give --{flag}"
            )
        return runs[0]
    if given < 1 or size % given:
        divisors = [str(n) for n in range(1, size + 1) if size % n == 0]
        raise ConfigError(
            f"{option}={given}: must divide the number of ranks, {size}; use one of {', '.join(divisors)}"
        )
    return given


def check_heads(method: str, inner: int, heads: int) -> None:
    """Refuse to share heads among more ranks than there are heads. Local.

    Raises
    ------
    ConfigError
        If a rank of a group would have none.
    """
    if method in SHARES_HEADS and heads < inner:
        raise ConfigError(
            f"method={method}: {heads} heads cannot be shared among {inner} ranks, each needs one; use at "
            f"most {heads} ranks, or method=hybrid with a --ulysses-degree of at most {heads}"
        )
