"""What computes, decided by all ranks of a job alike."""

from __future__ import annotations

from dataclasses import dataclass

from ringmpi.comm.team import Team
from ringmpi.devices import PREFERENCE, check_offered, why_missing
from ringmpi.errors import MissingCapabilityError


@dataclass(frozen=True)
class Agreed:
    """A device that every rank can have.

    Attributes
    ----------
    device : str
    reason : str
        Why it is not one that ``auto`` prefers; empty where it is, or was asked for by name.
    """

    device: str
    reason: str = ""


def agreed_device(team: Team, name: str, threads: int, matrix_unit: str) -> Agreed:
    """Return the device that `name` means on every rank. Collective.

    ``auto`` is the preferred one of those that no rank lacks: ranks with unlike devices would wait for
    each other in every step.

    Raises
    ------
    MissingCapabilityError
        On every rank, if any rank lacks what is asked for.
    """
    agreed = _preferred(team) if name == "auto" else Agreed(name)
    error: MissingCapabilityError | None = None
    try:
        check_offered(agreed.device, threads, matrix_unit, agreed.reason)
    except MissingCapabilityError as lacking:
        error = lacking
    team.agree(error)
    return agreed


def _preferred(team: Team) -> Agreed:
    reason = ""
    told = team.allgather({name: why_missing(name) for name in PREFERENCE})
    for name in PREFERENCE:
        lacking = [(rank, reasons[name]) for rank, reasons in enumerate(told) if reasons[name]]
        if not lacking:
            return Agreed(name, reason)
        rank, first = lacking[0]
        where = f" (rank {rank} of {team.size})" if len(lacking) < team.size else ""
        reason = reason or f"{first}{where}"
    raise MissingCapabilityError(f"device=auto: no device is on all ranks: {reason}")
