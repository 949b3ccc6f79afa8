"""What a rank holds: the Ring Attention paper's table 1, whole models, and the longest context."""

from __future__ import annotations

import pytest

from ringmpi.errors import ConfigError
from ringmpi.model.memory import (
    ARCHITECTURES,
    BLOCKWISE,
    MEMORY_EFFICIENT,
    RING,
    VANILLA,
    Activations,
    Setting,
    activations,
)
from ringmpi.model.transformer import plain, published
from ringmpi.schedule import Pass

#: b, s, h, n, c.
B, S, H, N, C = 3, 4096, 1024, 16, 512

MODEL = plain(2, H, N, N, 64)


@pytest.mark.parametrize(
    ("architecture", "attention", "feedforward"),
    [
        (VANILLA, 2 * B * N * S**2, 8 * B * S * H),
        (MEMORY_EFFICIENT, 2 * B * S * H + 4 * B * C * H, 8 * B * S * H),
        (BLOCKWISE, 2 * B * S * H, 2 * B * S * H),
        # Six blocks of 2 bytes an element; the paper's 6bch are elements.
        (RING, 2 * 6 * B * C * H, 2 * B * C * H),
    ],
)
def test_activations_are_those_of_table_1(architecture: str, attention: int, feedforward: int) -> None:
    assert activations(architecture, MODEL, S, C, B, 2) == Activations(attention, feedforward)


def test_the_larger_half_of_a_layer_counts() -> None:
    assert Activations(3, 5).total == Activations(5, 3).total == 5


def test_blocks_of_keys_have_the_width_of_kv_heads() -> None:
    """q and out of 16 heads, twice k and v of 4: 2 + 4/4 blocks."""
    grouped = plain(2, H, N, 4, 64)

    assert activations(RING, grouped, S, C, B, 2).attention == 2 * 3 * B * C * H


def test_twice_the_item_size_is_twice_the_memory() -> None:
    for architecture in ARCHITECTURES:
        half, full = (activations(architecture, MODEL, S, C, B, size) for size in (2, 4))
        assert (full.attention, full.feedforward) == (2 * half.attention, 2 * half.feedforward)


#: Parameters as published: LLaMA table 2, the model cards of Llama 3.
PARAMETERS = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_models_have_as_many_parameters_as_published(name: str) -> None:
    assert published(name).parameters == PARAMETERS[name]


def test_an_unknown_model_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama-3-8b'"):
        published("llama3-8b")


def test_all_but_attention_is_24_b_s_h_squared_a_layer() -> None:
    assert MODEL.matrix_flops(B * S, Pass.FORWARD) == 2 * 24 * B * S * H**2
    assert MODEL.matrix_flops(B * S, Pass.BACKWARD) == 2 * 48 * B * S * H**2


def test_a_rank_in_training_holds_states_inputs_of_layers_and_a_layer() -> None:
    setting = Setting(MODEL, ranks=4, batch=B, itemsize=2, training=True)
    weights = 12 * H**2
    states = 16 * (2 * weights + 5 * H) // 4

    ring = states + 2 * weights + 2 * (2 * B * C * H) + 12 * B * C * H
    assert setting.held_nbytes(RING, 4 * C) == ring
    blockwise = states + 2 * weights + 2 * (2 * B * S * H) + 2 * B * S * H
    assert setting.held_nbytes(BLOCKWISE, S) == blockwise


def test_a_rank_that_only_reads_holds_weights_and_keys_of_all_layers() -> None:
    setting = Setting(plain(2, H, N, 4, 64), ranks=4, batch=B, itemsize=2, training=False)
    layer = 2 * H * 64 * (N + 4) + 8 * H**2

    held = 2 * (2 * layer + 5 * H) // 4 + 2 * layer + 2 * (2 * B * C * 2 * 4 * 64) + 2 * 3 * B * C * H
    assert setting.held_nbytes(RING, 4 * C) == held


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("training", [True, False])
def test_the_longest_context_fits_and_one_token_more_does_not(
    architecture: str, training: bool
) -> None:
    setting = Setting(published("llama-7b"), 8, 1, 2, training)

    longest = setting.longest_context(architecture, 80e9)

    assert setting.held_nbytes(architecture, longest) <= 80e9
    assert setting.held_nbytes(architecture, longest + 1) > 80e9


def test_the_longest_context_of_one_layer_has_a_closed_form() -> None:
    """Without what is kept of layers: M = 16 N / P + 2 N + s (2 b h + 2 b h) for a blockwise layer."""
    setting = Setting(plain(1, H, N, N, 64), 1, 1, 2, training=True)
    fixed = 16 * (12 * H**2 + 3 * H) + 2 * 12 * H**2

    assert setting.longest_context(BLOCKWISE, fixed + 1000 * 4 * H) == 1000


def test_a_ring_of_n_ranks_has_n_times_the_context_of_its_share() -> None:
    """States apart, all that a rank of a ring holds is proportional to its own tokens."""
    model = published("llama-7b")
    contexts = []
    for ranks in (8, 64):
        setting = Setting(model, ranks, 1, 2, training=True)
        contexts.append(setting.longest_context(RING, setting.fixed_nbytes + 10e9))

    assert contexts[1] // 64 == contexts[0] // 8


def test_what_does_not_fit_has_no_context() -> None:
    assert Setting(published("llama-3-405b"), 8, 1, 2, True).longest_context(RING, 80e9) == 0
