from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ringmpi.config import experiment_from
from ringmpi.layout import LAYOUTS, Layout
from ringmpi.store import ResultFile, ResultWriter

#: The integers whose bits a value is made of: any pattern, so NaN with payloads too.
BITS: dict[Any, Any] = {
    np.dtype(np.float64): np.uint64,
    np.dtype(np.float32): np.uint32,
    np.dtype(np.float16): np.uint16,
    np.dtype(ml_dtypes.bfloat16): np.uint16,
}

sides = st.integers(1, 4)
shapes = st.tuples(sides, sides, st.integers(1, 20), sides)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(list(BITS)), shapes, st.sampled_from(sorted(LAYOUTS)))
def test_outputs_come_back_bit_by_bit(
    data: st.DataObject, dtype: Any, shape: tuple[int, int, int, int], name: str
) -> None:
    out = data.draw(arrays(BITS[dtype], shape)).view(dtype)
    layout = Layout(name, shape[2], data.draw(st.integers(1, 6)))
    ranks = data.draw(st.permutations(range(layout.size)))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.h5"
        with ResultWriter(path) as writer:
            writer.tensor("outputs/out", shape, dtype)
            for rank in ranks:
                for run in layout.runs(rank):
                    writer.write_rows("outputs/out", run, out[:, :, list(run)])
            writer.describe(experiment_from({"seq_len": shape[2]}), "")
            writer.commit()

        with h5py.File(path, "r") as file:
            assert file["outputs/out"][...].tobytes() == out.tobytes()
        with ResultFile(path) as result:
            for b in range(shape[0]):
                for h in range(shape[1]):
                    rows = result.rows("out", b, h, (range(shape[2]),))
                    assert rows.dtype == dtype
                    assert rows.tobytes() == out[b, h].tobytes()
