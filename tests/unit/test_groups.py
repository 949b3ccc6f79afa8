from __future__ import annotations

from collections.abc import Sequence

import pytest

from ringmpi.errors import ConfigError
from ringmpi.schedule import GROUP_OPTIONS, METHODS, check_heads, inner_ranks


def never_asked() -> Sequence[str]:
    raise AssertionError("nobody needs to know the nodes")


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"ulysses", *GROUP_OPTIONS}))
@pytest.mark.parametrize("given", [None, 3])
def test_a_method_without_groups_has_groups_of_one(method: str, given: int | None) -> None:
    assert inner_ranks(method, 8, given, never_asked) == 1


@pytest.mark.parametrize("size", [1, 3, 8])
def test_ulysses_is_one_group(size: int) -> None:
    assert inner_ranks("ulysses", size, None, never_asked) == size


@pytest.mark.parametrize("method", GROUP_OPTIONS)
class TestGroups:
    @pytest.mark.parametrize("given", [1, 2, 3, 4, 6, 12])
    def test_a_divisor_is_taken_and_no_node_asked_for(self, method: str, given: int) -> None:
        assert inner_ranks(method, 12, given, never_asked) == given

    @pytest.mark.parametrize(
        ("hosts", "inner"),
        [
            (["a"], 1),
            (["a"] * 5, 5),
            (["a", "a", "b", "b"], 2),
            (["b"] * 3 + ["a"] * 3 + ["c"] * 3, 3),
            (["a", "b", "c"], 1),
        ],
        ids=["one rank", "one node", "two nodes", "three nodes", "a rank a node"],
    )
    def test_the_ranks_of_a_node_are_a_group_by_default(
        self, method: str, hosts: list[str], inner: int
    ) -> None:
        assert inner_ranks(method, len(hosts), None, lambda: hosts) == inner

    @pytest.mark.parametrize(
        ("hosts", "told"),
        [
            (["a", "a", "a", "b"], "3, 1 neighbouring ranks"),
            (["a", "b", "b", "c"], "1, 2, 1 neighbouring ranks"),
            (["a", "b", "a", "b"], "1, 1, 1, 1 neighbouring ranks"),
            (["a", "a", "b", "b", "a", "a"], "2, 2, 2 neighbouring ranks"),
        ],
        ids=["one left over", "unequal", "cyclic", "in turns"],
    )
    def test_nodes_that_make_no_equal_groups_are_refused_with_what_would_work(
        self, method: str, hosts: list[str], told: str
    ) -> None:
        with pytest.raises(ConfigError) as refusal:
            inner_ranks(method, len(hosts), None, lambda: hosts)

        flag = {"hybrid": "--ulysses-degree", "double-ring": "--inner"}[method]
        assert told in str(refusal.value)
        assert f"start as many ranks on each node, neighbours together, or give {flag}" in str(
            refusal.value
        )

    @pytest.mark.parametrize("given", [-2, 0, 4, 5, 7, 12, 24])
    def test_groups_that_do_not_divide_the_ranks_are_refused_with_those_that_do(
        self, method: str, given: int
    ) -> None:
        with pytest.raises(ConfigError) as refusal:
            inner_ranks(method, 6, given, never_asked)

        told = f"{GROUP_OPTIONS[method]}={given}: must divide the number of ranks, 6; use one of 1, 2, 3, 6"
        assert str(refusal.value) == told


@pytest.mark.parametrize("method", ["ulysses", "hybrid"])
@pytest.mark.parametrize(("inner", "heads"), [(1, 1), (4, 4), (3, 8), (8, 9)])
def test_a_head_for_each_rank_of_a_group_is_enough(method: str, inner: int, heads: int) -> None:
    assert check_heads(method, inner, heads) is None


@pytest.mark.parametrize("method", ["ulysses", "hybrid"])
def test_fewer_heads_than_ranks_are_refused_with_both_numbers(method: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_heads(method, 8, 6)

    assert str(refusal.value) == (
        f"method={method}: 6 heads cannot be shared among 8 ranks, each needs one; use at most 6 ranks, "
        f"or method=hybrid with a --ulysses-degree of at most 6"
    )


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"ulysses", "hybrid"}))
def test_methods_that_share_no_heads_need_none_to_share(method: str) -> None:
    assert check_heads(method, 8, 1) is None
