"""What others have published, and how each number is simulated.

Nothing is fitted to the numbers that are compared: rates and links come from the sources in the machine
files, and what else is assumed stands with each claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from ringmpi.model.transformer import TRANSFORMERS
from ringmpi.schedule import Pass
from scenarios import Attention, attention

FORWARD, BACKWARD = Pass.FORWARD, Pass.BACKWARD


@dataclass(frozen=True)
class Claim:
    """A published number.

    Attributes
    ----------
    source : str
    what : str
    unit : str
    published : float or (float, float)
        A number, or the two that it lies between.
    simulate : callable
        Returns the same from simulations.
    of : Attention
        What is simulated, or the last of it.
    lacks : str
        What the model knows nothing of, and most likely makes the difference where there is one.
    """

    source: str
    what: str
    unit: str
    published: float | tuple[float, float]
    simulate: Callable[[], float]
    of: Attention
    lacks: str


def claims() -> Iterator[Claim]:
    """Yield all claims, source by source."""
    yield from _context_parallelism()
    yield from _crossover()
    yield from _striped()
    yield from _ring_flash_attention()
    yield from _pith_train()
    yield from _magi_attention()


# ---- Yang et al. 2024, arXiv:2411.01783: Llama-3 405B, tensor parallel in nodes of 8, context parallel
# across them.

META = "arXiv:2411.01783"
LLAMA = TRANSFORMERS["llama-3-405b"]

#: Prefill of 128 000 tokens on one node: the start from which the others are worked out.
ONE_NODE, ONE_NODE_TOKENS = 42.01, 128_000


def _prefill(ranks: int, tokens: int) -> Attention:
    """Return the attention of one GPU of each node: an eighth of the heads."""
    given = {
        "ranks": ranks,
        "seq_len": tokens,
        "heads": LLAMA.heads // 8,
        "kv_heads": LLAMA.kv_heads // 8,
        "head_dim": LLAMA.head_dim,
        "causal": True,
        "layout": "zigzag",
    }
    return attention("results/lab/machines/h100-node.toml", given)


def _prefill_seconds(ranks: int, tokens: int) -> float:
    """Return attention of all layers, and the rest of one node's time, divided among tokens and nodes."""
    layers = LLAMA.layers
    rest = ONE_NODE - layers * _prefill(1, ONE_NODE_TOKENS).seconds()
    return layers * _prefill(ranks, tokens).seconds() + rest * tokens / ONE_NODE_TOKENS / ranks


def _context_parallelism() -> Iterator[Claim]:
    lacks = (
        "all but attention is taken to divide among nodes as it does among tokens: the costs of a "
        "layer that do not "
        "(launching kernels, all-reduces of fewer tokens, matrices of fewer rows) are not known"
    )
    for nodes, seconds in ((2, 21.04), (4, 10.95), (8, 5.85), (16, 3.8)):
        yield Claim(
            META,
            f"prefill of 128 K, {nodes} nodes of 8 H100",
            "s",
            seconds,
            lambda nodes=nodes: _prefill_seconds(nodes, ONE_NODE_TOKENS),  # type: ignore[misc]
            _prefill(nodes, ONE_NODE_TOKENS),
            lacks,
        )
    million = 1_000_000
    yield Claim(
        META,
        "prefill of 1 M, 16 nodes of 8 H100",
        "s",
        77.0,
        lambda: _prefill_seconds(16, million),
        _prefill(16, million),
        lacks,
    )


def _crossover() -> Iterator[Claim]:
    """With few new tokens, of 128 000 on 4 nodes, it is better to pass on their queries than all keys.

    The new ones are taken to see all, which differs by half their share from what they do.
    """
    tokens = 128_000

    def passing(method: str, new: int) -> Attention:
        return _prefill(4, tokens).changed(method=method, query_len=new, causal=False)

    def simulate() -> float:
        low, high = 400, tokens
        while high - low > 40:
            new = (low + high) // 2
            sooner = passing("passq", new).seconds() < passing("ring", new).seconds()
            low, high = (new, high) if sooner else (low, new)
        return 100 * low / tokens

    yield Claim(
        META,
        "new tokens, of 128 K on 4 nodes, from which on pass-KV is the faster one",
        "%",
        (3.25, 5.0),
        simulate,
        passing("passq", 5280),
        "there partial results come home in an all-to-all at the end, which takes as long as all "
        "attends; passq hands "
        "its running state on in float32 beside the attends",
    )


# ---- Brandon et al. 2023, arXiv:2311.09431: striped against contiguous shards, training of 7B.

STRIPED = "arXiv:2311.09431"


def _striped() -> Iterator[Claim]:
    model = TRANSFORMERS["llama-7b"]
    lacks = (
        "kernels skip whole tiles of 2048 by 2048, of which a striped block has few that are empty; "
        "the model counts "
        "allowed pairs alone"
    )
    # FLOP/s of matrix products: github.com/stas00/ml-engineering measured 271e12 on A100; TPU v4: its peak.
    settings = (
        ("a100-measured", 4, 262_144, 1.43, 271e12),
        ("tpu-v4", 8, 262_144, 1.44, 275e12),
        ("a100-measured", 4, 16_384, 0.945, 271e12),
    )
    for machine, ranks, tokens, published, rate in settings:
        given = {
            "ranks": ranks,
            "seq_len": tokens,
            "heads": model.heads
            // 2,  # Meshes of (2, ranks): two share the heads, the others the sequence.
            "head_dim": model.head_dim,
            "causal": True,
            "dtype": "bfloat16",
        }
        striped = attention(machine, given | {"layout": "striped"})
        ring = attention(machine, given | {"layout": "contiguous"})
        matrices = sum(model.matrix_flops(tokens, way) for way in Pass) / (2 * ranks * rate)

        def speedup(
            ring: Attention = ring, striped: Attention = striped, matrices: float = matrices
        ) -> float:
            return (model.layers * ring.both() + matrices) / (model.layers * striped.both() + matrices)

        yield Claim(
            STRIPED,
            f"training of 7B at {tokens // 1024} K, mesh (2, {ranks}) of {machine}: striped against "
            f"contiguous",
            "times",
            published,
            speedup,
            striped,
            lacks,
        )


# ---- github.com/zhuzilin/ring-flash-attention, README: heads of Llama-3.1-8B, 8 K tokens a GPU, per cent
# of ideal.


def _ring_flash_attention() -> Iterator[Claim]:
    lacks = (
        "every step merges out and lse with what was there in separate passes over memory, and "
        "launches kernels: the "
        "model merges in no time"
    )
    measured = {
        "results/lab/machines/h800.toml": {
            "contiguous": (52.1, 53.9),
            "zigzag": (85.2, 90.2),
            "striped": (74.4, 82.9),
        },
        "a100-measured": {
            "contiguous": (51.4, 52.5),
            "zigzag": (81.7, 89.8),
            "striped": (69.6, 82.6),
        },
    }
    for machine, layouts in measured.items():
        for layout, both in layouts.items():
            given = {
                "ranks": 8,
                "seq_len": 65_536,
                "heads": 32,
                "kv_heads": 8,
                "head_dim": 128,
                "causal": True,
                "layout": layout,
                "dtype": "bfloat16",
            }
            of = attention(machine, given)
            for passes, published in zip(((FORWARD,), (FORWARD, BACKWARD)), both, strict=True):
                name = machine.rpartition("/")[2].removesuffix(".toml")
                yield Claim(
                    "github.com/zhuzilin/ring-flash-attention",
                    f"8 of {name}, {layout}, {' and '.join(way.value for way in passes)}",
                    "% of ideal",
                    published,
                    lambda of=of, passes=passes: of.percent_of_ideal(*passes),  # type: ignore[misc]
                    of,
                    lacks,
                )


def _pith_train() -> Iterator[Claim]:
    """Naive and zigzag ring attention at 32 K on 4 GPUs took 13.87 and 8.30 ms; its heads are not told."""
    given = {"ranks": 4, "seq_len": 32_768, "heads": 32, "kv_heads": 8, "head_dim": 128, "causal": True}
    zigzag = attention("h100-measured", given | {"layout": "zigzag"})
    yield Claim(
        "github.com/mlc-ai/pith-train, pull request 39",
        "32 K on 4 GPUs: zigzag against contiguous",
        "times",
        13.87 / 8.30,
        lambda: zigzag.changed(layout="contiguous").seconds() / zigzag.seconds(),
        zigzag,
        "shape and GPU are not told: those of Llama-3.1-8B on H100 are taken",
    )


# ---- github.com/SandAI-org/MagiAttention, docs/source/blog/cp_benchmark.md: H100, 64:8 heads, 8 K tokens a
# GPU.


def _magi_attention() -> Iterator[Claim]:
    lacks = {
        "Ring P2P": "merging in separate passes, kernels of half blocks, and two streams that share the GPU",
        "Ring all-gather": "their collective uses all eight network cards of a node at once; here "
        "blocks walk one "
        "ring, of which two links cross a node's border",
        "Ulysses": "what their network achieves between nodes: here it is 28.1 GB/s a GPU, as on "
        "another system",
        "USP": "copies between layouts around the all-to-alls, which take no time here",
        "LoongTrain": "merging in separate passes, as with Ring P2P",
    }
    measured = {
        "Ulysses": ((601, 557, 580, 586), (582, 560, 573, 585), (606, 574, 583, 620)),
        "Ring P2P": ((421, 454, 451, 446), (432, 475, 469, 458), (511, 536, 517, 513)),
        "Ring all-gather": ((601, 592, 592, 580), (517, 525, 522, 524), (606, 594, 587, 584)),
        "USP": ((593, 588, 593, 587), (572, 570, 574, 571), (579, 603, 593, 604)),
        "LoongTrain": ((593, 586, 581, 589), (568, 549, 546, 561), (578, 602, 597, 604)),
    }
    methods = {
        "Ulysses": ("ulysses", {}),
        "Ring P2P": ("ring", {}),
        "Ring all-gather": ("allgather", {}),
        "USP": ("hybrid", {"ulysses_degree": 8}),
        "LoongTrain": ("double-ring", {"inner": 8}),
    }
    ways = ((True, FORWARD), (True, BACKWARD), (False, FORWARD))
    for (name, rows), ((causal, way), column) in product(
        measured.items(), zip(ways, range(3), strict=True)
    ):
        method, groups = methods[name]
        for ranks, published in zip((8, 16, 32, 64), rows[column], strict=True):
            mask = {"causal": True, "layout": "zigzag"} if causal else {}
            given = {
                "ranks": ranks,
                "seq_len": 8192 * ranks,
                "heads": 64,
                "kv_heads": 8,
                "head_dim": 128,
                "method": method,
                **groups,
                **mask,
            }
            of = attention("h100-measured", given)
            yield Claim(
                "github.com/SandAI-org/MagiAttention",
                f"{name}, {ranks} H100, {'causal' if causal else 'full'}, {way.value}",
                "TFLOP/s a GPU",
                float(published),
                lambda of=of, way=way: of.tflops(way),  # type: ignore[misc]
                of if way is FORWARD else of.changed(backward=True),
                lacks[name],
            )
