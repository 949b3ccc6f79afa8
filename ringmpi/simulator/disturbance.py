"""What makes ranks compute unevenly: noise, slow ranks, single delays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, log1p, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmpi.digits import whole_number
from ringmpi.errors import ConfigError

Array = NDArray[Any]

#: Keys of generators, so that who is slow and how much noise there is have nothing to do with each other.
_NOISE, _STRAGGLERS = 1, 2


@dataclass(frozen=True)
class Disturbance:
    """What is done to the compute of steps. The default does nothing.

    Attributes
    ----------
    noise : float
        Standard deviation of a step's compute, as a share of it. Lognormal, so that time is never negative,
        and with the undisturbed time as its mean.
    seed : int
        Of the noise.
    slow : mapping of int to float
        Ranks, and how many times as long they compute.
    delays : mapping of (int, int) to float
        Ranks and steps, and how many seconds longer that one step computes.

    Examples
    --------
    >>> Disturbance(slow={1: 2.0}, delays={(2, 0): 0.5}).of(np.ones(3), 0, 0).tolist()
    [1.0, 2.0, 1.5]
    """

    noise: float = 0.0
    seed: int = 0
    slow: Mapping[int, float] = field(default_factory=dict)
    delays: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def of(self, compute: Array, repeat: int, step: int) -> Array:
        """Return what a step's compute takes then, seconds. Local.

        The noise of a rank depends on seed, repeat, step and rank alone: numbers are counted off a generator
        whose key are the first three. So it does not matter in which order steps are asked for, nor how many
        ranks there are.

        Parameters
        ----------
        compute : ndarray of float64, shape (ranks,)
            Undisturbed.
        """
        if not (self.noise or self.slow or self.delays):
            return compute
        taken = compute.copy()
        for rank, factor in self.slow.items():
            taken[rank] *= factor
        if self.noise:
            bits = np.random.Philox(key=[self.seed, _NOISE], counter=[0, 0, step, repeat])
            normal = np.random.Generator(bits).standard_normal(len(compute))
            variance = log1p(self.noise**2)
            taken *= np.exp(sqrt(variance) * normal - variance / 2)
        for (rank, at), seconds in self.delays.items():
            if at == step:
                taken[rank] += seconds
        return taken

    def check(self, size: int) -> None:
        """Refuse ranks that there are not. Local.

        Raises
        ------
        ConfigError
        """
        for rank in (*self.slow, *(rank for rank, _ in self.delays)):
            if rank >= size:
                raise ConfigError(f"rank {rank} is to be slow: there are {size}, 0 to {size - 1}")


def parse_stragglers(text: str, size: int, seed: int) -> dict[int, float]:
    """Return the slow ranks that ``N:FACTOR`` asks for, chosen by the seed. Local.

    Raises
    ------
    ConfigError
        If it is none, or there are not as many ranks.
    """
    number, _, factor = text.partition(":")
    count = _whole(number, "stragglers", text)
    if count > size:
        raise ConfigError(f"stragglers={text}: there are only {size} ranks")
    generator = np.random.Generator(np.random.Philox(key=[seed, _STRAGGLERS]))
    ranks = sorted(generator.permutation(size)[:count].tolist())
    return dict.fromkeys(ranks, _factor(factor, "stragglers", text))


def parse_noise(text: str) -> float:
    """Return the noise of a text such as ``0.02``. Local.

    Raises
    ------
    ConfigError
        If it is none.
    """
    return _number(text, "noise", text)


def parse_delays(text: str) -> dict[tuple[int, int], float]:
    """Return ranks, steps and seconds of a text such as ``0:3:2e-3``. Local.

    Raises
    ------
    ConfigError
        If it is none.

    Examples
    --------
    >>> parse_delays("0:3:2e-3")
    {(0, 3): 0.002}
    """
    found: dict[tuple[int, int], float] = {}
    for word in text.split(","):
        rank, _, rest = word.partition(":")
        step, _, seconds = rest.partition(":")
        at = _whole(rank, "delay", text), _whole(step, "delay", text)
        found[at] = _number(seconds, "delay", text)
    return found


_FORMS = {
    "noise": "a share of a step's compute such as 0.02",
    "stragglers": "N:FACTOR such as 2:1.5",
    "delay": "RANK:STEP:SECONDS,.. such as 0:3:2e-3",
}


def _whole(text: str, option: str, given: str) -> int:
    number = whole_number(text)
    if number is None:
        raise ConfigError(f"{option}={given!r}: use {_FORMS[option]}, with ranks and steps from 0 on")
    return number


def _number(text: str, option: str, given: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not (isfinite(number) and number >= 0):
        raise ConfigError(
            f"{option}={given!r}: use {_FORMS[option]}, with numbers that are finite and not below 0"
        )
    return number


def _factor(text: str, option: str, given: str) -> float:
    factor = _number(text, option, given)
    if not factor:
        raise ConfigError(f"{option}={given!r}: use {_FORMS[option]}; a factor is above 0")
    return factor
