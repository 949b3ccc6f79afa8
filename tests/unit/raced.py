"""Runs a library made with ThreadSanitizer on blocks of many units; started by test_native_sanitized.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from ringmpi.devices import NativeDevice, native

# The tests' own helpers ask for this process's library as they load.
native._Here.library = native.Library(Path(sys.argv[1]))

from unit.attending import Backward, Case, attend, cut  # noqa: E402

#: Seconds, so that the caller takes many breaks while others go on.
SLICE_S = 1e-4

#: Several pieces of rows and keys for each KV head; a piece each, so that threads go ahead by KV heads; and
#: few rows with many keys, whose segments follow each other in the forward pass too.
GRIDS = (
    Case(tokens=420, queries=300, batch=1, heads=6, kv_heads=3, head_dim=256),
    Case(tokens=70, batch=2, heads=8, kv_heads=8, head_dim=64),
    Case(tokens=3000, queries=20, batch=1, heads=1, kv_heads=1, head_dim=256),
)

#: With blocks as they lie, and prepared ones.
DTYPES = ("float64", "bfloat16")

#: The matrix unit, and weights.
WAYS = (("off", "exact"), ("off", "rounded"), ("on", "exact"), ("on", "rounded"))


def main() -> None:
    native.SLICE_S = SLICE_S
    made = 0
    for grid in GRIDS:
        for dtype in DTYPES:
            for unit, weights in WAYS if dtype == "bfloat16" else WAYS[:1]:
                if unit == "on" and not native.library().has_matrix_unit:
                    continue
                case = replace(grid, dtype=dtype)
                device = NativeDevice(case.mask, case.scale, 3, unit, weights)
                blocks = cut(case.tokens)
                attend(device, case, case.tensors(), blocks)
                Backward.of(case).run(device, blocks)
                made += 1
    print(f"{made} cases")


if __name__ == "__main__":
    main()
