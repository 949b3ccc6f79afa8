"""Exact attention over a sequence sharded across MPI ranks, with every stall measured.

Nothing is loaded before it is used: ``import ringmpi`` alone initialises no MPI and reads no NumPy, so
that thread counts can still be set and a login node can print help.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringmpi.attention import RingAttention, ring_attention
    from ringmpi.devices import prepare

__version__ = "0.1.0"

__all__ = ["RingAttention", "__version__", "prepare", "ring_attention"]

_HOMES = {
    "RingAttention": "ringmpi.attention",
    "ring_attention": "ringmpi.attention",
    "prepare": "ringmpi.devices",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ringmpi' has no attribute {name!r}")
