"""The tables of the Ring Attention paper, computed again (Liu et al. 2023, arXiv:2310.01889).

Each printed number stands here once, beside the number that our formulas give. A cell agrees if ours, rounded
as the paper rounds, is what is printed. What does not agree is a misprint or a rule that the paper does not
state; `findings` says which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringmpi.model.costs import least_queries
from ringmpi.model.memory import (
    BLOCKS_OF_RING,
    BLOCKWISE,
    MEMORY_EFFICIENT,
    RING,
    VANILLA,
    activations,
)
from ringmpi.model.transformer import Transformer, plain
from ringmpi.schedule import Pass
from ringmpi.tensors import Shape

#: bfloat16, in which table 1 is counted. NumPy has no such type; only the size of its items matters.
ITEMSIZE = 2

#: One head as wide as the hidden size, which is all that the paper's formulas know; they do not depend on it.
ONE_HEAD = Shape(1, 1, 1, 1, np.dtype(np.float16))


@dataclass(frozen=True)
class Cell:
    """One printed number or formula beside ours.

    Attributes
    ----------
    table, row, column : str
    printed, ours : str
        As printed, and ours rounded alike.
    agrees : bool
    """

    table: str
    row: str
    column: str
    printed: str
    ours: str
    agrees: bool


@dataclass(frozen=True)
class Finding:
    """Something printed that the paper's own formulas do not give.

    Attributes
    ----------
    place, printed, ours, why : str
    """

    place: str
    printed: str
    ours: str
    why: str


@dataclass(frozen=True)
class _Case:
    """Sizes to try a formula at; no two of them alike, so that no two letters can be mistaken."""

    b: int
    s: int
    h: int
    n: int
    c: int


_CASES = (_Case(3, 65_536, 4096, 32, 8192), _Case(2, 10_007, 1280, 20, 1009))

_Formula = Callable[[_Case], int]

#: Table 1, in bytes a layer: row, architecture, and for each column what is printed, the same as a function,
#: and what ours come to in the paper's letters.
_TABLE_1: tuple[tuple[str, str, tuple[tuple[str, _Formula, str], ...]], ...] = (
    (
        "Vanilla",
        VANILLA,
        (
            ("2bns^2", lambda x: 2 * x.b * x.n * x.s**2, "2bns^2"),
            ("8bsh", lambda x: 8 * x.b * x.s * x.h, "8bsh"),
            ("2bhs^2", lambda x: 2 * x.b * x.h * x.s**2, "2bns^2"),
        ),
    ),
    (
        "Memory efficient attention",
        MEMORY_EFFICIENT,
        (
            ("2bsh + 4bch", lambda x: 2 * x.b * x.s * x.h + 4 * x.b * x.c * x.h, "2bsh + 4bch"),
            ("8bsh", lambda x: 8 * x.b * x.s * x.h, "8bsh"),
            ("8bsh", lambda x: 8 * x.b * x.s * x.h, "8bsh"),
        ),
    ),
    (
        "Memory efficient attention and feedforward",
        BLOCKWISE,
        (
            ("2bsh", lambda x: 2 * x.b * x.s * x.h, "2bsh"),
            ("2bsh", lambda x: 2 * x.b * x.s * x.h, "2bsh"),
            ("2bsh", lambda x: 2 * x.b * x.s * x.h, "2bsh"),
        ),
    ),
    (
        "Ring Attention",
        RING,
        (
            ("6bch", lambda x: 6 * x.b * x.c * x.h, "12bch"),
            ("2bch", lambda x: 2 * x.b * x.c * x.h, "2bch"),
            ("6bch", lambda x: 6 * x.b * x.c * x.h, "12bch"),
        ),
    ),
)


@dataclass(frozen=True)
class _Host:
    """A row of table 2: TFLOP/s, GB, GB/s, and thousands of tokens."""

    name: str
    flops: float
    memory: float
    bandwidth: float
    block: str
    sequence: str


_TABLE_2 = (
    _Host("A100 NVLink", 312, 80, 300, "1.0", "6.2"),
    _Host("A100 InfiniBand", 312, 80, 12.5, "24.5", "149.5"),
    _Host("TPU v3", 123, 16, 112, "1.1", "6.6"),
    _Host("TPU v4", 275, 32, 268, "1.0", "6.2"),
    _Host("TPU v5e", 196, 16, 186, "1.1", "6.3"),
)


@dataclass(frozen=True)
class _Context:
    """A row of table 3: devices, model, and thousands of tokens by architecture."""

    hardware: str
    devices: int
    model: str
    vanilla: int
    memory_efficient: int
    blockwise: int
    ring: int
    gain: int


_TABLE_3 = (
    _Context("8x A100 NVLink", 8, "3B", 4, 32, 64, 512, 8),
    _Context("8x A100 NVLink", 8, "7B", 2, 16, 32, 256, 8),
    _Context("8x A100 NVLink", 8, "13B", 2, 4, 16, 128, 8),
    _Context("32x A100 InfiniBand", 32, "7B", 4, 64, 128, 4096, 32),
    _Context("32x A100 InfiniBand", 32, "13B", 4, 32, 64, 2048, 32),
    _Context("TPUv3-512", 512, "7B", 1, 4, 8, 2048, 256),
    _Context("TPUv3-512", 512, "13B", 1, 2, 8, 1024, 128),
    _Context("TPUv4-1024", 1024, "3B", 8, 16, 32, 16_384, 512),
    _Context("TPUv4-1024", 1024, "7B", 4, 8, 16, 8192, 512),
    _Context("TPUv4-1024", 1024, "13B", 4, 8, 16, 4096, 256),
    _Context("TPUv4-1024", 1024, "30B", 2, 4, 8, 2048, 256),
    _Context("TPUv5e-256", 256, "3B", 4, 8, 32, 4096, 128),
    _Context("TPUv5e-256", 256, "7B", 2, 8, 16, 2048, 128),
)

#: Contexts of figure 5 by their labels. The last two are 3072 and 32768 times 4096.
_CONTEXTS = {
    "8K": 2**13,
    "16K": 2**14,
    "32K": 2**15,
    "64K": 2**16,
    "128K": 2**17,
    "256K": 2**18,
    "1M": 2**20,
    "10M": 3072 * 4096,
    "100M": 32_768 * 4096,
}

#: The context that figure 5 compares with.
_SHORT = 4096

#: Figure 5: hidden size as the text has it, and the ratios of FLOPs.
_FIGURE_5: dict[str, tuple[int, str]] = {
    "7B": (4096, "1.1 1.4 2.0 3.1 5.4 10.0 37.4 439.7 4682.0"),
    "13B": (5140, "1.1 1.4 1.8 2.8 4.6 8.4 31.0 362.3 3855.9"),
    "33B": (7168, "1.1 1.3 1.6 2.3 3.7 6.5 23.2 268.0 2850.3"),
    "65B": (8192, "1.1 1.2 1.5 2.2 3.4 5.8 20.6 237.2 2521.5"),
    "175B": (12_288, "1.1 1.2 1.4 1.8 2.6 4.3 14.4 162.6 1725.6"),
    "1TB": (36_864, "1.0 1.1 1.1 1.3 1.6 2.1 5.6 56.8 596.8"),
}

#: What the hidden size of 13B really is (Touvron et al. 2023, arXiv:2302.13971, table 2).
_HIDDEN_13B = 5120


def table_1() -> list[Cell]:
    """Return the largest activations of a layer by architecture, in bytes."""
    cells = []
    for row, architecture, columns in _TABLE_1:
        for column, (printed, formula, ours) in zip(
            ("self-attention", "feedforward", "total"), columns, strict=True
        ):
            agrees = all(formula(case) == _held(architecture, column, case) for case in _CASES)
            cells.append(Cell("table 1", row, column, printed, ours, agrees))
    return cells


def _held(architecture: str, column: str, case: _Case) -> int:
    """Return what our memory formulas give for a cell of table 1."""
    model = Transformer(1, case.h, case.n, case.n, case.h // case.n, 4 * case.h)
    found = activations(architecture, model, case.s, case.c, case.b, ITEMSIZE)
    return {
        "self-attention": found.attention,
        "feedforward": found.feedforward,
        "total": found.total,
    }[column]


def table_2() -> list[Cell]:
    """Return the least block and sequence of a device, in thousands of tokens."""
    cells = []
    for host in _TABLE_2:
        block = least_queries(ONE_HEAD, Pass.FORWARD, host.flops * 1e12, host.bandwidth * 1e9) / 1e3
        for column, printed, value in (
            ("block", host.block, block),
            ("sequence", host.sequence, BLOCKS_OF_RING * block),
        ):
            ours = f"{value:.1f}"
            cells.append(Cell("table 2", host.name, column, printed, ours, ours == printed))
    return cells


def table_3() -> list[Cell]:
    """Return the longest contexts of rings, in thousands of tokens, and how much longer they are.

    "If a model can be trained with context size s on n GPUs using the blockwise attention and feedforward,
    with our Ring Attention approach, it becomes possible to train a model with a context size of ns": n times
    the printed context l of the blockwise transformer.
    """
    cells = []
    for row in _TABLE_3:
        name = f"{row.hardware} {row.model}, l = {row.blockwise}"
        context = row.devices * row.blockwise
        gain = f"{row.ring / row.blockwise:g}x"
        cells += [
            Cell("table 3", name, "context", str(row.ring), str(context), context == row.ring),
            Cell("table 3", name, "gain", f"{row.gain}x", gain, gain == f"{row.gain}x"),
        ]
    return cells


def figure_5() -> list[Cell]:
    """Return how many times the FLOPs of training on a data set grow with the context.

    The hidden size of 13B is the one that gives what is printed, 5120.
    """
    return [
        cell
        for model, (hidden, _) in _FIGURE_5.items()
        for cell in _ratios(model, _HIDDEN_13B if model == "13B" else hidden)
    ]


def _ratios(model: str, hidden: int) -> list[Cell]:
    printed = _FIGURE_5[model][1].split()
    cells = []
    for (label, context), told in zip(_CONTEXTS.items(), printed, strict=True):
        ours = f"{flops_ratio(hidden, context):.1f}"
        cells.append(Cell("figure 5", f"{model}, h = {hidden}", label, told, ours, ours == told))
    return cells


def flops_ratio(hidden: int, context: int) -> float:
    """Return FLOPs a token at a context over those at 4096 tokens: ``(6 h + s) / (6 h + 4096)``.

    From what a layer of a plain transformer computes, ``24 b s h^2 + 4 b s^2 h`` (appendix D).
    """

    def per_token(tokens: int) -> float:
        model = plain(1, hidden, 1, 1, hidden)
        return model.matrix_flops(tokens, Pass.FORWARD) / tokens + 4 * tokens * hidden

    return per_token(context) / per_token(_SHORT)


def findings() -> list[Finding]:
    """Return what is printed and not given by the paper's own formulas."""
    infiniband = next(host for host in _TABLE_2 if host.name == "A100 InfiniBand")
    block = infiniband.flops / infiniband.bandwidth  # TFLOP/s over GB/s: thousands of tokens.
    wrong = sum(not cell.agrees for cell in _ratios("13B", _FIGURE_5["13B"][0]))
    largest = max(row.ring for row in _TABLE_3)
    output = ITEMSIZE * 10**8 * 1024 / 1e9
    ratio = 186e9 / (0.4 * 196e12)
    divided: dict[str, list[str]] = {row.hardware: [] for row in _TABLE_3}
    for row in _TABLE_3:
        divided[row.hardware].append(f"{row.devices * row.blockwise // row.ring} ({row.model})")
    tpus = "; ".join(f"{name}: {', '.join(m)}" for name, m in divided.items() if name.startswith("TPU"))
    return [
        Finding(
            "table 1, vanilla, total", "2bhs^2", "2bns^2", "the larger of its two columns; h for n"
        ),
        Finding(
            "table 1, ring; section 3",
            "6bch bytes",
            "12bch bytes",
            "six blocks of bch elements, of 2 bytes each in bfloat16, as in the other rows and in 2bch",
        ),
        Finding(
            "section 3",
            "k and v 2cd bytes, together 4cd",
            "4cd bytes",
            "2cd counts elements",
        ),
        Finding(
            "table 2, A100 InfiniBand, block",
            infiniband.block,
            f"{block:.2f}",
            "312e12 / 12.5e9 = 24960 tokens",
        ),
        Finding(
            "table 2, A100 InfiniBand, sequence",
            infiniband.sequence,
            f"{BLOCKS_OF_RING * block:.2f}",
            f"0.2 % off; neither 6 x 24.96 nor 6 x 24.5 = {6 * 24.5:g}",
        ),
        Finding(
            "table 2, TPU bandwidths",
            "268 (v4), 186 (v5e) GB/s",
            "45 GB/s a link, one way",
            "all links of a chip in GiB/s; a ring has one each way, so F / B is 6111 (v4) and 4378 (v5e)",
        ),
        Finding(
            "table 3, contexts on TPU",
            "n l / m",
            "n l",
            f"m is not printed; it must be {tpus}. On A100 it is 1, as the text says",
        ),
        Finding(
            "section 5.1",
            "TPUv4-512, over 30 million tokens",
            f"{largest / 1e3:.1f} million",
            "the largest context of table 3, on TPUv4-1024",
        ),
        Finding(
            "sections 1 and 2",
            "over 1000 GB for 1e8 tokens, h = 1024",
            f"{output:g} GB",
            f"one output of a layer in bfloat16; over 1000 GB needs {int(1000 // output) + 1} layers",
        ),
        Finding(
            "algorithm 1",
            "N_h - 1 rounds",
            "N_h",
            "every rank attends to N_h blocks, as in the code of appendix A; N_h - 1 hops are enough",
        ),
        Finding(
            "figure 5, hidden size of 13B",
            "5140",
            "5120",
            f"5120 gives every printed ratio, with 5140 {wrong} of 9 differ",
        ),
        Finding(
            "appendix A",
            "512 / 8 leaves 32",
            f"{512 // 8}",
            "or data parallelism of 2 is not mentioned",
        ),
        Finding(
            "appendix C",
            "B / F = 2.4, at least 2 needed",
            f"{ratio:.2e}",
            f"186e9 / (0.4 x 196e12): GB/s over TFLOP/s is not a ratio of bytes to FLOPs; {2 / ratio:.0f} "
            f"times too little, so decoding is not hidden",
        ),
        Finding("section 5.2", "TPUv4-256", "TPUv4-1024", "in table 4, of the same experiment"),
    ]
