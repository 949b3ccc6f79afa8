"""Shapes of whole transformers: their parameters and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from ringmpi.errors import check_choice
from ringmpi.schedule import Pass


@dataclass(frozen=True)
class Transformer:
    """What a transformer is made of.

    Attributes
    ----------
    layers, hidden : int
    heads, kv_heads, head_dim : int
    feedforward : int
        Width between the matrices of a feedforward network.
    gated : bool
        Whether it has three matrices (SwiGLU), not two.
    vocabulary : int
        Tokens of the two embeddings; 0 to leave them out.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feedforward: int
    gated: bool = False
    vocabulary: int = 0

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of a layer."""
        projections = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return projections + (3 if self.gated else 2) * self.hidden * self.feedforward

    @property
    def parameters(self) -> int:
        """All elements, with a norm before each half of a layer and one at the end."""
        norms = (2 * self.layers + 1) * self.hidden
        return self.layers * self.layer_weights + 2 * self.vocabulary * self.hidden + norms

    def matrix_flops(self, tokens: int, direction: Pass) -> int:
        """Return the FLOPs of all but attention: 2 a weight and token, twice that in the backward pass.

        For as many KV heads as heads, a plain feedforward network of ``4 h`` and no vocabulary this is
        ``24 b s h^2`` a layer (Liu et al. 2023, appendix D).
        """
        weights = self.layers * self.layer_weights + self.vocabulary * self.hidden
        return (2 if direction is Pass.FORWARD else 4) * weights * tokens


def plain(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> Transformer:
    """Return the transformer of the Ring Attention paper's formulas: a feedforward network of ``4 h``."""
    return Transformer(layers, hidden, heads, kv_heads, head_dim, 4 * hidden)


def _llama(layers: int, hidden: int, heads: int, feedforward: int) -> Transformer:
    return Transformer(layers, hidden, heads, heads, 128, feedforward, True, 32_000)


def _llama_3(layers: int, hidden: int, heads: int, feedforward: int) -> Transformer:
    return Transformer(layers, hidden, heads, 8, 128, feedforward, True, 128_256)


#: Published shapes. llama: Touvron et al. 2023 (arXiv:2302.13971), table 2, with feedforward networks of
#: 2/3 * 4 h rounded up to a multiple of 256. llama-3: Dubey et al. 2024 (arXiv:2407.21783), table 3, with
#: the vocabulary of 128 256 of the released weights.
TRANSFORMERS = {
    "llama-7b": _llama(32, 4096, 32, 11_008),
    "llama-13b": _llama(40, 5120, 40, 13_824),
    "llama-33b": _llama(60, 6656, 52, 17_920),
    "llama-65b": _llama(80, 8192, 64, 22_016),
    "llama-3-8b": _llama_3(32, 4096, 32, 14_336),
    "llama-3-70b": _llama_3(80, 8192, 64, 28_672),
    "llama-3-405b": _llama_3(126, 16_384, 128, 53_248),
}


def published(name: str) -> Transformer:
    """Return a published shape by name.

    Raises
    ------
    ConfigError
        If the name is unknown.
    """
    check_choice("model", name, TRANSFORMERS)
    return TRANSFORMERS[name]
