"""Who takes part, in which case, measured against what, and what is aimed at."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from case import BOTH, FORWARD, Case
from contenders import Program

HERE = Path(__file__).parent

OURS = ("native", "native-unsliced", "native-exact", "numpy", "ring", "one-rank")

#: Packages, and the contenders that come of them.
PEERS = {
    "torch": ("torch-sdpa", "torch-ring", "torch-ring-allgather"),
    "lucidrains": ("ring-attention-pytorch",),
    "jax": ("jax-ring",),
}

#: They take several times as long as the others: enough is seen of them at moderate lengths.
SLOW = ("jax-ring", "ring-attention-pytorch")

#: Contenders of the ring part, and those of them that have contiguous shards only.
RINGS = ("ring", "torch-ring", "torch-ring-allgather", "jax-ring", "ring-attention-pytorch")
CONTIGUOUS_ONLY = ("jax-ring", "ring-attention-pytorch")

#: The layout in which all ranks have the same work.
BALANCED = {"full": "contiguous", "causal": "zigzag"}

#: What a device that takes no breaks for MPI may take at least of the time of ours: slices cost 2 % at most.
UNSLICED = 0.98

#: A ring may cost this much more than its share of the time of one rank.
RING_COST = 1.05

AGAINST_TORCH = {
    ("float32", FORWARD): 1.1,
    ("float32", BOTH): 1.4,
    ("bfloat16", FORWARD): 1.5,
    ("bfloat16", BOTH): 2.0,
}


@dataclass(frozen=True)
class Place:
    """A contender's place in a case.

    Attributes
    ----------
    name, layout : str
    """

    name: str
    layout: str = ""


def programs(
    device: str, weights: str, threads: int, peers: Sequence[str], python: str
) -> list[Program]:
    """Return how contenders are started.

    Parameters
    ----------
    device : str
        Of the ring; there is no contender `native` with ``numpy``.
    weights : str
        Of our own in bfloat16, but NumPy, which only grows slower by rounding. Where they are ``rounded``,
        `native-exact` shows what that gives.
    threads : int
        Or ranks.
    peers : sequence of str
        Of `PEERS`.
    python : str
        The one that has them.
    """
    ours, mpiexec = sys.executable, shutil.which("mpiexec") or "mpiexec"

    def script(name: str) -> str:
        return str(HERE / name)

    def ring(ranks: int) -> list[str]:
        return [
            mpiexec,
            "-n",
            str(ranks),
            ours,
            script("ringmpi_ring.py"),
            "{address}",
            device,
            weights,
        ]

    def single(name: str) -> list[str]:
        return [ours, script("ringmpi_device.py"), "{address}", name, str(threads), weights]

    found = [
        Program(name, [single(name)], threads=threads)
        for name in ("native", "native-unsliced", "native-exact", "numpy")
        if name == "numpy" or (device == "native" and (name != "native-exact" or weights == "rounded"))
    ]
    found += [
        Program("ring", [ring(threads)], ranks=threads),
        Program("one-rank", [ring(1)]),
    ]

    def gloo(name: str, *arguments: str) -> list[list[str]]:
        words = [python, script(name), "{address}"]
        return [[*words, str(rank), str(threads), "{store}", *arguments] for rank in range(threads)]

    devices = f"--xla_force_host_platform_device_count={threads}"
    found += [
        Program(
            "torch-sdpa",
            [[python, script("torch_sdpa.py"), "{address}", str(threads)]],
            threads=threads,
        ),
        Program("torch-ring", gloo("torch_ring.py", "alltoall"), ranks=threads),
        Program("torch-ring-allgather", gloo("torch_ring.py", "allgather"), ranks=threads),
        Program("ring-attention-pytorch", gloo("lucidrains_ring.py"), ranks=threads),
        Program(
            "jax-ring",
            [[python, script("jax_ring.py"), "{address}"]],
            threads=threads,
            environment={"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"},
        ),
    ]
    wanted = [name for peer in peers for name in PEERS[peer]]
    return [program for program in found if program.name in (*OURS, *wanted)]


def places(case: Case, slow_limit: int) -> list[Place]:
    """Return who takes part in a case, ours first."""
    if case.part == "single":
        return [
            Place(name)
            for name in ("native", "native-unsliced", "native-exact", "numpy", "torch-sdpa")
            if name != "native-exact" or case.dtype == "bfloat16"
        ]
    balanced = BALANCED[case.mask]
    found = [
        Place(name, layout)
        for name in RINGS
        for layout in dict.fromkeys((balanced, "contiguous"))
        if layout == "contiguous" or name not in CONTIGUOUS_ONLY
    ]
    # On one rank every layout is the whole; the name says which ring is held against it.
    found.append(Place("one-rank", balanced))
    return [each for each in found if each.name not in SLOW or case.seq_len <= slow_limit]


def base_of(place: Place, present: list[Place]) -> Place | None:
    """Return the contender of ours that another one is held against: the one with its layout."""
    ours = [each for each in present if each.name in ("native", "ring")] or [
        each for each in present if each.name == "numpy"
    ]
    return next((each for each in ours if place.layout in ("", each.layout)), None)


def aim(case: Case, place: Place, ranks: int) -> float | None:
    """Return the least ratio that is aimed at, of a contender's time to ours."""
    if place.name == "torch-sdpa":
        return AGAINST_TORCH[case.dtype, case.direction]
    if place.name.startswith("torch-ring"):
        return AGAINST_TORCH[case.dtype, case.direction] if place.layout == "zigzag" else None
    if place.name == "peak-fma":
        steady = (case.part, case.dtype, case.direction, case.mask, case.head_dim)
        return 0.75 if steady == ("single", "float32", FORWARD, "full", 128) else None
    return {
        "native-unsliced": UNSLICED,
        "numpy": 2.5,
        "jax-ring": 3.0,
        "ring-attention-pytorch": 8.0,
        "one-rank": ranks / RING_COST,
    }.get(place.name)
