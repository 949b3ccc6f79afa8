"""The page: facts, problems, and what helps. Tells no secrets, and not who the user is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.console import Console

from ringmpi.redaction import anonymous

#: What a fact is called that nobody should leave as it is.
PROBLEM = "problem"

#: Characters of the longest name of a fact, and two.
NAME_WIDTH = 15

#: Set where environment modules are: by Lmod, and by Environment Modules.
MODULE_VARIABLES = ("MODULEPATH", "LMOD_CMD", "MODULESHOME")


@dataclass(frozen=True)
class Fact:
    """One line of the page, and perhaps another one.

    Attributes
    ----------
    name : str
    value : str
    remedy : str
        Where something is missing or wrong, the command or module that helps.
    """

    name: str
    value: str
    remedy: str = ""


class Page:
    """What has been told so far.

    Parameters
    ----------
    console : Console or None
        None on ranks that tell nothing.
    environment : mapping
        Whose secrets must not be told.
    """

    def __init__(self, console: Console | None, environment: Mapping[str, str]) -> None:
        self._console = console
        self._environment = environment
        self._problems = 0

    def show(self, facts: Iterable[Fact]) -> None:
        """Print facts, each as it is found: what comes later may end the process."""
        for fact in facts:
            self._problems += fact.name == PROBLEM
            self._print(f"{fact.name:<{NAME_WIDTH}} {fact.value}")
            if fact.remedy:
                self._print(f"{'':<{NAME_WIDTH}} -> {fact.remedy}")

    def conclude(self) -> None:
        """Print how many problems there were."""
        self._print(f"# {self._problems or 'no'} {PROBLEM}{'s' * (self._problems != 1)}")

    def _print(self, line: str) -> None:
        if self._console is not None:
            self._console.print(anonymous(line, self._environment), soft_wrap=True, markup=False)
            self._console.file.flush()


def way_to(module: str, otherwise: str, environment: Mapping[str, str]) -> str:
    """Return how to get something: by a module where there are modules, else by a command.

    >>> way_to("cuda", "apt-get install nvidia-cuda-toolkit", {"LMOD_CMD": "/lmod"})
    'module load cuda'
    """
    has_modules = any(environment.get(name) for name in MODULE_VARIABLES)
    return f"module load {module}" if has_modules else otherwise
