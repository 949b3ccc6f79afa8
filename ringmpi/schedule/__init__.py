"""Schedules as data: what each rank sends, receives and attends to, step by step.

A method is a pure function ``(shards, direction) -> list of Step``. The executor runs the list, a
simulator can price it, a plot can draw it; none of them knows the method's name.
"""

from __future__ import annotations

from collections.abc import Callable

from ringmpi.schedule.allgather import allgather
from ringmpi.schedule.check import check_schedule
from ringmpi.schedule.double_ring import double_ring
from ringmpi.schedule.groups import GROUP_OPTIONS, check_heads, inner_ranks
from ringmpi.schedule.mesh import hybrid, ulysses
from ringmpi.schedule.passq import passq
from ringmpi.schedule.ring import bidirectional, ring
from ringmpi.schedule.steps import Pass, Shards, Step

Method = Callable[[Shards, Pass], list[Step]]

METHODS: dict[str, Method] = {
    "ring": ring,
    "bidirectional": bidirectional,
    "double-ring": double_ring,
    "passq": passq,
    "allgather": allgather,
    "ulysses": ulysses,
    "hybrid": hybrid,
}

__all__ = [
    "GROUP_OPTIONS",
    "METHODS",
    "Method",
    "Pass",
    "Shards",
    "Step",
    "check_heads",
    "check_schedule",
    "inner_ranks",
]
