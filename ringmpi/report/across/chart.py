"""What a chart is made of; how it is drawn is up to whoever draws it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Mark(Enum):
    """What the points of a series are, which decides how they look."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    PREDICTED = "predicted"
    IDEAL = "ideal"


@dataclass(frozen=True)
class Axis:
    """One direction of a chart.

    Attributes
    ----------
    label : str
        What it shows, with its unit.
    logarithmic : bool
        To the base of 2; else it begins at 0.
    """

    label: str
    logarithmic: bool = False


@dataclass(frozen=True)
class Point:
    """One value.

    Attributes
    ----------
    x, y : float
    low, high : float
        From where to where it varies; both `y` where nothing is known of that.
    told : tuple of (str, str)
        What else there is to say: names and texts.
    hollow : bool
        Whether it is to be doubted.
    """

    x: float
    y: float
    low: float
    high: float
    told: tuple[tuple[str, str], ...] = ()
    hollow: bool = False


@dataclass(frozen=True)
class Series:
    """Points that belong together.

    Attributes
    ----------
    name : str
    mark : Mark
    group : int
        Series of one group are about the same thing, and have one colour.
    points : tuple of Point
        By rising x.
    """

    name: str
    mark: Mark
    group: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Guide:
    """A value of x that is marked.

    Attributes
    ----------
    x : float
    label : str
    group : int
        As of a `Series`.
    """

    x: float
    label: str
    group: int


@dataclass(frozen=True)
class Chart:
    """Values over values, or over the names of `categories`, which x then counts.

    Attributes
    ----------
    title : str
    x, y : Axis
    series : tuple of Series
    guides : tuple of Guide
    categories : tuple of str
    notes : tuple of str
        What a reader must know, a sentence each.
    """

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    guides: tuple[Guide, ...] = ()
    categories: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


#: Of the groups of series, in turn: of Okabe and Ito (2008), chosen for people who see two of three colours.
GROUP_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
