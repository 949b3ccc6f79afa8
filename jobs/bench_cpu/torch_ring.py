"""Contender `torch-ring`: PyTorch's own ring template of context parallelism, over gloo.

The public interface does not work on CPUs, since it has no sharding rule for their flash attention. The
template under it does, when it is given that operation.

Usage: torch_ring.py ADDRESS RANK RANKS STORE ROTATION
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as template

from case import LAYOUTS, Array, Case
from worker import Job, serve

SEQUENCE_DIM = 2
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(q: Any, k: Any, v: Any, is_causal: bool, **options: Any) -> Any:
    """Call the operation as the template does."""
    return FLASH(q, k, v, is_causal=is_causal, **options)


def attend_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    is_causal: bool,
    **_: Any,
) -> Any:
    """Call the operation as the template does."""
    return FLASH_BACKWARD(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)


class TemplateJob(Job):
    """Attention over the shards of all ranks."""

    def __init__(self, case: Case, layout: str, rotation: str) -> None:
        self.case, self.layout, self.rotation = case, layout, rotation
        self.positions = LAYOUTS[layout](case.seq_len, dist.get_rank(), dist.get_world_size())
        dtype = getattr(torch, case.dtype)
        inputs = case.inputs(self.positions)
        self.tensors = [torch.from_numpy(array).to(dtype) for array in inputs.values()]

    def run(self) -> list[Any]:
        """Attend, and go back if asked to."""
        template.set_rotate_method(self.rotation)
        # The template takes shards as zigzag ones where this is set.
        template._cp_options.enable_load_balance = self.layout == "zigzag"
        q, k, v, dout = self.tensors
        group, causal = dist.group.WORLD, self.case.causal
        with torch.no_grad():
            out, lse, *_ = template._templated_ring_attention(
                group, SEQUENCE_DIM, attend, q, k, v, is_causal=causal
            )
            if not self.case.backward:
                return [out]
            back = template._templated_ring_attention_backward(
                group, SEQUENCE_DIM, attend_backward, dout, "grad_out", q, k, v, out, lse, causal
            )
        return [out, *back[:3]]

    def outputs(self, result: list[Any]) -> dict[str, Array]:
        """Return the results by name."""
        return {
            name: tensor.float().numpy() for name, tensor in zip(self.case.tensors, result, strict=True)
        }


if __name__ == "__main__":
    address, rank, ranks, store, rotation = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks)
    )
    serve(
        address,
        lambda case, layout: TemplateJob(case, layout, rotation),
        {"torch": str(torch.__version__)},
        int(rank),
        dist.barrier,
    )
