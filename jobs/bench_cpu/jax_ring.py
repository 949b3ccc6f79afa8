"""Contender `jax-ring`: the JAX ring of the authors of the paper, on devices that share this process.

Usage: XLA_FLAGS=--xla_force_host_platform_device_count=RANKS JAX_PLATFORMS=cpu jax_ring.py ADDRESS
"""

from __future__ import annotations

import sys
import types
from importlib import metadata
from typing import Any

import jax
import jax.extend.backend
import jax.lib
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from case import Array, Case
from worker import Job, Unsupported, serve

# ringattention 0.1.2 asks at import for a module that jax has since moved.
if not hasattr(jax.lib, "xla_bridge"):
    jax.lib.xla_bridge = types.SimpleNamespace(get_backend=jax.extend.backend.get_backend)

from ringattention import ringattention

AXIS = "ring"
MESH = Mesh(np.array(jax.devices()), (AXIS,))
SHARDED = PartitionSpec(None, AXIS)  # [batch, tokens, heads, head_dim]

#: Queries and keys of a tile; of 256 to 2048 the fastest or nearly so, on 4096 tokens.
CHUNK = 512


class JaxJob(Job):
    """Attention over the shards of all devices."""

    def __init__(self, case: Case, layout: str) -> None:
        if layout != "contiguous":
            raise Unsupported(f"it has no {layout} shards")
        self.case = case
        place = NamedSharding(MESH, SHARDED)
        self.tensors = [
            jax.device_put(jnp.asarray(array.swapaxes(1, 2), case.dtype), place)
            for array in case.inputs().values()
        ]
        chunk = min(CHUNK, case.seq_len // MESH.size)
        options = {
            "causal_block_size": 1 if case.causal else None,
            "deterministic": True,
            "dropout_rng": None,
            "attn_pdrop": 0.0,
            "query_chunk_size": chunk,
            "key_chunk_size": chunk,
            "policy": jax.checkpoint_policies.nothing_saveable,
            "dtype": jnp.float32,
            "precision": None,
            "prevent_cse": True,
        }

        def ring(q: Any, k: Any, v: Any) -> Any:
            return ringattention(q, k, v, None, None, None, AXIS, True, options)

        attend = jax.shard_map(
            ring, mesh=MESH, in_specs=(SHARDED,) * 3, out_specs=SHARDED, check_vma=False
        )

        def both(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
            out, back = jax.vjp(attend, q, k, v)
            return out, *back(dout)

        def forward(q: Any, k: Any, v: Any, _: Any) -> tuple[Any, ...]:
            return (attend(q, k, v),)

        self._function = jax.jit(both if case.backward else forward)

    def run(self) -> Any:
        """Attend, and go back if asked to."""
        return jax.block_until_ready(self._function(*self.tensors))

    def outputs(self, result: Any) -> dict[str, Array]:
        """Return the results by name."""
        return {
            name: np.asarray(array, np.float32).swapaxes(1, 2)
            for name, array in zip(self.case.tensors, result, strict=True)
        }


if __name__ == "__main__":
    serve(
        sys.argv[1],
        JaxJob,
        {"jax": jax.__version__, "ringattention": metadata.version("ringattention")},
    )
