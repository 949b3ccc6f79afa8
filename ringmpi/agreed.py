"""What computes, and how its blocks get to MPI, decided by all ranks of a job alike."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ringmpi.comm.awareness import why_no_device_pointers
from ringmpi.comm.node import local_from_environment
from ringmpi.comm.policy import chosen_transport
from ringmpi.comm.team import Team
from ringmpi.devices import (
    CUDA,
    PREFERENCE,
    Gpu,
    candidates,
    check_offered,
    gpu_for,
    is_expected,
    why_missing,
)
from ringmpi.devices.placement import local_rank, sharing
from ringmpi.errors import MissingCapabilityError, RingMPIError


@dataclass(frozen=True)
class Agreed:
    """A device that every rank can have.

    Attributes
    ----------
    device : str
    reason : str
        Why it is not one that ``auto`` prefers; empty where it is, or was asked for by name.
    transport : str
        ``direct`` or ``staged``.
    transport_reason : str
        Why it is not ``direct``.
    gpu : Gpu or None
        Which one this rank takes.
    """

    device: str
    reason: str = ""
    transport: str = "direct"
    transport_reason: str = ""
    gpu: Gpu | None = None


def agreed_device(
    team: Team, name: str, threads: int, matrix_unit: str, transport: str = "auto"
) -> Agreed:
    """Return the device that `name` means on every rank, and the transport. Collective.

    ``auto`` is the preferred one of those that no rank lacks: ranks with unlike devices would wait for
    each other in every step. Blocks are cut as the transport needs it, so that is one for all ranks too.

    Raises
    ------
    ConfigError, MissingCapabilityError
        On every rank, if any rank lacks what is asked for.
    """
    agreed = _preferred(team, candidates(threads, matrix_unit)) if name == "auto" else Agreed(name)
    error: RingMPIError | None = None
    try:
        check_offered(agreed.device, threads, matrix_unit, agreed.reason)
    except MissingCapabilityError as lacking:
        error = lacking
    team.agree(error)
    return _with_gpu(team, agreed, transport) if agreed.device == CUDA else _on_host(agreed, transport)


def _on_host(agreed: Agreed, transport: str) -> Agreed:
    """Return a device in host memory with its transport; refused on all ranks alike."""
    return replace(agreed, transport=chosen_transport(transport, agreed.device, ""))


def _with_gpu(team: Team, agreed: Agreed, transport: str) -> Agreed:
    gpu: Gpu | None = None
    error: RingMPIError | None = None
    # Transports first: a GPU is not touched where what is asked for is refused.
    reasons = [
        (rank, reason) for rank, reason in enumerate(team.allgather(why_no_device_pointers())) if reason
    ]
    why = f"{reasons[0][1]} (rank {reasons[0][0]} of {team.size})" if reasons else ""
    chosen = chosen_transport(transport, agreed.device, why)
    hosts, local = team.hosts(), local_from_environment()
    told = team.allgather(None if local is None else local.rank)
    try:
        gpu = gpu_for(local_rank(hosts, told, team.rank))
    except RingMPIError as lacking:
        error = lacking
    team.agree(error)
    assert gpu is not None  # Or there was an error, of some rank.
    places = list(zip(hosts, team.allgather(gpu.identity), strict=True))
    gpu = replace(gpu, sharing=sharing(places, team.rank))
    return replace(agreed, transport=chosen, transport_reason=why, gpu=gpu)


def _preferred(team: Team, names: tuple[str, ...]) -> Agreed:
    reason = ""
    names = tuple(name for name in PREFERENCE if name in names)
    told = team.allgather({name: (why_missing(name), is_expected(name)) for name in names})
    for name in names:
        lacking = [(rank, reasons[name][0]) for rank, reasons in enumerate(told) if reasons[name][0]]
        if not lacking:
            return Agreed(name, reason)
        if not any(reasons[name][1] for reasons in told):
            continue
        rank, first = lacking[0]
        where = f" (rank {rank} of {team.size})" if len(lacking) < team.size else ""
        reason = reason or f"{first}{where}"
    raise MissingCapabilityError(f"device=auto: no device is on all ranks: {reason}")
