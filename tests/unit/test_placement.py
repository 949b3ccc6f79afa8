"""Which GPU a rank takes, and how many share it: for nodes and ranks of every kind."""

from __future__ import annotations

import pytest

from ringmpi.devices.placement import Gpu, chosen_index, local_rank, sharing

#: Hosts by rank, GPUs that a rank sees on each host, and the right index of every rank.
NODES = {
    "one node, a GPU each": ("aaaa", {"a": 4}, [0, 1, 2, 3]),
    "cyclic, where rank % GPUs is wrong": ("abab", {"a": 2, "b": 2}, [0, 0, 1, 1]),
    "nodes of unlike size": ("aaab", {"a": 2, "b": 1}, [0, 1, 0, 0]),
    "four ranks on one GPU": ("aaaa", {"a": 1}, [0, 0, 0, 0]),
    "each sees its own alone": ("aabb", {"a": 1, "b": 1}, [0, 0, 0, 0]),
}


@pytest.mark.parametrize(("hosts", "visible", "right"), NODES.values(), ids=NODES)
def test_ranks_of_a_node_take_the_gpus_that_they_see_in_turns(
    hosts: str, visible: dict[str, int], right: list[int]
) -> None:
    found = [
        chosen_index(local_rank(list(hosts), [None] * len(hosts), rank), visible[hosts[rank]])
        for rank in range(len(hosts))
    ]

    assert found == right


def test_two_rings_on_a_node_do_not_take_the_same_gpus() -> None:
    # Each of two communicators, of ranks 0, 1 and of ranks 2, 3 of one node, by what the launcher told them.
    found = [local_rank(["a", "a"], told, rank) for told in ([0, 1], [2, 3]) for rank in range(2)]

    assert found == [0, 1, 2, 3]


def test_what_a_launcher_told_some_ranks_alone_does_not_count() -> None:
    assert [local_rank(["a", "a", "a"], [0, None, 0], rank) for rank in range(3)] == [0, 1, 2]


def test_who_shares_is_told_by_identity_and_not_by_index() -> None:
    # On node a each rank sees its own GPU as the first one; on node b two ranks see the same.
    places = [("a", "uuid-1"), ("a", "uuid-2"), ("b", "uuid-3"), ("b", "uuid-3")]

    assert [sharing(places, rank) for rank in range(4)] == [1, 1, 2, 2]


def test_a_gpu_is_told_with_its_architecture() -> None:
    assert str(Gpu(0, "NVIDIA H200", "uuid", (9, 0))) == "NVIDIA H200, sm_90"
