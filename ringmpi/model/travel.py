"""Who should travel, keys and values or queries: the rule of Yang et al. 2024 (arXiv:2411.01783).

There T new tokens attend to T + P, of which P are cached, on N ranks that each compute C FLOP/s and send B
bytes a second. ``pass-KV`` is what ``ring`` does, ``pass-Q`` what ``passq`` does, with one difference: there
partial results come home in an all-to-all at the end, here the running state follows its queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True)
class Prompt:
    """Queries at the end of a sequence, and who attends.

    Attributes
    ----------
    new, cached : int
        Tokens T that attend, and tokens P before them.
    ranks : int
    heads, kv_heads : int
    itemsize : int
        Bytes of an element of q, k and v.
    """

    new: int
    cached: int
    ranks: int
    heads: int
    kv_heads: int
    itemsize: int

    @property
    def share(self) -> float:
        """``T / (T + P)``."""
        return self.new / (self.new + self.cached)

    @property
    def largest_share(self) -> float:
        """``2 N_KV / N_H``: up to this share queries are smaller than keys and values (their eq. 1)."""
        return 2 * self.kv_heads / self.heads

    def hidden_from(self, flops: float, bandwidth: float) -> float:
        """Return from how many new tokens on the compute hides keys and values (their eq. 2).

        Parameters
        ----------
        flops : float
            FLOP/s of a rank.
        bandwidth : float
            Bytes a second that a rank sends.
        """
        reads = self.kv_heads * self.itemsize / (2 * self.heads)
        return self.ranks * flops * reads / bandwidth

    def queries_should_travel(self, flops: float, bandwidth: float) -> bool:
        """Return what the rule says (their algorithm 1); without rates, what the sizes alone say.

        Parameters
        ----------
        flops, bandwidth : float
            As in `hidden_from`; NaN where not known.
        """
        known = isfinite(flops) and isfinite(bandwidth) and bandwidth > 0
        hidden = known and self.new >= self.hidden_from(flops, bandwidth)
        return not (hidden or self.share >= self.largest_share)
