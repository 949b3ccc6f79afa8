from __future__ import annotations

import errno
import hashlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from dense import DTYPES
from numpy.typing import NDArray

from ringmpi import problem as room
from ringmpi.config import Experiment, experiment_from
from ringmpi.errors import ConfigError
from ringmpi.layout import Layout
from ringmpi.problem import (
    TENSORS,
    FromFile,
    Generated,
    describe_input,
    numpy_dtype,
    pieces_of,
    positions_of,
    problem_of,
    sha256_of,
    shard_of,
    tensors_of,
)

Array = NDArray[Any]


def generated(**given: Any) -> Generated:
    return Generated(experiment_from({"seq_len": 17, "heads": 3, "head_dim": 5} | given))


def whole(problem: Any, tensor: str, tokens: int = 17, batch: int = 1) -> Array:
    heads = range(problem.heads_of(tensor))
    return np.asarray(problem.rows(tensor, (range(tokens),), heads, range(batch)))


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_is_found_by_its_name(name: str) -> None:
    assert numpy_dtype(name) == np.dtype(DTYPES[name])


class TestGenerated:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("tensor", TENSORS)
    def test_rows_have_the_shape_and_dtype_asked_for(self, tensor: str, dtype: str) -> None:
        problem = generated(dtype=dtype, heads=6, kv_heads=2)

        rows = problem.rows(tensor, (range(3), range(9, 16)), range(1, 2), range(4, 7))

        assert rows.shape == (3, 1, 10, 5)
        assert rows.dtype == DTYPES[dtype]
        assert problem.heads_of(tensor) == (6 if tensor in ("q", "dout") else 2)

    def test_no_runs_are_no_rows(self) -> None:
        assert generated().rows("q", (), range(3), range(1)).shape == (1, 3, 0, 5)

    @pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
    @pytest.mark.parametrize("head_dim", [1, 3, 4, 5, 64])
    def test_shards_are_slices_of_the_whole(self, layout: str, head_dim: int) -> None:
        problem = generated(head_dim=head_dim)
        everything = whole(problem, "k")
        shards = Layout(layout, 17, 3)

        for rank in range(3):
            shard = problem.rows("k", shards.runs(rank), range(3), range(1))
            assert np.array_equal(shard, everything[:, :, shards.positions(rank)])

    @pytest.mark.parametrize(
        "other",
        [{"heads": 7}, {"seq_len": 1000}, {"batch": 3}, {"heads": 6, "kv_heads": 3}, {"causal": True}],
        ids=["more heads", "longer", "larger batch", "grouped heads", "mask"],
    )
    def test_values_depend_on_nothing_but_their_place(self, other: dict[str, Any]) -> None:
        for tensor in TENSORS:
            assert np.array_equal(whole(generated(), tensor), whole(generated(**other), tensor)[:, :3])

    def test_a_head_dim_that_shares_counters_shares_values(self) -> None:
        wide, narrow = whole(generated(head_dim=8), "v"), whole(generated(head_dim=5), "v")

        assert np.array_equal(wide[..., :5], narrow)

    @pytest.mark.parametrize("tensor", TENSORS)
    def test_another_seed_gives_other_values(self, tensor: str) -> None:
        one, other = whole(generated(seed=1), tensor), whole(generated(seed=2), tensor)

        # Sums of four 16-bit integers agree by chance in one of 1e5 values.
        assert (one == other).mean() < 0.02

    def test_tensors_heads_and_sequences_differ(self) -> None:
        problem = generated(batch=2)

        parts = [whole(problem, t, batch=2)[b, h] for t in TENSORS for b in range(2) for h in range(3)]

        same = [(a == b).mean() for n, a in enumerate(parts) for b in parts[:n]]
        assert max(same) < 0.05

    def test_no_two_rows_are_alike(self) -> None:
        rows = whole(generated(seq_len=1000), "q", tokens=1000).reshape(-1, 5)

        assert len(np.unique(rows, axis=0)) == 3000

    @pytest.mark.parametrize("tensor", TENSORS)
    def test_values_have_mean_0_and_variance_1(self, tensor: str) -> None:
        values = whole(generated(dtype="float64", seq_len=4096, head_dim=64), tensor, tokens=4096)
        count = values.size

        # The mean has a standard error of 1 / sqrt(n). The variance has sqrt((kurtosis - 1) / n), where a
        # sum of four uniform numbers has kurtosis 3 - 1.2 / 4 = 2.7. Six of them: one in 1e9.
        assert abs(values.mean()) <= 6 * count**-0.5
        assert abs(values.var() - 1) <= 6 * (1.7 / count) ** 0.5
        # The largest sum is 4 (2**16 - 1), centred 2 (2**16 - 1), over sqrt((2**32 - 1) / 3).
        assert np.abs(values).max() <= 2 * 3**0.5

    def test_neighbouring_values_are_not_correlated(self) -> None:
        values = whole(generated(dtype="float64", seq_len=4096, head_dim=64), "q", tokens=4096)

        along = [
            (values[:, :, 1:] * values[:, :, :-1]).mean(),
            (values[..., 1:] * values[..., :-1]).mean(),
        ]

        # A product of independent values has mean 0 and variance 1; six standard errors.
        assert max(map(abs, along)) <= 6 * (3 * 4095 * 63) ** -0.5

    def test_narrow_dtypes_are_the_wide_values_rounded_once(self) -> None:
        exact = whole(generated(dtype="float64"), "v")

        for name, dtype in DTYPES.items():
            assert np.array_equal(whole(generated(dtype=name), "v"), exact.astype(dtype))

    def test_positions_far_out_are_reached_at_once(self) -> None:
        problem = generated(seq_len=2**50)

        rows = problem.rows("q", (range(2**50 - 3, 2**50),), range(1), range(1))
        again = problem.rows("q", (range(2**50 - 1, 2**50),), range(1), range(1))

        assert np.array_equal(rows[:, :, 2:], again)


@pytest.mark.parametrize(
    ("given", "tensors"),
    [({}, "q k v"), ({"backward": True}, "q k v dout")],
    ids=["forward", "backward"],
)
def test_only_a_backward_pass_has_a_dout(given: dict[str, Any], tensors: str) -> None:
    assert tensors_of(experiment_from({"seq_len": 17, **given})) == tuple(tensors.split())


@pytest.mark.parametrize("query_len", [None, 1, 6, 17])
def test_queries_are_the_last_positions(query_len: int | None) -> None:
    experiment = experiment_from({"seq_len": 17, "query_len": query_len})

    covered = {name: positions_of(name, experiment) for name in TENSORS}

    assert covered["q"] == covered["dout"] == range(17 - (query_len or 17), 17)
    assert covered["k"] == covered["v"] == range(17)


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (17, 5), (17, 2**23), (17, 2**30)])
def test_pieces_partition_a_sequence(tokens: int, width: int) -> None:
    pieces = list(pieces_of(tokens, width))

    assert [at for piece in pieces for at in piece] == list(range(tokens))
    assert all(len(piece) * width <= room.PIECE_VALUES or len(piece) == 1 for piece in pieces)
    assert [at for piece in pieces_of(tokens, width, tokens // 3) for at in piece] == list(
        range(tokens // 3, tokens)
    )


class TestShard:
    """A shard is made head by head, so that making it can be given up."""

    EXPERIMENT = experiment_from(
        {"seq_len": 17, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 5, "dtype": "bfloat16"}
    )

    @pytest.mark.parametrize("rank", [0, 1, 2])
    @pytest.mark.parametrize("tensor", TENSORS)
    def test_it_holds_all_heads_of_its_rows(self, tensor: str, rank: int) -> None:
        problem, layout = Generated(self.EXPERIMENT), Layout("zigzag", 17, 3)

        shard = shard_of(problem, tensor, layout.runs(rank), self.EXPERIMENT, lambda: None)

        expected = whole(problem, tensor, batch=2)[:, :, layout.positions(rank)]
        assert shard.dtype == DTYPES["bfloat16"]
        assert np.array_equal(shard, expected)

    def test_it_may_have_no_tokens(self) -> None:
        shard = shard_of(Generated(self.EXPERIMENT), "k", (), self.EXPERIMENT, lambda: None)

        assert shard.shape == (2, 2, 0, 5)

    def test_there_is_a_look_around_after_every_head(self) -> None:
        looks: list[int] = []

        shard_of(Generated(self.EXPERIMENT), "q", (range(1),), self.EXPERIMENT, lambda: looks.append(1))

        assert len(looks) == 2 * 4

    def test_it_can_be_given_up(self) -> None:
        def stop() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            shard_of(Generated(self.EXPERIMENT), "q", (range(1),), self.EXPERIMENT, stop)


@pytest.mark.parametrize("query_len", [None, 6])
@pytest.mark.parametrize("piece_values", [1, 35, 2**23])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digest_is_that_of_all_positions_covered(
    dtype: str, piece_values: int, query_len: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PIECE_VALUES", piece_values)
    experiment = experiment_from(
        {"seq_len": 17, "batch": 2, "heads": 3, "head_dim": 5, "dtype": dtype, "query_len": query_len}
    )
    problem = Generated(experiment)

    for tensor in TENSORS:
        array = whole(problem, tensor, batch=2)
        if tensor in ("q", "dout"):
            array = array[:, :, -experiment.num_queries :]
        assert (
            sha256_of(problem, tensor, experiment, lambda: None)
            == hashlib.sha256(array.tobytes()).hexdigest()
        )


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("dtype", "digests"),
    [
        ("float32", ("077cbd990cfebbce", "ec7cd9835e5ea4f2", "95b5c19910c5e4dc")),
        ("bfloat16", ("0cbc5517082bce3f", "fa9489c0b859399a", "dc2472a7274c2182")),
    ],
)
def test_generated_values_are_those_of_earlier_versions(
    dtype: str, digests: tuple[str, ...], backward: bool
) -> None:
    """Result files record digests of their inputs, which are made again to verify them."""
    given = {"seq_len": 17, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 5, "seed": 3}
    experiment = experiment_from({**given, "dtype": dtype, "backward": backward})

    found = (sha256_of(Generated(experiment), name, experiment, lambda: None) for name in "qkv")

    assert tuple(digest[:16] for digest in found) == digests


def inputs(dtype: Any = np.float32, heads: int = 4, kv_heads: int = 2) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    shapes = {"q": (2, heads, 17, 5), "k": (2, kv_heads, 17, 5), "v": (2, kv_heads, 17, 5)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write_inputs(path: Path, tensors: dict[str, Array], **more: Array) -> str:
    with h5py.File(path, "w") as file:
        for name, array in tensors.items():
            if array.dtype == DTYPES["bfloat16"]:
                file[name] = array.view(np.uint16)
                file[name].attrs["dtype"] = "bfloat16"
            else:
                file[name] = array
        for name, array in more.items():
            file[name] = array
    return str(path)


def experiment_on(path: str, **given: Any) -> Experiment:
    return experiment_from({"input": path, **given}, describe_input(path))


class TestFromFile:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_are_those_of_the_file(self, tmp_path: Path, dtype: str) -> None:
        tensors = inputs(DTYPES[dtype])
        problem = problem_of(experiment_on(write_inputs(tmp_path / "in.h5", tensors)))

        assert isinstance(problem, FromFile)
        for name, array in tensors.items():
            rows = problem.rows(name, (range(1, 4), range(9, 17, 3)), range(1, 2), range(1, 2))
            at = [1, 2, 3, 9, 12, 15]
            assert rows.dtype == array.dtype
            assert rows.tobytes() == array[1:2, 1:2, at].tobytes()
            assert problem.heads_of(name) == array.shape[1]

    @pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
    def test_big_endian_files_give_the_same_values(self, tmp_path: Path, dtype: str) -> None:
        tensors = inputs(DTYPES[dtype])
        with h5py.File(tmp_path / "in.h5", "w") as file:
            for name, array in tensors.items():
                stored = array.view(np.uint16) if dtype == "bfloat16" else array
                file[name] = stored.astype(stored.dtype.newbyteorder(">"))
                if dtype == "bfloat16":
                    file[name].attrs["dtype"] = "bfloat16"
        experiment = experiment_on(str(tmp_path / "in.h5"))
        problem = FromFile(experiment, str(tmp_path / "in.h5"))

        for name, array in tensors.items():
            rows = whole(problem, name, batch=2)
            assert rows.dtype == DTYPES[dtype]
            assert np.array_equal(rows.view(np.uint8), array.view(np.uint8))
            digest = hashlib.sha256(array.tobytes()).hexdigest()
            assert sha256_of(problem, name, experiment, lambda: None) == digest

    def test_a_bfloat16_mark_may_be_a_text_of_fixed_length(self, tmp_path: Path) -> None:
        tensors = inputs(DTYPES["bfloat16"])
        with h5py.File(tmp_path / "in.h5", "w") as file:
            for name, array in tensors.items():
                file[name] = array.view(np.uint16)
                file[name].attrs["dtype"] = np.bytes_("bfloat16")

        assert describe_input(str(tmp_path / "in.h5"))["dtype"] == "bfloat16"

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("stored", DTYPES)
    def test_values_are_converted_where_asked_to(self, tmp_path: Path, stored: str, dtype: str) -> None:
        tensors = inputs(DTYPES[stored])
        path = write_inputs(tmp_path / "in.h5", tensors)

        problem = FromFile(experiment_on(path, dtype=dtype), str(path))

        for name, array in tensors.items():
            assert np.array_equal(whole(problem, name, batch=2), array.astype(DTYPES[dtype]))

    def test_only_the_rows_asked_for_are_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_inputs(tmp_path / "in.h5", inputs())
        problem = FromFile(experiment_on(path), str(path))
        read: list[int] = []
        original = h5py.Dataset.__getitem__

        def counting(dataset: Any, *arguments: Any, **options: Any) -> Any:
            found = original(dataset, *arguments, **options)
            read.append(found.size)
            return found

        monkeypatch.setattr(h5py.Dataset, "__getitem__", counting)
        problem.rows("q", (range(3, 4), range(4, 17, 6)), range(1, 3), range(1))

        assert sum(read) == 2 * 4 * 5

    def test_a_file_says_its_own_shape(self, tmp_path: Path) -> None:
        path = write_inputs(tmp_path / "in.h5", inputs(np.float64), documents=np.array([0, 5, 5, 17]))

        found = describe_input(path)

        assert found == {
            "batch": 2,
            "heads": 4,
            "kv_heads": 2,
            "seq_len": 17,
            "head_dim": 5,
            "dtype": "float64",
            "documents": (0, 5, 5, 17),
        }

    def test_documents_of_a_file_that_end_elsewhere_are_refused(self, tmp_path: Path) -> None:
        path = write_inputs(tmp_path / "in.h5", inputs(), documents=np.array([0, 5, 16]))

        with pytest.raises(ConfigError, match=r"documents=0,5,16.*17"):
            experiment_on(path)

    def test_a_file_that_a_writer_holds_locked_is_read_all_the_same(self, tmp_path: Path) -> None:
        import fcntl

        tensors = inputs()
        path = write_inputs(tmp_path / "in.h5", tensors)
        with Path(path).open("rb") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)

            rows = whole(FromFile(experiment_on(path), str(path)), "q", batch=2)

        assert np.array_equal(rows, tensors["q"])

    def test_a_file_system_without_locks_is_read_all_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tensors = inputs()
        path = write_inputs(tmp_path / "in.h5", tensors)
        original = h5py.File

        def without_locks(name: str, mode: str = "r", **options: Any) -> Any:
            if options.get("locking") is not False:
                raise OSError(errno.ENOLCK, "unable to lock file, errno = 37, 'No locks available'")
            return original(name, mode, **options)

        monkeypatch.setattr(h5py, "File", without_locks)

        rows = whole(FromFile(experiment_on(path), str(path)), "q", batch=2)

        assert np.array_equal(rows, tensors["q"])

    def test_fewer_queries_are_the_last_positions(self, tmp_path: Path) -> None:
        tensors = inputs()
        tensors["q"] = tensors["q"][:, :, :6]
        path = write_inputs(tmp_path / "in.h5", tensors)
        experiment = experiment_on(path)
        problem = problem_of(experiment)

        assert (experiment.seq_len, experiment.query_len) == (17, 6)
        rows = problem.rows("q", (range(11, 13), range(13, 17, 3)), range(4), range(2))
        assert np.array_equal(rows, tensors["q"][:, :, [0, 1, 2, 5]])
        assert np.array_equal(whole(problem, "k", batch=2), tensors["k"])
        shard = shard_of(problem, "q", (range(15, 17),), experiment, lambda: None)
        assert np.array_equal(shard, tensors["q"][:, :, 4:])
        digest = hashlib.sha256(tensors["q"].tobytes()).hexdigest()
        assert sha256_of(problem, "q", experiment, lambda: None) == digest

    def test_the_last_queries_of_a_whole_file_may_be_asked_for(self, tmp_path: Path) -> None:
        tensors = inputs()
        path = write_inputs(tmp_path / "in.h5", tensors)
        experiment = experiment_on(path, query_len=6)
        problem = problem_of(experiment)

        assert "query_len" not in describe_input(path)
        rows = problem.rows("q", (range(11, 17),), range(4), range(2))
        assert np.array_equal(rows, tensors["q"][:, :, 11:])
        digest = hashlib.sha256(tensors["q"][:, :, 11:].tobytes()).hexdigest()
        assert sha256_of(problem, "q", experiment, lambda: None) == digest

    def test_another_number_of_queries_than_the_file_has_is_refused(self, tmp_path: Path) -> None:
        tensors = inputs()
        tensors["q"] = tensors["q"][:, :, :6]
        path = write_inputs(tmp_path / "in.h5", tensors)

        assert experiment_on(path, query_len=6).num_queries == 6
        with pytest.raises(ConfigError, match=r"query_len=5: .*has query_len=6"):
            experiment_on(path, query_len=5)

    @pytest.mark.parametrize("queries", [17, 6])
    @pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
    def test_a_dout_of_a_file_is_used(self, tmp_path: Path, dtype: str, queries: int) -> None:
        tensors = inputs(DTYPES[dtype])
        dout = inputs(DTYPES[dtype])["q"][::-1, :, :queries]
        tensors |= {"q": tensors["q"][:, :, :queries], "dout": dout}
        path = write_inputs(tmp_path / "in.h5", tensors)
        experiment = experiment_on(path, backward=True)
        problem = problem_of(experiment)

        rows = problem.rows("dout", (range(17 - queries, 17),), range(4), range(2))

        assert problem.heads_of("dout") == 4
        assert np.array_equal(rows, dout)
        digest = hashlib.sha256(dout.tobytes()).hexdigest()
        assert sha256_of(problem, "dout", experiment, lambda: None) == digest

    def test_a_dout_that_a_file_lacks_is_generated(self, tmp_path: Path) -> None:
        experiment = experiment_on(write_inputs(tmp_path / "in.h5", inputs()), backward=True, seed=5)

        found = whole(problem_of(experiment), "dout", batch=2)

        assert np.array_equal(found, whole(Generated(experiment), "dout", batch=2))

    def test_inputs_in_a_group_may_hold_the_queries_alone(self, tmp_path: Path) -> None:
        tensors = inputs()
        tensors["dout"] = tensors["q"] + 1
        with h5py.File(tmp_path / "in.h5", "w") as file:
            for name, array in tensors.items():
                last = 6 if name in ("q", "dout") else 17
                file[f"inputs/{name}"] = array[:, :, -last:]
        given = {"seq_len": 17, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 5}
        experiment = experiment_from(given | {"query_len": 6, "backward": True})
        problem = FromFile(experiment, str(tmp_path / "in.h5"), "inputs")

        for name, array in tensors.items():
            at = positions_of(name, experiment)
            rows = problem.rows(name, (at,), range(problem.heads_of(name)), range(2))
            assert np.array_equal(rows, array[:, :, at.start :])


def without(name: str) -> dict[str, Array]:
    return {key: array for key, array in inputs().items() if key != name}


def with_(**changed: Array) -> dict[str, Array]:
    return inputs() | changed


REFUSED: dict[str, tuple[dict[str, Array], list[str]]] = {
    "no v": (without("v"), ["no dataset /v", "/q, /k and /v"]),
    "no q": (without("q"), ["no dataset /q"]),
    "three axes": (with_(q=np.zeros((4, 17, 5))), ["(4, 17, 5)", "[batch, heads, tokens, head_dim]"]),
    "no tokens": (
        {name: array[:, :, :0] for name, array in inputs().items()},
        ["(2, 4, 0, 5)", "[batch, heads, tokens, head_dim]"],
    ),
    "other tokens": (
        with_(k=np.zeros((2, 2, 16, 5), "f4"), v=np.zeros((2, 2, 16, 5), "f4")),
        ["(2, 2, 16, 5)", "(2, 4, 17, 5)", "/q may have at most as many tokens as /k"],
    ),
    "k and v of other lengths": (
        with_(v=np.zeros((2, 2, 16, 5), "f4")),
        ["/k (2, 2, 17, 5)", "/v (2, 2, 16, 5)", "alike"],
    ),
    "dout of other tokens": (
        with_(dout=np.zeros((2, 4, 16, 5), "f4")),
        ["/dout (2, 4, 16, 5) float32", "shape and dtype of /q, (2, 4, 17, 5) float32"],
    ),
    "dout of the keys' heads": (
        with_(dout=np.zeros((2, 2, 17, 5), "f4")),
        ["/dout (2, 2, 17, 5)", "shape and dtype of /q"],
    ),
    "dout of another dtype": (
        with_(dout=np.zeros((2, 4, 17, 5), "f8")),
        ["/dout (2, 4, 17, 5) float64", "shape and dtype of /q, (2, 4, 17, 5) float32"],
    ),
    "other batch": (with_(q=np.zeros((1, 4, 17, 5), "f4")), ["/q (1, 4, 17, 5)", "alike"]),
    "other width": (with_(q=np.zeros((2, 4, 17, 6), "f4")), ["/q (2, 4, 17, 6)", "alike"]),
    "k and v differ": (with_(v=np.zeros((2, 1, 17, 5), "f4")), ["/v (2, 1, 17, 5)", "/k and /v"]),
    "integers": (
        {name: array.astype(np.int32) for name, array in inputs().items()},
        ["int32", "float64, float32, float16, bfloat16"],
    ),
    "unmarked 16-bit integers": (
        {name: array.astype(np.uint16) for name, array in inputs().items()},
        ["uint16", "with the attribute dtype"],
    ),
    "two dtypes": (with_(k=inputs(np.float64)["k"]), ["float32, float64", "for all three"]),
}


@pytest.mark.parametrize(("tensors", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_tensors_that_do_not_belong_together_are_refused(
    tmp_path: Path, tensors: dict[str, Array], told: list[str]
) -> None:
    path = write_inputs(tmp_path / "in.h5", tensors)

    with pytest.raises(ConfigError) as refusal:
        describe_input(path)

    message = str(refusal.value)
    assert f"input={path}" in message
    assert [part for part in told if part not in message] == [], message


def test_a_mark_that_contradicts_the_stored_type_is_refused(tmp_path: Path) -> None:
    path = write_inputs(tmp_path / "in.h5", inputs())
    with h5py.File(path, "r+") as file:
        for name in "qkv":
            file[name].attrs["dtype"] = "bfloat16"

    with pytest.raises(ConfigError, match="bfloat16"):
        describe_input(path)


def test_groups_in_the_place_of_tensors_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for name in TENSORS:
            file.create_group(name)

    with pytest.raises(ConfigError, match="no dataset /q"):
        describe_input(str(tmp_path / "in.h5"))


def test_a_group_in_the_place_of_dout_is_refused(tmp_path: Path) -> None:
    path = write_inputs(tmp_path / "in.h5", inputs())
    with h5py.File(path, "r+") as file:
        file.create_group("dout")

    with pytest.raises(ConfigError, match="/dout must be a dataset"):
        describe_input(path)


@pytest.mark.parametrize(
    "content", [b"", b"neither HDF5 nor anything else" * 100], ids=["empty", "text"]
)
def test_a_file_that_is_not_hdf5_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in.h5"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=f"input={path}: cannot be read as HDF5"):
        describe_input(str(path))


@pytest.mark.parametrize("name", ["nowhere.h5", "."])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        describe_input(str(tmp_path / name))


def test_tensors_beyond_memory_that_nobody_wrote_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for name in "qkv":
            file.create_dataset(name, (1, 2, 2**40, 4), np.float32)

    with pytest.raises(ConfigError, match="/q has no values, only a shape"):
        describe_input(str(tmp_path / "in.h5"))


@pytest.mark.parametrize("there", [True, False])
def test_a_virtual_tensor_needs_its_sources(tmp_path: Path, there: bool) -> None:
    """HDF5 gives zeros for what is missing."""
    path = Path(write_inputs(tmp_path / "in.h5", inputs()))
    with h5py.File(path, "r+") as file:
        whole_k = file["k"][...]
        del file["k"]
        layout = h5py.VirtualLayout(whole_k.shape, whole_k.dtype)
        layout[...] = h5py.VirtualSource("part.h5", "k", whole_k.shape)
        file.create_virtual_dataset("k", layout)
    if there:
        with h5py.File(tmp_path / "part.h5", "w") as file:
            file["k"] = whole_k
        assert describe_input(str(path))["seq_len"] == whole_k.shape[2]
        return
    with pytest.raises(ConfigError, match=r"/k is made of .*part\.h5, which is not there"):
        describe_input(str(path))


@pytest.mark.parametrize(
    "damage",
    [
        h5py.SoftLink("/q"),
        h5py.SoftLink("/nowhere"),
        h5py.ExternalLink("nowhere.h5", "/q"),
        h5py.Empty("f4"),
        np.zeros((1, 4, 17, 8), [("re", "f4"), ("im", "f4")]),
    ],
    ids=["round", "nowhere", "elsewhere", "empty", "compound"],
)
def test_something_else_in_the_place_of_a_tensor_is_refused(tmp_path: Path, damage: Any) -> None:
    path = write_inputs(tmp_path / "in.h5", inputs())
    with h5py.File(path, "r+") as file:
        del file["q"]
        file["q"] = damage

    with pytest.raises(ConfigError, match=f"input={path}: "):
        describe_input(path)


def test_more_documents_than_tokens_are_refused_unread(tmp_path: Path) -> None:
    path = write_inputs(tmp_path / "in.h5", inputs())
    with h5py.File(path, "r+") as file:
        file.create_dataset("documents", (2**45,), np.int64)

    with pytest.raises(ConfigError, match="offsets, more than"):
        describe_input(path)
