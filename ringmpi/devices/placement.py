"""Which GPU a rank computes on: by its place among the ranks of its node, over those that it sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU, and who shares it.

    Attributes
    ----------
    index : int
        Among those that the process sees.
    name : str
    identity : str
        The same for all processes that see this GPU, under whatever index.
    capability : tuple of int
        Of its architecture, such as (9, 0).
    sharing : int
        Ranks that compute on it.
    """

    index: int
    name: str
    identity: str
    capability: tuple[int, int]
    sharing: int = 1

    def __str__(self) -> str:
        return f"{self.name}, sm_{self.capability[0]}{self.capability[1]}"


def local_rank(hosts: Sequence[str], told: Sequence[int | None], rank: int) -> int:
    """Return the place of a rank among those of its node, however ranks are spread over nodes. Local.

    Parameters
    ----------
    hosts : sequence of str
        By rank.
    told : sequence of int or None
        What the launcher told each rank of its place. It goes first: a communicator of some of the ranks does
        not know of the others on its nodes, and two of them would take the same GPU.
    rank : int

    Examples
    --------
    >>> [local_rank(["a", "b", "a", "b"], [None] * 4, rank) for rank in range(4)]
    [0, 0, 1, 1]
    >>> [local_rank(["a", "a"], [2, 3], rank) for rank in range(2)]
    [2, 3]
    """
    places = [place for place in told if place is not None]
    if len(places) == len(hosts):
        return places[rank]
    return sum(host == hosts[rank] for host in hosts[:rank])


def chosen_index(local: int, visible: int) -> int:
    """Return which of the visible GPUs the rank at a place of its node takes: in turns. Local.

    >>> [chosen_index(local, 2) for local in range(4)]
    [0, 1, 0, 1]
    """
    return local % visible


def sharing(places: Sequence[tuple[str, str]], rank: int) -> int:
    """Return how many ranks compute on the GPU of a rank, given each one's host and GPU. Local.

    >>> sharing([("a", "gpu-1"), ("a", "gpu-1"), ("b", "gpu-1")], 0)
    2
    """
    return Counter(places)[places[rank]]
