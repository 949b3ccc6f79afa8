"""A rank that fails ends the whole job, and says who it was."""

from __future__ import annotations

import io
from typing import Any

import h5py
import pytest
from running import Ended, Scenario

#: Seconds after which a failure must have ended all ranks, from the failure to the launcher's end.
LIMIT = 10.0

RUN = "run --seq-len 48 --heads 2 --head-dim 4 --repeats 2 --output r.h5"


def older_result() -> bytes:
    """Return a file that ringmpi takes for a result, and so would replace."""
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        file.attrs["format_version"] = 1
    return image.getvalue()


OLDER = older_result()


def failing(ranks: int, fault: str, options: str = "", *, as_module: bool = False) -> Scenario:
    return Scenario(
        ranks,
        f"{RUN} {options}",
        fault=fault,
        as_module=as_module,
        files=lambda work: (work / "r.h5").write_bytes(OLDER) and None,
    )


#: The failing rank, how many there are, the fault, whether ``python -m ringmpi`` runs, and options.
RAISING: dict[str, tuple[Any, ...]] = {
    "first rank, making shards": (0, 3, "shards:call=1", False),
    "middle rank, attending beside a thread": (1, 3, "attend:call=1", False, "--progress thread"),
    "last rank, attending, python -m": (2, 3, "attend:call=4", True),
    "first rank, starting transfers, python -m": (0, 3, "start:call=1", True),
    "last rank, starting transfers": (3, 4, "start:call=6", False),
    "middle rank, finishing transfers": (1, 3, "finish:call=1", False),
    "last rank, finishing in a later pass": (2, 3, "finish:call=7", False),
    "rank 0, verifying": (0, 3, "verify", False),
    "rank 0, moving the file into place": (0, 3, "commit", False),
    "the only rank": (0, 1, "attend", False),
    # After three steps forward: in the second step back.
    "middle rank, attending on the way back": (1, 3, "attend:call=4", False, "--backward"),
    # The last step back, in which nothing is computed and the sums come home.
    "last rank, waiting for its gradients": (2, 3, "finish:call=6", False, "--backward"),
}


@pytest.mark.parametrize(
    ("ended", "rank", "ranks"),
    [
        pytest.param(
            failing(ranks, f"raise:rank={rank}:place={place}", *options, as_module=as_module),
            rank,
            ranks,
            id=name,
        )
        for name, (rank, ranks, place, as_module, *options) in RAISING.items()
    ],
    indirect=["ended"],
)
def test_exception_on_one_rank_ends_the_job(ended: Ended, rank: int, ranks: int) -> None:
    assert ended.returncode not in (0, 2), ended.told()
    assert ended.since("raise") < LIMIT, ended.told()
    lines = ended.complaints()
    assert all(line.startswith(f"ringmpi: rank {rank} of {ranks}: ") for line in lines), ended.told()
    assert lines[0].endswith("Traceback (most recent call last):"), ended.told()
    assert lines[-1].endswith("RuntimeError: a fault of the test"), ended.told()
    # The rank that raises removes what another one has begun to write.
    assert_only_the_older_file_is_there(ended)


def assert_only_the_older_file_is_there(ended: Ended) -> None:
    assert (ended.work / "r.h5").read_bytes() == OLDER
    assert ended.files() == ["r.h5"], ended.told()


@pytest.mark.parametrize(
    ("ended", "word"),
    [
        pytest.param(failing(3, "exit:rank=1:place=attend:call=1"), "SystemExit", id="sys.exit(0)"),
        pytest.param(
            failing(3, "memory:rank=2:place=attend:call=1"), "MemoryError", id="memory that runs out"
        ),
    ],
    indirect=["ended"],
)
def test_what_is_not_an_ordinary_exception_ends_the_job_too(ended: Ended, word: str) -> None:
    assert ended.returncode != 0, ended.told()
    assert ended.since("exit" if word == "SystemExit" else "memory") < LIMIT, ended.told()
    assert any(word in line for line in ended.complaints()), ended.told()
    assert_only_the_older_file_is_there(ended)


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(failing(3, "kill:rank=1:place=attend:call=1"), id="a rank that computes"),
        pytest.param(failing(3, "kill:rank=0:place=commit"), id="the rank that writes"),
    ],
    indirect=True,
)
def test_killed_rank_ends_the_job(ended: Ended) -> None:
    assert ended.returncode != 0, ended.told()
    assert ended.since("kill") < LIMIT, ended.told()
    assert (ended.work / "r.h5").read_bytes() == OLDER
    # What a killed job has begun to write the next one removes.
    left = [name for name in ended.files() if not name.startswith(".r.h5.")]
    assert left == ["r.h5"], ended.told()


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(
            Scenario(3, RUN, fault=f"raise:rank={rank}:place={place}"), id=f"rank {rank}, {place}"
        )
        for rank, place in ((0, "commit"), (1, "finish"))
    ],
    indirect=True,
)
def test_no_result_appears_where_none_was(ended: Ended) -> None:
    assert ended.returncode != 0, ended.told()
    assert not (ended.work / "r.h5").exists()
