"""Runs whose compute takes time and computes nothing: their files say so, and nobody verifies them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable

import h5py
import numpy as np
import pytest
from running import Ended, Here, Scenario

MAP = "2:1Gbit/s,1us:100Mbit/s,1ms,shared:2-0=10Mbit/s,2ms"

#: 40 causal tokens, 2 heads of width 4, on 3 ranks; a FLOP takes a microsecond.
PACED = Scenario(
    3,
    f"run --seq-len 40 --heads 2 --head-dim 4 --causal --layout zigzag --backward --device paced --flops 1e6 "
    f"--slow 2:1.5 --link-map {MAP} --repeats 2 --output p.h5",
)

SWEEP = Scenario(
    0,
    "sweep --ranks 1,2 --seq-len 40 --heads 2 --head-dim 4 --device paced --flops 1e6 --repeats 1 "
    "--vary slow=0:1;0:2,1:3 --vary link_map=1:1Gbit/s,1us:1Gbit/s,1us --output swept",
    timeout=110,
)


@pytest.mark.parametrize("ended", [PACED], indirect=True)
def test_the_file_says_that_nothing_was_computed(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    assert "# nothing is computed, so nothing will be verified" in ended.stdout
    assert ended.stdout.rstrip().endswith("# verdict: not verified (none)")
    with h5py.File(ended.work / "p.h5") as file:
        assert "outputs" not in file
        assert not file["inputs"].attrs
        assert dict(file["verification"].attrs) == {"how": "none"}
        assert list(file["ranks/device"].asstr()) == ["paced"] * 3
        # Two divisions by 1 and by 1.5: each rounds once.
        np.testing.assert_allclose(file["ranks/paced_flops"][:], [1e6, 1e6, 1e6 / 1.5], rtol=1e-15)
        assert "nothing is computed" in file["machine"].attrs["compute"]
        assert not file["machine"].attrs["oversubscribed"]
        config = json.loads(file.attrs["config"])
        assert (config["flops"], config["slow"], config["link_map"]) == (1e6, "2:1.5", MAP)
        flops = 4 * 4 * 2 * (40 * 41 // 2)
        assert file["timings/flops"][0].sum() == flops
        assert file["timings/backward/flops"][0].sum() == 2.5 * flops
        # What a rank oversleeps, it makes up for by a millisecond at most.
        took = file["timings/compute_done"][:] - file["timings/launched"][:]
        least = file["timings/flops"][:] / file["ranks/paced_flops"][:][:, None]
        assert (took.sum(axis=2) >= least.sum(axis=2) - 1e-3).all()


@pytest.mark.parametrize("ended", [PACED], indirect=True)
def test_it_is_reported_and_compared_but_not_verified(
    ended: Ended, here: Here, launch: Callable[..., Ended]
) -> None:
    path = ended.work / "p.h5"
    code, told = here("report", path)
    assert code == 0
    assert "paced at 1e-06 TFLOP/s a rank, computes nothing" in told
    assert f"{MAP} is emulated" in told
    assert "nothing was computed, so nothing could be verified" in told
    assert "ranks made slower: 2:1.5" in told
    code, told = here("report", "--compare", path)
    assert code == 0
    assert told.count("not verified") == 2  # Forward and backward.
    refused = launch(0, "verify", path)
    assert refused.returncode == 2, refused.told()
    assert refused.complaints() == [
        f"ringmpi: {path}: device=paced computes nothing, so it has no outputs to verify"
    ]


@pytest.mark.parametrize("ended", [SWEEP], indirect=True)
def test_a_sweep_leaves_the_verdict_open(ended: Ended) -> None:
    """A slow rank 1 needs two ranks: with one the sweep is refused before anything runs."""
    assert ended.returncode == 2, ended.told()
    assert "slow=0:2,1:3: rank 1 is none of the 1" in ended.stderr
    assert ended.files() == []


@pytest.mark.parametrize(
    "ended", [Scenario(0, SWEEP.args.replace("--ranks 1,2", "--ranks 2"), timeout=110)], indirect=True
)
def test_a_sweep_over_paced_ranks_goes_through(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    with (ended.work / "swept/sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["slow"] for row in rows] == ["0:1", "0:2,1:3"]
    assert {row["verdict"] for row in rows} == {"not verified"}
    assert {row["max error"] for row in rows} == {"-"}
    # More ranks than cores or not, the time counts: 4 * 4 FLOPs for each of 2 * 20 * 40 pairs of a rank.
    assert [float(row["time ms"]) >= least for row, least in zip(rows, (25.6, 76.8), strict=True)] == [
        True,
        True,
    ]
