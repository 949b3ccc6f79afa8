"""Contender `ring-attention-pytorch`: the attention function of lucidrains' package, over gloo.

Forward in float32 only: version 0.5.20 returns wrong dk and dv, and refuses bfloat16 on CPUs.

Usage: lucidrains_ring.py ADDRESS RANK RANKS STORE
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

from case import LAYOUTS, Array, Case
from worker import Job, Unsupported, serve

#: Of 256 to 2048 the fastest or nearly so, on 4096 tokens; a shard must be a multiple of it.
BUCKET = 512


class LucidrainsJob(Job):
    """Attention over the shards of all ranks."""

    def __init__(self, case: Case, layout: str) -> None:
        if case.backward:
            raise Unsupported("its dk and dv are wrong")
        if case.dtype != "float32":
            raise Unsupported(f"it refuses {case.dtype} on CPUs")
        self.case = case
        positions = LAYOUTS[layout](case.seq_len, dist.get_rank(), dist.get_world_size())
        self.positions = positions
        self.bucket = min(BUCKET, len(positions))
        inputs = case.inputs(positions)
        # [batch, tokens, heads, head_dim]
        self.tensors = [
            torch.from_numpy(inputs[name]).transpose(1, 2).contiguous() for name in ("q", "k", "v")
        ]

    def run(self) -> Any:
        """Attend."""
        with torch.no_grad():
            return ring_flash_attn(
                *self.tensors,
                causal=self.case.causal,
                bucket_size=self.bucket,
                ring_reduce_col=True,
                ring_size=dist.get_world_size(),
            )

    def outputs(self, result: Any) -> dict[str, Array]:
        """Return the result by name."""
        return {"out": result.transpose(1, 2).numpy()}


if __name__ == "__main__":
    address, rank, ranks, store = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks)
    )
    serve(
        address,
        LucidrainsJob,
        {"ring-attention-pytorch": metadata.version("ring-attention-pytorch")},
        int(rank),
        dist.barrier,
    )
