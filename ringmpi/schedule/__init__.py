"""Schedules as data: what each rank sends, receives and attends to, step by step.

A method is a pure function ``(layout, rank) -> list of Step``. The executor runs the list, a
simulator can price it, a plot can draw it; none of them knows the method's name.
"""

from __future__ import annotations

from collections.abc import Callable

from ringmpi.layout import Layout
from ringmpi.schedule.check import check_schedule
from ringmpi.schedule.ring import ring
from ringmpi.schedule.steps import Attend, Direction, Step, Transfer

METHODS: dict[str, Callable[[Layout, int], list[Step]]] = {"ring": ring}

__all__ = ["METHODS", "Attend", "Direction", "Step", "Transfer", "check_schedule", "ring"]
