"""What a run of the soak does and what is done to it, drawn by seed and number: each can be had again."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: The ranks of every run.
RANKS = 4

#: What is done to a run, in turn, and what is told about it.
FAULTS = {
    "none": "undisturbed",
    "kill": "one rank killed by SIGKILL",
    "term": "SIGTERM to the launcher",
    "full": "disk that gets full",
    "writers": "two jobs write to one file",
}

METHODS = (
    *("ring", "bidirectional", "double-ring --inner 2", "passq"),
    *("allgather", "ulysses", "hybrid --ulysses-degree 2"),
)
LAYOUTS = ("contiguous", "striped", "zigzag")
DTYPES = ("float32", "float64", "float16", "bfloat16")
PROGRESS = ("wait", "poll", "thread")
LINKS = (
    "",
    "",
    "--link 1Gbit/s,0.1ms",
    "--link 200Mbit/s,1ms,shared",
    "--link-map 2:1Gbit/s,0.1ms:100Mbit/s,1ms",
)
DEVICES = ("auto", "auto", "numpy", "paced --flops 1e9")

#: Kilobytes of the disk that gets full: from one that holds next to nothing to one that holds small results.
LEAST_SPACE, MOST_SPACE = 4, 240


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes
    ----------
    number : int
        From 1.
    fault : str
        Of `FAULTS`.
    options : str
        Of ``ringmpi run``, without the output.
    moment : float
        When the fault strikes, as a share of the time that an undisturbed run takes.
    victim : int
        The rank that is killed.
    space : int
        Kilobytes of the disk that gets full.
    older : bool
        Whether the result of an earlier run may be at the place of the output.
    """

    number: int
    fault: str
    options: str
    moment: float
    victim: int
    space: int
    older: bool


def plan(seed: int, number: int) -> Plan:
    """Return what run `number` of a seed is."""
    of = random.Random(f"{seed}/{number}")  # noqa: S311 - a draw that can be had again
    return Plan(
        number=number,
        fault=list(FAULTS)[(number - 1) % len(FAULTS)],
        options=_options(of),
        moment=of.uniform(0.0, 1.1),
        victim=of.randrange(RANKS),
        space=of.randint(LEAST_SPACE, MOST_SPACE),
        older=of.random() < 0.7,
    )


def _options(of: random.Random) -> str:
    seq_len = of.choice((1, 3, RANKS, 17, of.randint(5, 100), of.randint(100, 600)))
    device = of.choice(DEVICES)
    paced = device.startswith("paced")
    words = [
        f"--seq-len {seq_len}",
        f"--batch {of.choice((1, 1, 2))}",
        f"--heads 4 --kv-heads {of.choice((1, 2, 4))}",
        f"--head-dim {of.choice((1, 5, 16, 33, 64))}",
        f"--dtype {of.choice(DTYPES)}",
        f"--layout {of.choice(LAYOUTS)}",
        f"--method {of.choice(METHODS)}",
        f"--progress {of.choice(PROGRESS)}",
        f"--device {device}",
        f"--repeats {of.choice((1, 2, 5, 20))} --warmup {of.choice((0, 1))}",
        f"--seed {of.randrange(1000)}",
        of.choice(("", "--causal")),
        of.choice(("", "", f"--window {of.randint(0, seq_len)}")),
        of.choice(("", "", _documents(of, seq_len))),
        of.choice(("", "", f"--query-len {of.randint(1, seq_len)}")),
        of.choice(LINKS),
        of.choice(("", "--backward")),
        of.choice(("", "--check-transfers")),
        of.choice(("", f"--chunk-limit {of.choice((1000, 65536))}")),
        "" if paced else of.choice(("--verify full", "--verify sample:8", "--verify none")),
        "" if paced else of.choice(("", "", "--store-inputs")),
    ]
    return " ".join(filter(None, words))


def _documents(of: random.Random, seq_len: int) -> str:
    between = {of.randint(1, seq_len) for _ in range(3)} - {seq_len}
    return "--documents " + ",".join(map(str, (0, *sorted(between), seq_len)))
