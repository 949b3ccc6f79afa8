"""Contender `torch-sdpa`: torch scaled_dot_product_attention, its flash path for CPUs.

Usage: torch_sdpa.py ADDRESS THREADS
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from case import Array, Case
from worker import Job, serve


class SdpaJob(Job):
    """Attention in one process."""

    def __init__(self, case: Case) -> None:
        self.case = case
        dtype = getattr(torch, case.dtype)
        inputs = {name: torch.from_numpy(array).to(dtype) for name, array in case.inputs().items()}
        self.dout = inputs.pop("dout")
        self.leaves = [tensor.requires_grad_(case.backward) for tensor in inputs.values()]

    def run(self) -> list[Any]:
        """Attend, and go back if asked to."""
        for leaf in self.leaves:
            leaf.grad = None
        with torch.set_grad_enabled(self.case.backward), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(*self.leaves, is_causal=self.case.causal)
            if not self.case.backward:
                return [out]
            out.backward(self.dout)
        return [out, *(leaf.grad for leaf in self.leaves)]

    def outputs(self, result: list[Any]) -> dict[str, Array]:
        """Return the results by name."""
        return {
            name: tensor.detach().float().numpy()
            for name, tensor in zip(self.case.tensors, result, strict=True)
        }


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    serve(
        sys.argv[1],
        lambda case, _: SdpaJob(case),
        {"torch": str(torch.__version__), "torch cpu": torch.backends.cpu.get_cpu_capability()},
    )
