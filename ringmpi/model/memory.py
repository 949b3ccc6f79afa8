"""What a rank must hold: activations of a layer by architecture, and the longest context that fits.

Activations are those of Liu et al. 2023 (arXiv:2310.01889, table 1): what self-attention and the feedforward
network of one layer hold at their peak, of which the larger counts. There ``b`` is the batch, ``s`` the
sequence, ``c`` a block, ``h`` the hidden size and ``n`` the heads; here ``e`` are the bytes of an element.

====================  =======================  ===========
architecture          self-attention           feedforward
====================  =======================  ===========
vanilla               ``e b n s^2``            ``4 e b s h``
memory-efficient      ``e b s h + 2 e b c h``  ``4 e b s h``
blockwise             ``e b s h``              ``e b s h``
ring                  six blocks               ``e b c h``
====================  =======================  ===========

The six blocks of a ring are q and out, and k and v twice: the ones here and the ones that arrive. That is
``6 e b c h``, so in 16 bits ``12 b c h`` bytes; the paper prints ``6 b c h`` bytes, which counts elements.
Blocks of k and v have the width of the KV heads. For the ring ``c`` is the shard of a rank; the others keep
the whole sequence on every rank, each rank with a batch of its own.

Beside a layer's activations a rank holds, for whole transformers,

* in training: weights, gradients and the state of Adam, 16 bytes a parameter, in mixed precision as in
  single (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1), sharded over all ranks; and the input of
  every layer, since with full checkpointing the rest is computed again;
* forward alone: the weights, sharded over all ranks; and k and v of every layer;
* the whole weights of the layer at work, gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringmpi.model.transformer import Transformer

#: Architectures by their names in the table above.
VANILLA, MEMORY_EFFICIENT, BLOCKWISE, RING = "vanilla", "memory-efficient", "blockwise", "ring"
ARCHITECTURES = (VANILLA, MEMORY_EFFICIENT, BLOCKWISE, RING)

#: Blocks that a rank of a ring holds: q, out, and twice k and v.
BLOCKS_OF_RING = 6

#: Bytes a parameter in training with Adam.
TRAINING_NBYTES = 16

#: Contexts beyond this are not looked for; positions are exact up to 2**53.
LONGEST = 2**50


@dataclass(frozen=True)
class Activations:
    """What one layer holds at its peak, bytes.

    Attributes
    ----------
    attention, feedforward : int
    """

    attention: int
    feedforward: int

    @property
    def total(self) -> int:
        """The larger of the two, which are not there at once."""
        return max(self.attention, self.feedforward)


def activations(
    architecture: str, model: Transformer, seq_len: int, block: int, batch: int, itemsize: int
) -> Activations:
    """Return what one layer of a rank holds.

    Parameters
    ----------
    architecture : str
        One of `ARCHITECTURES`.
    model : Transformer
    seq_len, block : int
        Tokens of the whole sequence, and of a block.
    batch : int
    itemsize : int
        Bytes of an element.
    """
    wide, narrow = model.hidden, model.kv_heads * model.head_dim
    element = batch * itemsize
    whole = element * seq_len * wide
    if architecture == VANILLA:
        return Activations(element * model.heads * seq_len**2, 4 * whole)
    if architecture == MEMORY_EFFICIENT:
        return Activations(whole + 2 * element * block * narrow, 4 * whole)
    if architecture == BLOCKWISE:
        return Activations(whole, whole)
    assert architecture == RING
    queries, keys = 2, BLOCKS_OF_RING - 2
    return Activations(element * block * (queries * wide + keys * narrow), element * block * wide)


@dataclass(frozen=True)
class Setting:
    """Who trains or reads what, and how.

    Attributes
    ----------
    model : Transformer
    ranks : int
    batch, itemsize : int
    training : bool
        Whether there is a backward pass.
    """

    model: Transformer
    ranks: int
    batch: int
    itemsize: int
    training: bool

    @property
    def fixed_nbytes(self) -> int:
        """Bytes of a rank that do not depend on the context."""
        each = TRAINING_NBYTES if self.training else self.itemsize
        sharded = -(-each * self.model.parameters // self.ranks)
        return sharded + self.itemsize * self.model.layer_weights

    def held_nbytes(self, architecture: str, seq_len: int) -> int:
        """Return all that a rank holds for a context."""
        model = self.model
        block = -(-seq_len // self.ranks)
        tokens = block if architecture == RING else seq_len
        width = model.hidden if self.training else 2 * model.kv_heads * model.head_dim
        kept = model.layers * self.batch * self.itemsize * tokens * width
        layer = activations(architecture, model, seq_len, block, self.batch, self.itemsize)
        return self.fixed_nbytes + kept + layer.total

    def longest_context(self, architecture: str, memory: float) -> int:
        """Return the most tokens of a sequence that fit into the memory of a rank; 0 if not even one does."""
        low, high = 0, LONGEST
        while low < high:
            middle = (low + high + 1) // 2
            if self.held_nbytes(architecture, middle) <= memory:
                low = middle
            else:
                high = middle - 1
        return low
