from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from dense import DTYPES
from numpy.typing import NDArray

from ringmpi.config import experiment_from
from ringmpi.errors import ConfigError, StoreError
from ringmpi.layout import LAYOUTS, Layout
from ringmpi.problem import describe_input
from ringmpi.recheck import verify_file
from ringmpi.shards import ShardWriter
from ringmpi.store import ResultFile, ResultWriter, refusal

Array = NDArray[Any]

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 7, 4


def values(dtype: str = "float32", tokens: int = TOKENS) -> Array:
    return np.random.default_rng(3).normal(size=(BATCH, HEADS, tokens, WIDTH)).astype(DTYPES[dtype])


def write(
    path: Path, layout: Layout, tensors: dict[str, Array], *, commit: bool = True
) -> list[ShardWriter]:
    """Write a result as the ranks of a job do, one after the other."""
    with ResultWriter(path) as writer:
        folder = writer.begin_shards()
        shards = [ShardWriter(folder, writer.token, rank) for rank in range(layout.size)]
        for name, whole in tensors.items():
            for rank, shard in enumerate(shards):
                own = whole[:, :, layout.positions(rank) - layout.first]
                halves = (slice(0, own.shape[2] // 2), slice(own.shape[2] // 2, own.shape[2]))
                pieces = ((tokens, own[:, :, tokens]) for tokens in halves)
                shard.write(f"outputs/{name}", own.shape, own.dtype, pieces)
            writer.show_shards(f"outputs/{name}", whole.shape, whole.dtype, layout)
        if commit:
            writer.seal_shards([shard.seal() for shard in shards])
            describe(writer)
            writer.commit()
    return shards


def describe(writer: ResultWriter) -> None:
    shape = {"batch": BATCH, "seq_len": TOKENS, "heads": HEADS, "head_dim": WIDTH}
    writer.describe(experiment_from(shape), "ringmpi run")


def folder_of(path: Path) -> Path:
    (folder,) = path.parent.glob(f"{path.stem}.*.shards")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(str(found.relative_to(folder)) for found in folder.rglob("*") if found.is_file())


def rows(path: Path, tensor: str = "out", first: int = 0, tokens: int = TOKENS) -> Array:
    """Read a whole tensor as ringmpi does."""
    with ResultFile(path) as result:
        found = [
            result.rows(tensor, batch, head, (range(first, first + tokens),))
            for batch in range(BATCH)
            for head in range(HEADS)
        ]
    return np.stack(found).reshape(BATCH, HEADS, tokens, -1)


def same_bits(found: Array, right: Array) -> bool:
    return found.dtype == right.dtype and found.tobytes() == np.ascontiguousarray(right).tobytes()


class TestOneTensor:
    @pytest.mark.parametrize("size", [1, 2, 3, 7, 9])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_token_i_is_at_index_i_whatever_the_layout(
        self, tmp_path: Path, layout: str, size: int
    ) -> None:
        out = values()
        write(tmp_path / "r.h5", Layout(layout, TOKENS, size), {"out": out})

        assert same_bits(rows(tmp_path / "r.h5"), out)
        with h5py.File(tmp_path / "r.h5", "r") as file:
            assert np.array_equal(file["outputs/out"][...], out)
            assert [axis.label for axis in file["outputs/out"].dims][:3] == ["batch", "head", "token"]
        assert len(names(folder_of(tmp_path / "r.h5"))) == size

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_dtype_keeps_its_bits(self, tmp_path: Path, dtype: str) -> None:
        out = values(dtype)
        write(tmp_path / "r.h5", Layout("zigzag", TOKENS, 3), {"out": out})

        assert same_bits(rows(tmp_path / "r.h5"), out)
        with h5py.File(folder_of(tmp_path / "r.h5") / "1.h5", "r") as file:
            assert file["outputs/out"].attrs.get("dtype") == (
                "bfloat16" if dtype == "bfloat16" else None
            )

    def test_tensors_of_queries_begin_later(self, tmp_path: Path) -> None:
        dq = values()
        write(tmp_path / "r.h5", Layout("striped", TOKENS, 3, first=40), {"dq": dq})

        assert same_bits(rows(tmp_path / "r.h5", "dq", first=40), dq)

    def test_lse_has_an_axis_less(self, tmp_path: Path) -> None:
        lse = values()[..., 0]
        write(tmp_path / "r.h5", Layout("zigzag", TOKENS, 2), {"lse": lse})

        assert same_bits(rows(tmp_path / "r.h5", "lse")[..., 0], lse.reshape(BATCH, HEADS, TOKENS))

    def test_a_tensor_may_be_written_again(self, tmp_path: Path) -> None:
        """As after an interruption that some ranks met while they wrote."""
        layout, path = Layout("contiguous", TOKENS, 2), tmp_path / "r.h5"
        with ResultWriter(path) as writer:
            folder = writer.begin_shards()
            shards = [ShardWriter(folder, writer.token, rank) for rank in range(2)]
            for factor in (2, 1):
                for rank, shard in enumerate(shards):
                    own = factor * values()[:, :, layout.positions(rank)]
                    shard.write("outputs/out", own.shape, own.dtype, [(slice(None), own)])
                writer.show_shards("outputs/out", values().shape, values().dtype, layout)
            writer.seal_shards([shard.seal() for shard in shards])
            describe(writer)
            writer.commit()

        assert same_bits(rows(path), values())

    def test_the_writer_reads_what_ranks_have_written(self, tmp_path: Path) -> None:
        """So a run verifies what it has written before anything has its final name."""
        layout, out = Layout("zigzag", TOKENS, 3), values()
        with ResultWriter(tmp_path / "r.h5") as writer:
            folder = writer.begin_shards()
            for rank in range(3):
                own = out[:, :, layout.positions(rank)]
                shard = ShardWriter(folder, writer.token, rank)
                shard.write("outputs/out", own.shape, own.dtype, [(slice(None), own)])
            writer.show_shards("outputs/out", out.shape, out.dtype, layout)

            assert same_bits(writer.rows("out", 1, 2, (range(TOKENS),)), out[1, 2])


class TestWholeOrNotAtAll:
    def test_nothing_is_visible_before_it_is_complete(self, tmp_path: Path) -> None:
        seen: list[str] = []

        class Looking(ResultWriter):
            def seal_shards(self, seals: Sequence[Any]) -> None:
                seen.extend(path.name for path in tmp_path.iterdir())
                super().seal_shards(seals)

        layout = Layout("contiguous", TOKENS, 2)
        with Looking(tmp_path / "r.h5") as writer:
            folder = writer.begin_shards()
            shards = [ShardWriter(folder, writer.token, rank) for rank in range(layout.size)]
            writer.seal_shards([shard.seal() for shard in shards])
            writer.commit()

        assert len(seen) == 2
        assert all(name.startswith(".") for name in seen), seen
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]

    def test_leaving_without_commit_leaves_nothing_behind(self, tmp_path: Path) -> None:
        write(tmp_path / "r.h5", Layout("striped", TOKENS, 3), {"out": values()}, commit=False)

        assert list(tmp_path.iterdir()) == []

    def test_an_older_result_stays_until_a_newer_one_is_complete(self, tmp_path: Path) -> None:
        layout, path = Layout("striped", TOKENS, 3), tmp_path / "r.h5"
        write(path, layout, {"out": values()})
        before = names(tmp_path)

        write(path, layout, {"out": 2 * values()}, commit=False)

        assert names(tmp_path) == before
        assert same_bits(rows(path), values())

    def test_a_newer_result_takes_the_place_of_all_files_of_the_older_one(self, tmp_path: Path) -> None:
        layout, path = Layout("striped", TOKENS, 3), tmp_path / "r.h5"
        write(path, layout, {"out": values()})
        older = folder_of(path)

        write(path, layout, {"out": 2 * values()})

        assert not older.exists()
        assert same_bits(rows(path), 2 * values())

    def test_a_newer_result_in_one_file_does_so_too(self, tmp_path: Path) -> None:
        path = tmp_path / "r.h5"
        write(path, Layout("striped", TOKENS, 3), {"out": values()})

        with ResultWriter(path) as writer:
            writer.commit()

        assert names(tmp_path) == ["r.h5"]

    def test_of_an_older_folder_only_its_own_shards_are_removed(self, tmp_path: Path) -> None:
        layout, path = Layout("striped", TOKENS, 3), tmp_path / "r.h5"
        write(path, layout, {"out": values()})
        older = folder_of(path)
        (older / "notes.txt").write_text("of somebody")
        (older / "1.h5").write_text("of somebody")

        write(path, layout, {"out": values()})

        assert names(older) == ["1.h5", "notes.txt"]

    def test_a_link_is_replaced_and_what_it_led_to_stays(self, tmp_path: Path) -> None:
        (tmp_path / "old").mkdir()
        layout, there = Layout("striped", TOKENS, 3), tmp_path / "old" / "r.h5"
        write(there, layout, {"out": values()})
        (tmp_path / "r.h5").symlink_to(there)

        write(tmp_path / "r.h5", layout, {"out": 2 * values()})

        assert same_bits(rows(there), values())
        assert same_bits(rows(tmp_path / "r.h5"), 2 * values())

    @pytest.mark.parametrize("folder", ["../elsewhere", "/tmp", "a/b.0123456789ab.shards", "r.h5"])
    def test_nothing_is_removed_because_a_file_says_so(self, tmp_path: Path, folder: str) -> None:
        path = tmp_path / "r.h5"
        write(path, Layout("striped", TOKENS, 1), {"out": values()})
        with h5py.File(path, "r+") as file:
            file["shards"].attrs["folder"] = folder
        before = names(folder_of(path))

        with pytest.raises(StoreError, match="no folder of ringmpi"):
            ResultFile(path)
        with ResultWriter(path) as writer:
            writer.commit()

        assert names(folder_of(path)) == before


@dataclass
class Result:
    """A result of three ranks, and one of another run of the same problem beside it."""

    path: Path
    other: Path

    def shard(self, rank: int) -> Path:
        return folder_of(self.path) / f"{rank}.h5"


@pytest.fixture
def result(tmp_path: Path) -> Result:
    layout = Layout("zigzag", TOKENS, 3)
    paths = [tmp_path / "here" / "r.h5", tmp_path / "there" / "r.h5"]
    for path in paths:
        path.parent.mkdir()
        write(path, layout, {"out": values()})
    return Result(*paths)


def cut(result: Result) -> None:
    shard = result.shard(1)
    os.truncate(shard, shard.stat().st_size // 2)


def cut_and_fill(result: Result) -> None:
    """As some copying programs do that were stopped: the size is right, the rest is zeros."""
    shard = result.shard(1)
    nbytes = shard.stat().st_size
    os.truncate(shard, nbytes - 60)
    os.truncate(shard, nbytes)


def flip(result: Result) -> None:
    data = bytearray(result.shard(1).read_bytes())
    data[-1] ^= 1
    result.shard(1).write_bytes(data)


def zero_all(result: Result) -> None:
    with h5py.File(result.shard(1), "r+") as file:
        file["outputs/out"][...] = 0


def swap_in(result: Result) -> None:
    shutil.copy(folder_of(result.other) / "1.h5", result.shard(1))


def swap_ranks(result: Result) -> None:
    # Of rank 1 and rank 2, which own as many tokens.
    shutil.copy(result.shard(2), result.shard(1))


def not_hdf5(result: Result) -> None:
    result.shard(1).write_bytes(b"x" * result.shard(1).stat().st_size)


def folder_instead(result: Result) -> None:
    result.shard(1).unlink()
    result.shard(1).mkdir()


def lead_nowhere(result: Result) -> None:
    result.shard(1).unlink()
    result.shard(1).symlink_to("nowhere.h5")


#: What is done to a result, and what is then said when it is opened.
SEEN_AT_ONCE: dict[str, tuple[Callable[[Result], None], str]] = {
    "one is missing": (lambda result: result.shard(1).unlink(), "1.h5 is not there"),
    "all are missing": (
        lambda result: shutil.rmtree(folder_of(result.path)),
        "0.h5 is not there",
    ),
    "cut": (cut, "1.h5 has"),
    "of another run": (swap_in, "1.h5 is no shard of it"),
    "of another rank": (swap_ranks, "1.h5 is the shard of rank 2"),
    "no HDF5 file": (not_hdf5, "1.h5 is not an HDF5 file"),
    "a folder": (folder_instead, "1.h5 has"),
    "a link that leads nowhere": (lead_nowhere, "1.h5 is not there"),
}

#: Where only the values are wrong.
SEEN_WHEN_READ: dict[str, Callable[[Result], None]] = {
    "cut and filled up": cut_and_fill,
    "one bit": flip,
    "zeros": zero_all,
}


class TestDamage:
    @pytest.mark.parametrize(("damage", "told"), SEEN_AT_ONCE.values(), ids=SEEN_AT_ONCE.keys())
    def test_a_shard_that_is_not_the_one_is_refused(
        self, result: Result, damage: Callable[[Result], None], told: str
    ) -> None:
        assert same_bits(rows(result.path), values())
        damage(result)

        with pytest.raises(StoreError) as refused:
            ResultFile(result.path)

        assert str(result.path) in str(refused.value)
        assert told in str(refused.value)

    @pytest.mark.parametrize("damage", SEEN_WHEN_READ.values(), ids=SEEN_WHEN_READ.keys())
    def test_values_that_are_not_those_that_were_written_are_refused(
        self, result: Result, damage: Callable[[Result], None]
    ) -> None:
        damage(result)

        with ResultFile(result.path) as opened, pytest.raises(StoreError, match=r"1\.h5 is damaged"):
            opened.rows("out", 0, 0, (range(1),))  # Row 0 is in another shard.
        with pytest.raises(StoreError, match=r"1\.h5 is damaged"):
            verify_file(str(result.path), "full", lambda done, total: None)

    def test_the_shard_of_a_rank_without_rows_is_looked_for_too(self, tmp_path: Path) -> None:
        path = tmp_path / "r.h5"
        write(path, Layout("striped", TOKENS, TOKENS + 2), {"out": values()})
        (folder_of(path) / f"{TOKENS + 1}.h5").unlink()

        with pytest.raises(StoreError, match=f"{TOKENS + 1}.h5 is not there"):
            ResultFile(path)

    def test_a_copy_without_its_shards_is_refused(self, result: Result, tmp_path: Path) -> None:
        shutil.copy(result.path, tmp_path / "copy.h5")

        with pytest.raises(StoreError, match="must be kept together"):
            ResultFile(tmp_path / "copy.h5")

    def test_a_copy_in_another_folder_takes_no_shards_from_where_one_stands(
        self, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """HDF5 looks in the current folder too."""
        shutil.copy(result.path, tmp_path / "copy.h5")
        monkeypatch.chdir(result.path.parent)

        with pytest.raises(StoreError, match="is not there"):
            ResultFile(tmp_path / "copy.h5")

    def test_what_hdf5_would_fill_in_is_nan_and_not_zero(self, result: Result) -> None:
        """For those who read with plain h5py."""
        result.shard(1).unlink()

        with h5py.File(result.path, "r") as file:
            out = file["outputs/out"][...]

        lost = Layout("zigzag", TOKENS, 3).positions(1)
        assert np.isnan(out[:, :, lost]).all()
        assert np.array_equal(np.delete(out, lost, axis=2), np.delete(values(), lost, axis=2))

    def test_a_variable_that_leads_hdf5_elsewhere_is_refused(
        self, result: Result, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HDF5_VDS_PREFIX", str(result.other.parent))

        with pytest.raises(StoreError, match="HDF5_VDS_PREFIX is set"):
            ResultFile(result.path)

    @pytest.mark.parametrize("lacking", ["nbytes", "sha256"])
    def test_a_main_file_that_lacks_what_shards_are_known_by_is_refused(
        self, result: Result, lacking: str
    ) -> None:
        with h5py.File(result.path, "r+") as file:
            del file[f"shards/{lacking}"]

        with pytest.raises(StoreError, match="is damaged"):
            ResultFile(result.path)

    def test_a_shard_is_no_result(self, result: Result) -> None:
        with pytest.raises(StoreError, match="is the shard of rank 2; name the result"):
            ResultFile(result.shard(2))

    def test_a_shard_is_not_replaced_by_a_result(self, result: Result) -> None:
        refused = refusal(result.shard(2))

        assert refused is not None
        assert "no result of ringmpi" in str(refused)


class TestMoving:
    def test_folder_and_file_may_be_moved_together(
        self, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        result.path.parent.rename(tmp_path / "moved")
        monkeypatch.chdir(tmp_path)

        assert same_bits(rows(tmp_path / "moved" / "r.h5"), values())
        assert same_bits(rows(Path("moved/r.h5")), values())

    def test_the_file_may_have_another_name(self, result: Result) -> None:
        renamed = result.path.rename(result.path.with_name("best.h5"))

        assert same_bits(rows(renamed), values())

    def test_a_link_leads_to_the_shards_too(self, result: Result, tmp_path: Path) -> None:
        (tmp_path / "link.h5").symlink_to(result.path)

        assert same_bits(rows(tmp_path / "link.h5"), values())

    def test_through_a_link_no_shards_are_taken_from_where_one_stands(
        self, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """HDF5 looks beside the link, then in the current folder, and last where the link leads."""
        (tmp_path / "link.h5").symlink_to(result.path)
        copy = tmp_path / "cwd" / folder_of(result.path).name
        shutil.copytree(folder_of(result.path), copy)
        with h5py.File(copy / "1.h5", "r+") as file:
            file["outputs/out"][...] = 0
        monkeypatch.chdir(copy.parent)

        assert same_bits(rows(tmp_path / "link.h5"), values())

    @pytest.mark.parametrize("name", ["50%.h5", "%b.h5", "two words.h5", "Größe.h5", "plain", "a.b.h5"])
    def test_any_file_name_will_do(self, tmp_path: Path, name: str) -> None:
        write(tmp_path / name, Layout("striped", TOKENS, 2), {"out": values()})

        assert same_bits(rows(tmp_path / name), values())


class TestInputs:
    """Input files may be made of others too, by whoever made them."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        for name in "qkv":
            whole = h5py.VirtualLayout((1, 2, 6, 4), np.float32)
            for part in range(2):
                with h5py.File(tmp_path / f"part{part}.h5", "a") as file:
                    file[name] = np.ones((1, 2, 3, 4), np.float32)
                source = h5py.VirtualSource(f"part{part}.h5", name, (1, 2, 3, 4), np.float32)
                whole[:, :, 3 * part : 3 * part + 3] = source
            with h5py.File(tmp_path / "in.h5", "a") as file:
                file.create_virtual_dataset(name, whole)
        return tmp_path / "in.h5"

    def test_a_whole_one_is_read(self, path: Path) -> None:
        assert describe_input(str(path))["seq_len"] == 6

    def test_one_that_lacks_a_part_is_refused(self, path: Path) -> None:
        """HDF5 would read it as zeros."""
        path.with_name("part1.h5").unlink()

        with pytest.raises(ConfigError, match=r"/q is made of .*part1\.h5, which is not there"):
            describe_input(str(path))

    def test_one_that_lacks_a_dataset_of_a_part_is_refused(self, path: Path) -> None:
        with h5py.File(path.with_name("part0.h5"), "a") as file:
            del file["v"]

        with pytest.raises(ConfigError, match=r"/v is made of .*part0\.h5:v, which is not there"):
            describe_input(str(path))

    def test_one_with_a_part_cut_short_is_refused(self, path: Path) -> None:
        os.truncate(path.with_name("part1.h5"), 100)

        with pytest.raises(ConfigError, match=r"part1\.h5"):
            describe_input(str(path))

    def test_a_link_leads_to_the_parts_too(self, path: Path, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "in.h5").symlink_to(path)

        assert describe_input(str(tmp_path / "elsewhere" / "in.h5"))["seq_len"] == 6
