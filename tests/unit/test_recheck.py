from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from ringmpi.config import experiment_from
from ringmpi.errors import StoreError
from ringmpi.problem import FromFile, describe_input
from ringmpi.recheck import _problem


def write(path: Path, queries: int, keys: int) -> str:
    with h5py.File(path, "w") as file:
        for name, tokens in (("q", queries), ("k", keys), ("v", keys)):
            file[name] = np.zeros((1, 2, tokens, 3), np.float32)
    return str(path)


@pytest.mark.parametrize(
    ("queries", "keys", "told"),
    [(5, 9, "query_len=5, the run used 7"), (7, 8, "seq_len=8, the run used 9"), (7, 10, "seq_len=10")],
)
def test_an_input_file_of_other_tokens_is_refused(
    tmp_path: Path, queries: int, keys: int, told: str
) -> None:
    path = write(tmp_path / "in.h5", 7, 9)
    experiment = experiment_from({"input": path}, describe_input(path))
    result: Any = SimpleNamespace(has_inputs=False, path=tmp_path / "r.h5")
    assert isinstance(_problem(result, experiment), FromFile)
    write(tmp_path / "other.h5", queries, keys)
    (tmp_path / "other.h5").replace(path)

    with pytest.raises(StoreError, match=told):
        _problem(result, experiment)
