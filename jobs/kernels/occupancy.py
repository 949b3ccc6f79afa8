"""How many blocks of threads a multiprocessor can hold at once, from what a kernel needs and what there is.

The limits are those of the appendix "Compute Capabilities" of the CUDA Programming Guide: its tables of
technical specifications, and its sections on shared memory (1 KiB of every block is CUDA's own from 8.0 on).
The units of allocation are those of the spreadsheet "CUDA Occupancy Calculator", and of Nsight Compute, which
replaced it.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
REGISTERS = 64 * 1024
#: Registers are given to a warp in pieces of 256, and warps to the 4 parts of a multiprocessor.
REGISTER_UNIT = 256
PARTS = 4


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor of an architecture has.

    Attributes
    ----------
    threads, blocks : int
        At most, at once.
    shared, shared_block : int
        Bytes in all, and of one block if it asks for them.
    shared_own, shared_unit : int
        Bytes of every block that are CUDA's own, and the unit of allocation.
    """

    threads: int
    blocks: int
    shared: int
    shared_block: int
    shared_own: int
    shared_unit: int


_KIB = 1024

MULTIPROCESSORS = {
    "sm_75": Multiprocessor(1024, 16, 64 * _KIB, 64 * _KIB, 0, 256),
    "sm_80": Multiprocessor(2048, 32, 164 * _KIB, 163 * _KIB, _KIB, 128),
    "sm_86": Multiprocessor(1536, 16, 100 * _KIB, 99 * _KIB, _KIB, 128),
    "sm_89": Multiprocessor(1536, 24, 100 * _KIB, 99 * _KIB, _KIB, 128),
    "sm_90": Multiprocessor(2048, 32, 228 * _KIB, 227 * _KIB, _KIB, 128),
    "sm_100": Multiprocessor(2048, 32, 228 * _KIB, 227 * _KIB, _KIB, 128),
    "sm_120": Multiprocessor(1536, 24, 100 * _KIB, 99 * _KIB, _KIB, 128),
}


@dataclass(frozen=True)
class Occupancy:
    """How full a multiprocessor gets.

    Attributes
    ----------
    blocks : int
        At once.
    share : float
        Of the threads that it could hold.
    limit : str
        What allows no more.
    """

    blocks: int
    share: float
    limit: str


def occupancy(arch: str, threads: int, registers: int, shared: int) -> Occupancy:
    """Return how many blocks fit at once.

    Parameters
    ----------
    arch : str
    threads : int
        Of a block.
    registers : int
        Of a thread.
    shared : int
        Bytes of a block.
    """
    has = MULTIPROCESSORS[arch]
    warps = -(-threads // WARP)
    of_warp = _up(registers * WARP, REGISTER_UNIT)
    fit = {
        "registers": REGISTERS // of_warp // PARTS * PARTS // warps,
        "threads": has.threads // WARP // warps,
        "blocks": has.blocks,
    }
    if shared + has.shared_own:
        fit["shared memory"] = has.shared // _up(shared + has.shared_own, has.shared_unit)
    limit = min(fit, key=lambda name: fit[name])
    return Occupancy(fit[limit], fit[limit] * warps * WARP / has.threads, limit)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
