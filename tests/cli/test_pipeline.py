"""From run to file to verify, report and picture, at every rank count."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from dense import allowed_pairs, dense_attention, uniform_answer, uniform_inputs
from running import Ended, Queue, Scenario

SIZES = (1, 2, 3, 4, 5, 8)
LAYOUTS = ("contiguous", "striped", "zigzag")

BATCH, HEADS, KV_HEADS, TOKENS, WIDTH = 2, 4, 2, 37, 5
DOCUMENTS = (0, 1, 13, 13, 37)


def uniform_file(work: Path) -> None:
    with h5py.File(work / "uniform.h5", "w") as file:
        for name, values in zip(
            "qkv", uniform_inputs(BATCH, HEADS, KV_HEADS, TOKENS, WIDTH), strict=True
        ):
            file[name] = values


def packed_file(work: Path) -> None:
    uniform_file(work)
    with h5py.File(work / "uniform.h5", "a") as file:
        file["documents"] = np.array(DOCUMENTS)


def random_file(work: Path) -> None:
    import ml_dtypes

    rng = np.random.default_rng(5)
    with h5py.File(work / "random.h5", "w") as file:
        for name, heads in (("q", 4), ("k", 1), ("v", 1)):
            values = rng.standard_normal((2, heads, 40, 12)).astype(ml_dtypes.bfloat16)
            file[name] = values.view(np.uint16)
            file[name].attrs["dtype"] = "bfloat16"
        file["documents"] = np.array([0, 5, 29, 40])


def uniform(size: int, layout: str, options: str = "", **more: Any) -> Scenario:
    args = f"run --input uniform.h5 --layout {layout} --repeats 2 --output out/u.h5 {options}"
    return Scenario(size, args, **{"files": uniform_file, **more})


RINGS = [
    pytest.param(uniform(size, LAYOUTS[at % 3], "--causal"), id=f"{size} ranks, {LAYOUTS[at % 3]}")
    for at, size in enumerate(SIZES)
]


@pytest.mark.parametrize("ended", RINGS, indirect=True)
def test_uniform_attention_in_the_file_is_the_closed_form(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    assert "# verdict: OK" in ended.stdout
    out, lse = uniform_answer(allowed_pairs(TOKENS, causal=True), BATCH, HEADS, KV_HEADS)
    with h5py.File(ended.work / "out/u.h5") as file:
        assert file.attrs["complete"]
        assert file["outputs/out"].dtype == np.float64
        assert file["outputs/out"].shape == (BATCH, HEADS, TOKENS, WIDTH)
        # Means of at most 37 integers below 20000: a few roundings of numbers of that size.
        np.testing.assert_allclose(file["outputs/out"][:], np.stack([out] * WIDTH, -1), rtol=1e-13)
        np.testing.assert_allclose(file["outputs/lse"][:], lse, rtol=1e-13, atol=1e-13)
    assert ended.files() == ["out/u.h5", "uniform.h5"]


@pytest.mark.parametrize("ended", RINGS, indirect=True)
def test_file_holds_what_the_ranks_recorded(ended: Ended) -> None:
    with h5py.File(ended.work / "out/u.h5") as file:
        size = len(file["ranks/hostname"])
        assert f"-n {size} " in " ".join(ended.args)
        assert file.attrs["kind"] == "measured"
        assert json.loads(file.attrs["config"])["input"] == str(ended.work / "uniform.h5")
        assert sum(file["ranks/shard_len"][:]) == TOKENS
        assert len(set(file["ranks/pid"][:])) == size
        started, ended_at = file["timings/started"][:], file["timings/step_end"][:]
        assert started.shape == ended_at.shape == (2, size, size)
        assert (ended_at >= started).all()
        # Causal pairs, over batch and query heads.
        assert file["timings/pairs"][0].sum() == BATCH * HEADS * TOKENS * (TOKENS + 1) / 2
        token_nbytes = 2 * BATCH * KV_HEADS * WIDTH * 8
        assert file["timings/bytes_sent"][0].sum() == (size - 1) * TOKENS * token_nbytes
        assert file["timings/warmup/started"].shape == (1, size, size)
        assert {"out", "lse"} == set(file["verification"])
        assert all(file["verification"][name].attrs["passed"] for name in ("out", "lse"))


@pytest.mark.parametrize("ended", RINGS[1:3], indirect=True)
def test_verify_report_and_plot_take_the_file(
    ended: Ended, tmp_path: Path, launch: Callable[..., Ended]
) -> None:
    path = tmp_path / "moved.h5"
    path.write_bytes((ended.work / "out/u.h5").read_bytes())
    # The input was named relative to the folder of the run; here it is verified from another one.
    with h5py.File(path, "a") as file:
        config = json.loads(file.attrs["config"])
        file.attrs["config"] = json.dumps({**config, "input": str(ended.work / "uniform.h5")})
    verified = launch(0, "verify", path)
    assert verified.returncode == 0, verified.told()
    assert verified.stdout.rstrip().endswith("# verdict: OK")
    picture, page, trace = (tmp_path / name for name in ("picture.png", "page.html", "trace.json"))
    reported = launch(0, "report", path, "--plot", picture, "--html", page, "--perfetto", trace)
    assert reported.returncode == 0, reported.told()
    assert "# verdict: OK" in reported.stdout
    assert f"# timeline: {picture}" in reported.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    size = int(ended.args[ended.args.index("-n") + 1])
    slices = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in slices} == set(range(size))
    embedded = re.search(r'<script type="application/json" id="data">(.*)</script>', page.read_text())
    assert embedded is not None
    (shown,) = json.loads(embedded[1])["files"][0]["passes"]
    assert [view["ranks"] for view in shown["views"]] == [list(range(size))] * 2


VARIANTS = {
    "packed documents from the file, causal, striped": uniform(
        3, "striped", "--causal", files=packed_file
    ),
    "packed documents from the file, zigzag": uniform(2, "zigzag", files=packed_file),
    "documents as an option": uniform(2, "striped", "--documents 0,1,13,13,37"),
    "window longer than a shard": uniform(4, "contiguous", "--causal --window 10"),
    "full": uniform(3, "zigzag", "--check-transfers --progress wait"),
    "float32 by conversion": uniform(3, "contiguous", "--dtype float32 --chunk-limit 999"),
}
MASKS: dict[str, dict[str, Any]] = {
    "packed documents from the file, causal, striped": {"causal": True, "documents": DOCUMENTS},
    "packed documents from the file, zigzag": {"documents": DOCUMENTS},
    "documents as an option": {"documents": DOCUMENTS},
    "window longer than a shard": {"causal": True, "window": 10},
    "full": {},
    "float32 by conversion": {},
}


@pytest.mark.parametrize(
    ("ended", "mask"),
    [pytest.param(VARIANTS[name], mask, id=name) for name, mask in MASKS.items()],
    indirect=["ended"],
)
def test_masks_and_options_give_the_closed_form(ended: Ended, mask: dict[str, Any]) -> None:
    assert ended.returncode == 0, ended.told()
    out, lse = uniform_answer(allowed_pairs(TOKENS, **mask), BATCH, HEADS, KV_HEADS)
    with h5py.File(ended.work / "out/u.h5") as file:
        found = file["outputs/out"][:]
        # Sums of 37 values in order of size: at most that many roundings of the dtype.
        rtol = TOKENS * np.finfo(found.dtype).eps
        np.testing.assert_allclose(found, np.stack([out] * WIDTH, -1), rtol=rtol)
        np.testing.assert_allclose(file["outputs/lse"][:], lse, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(
            Scenario(
                3, "run --input random.h5 --causal --output r.h5 --store-inputs", files=random_file
            ),
            id="bfloat16, one KV head, batch 2, documents",
        )
    ],
    indirect=True,
)
def test_bfloat16_is_stored_as_marked_bits_of_the_exact_result(ended: Ended) -> None:
    import ml_dtypes

    assert ended.returncode == 0, ended.told()
    with h5py.File(ended.work / "random.h5") as inputs, h5py.File(ended.work / "r.h5") as file:
        q, k, v = (inputs[name][:].view(ml_dtypes.bfloat16) for name in "qkv")
        assert file["outputs/out"].dtype == np.uint16
        assert file["outputs/out"].attrs["dtype"] == "bfloat16"
        assert file["outputs/lse"].dtype == np.float32
        allowed = allowed_pairs(40, causal=True, documents=(0, 5, 29, 40))
        out, lse = dense_attention(q, k, v, allowed)
        found = file["outputs/out"][:].view(ml_dtypes.bfloat16).astype(np.float64)
        # Half a unit in the last of 8 bits, and a little for the float32 before that rounding.
        np.testing.assert_allclose(found, out, rtol=2.0**-8 * 1.02, atol=1e-6)
        np.testing.assert_allclose(file["outputs/lse"][:], lse, rtol=1e-5, atol=1e-5)
        assert file["inputs/q"].attrs["dtype"] == "bfloat16"
        np.testing.assert_array_equal(file["inputs/v"][:], inputs["v"][:])
        np.testing.assert_array_equal(file["inputs/documents"][:], [0, 5, 29, 40])


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(Scenario(5, f"run --seq-len 3 --heads 2 --head-dim 3 --layout {name}"), id=name)
        for name in LAYOUTS
    ],
    indirect=True,
)
def test_fewer_tokens_than_ranks_work_and_the_default_name_says_what_was_run(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    layout = ended.args[-1]
    (name,) = ended.files()
    assert re.fullmatch(rf"results/ring-n3-b1-h2-d3-float32-{layout}-[0-9a-f]{{8}}-p5\.h5", name)
    with h5py.File(ended.work / name) as file:
        assert sorted(file["ranks/shard_len"][:]) == [0, 0, 1, 1, 1]
        assert np.isfinite(file["outputs/out"][:]).all()


def random_run(size: int, **more: Any) -> Scenario:
    args = "run --seq-len 50 --heads 4 --kv-heads 2 --head-dim 12 --batch 2 --causal --layout zigzag"
    return Scenario(size, f"{args} --output r.h5", **more)


ALONE = random_run(0)
AS_MODULE = random_run(2, as_module=True)


@pytest.mark.parametrize(
    "ended",
    [pytest.param(ALONE, id="no launcher"), pytest.param(AS_MODULE, id="python -m")],
    indirect=True,
)
def test_generated_inputs_are_verified_however_it_is_started(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    assert "# verdict: OK" in ended.stdout


def test_every_rank_count_sees_the_same_problem(queue: Queue) -> None:
    paths = [queue.result(scenario).work / "r.h5" for scenario in (ALONE, AS_MODULE)]
    with h5py.File(paths[0]) as one, h5py.File(paths[1]) as two:
        assert dict(one["inputs"].attrs) == dict(two["inputs"].attrs)
        for name in ("out", "lse"):
            found = [np.asarray(file[f"outputs/{name}"]) for file in (one, two)]
            # Each is verified to a few units of float32 by itself.
            np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


def toml_file(work: Path) -> None:
    (work / "run.toml").write_text(
        "seq-len = 20\nheads = 2\nhead_dim = 4\ncausal = true\ndocuments = [0, 7, 20]\n"
    )


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(
            Scenario(2, "run --config run.toml --head-dim 6 --output r.h5", files=toml_file), id=""
        )
    ],
    indirect=True,
)
def test_options_come_from_a_file_and_the_command_line_outranks_it(ended: Ended) -> None:
    assert ended.returncode == 0, ended.told()
    with h5py.File(ended.work / "r.h5") as file:
        config = json.loads(file.attrs["config"])
    assert (config["seq_len"], config["head_dim"], config["causal"]) == (20, 6, True)
    assert config["documents"] == [0, 7, 20]


@pytest.mark.parametrize("ended", RINGS[1:2], indirect=True)
def test_tables_of_a_job_are_whole(ended: Ended) -> None:
    assert "…" not in ended.stdout
