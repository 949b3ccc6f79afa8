"""FLOPs, bytes and thresholds, against published numbers and forms."""

from __future__ import annotations

import numpy as np
import pytest

from ringmpi.encoding import numpy_dtype
from ringmpi.layout import Layout
from ringmpi.model.costs import allowed_share, attention_flops, hop_nbytes, least_queries
from ringmpi.schedule import Pass, Shards
from ringmpi.schedule.steps import Part, Payload
from ringmpi.tensors import Shape

FORWARD, BACKWARD = Pass.FORWARD, Pass.BACKWARD


def shape(heads: int = 32, kv_heads: int = 0, dtype: str = "bfloat16", batch: int = 1) -> Shape:
    return Shape(batch, heads, kv_heads or heads, 128, numpy_dtype(dtype))


def test_flops_are_those_of_the_flash_attention_benchmarks() -> None:
    """4 * seqlen^2 * headdim * heads * batch, and 2.5 times that backward."""
    pairs = 4096 * 4096

    assert attention_flops(shape(batch=4), pairs, FORWARD) == 4 * 4096**2 * 128 * 32 * 4
    assert attention_flops(shape(batch=4), pairs, BACKWARD) * 2 == 5 * 4 * 4096**2 * 128 * 32 * 4


def test_a_hop_has_the_bytes_of_the_paper() -> None:
    """4 c d bytes with d = 32 * 128; 16 MiB in the simulator's example; 16.38 MB in Meta's."""
    assert hop_nbytes(shape(), 1000, FORWARD) == 4 * 1000 * 4096
    assert hop_nbytes(shape(8, dtype="float16"), 4096, FORWARD) == 16_777_216
    assert hop_nbytes(shape(16, 1), 32_000, FORWARD) == 16_384_000


def test_gradients_follow_in_the_dtype_of_the_state() -> None:
    """k, v of 2 bytes and dk, dv of 4: 12 c d; of 8 and 8 for float64: 32 c d."""
    assert hop_nbytes(shape(), 1000, BACKWARD) == 12 * 1000 * 4096
    assert hop_nbytes(shape(dtype="float64"), 1000, BACKWARD) == 32 * 1000 * 4096


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [1, 4, 32])
def test_bytes_by_formula_are_those_of_the_buffers(dtype: str, kv_heads: int) -> None:
    whole = Layout("contiguous", 77, 1)
    one, inputs = Shards(whole, whole, 0), shape(32, kv_heads, dtype, 3)
    keys, gradients = (inputs.nbytes(Part(what, 0), one) for what in (Payload.KV, Payload.DKV))

    assert hop_nbytes(inputs, 77, FORWARD) == keys
    assert hop_nbytes(inputs, 77, BACKWARD) == keys + gradients


#: F in TFLOP/s, B in GB/s, tokens: full mask, as many KV heads as heads, 16 bits.
HARDWARE = [
    (312, 300, 1040),
    (203, 274, 741),
    (312, 25, 12_480),
    (312, 12.5, 24_960),
    (312, 100, 3120),
    (989, 450, 2198),
    (648, 376, 1723),
    (989, 50, 19_780),
    (648, 26, 24_923),
    (989, 25, 39_560),
    (989, 150, 6593),
    (2250, 900, 2500),
    (1300, 746, 1743),
    (2250, 50, 45_000),
    (2250, 100, 22_500),
    (383, 25, 15_320),
    (191.5, 50, 3830),
    (1307, 64, 20_422),
    (1307, 448, 2917),
    (256, 185, 1384),
    (256, 15, 17_067),
    (197, 45, 4378),
    (459, 90, 5100),
    (918, 90, 10_200),
]


@pytest.mark.parametrize(("flops", "bandwidth", "tokens"), HARDWARE)
def test_thresholds_of_hardware_are_as_published(flops: float, bandwidth: float, tokens: int) -> None:
    assert round(least_queries(shape(), FORWARD, flops * 1e12, bandwidth * 1e9)) == tokens


def factor(direction: Pass = FORWARD, share: float = 1.0, **inputs: object) -> float:
    """Return the threshold in multiples of F / B."""
    return least_queries(shape(**inputs), direction, 3e12, 1e9, share=share) / 3000  # type: ignore[arg-type]


def test_factors_of_the_threshold() -> None:
    assert factor() == pytest.approx(1)
    assert factor(kv_heads=8) == pytest.approx(8 / 32)
    assert factor(dtype="float32") == pytest.approx(2)
    assert factor(dtype="float64", kv_heads=8) == pytest.approx(4 / 4)
    assert factor(share=0.5) == pytest.approx(2)
    assert factor(BACKWARD) == pytest.approx(1.2)
    assert factor(BACKWARD, dtype="float64") == pytest.approx(3.2)
    assert factor(BACKWARD, kv_heads=8, share=0.5) == pytest.approx(1.2 * 2 / 4)


def test_batch_and_width_cancel() -> None:
    wide = Shape(5, 32, 32, 64, np.dtype(np.float16))

    assert least_queries(wide, FORWARD, 3e12, 1e9) == pytest.approx(3000)


def test_the_threshold_is_where_meta_measured_it() -> None:
    """128 heads of which 8 KV, 4 ranks, 520 TFLOP/s and 26 GB/s a rank: 5000 new tokens, so 1250 a rank."""
    inputs = shape(128, 8)

    assert least_queries(inputs, FORWARD, 520e12, 26e9) == pytest.approx(1250)


def test_with_latency_compute_and_transfer_take_equally_long() -> None:
    inputs = shape(8, 2, batch=2)

    tokens = least_queries(inputs, BACKWARD, 1e14, 1e10, share=0.5, latency=1e-4, keys_per_query=3.0)

    computing = 10 * 2 * 8 * 128 * tokens * (3 * tokens) * 0.5 / 1e14
    sending = 1e-4 + 2 * 2 * 2 * 128 * (3 * tokens) * (2 + 4) / 1e10
    assert computing == pytest.approx(sending, rel=1e-12)


@pytest.mark.parametrize(
    ("causal", "layout", "queries", "share"),
    [
        (False, "zigzag", 1024, 1.0),
        (True, "contiguous", 1024, 1.0),
        (True, "zigzag", 1024, 0.5),
        (True, "striped", 1024, 0.5),
        (True, "striped", 256, 1 - 256 / 2048),
    ],
)
def test_the_share_of_allowed_pairs(causal: bool, layout: str, queries: int, share: float) -> None:
    keys, asking = Layout(layout, 1024, 4), Layout(layout, queries, 4, 1024 - queries)

    assert allowed_share(causal, keys, asking) == share
