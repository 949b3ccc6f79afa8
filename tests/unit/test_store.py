from __future__ import annotations

import fcntl
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from dense import DTYPES
from numpy.typing import NDArray

import ringmpi
from ringmpi.config import Experiment, experiment_from
from ringmpi.errors import BAD_PARAMETER, ConfigError, StoreError
from ringmpi.layout import Layout
from ringmpi.schedule import Pass
from ringmpi.store import FORMAT_VERSION, ResultFile, ResultWriter, refusal
from ringmpi.trace import QUANTITIES, RECORD
from ringmpi.verify import Verdict

Array = NDArray[Any]

EXPERIMENT = experiment_from({"seq_len": 7, "heads": 2, "head_dim": 3, "documents": (0, 3, 7)})


def finish(writer: ResultWriter, experiment: Experiment = EXPERIMENT) -> None:
    """Write what every file holds, and let it appear."""
    writer.describe(experiment, "ringmpi run --seq-len 7")
    writer.commit()


def write(path: Path, **outputs: Array) -> Path:
    with ResultWriter(path) as writer:
        for name, array in outputs.items():
            writer.tensor(f"outputs/{name}", array.shape, array.dtype)
            writer.write_rows(f"outputs/{name}", range(array.shape[2]), array)
        finish(writer)
    return path


def assert_only(folder: Path, *names: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


class TestTensors:
    def test_all_bfloat16_patterns_survive(self, tmp_path: Path) -> None:
        bits = np.arange(2**16, dtype=np.uint16).reshape(1, 1, 2**10, 2**6)
        out = bits.view(DTYPES["bfloat16"])

        with ResultFile(write(tmp_path / "a.h5", out=out)) as result:
            rows = result.rows("out", 0, 0, (range(2**10),))

        assert rows.dtype == DTYPES["bfloat16"]
        assert np.array_equal(rows.view(np.uint16), bits[0, 0])

    def test_bfloat16_is_readable_without_ringmpi(self, tmp_path: Path) -> None:
        out = np.array([1.0, -2.5, np.inf, 0]).astype(DTYPES["bfloat16"]).reshape(1, 1, 4, 1)
        write(tmp_path / "a.h5", out=out)

        with h5py.File(tmp_path / "a.h5", "r") as file:
            dataset = file["outputs/out"]
            assert dataset.dtype == np.uint16
            assert dataset.attrs["dtype"] == "bfloat16"
            # The upper half of a float32 is a bfloat16.
            values = (dataset[...].astype(np.uint32) << 16).view(np.float32)

        assert values.ravel().tolist() == [1.0, -2.5, math.inf, 0.0]

    @pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
    def test_other_dtypes_are_stored_as_they_are(self, tmp_path: Path, dtype: str) -> None:
        out = np.random.default_rng(1).normal(size=(2, 3, 7, 5)).astype(dtype)
        path = write(tmp_path / "a.h5", out=out)

        with h5py.File(path, "r") as file:
            assert file["outputs/out"].dtype == dtype
            assert np.array_equal(file["outputs/out"][...], out)
            labels = [axis.label for axis in file["outputs/out"].dims]
        with ResultFile(path) as result:
            assert np.array_equal(result.rows("out", 1, 2, (range(7),)), out[1, 2])

        assert labels == ["batch", "head", "token", "head_dim"]

    @pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
    @pytest.mark.parametrize("size", [1, 3, 7, 9])
    def test_token_i_is_at_index_i_whatever_the_layout(
        self, tmp_path: Path, layout: str, size: int
    ) -> None:
        out = np.arange(2 * 2 * 7 * 3, dtype=np.float32).reshape(2, 2, 7, 3)
        shards = Layout(layout, 7, size)

        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.tensor("outputs/out", out.shape, out.dtype)
            for rank in reversed(range(size)):
                for run in shards.runs(rank):
                    writer.write_rows("outputs/out", run, out[:, :, list(run)])
            read_back = writer.rows("out", 1, 0, (range(7),))
            finish(writer)

        with h5py.File(tmp_path / "a.h5", "r") as file:
            assert np.array_equal(file["outputs/out"][...], out)
        assert np.array_equal(read_back, out[1, 0])

    def test_rows_are_read_run_by_run(self, tmp_path: Path) -> None:
        out = np.arange(2 * 7, dtype=np.float32).reshape(1, 1, 7, 2)

        with ResultFile(write(tmp_path / "a.h5", out=out)) as result:
            rows = result.rows("out", 0, 0, (range(1, 2), range(3, 7, 3)))

        assert np.array_equal(rows, out[0, 0, [1, 3, 6]])

    def test_a_shard_without_tokens_writes_nothing(self, tmp_path: Path) -> None:
        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.tensor("outputs/out", (1, 1, 7, 3), np.dtype(np.float32))
            writer.write_rows("outputs/out", range(3, 3), np.empty((1, 1, 0, 3), np.float32))
            finish(writer)

        with h5py.File(tmp_path / "a.h5", "r") as file:
            assert np.isnan(file["outputs/out"][...]).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_nobody_wrote_is_nan(self, tmp_path: Path, dtype: str) -> None:
        rows = np.ones((1, 1, 1, 3), DTYPES[dtype])

        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.tensor("outputs/out", (1, 1, 3, 3), rows.dtype)
            writer.write_rows("outputs/out", range(1, 2), rows)
            finish(writer)

        with ResultFile(tmp_path / "a.h5") as result:
            found = result.rows("out", 0, 0, (range(3),)).astype(np.float64)
        assert np.isnan(found).all(axis=1).tolist() == [True, False, True]

    def test_tokens_may_begin_later_in_the_sequence(self, tmp_path: Path) -> None:
        """As results of the last queries do: rows are named by their global positions."""
        dq = np.arange(2 * 3 * 2, dtype=np.float32).reshape(1, 2, 3, 2)

        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.tensor("outputs/dq", dq.shape, dq.dtype, first=40)
            writer.write_rows("outputs/dq", range(40, 43, 2), dq[:, :, ::2])
            writer.write_rows("outputs/dq", range(41, 42), dq[:, :, 1:2])
            written = writer.rows("dq", 0, 1, (range(41, 43),))
            finish(writer)

        assert np.array_equal(written, dq[0, 1, 1:])
        with h5py.File(tmp_path / "a.h5", "r") as file:
            dataset = file["outputs/dq"]
            assert np.array_equal(dataset[...], dq)
            assert dataset.attrs["first_token"] == 40
            assert dataset.attrs["description"] == "index i along tokens is global token 40 + i"
        with ResultFile(tmp_path / "a.h5") as result:
            assert np.array_equal(result.rows("dq", 0, 0, (range(40, 43, 2),)), dq[0, 0, ::2])

    def test_a_tensor_without_a_first_token_begins_at_the_first(self, tmp_path: Path) -> None:
        """As in files of an older ringmpi."""
        path = write(tmp_path / "a.h5", out=np.arange(6, dtype=np.float32).reshape(1, 1, 3, 2))
        with h5py.File(path, "r+") as file:
            assert file["outputs/out"].attrs["first_token"] == 0
            del file["outputs/out"].attrs["first_token"]

        with ResultFile(path) as result:
            assert result.rows("out", 0, 0, (range(1, 3),)).tolist() == [[2, 3], [4, 5]]

    def test_a_tensor_is_made_once(self, tmp_path: Path) -> None:
        with ResultWriter(tmp_path / "a.h5") as writer:
            for _ in range(2):
                writer.tensor("outputs/lse", (1, 1, 3), np.dtype(np.float32))
                writer.write_rows("outputs/lse", range(1), np.ones((1, 1, 1), np.float32))
            finish(writer)

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.rows("lse", 0, 0, (range(1),)).tolist() == [1]


class TestWholeOrNotAtAll:
    def test_no_file_is_there_before_it_is_complete(self, tmp_path: Path) -> None:
        path = tmp_path / "a.h5"

        with ResultWriter(path) as writer:
            assert not path.exists()
            finish(writer)
            assert path.exists()

        assert_only(tmp_path, "a.h5")

    def test_an_error_leaves_nothing_behind(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), ResultWriter(tmp_path / "a.h5") as writer:
            writer.facts("machine", {"a": 1})
            raise ZeroDivisionError

        assert_only(tmp_path)

    def test_leaving_without_commit_leaves_nothing_behind(self, tmp_path: Path) -> None:
        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.facts("machine", {"a": 1})

        assert_only(tmp_path)

    def test_an_older_file_stays_until_a_newer_one_is_complete(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.h5", lse=np.ones((1, 1, 3), np.float32))
        before = path.read_bytes()

        with pytest.raises(ZeroDivisionError), ResultWriter(path) as writer:
            writer.describe(EXPERIMENT, "newer")
            raise ZeroDivisionError

        assert path.read_bytes() == before
        assert_only(tmp_path, "a.h5")

    def test_a_newer_file_takes_the_place_of_an_older_one(self, tmp_path: Path) -> None:
        write(tmp_path / "a.h5", lse=np.ones((1, 1, 3), np.float32))
        write(tmp_path / "a.h5", lse=np.full((1, 1, 3), 2, np.float32))

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.rows("lse", 0, 0, (range(3),)).tolist() == [2, 2, 2]
        assert_only(tmp_path, "a.h5")

    def test_two_writers_of_one_path_do_not_mix(self, tmp_path: Path) -> None:
        path = tmp_path / "a.h5"

        with ResultWriter(path) as one, ResultWriter(path) as other:
            for writer, value in ((one, 1), (other, 2)):
                writer.tensor("outputs/lse", (1, 1, 3), np.dtype(np.float32))
                writer.write_rows("outputs/lse", range(2), np.full((1, 1, 2), value, np.float32))
            finish(one)
            first = path.read_bytes()
            other.write_rows("outputs/lse", range(2, 3), np.full((1, 1, 1), 2, np.float32))
            assert path.read_bytes() == first
            finish(other)

        with ResultFile(path) as result:
            assert result.rows("lse", 0, 0, (range(3),)).tolist() == [2, 2, 2]
        assert_only(tmp_path, "a.h5")

    def test_the_data_is_on_disk_before_the_name_appears(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, synced = tmp_path / "a.h5", []

        def fsync(number: int) -> None:
            synced.append((os.fstat(number).st_size, path.exists()))

        monkeypatch.setattr(os, "fsync", fsync)
        with ResultWriter(path) as writer:
            finish(writer)

        assert synced == [(path.stat().st_size, False)]

    def test_the_temporary_file_is_beside_the_target(self, tmp_path: Path) -> None:
        with ResultWriter(tmp_path / "a.h5"):
            (temporary,) = tmp_path.iterdir()

            assert temporary.name.startswith(".a.h5.")


class TestRefusedFiles:
    @staticmethod
    def assert_refused(path: Path, told: str) -> None:
        with pytest.raises(StoreError, match=told) as refusal_of_file:
            ResultFile(path)
        assert str(path) in str(refusal_of_file.value)
        assert refusal_of_file.value.exit_code == BAD_PARAMETER

    def test_a_missing_one(self, tmp_path: Path) -> None:
        self.assert_refused(tmp_path / "nowhere.h5", "is no file")

    def test_a_folder(self, tmp_path: Path) -> None:
        self.assert_refused(tmp_path, "is no file")

    @pytest.mark.parametrize("content", [b"", b"plain text" * 1000], ids=["empty", "text"])
    def test_one_that_is_not_hdf5(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "a.h5"
        path.write_bytes(content)

        self.assert_refused(path, "not an HDF5 file")

    def test_one_that_was_cut_off(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.h5", out=np.zeros((1, 1, 1000, 3), np.float32))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

        self.assert_refused(path, "damaged")

    def test_one_of_somebody_else(self, tmp_path: Path) -> None:
        path = tmp_path / "a.h5"
        with h5py.File(path, "w") as file:
            file["outputs/out"] = np.zeros(3)

        self.assert_refused(path, "not a complete result file")

    def test_one_that_was_never_completed(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.h5")
        with h5py.File(path, "r+") as file:
            file.attrs["complete"] = False

        self.assert_refused(path, "not a complete result file")

    @pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 0, None], ids=["newer", "older", "none"])
    def test_one_of_another_version(self, tmp_path: Path, version: int | None) -> None:
        path = write(tmp_path / "a.h5")
        with h5py.File(path, "r+") as file:
            del file.attrs["format_version"]
            if version is not None:
                file.attrs["format_version"] = version

        self.assert_refused(path, f"has format version {version}, this ringmpi reads {FORMAT_VERSION}")

    def test_one_that_somebody_writes_to(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ringmpi.store.LOCK_PATIENCE", 0.05)
        path = write(tmp_path / "a.h5")
        with path.open("rb") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)

            self.assert_refused(path, "another process is writing to it")

    def test_not_one_whose_writer_is_about_to_let_go_of_it(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.h5")
        with path.open("rb") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            end = threading.Timer(0.2, fcntl.flock, (holder, fcntl.LOCK_UN))
            end.start()

            with ResultFile(path) as result:
                assert result.kind == "measured"

            end.join()

    def test_a_refused_file_is_not_held_open(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.h5")
        with h5py.File(path, "r+") as file:
            file.attrs["complete"] = False
        with pytest.raises(StoreError) as refused:
            ResultFile(path)

        with h5py.File(path, "r+") as file:
            file.attrs["complete"] = True

        assert refused.value is not None
        with ResultFile(path) as result:
            assert result.kind == "measured"


class TestFacts:
    def test_what_the_file_is(self, tmp_path: Path) -> None:
        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.describe(EXPERIMENT, "ringmpi run --seq-len 7", kind="simulated")
            writer.commit()

        with h5py.File(tmp_path / "a.h5", "r") as file:
            attributes = dict(file.attrs)
        assert attributes["complete"]
        assert attributes["format_version"] == FORMAT_VERSION
        assert attributes["kind"] == "simulated"
        assert attributes["ringmpi_version"] == ringmpi.__version__
        assert attributes["command"] == "ringmpi run --seq-len 7"
        assert json.loads(attributes["config"])["seq_len"] == 7
        assert attributes["created"].endswith("+00:00")

    def test_the_experiment_comes_back(self, tmp_path: Path) -> None:
        experiment = experiment_from(
            {"seq_len": 7, "documents": (0, 0, 7), "softmax_scale": 0.1 + 0.2, "output": "größe.h5"}
        )
        with ResultWriter(tmp_path / "a.h5") as writer:
            finish(writer, experiment)

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.experiment == experiment
            assert result.interrupted is None
            assert result.command == "ringmpi run --seq-len 7"

    def test_options_of_methods_come_back(self, tmp_path: Path) -> None:
        experiment = experiment_from(
            {"seq_len": 7, "query_len": 2, "method": "hybrid", "ulysses_degree": 2, "inner": 3}
            | {"backward": True, "link": "1Gbit/s,1ms,shared"}
        )
        with ResultWriter(tmp_path / "a.h5") as writer:
            finish(writer, experiment)

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.experiment == experiment
            assert (result.experiment.num_queries, result.experiment.group_ranks) == (2, 2)

    def test_a_file_from_before_an_option_was_there_has_its_default(self, tmp_path: Path) -> None:
        newer = ("query_len", "ulysses_degree", "inner", "backward", "link")
        path = write(tmp_path / "a.h5")
        with h5py.File(path, "r+") as file:
            record = json.loads(file.attrs["config"])
            file.attrs["config"] = json.dumps({k: v for k, v in record.items() if k not in newer})

        with ResultFile(path) as result:
            assert result.experiment == EXPERIMENT

    def test_a_command_with_bytes_that_are_no_text_does_not_lose_the_result(
        self, tmp_path: Path
    ) -> None:
        command = os.fsdecode(b"ringmpi run --output b\xff.h5")

        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.describe(EXPERIMENT, command)
            writer.commit()

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.command.startswith("ringmpi run --output b")

    def test_an_early_end_is_told(self, tmp_path: Path) -> None:
        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.mark_interrupted(15)
            finish(writer)

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.interrupted == 15

    def test_plain_facts_come_back_as_they_are(self, tmp_path: Path) -> None:
        facts = {
            "number": 3,
            "time": 0.1,
            "yes": True,
            "text": "größer ≥ 3",
            "empty": "",
            "nan": math.nan,
        }
        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.facts("machine", facts)
            finish(writer)

        with ResultFile(tmp_path / "a.h5") as result:
            found = result.facts("machine")
            assert result.facts("nowhere") == {}
        assert math.isnan(found.pop("nan"))
        assert found == {name: value for name, value in facts.items() if name != "nan"}

    @pytest.mark.parametrize(
        "value",
        [None, [1, None, "ü"], {"numpy": "2.0", "größe": None}, list(range(20000)), "x" * 100_000],
        ids=["None", "list", "dict", "beyond 64 KiB", "long text"],
    )
    def test_facts_that_hdf5_has_no_type_for_come_back_as_json(
        self, tmp_path: Path, value: Any
    ) -> None:
        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.facts("machine", {"fact": value})
            finish(writer)

        with ResultFile(tmp_path / "a.h5") as result:
            found = result.facts("machine")["fact"]
        assert (found if isinstance(value, str) else json.loads(found)) == value

    def test_tables_of_9000_ranks_are_datasets(self, tmp_path: Path) -> None:
        names = [f"nöde-{rank:05}.cluster.example.org" for rank in range(9000)]
        times = np.arange(9000) * 0.1
        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.texts("ranks/hostname", names, "node")
            writer.table("ranks/pid", np.arange(9000), "1", "process")
            writer.table("clocks/offset", times, "s", "offset")
            finish(writer)

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.size == 9000
            assert result.texts("ranks/hostname") == names
            assert result.column("ranks/pid").tolist() == list(range(9000))
            assert np.array_equal(result.column("clocks/offset"), times)
        with h5py.File(tmp_path / "a.h5", "r") as file:
            assert file["ranks/hostname"].asstr()[0] == names[0]
            assert file["clocks/offset"].attrs["unit"] == "s"
            assert np.isnan(file["clocks/offset"].fillvalue)
            assert file["clocks/offset"].dtype == np.float64

    @pytest.mark.parametrize("bad", [0.1, math.nan, math.inf], ids=str)
    def test_verdicts_come_back(self, tmp_path: Path, bad: float) -> None:
        verdicts = [
            Verdict("out", False, bad, 0.1, bad, 1e-6, 1e-7, 1e-6, 1e-7, 14, [0, 1, 6, 2], 2, bad, 0.5),
            Verdict("lse", True, 0.0, 0.0, 0.0, 1e-6, 1e-7, 1e-6, 1e-7, 14, [0, 1, 6], 2, -bad, -bad),
        ]
        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.verdicts("sample:14", verdicts)
            finish(writer)

        with ResultFile(tmp_path / "a.h5") as result:
            found = result.verdicts()
            how = result.facts("verification")["how"]
        assert how == "sample:14"
        for one, other in zip(found, verdicts, strict=True):
            for name, value in other.record().items():
                same = getattr(one, name)
                assert same == value or (same != same and value != value)

    def test_verdicts_come_in_the_order_of_the_passes(self, tmp_path: Path) -> None:
        verdicts = [
            Verdict(name, True, 0.0, 0.0, 0.0, 1e-6, 1e-7, 1e-6, 1e-7, 14, [0, 1, 6, 2], 2, 0.5, 0.5)
            for name in ("out", "lse", "dq", "dk", "dv")
        ]
        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.verdicts("full", verdicts[::-1])
            finish(writer)

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.verdicts() == verdicts

    def test_stored_inputs_are_all_or_none(self, tmp_path: Path) -> None:
        for names, there in (("qk", False), ("qkv", True)):
            with ResultWriter(tmp_path / "a.h5") as writer:
                for name in names:
                    writer.tensor(f"inputs/{name}", (1, 1, 3, 2), np.dtype(np.float32))
                finish(writer)
            with ResultFile(tmp_path / "a.h5") as result:
                assert result.has_inputs == there

    def test_a_run_that_was_not_verified_has_no_verdicts(self, tmp_path: Path) -> None:
        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.verdicts("none", [])
            finish(writer)

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.verdicts() == []


class TestTimings:
    @staticmethod
    def write_timings(path: Path, repeats: int, records: Array, backward: Array | None = None) -> None:
        with ResultWriter(path) as writer:
            groups = (
                {"timings": records}
                if backward is None
                else {"timings": records, "timings/backward": backward}
            )
            for group, found in groups.items():
                for name in (group, f"{group}/alone"):
                    writer.records(name, (repeats, *found.shape[1:]))
                    for rank in range(found.shape[1]):
                        writer.write_records(name, rank, found[:, rank])
            writer.texts("ranks/hostname", ["node"] * 3, "node")
            writer.table("clocks/measured_at", np.array([[1.0, 2.0, 3.0]]), "s", "when")
            writer.table("clocks/offset", np.array([[0.0, 0.25, -0.1]]), "s", "offset")
            writer.table("clocks/error_bound", np.array([[0.0, 1e-6, 2e-6]]), "s", "error bound")
            finish(writer)

    def test_records_come_back(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(1)
        records = np.zeros((2, 3, 3), RECORD)
        for name in QUANTITIES:
            records[name] = 1.7e9 + rng.random((2, 3, 3))
        records["waited_for"] = 2
        self.write_timings(tmp_path / "a.h5", 2, records)

        with ResultFile(tmp_path / "a.h5") as result:
            timings = result.timings()

        assert np.array_equal(timings.records, records)
        assert np.array_equal(timings.alone, records)
        assert timings.clocks.measured_at.tolist() == [[1.0, 2.0, 3.0]]
        assert timings.clocks.offset.tolist() == [[0.0, 0.25, -0.1]]
        assert timings.clocks.error_bound.tolist() == [[0.0, 1e-6, 2e-6]]

    def test_the_way_back_has_records_of_its_own(self, tmp_path: Path) -> None:
        """It has other steps than the way there."""
        rng = np.random.default_rng(1)
        forward, backward = np.zeros((2, 3, 3), RECORD), np.zeros((2, 3, 4), RECORD)
        for name in QUANTITIES:
            forward[name], backward[name] = rng.random(forward.shape), rng.random(backward.shape)
        self.write_timings(tmp_path / "a.h5", 2, forward, backward)

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.directions == [Pass.FORWARD, Pass.BACKWARD]
            there, back = result.timings(), result.timings(Pass.BACKWARD)

        assert np.array_equal(there.records, forward)
        assert np.array_equal(there.alone, forward)
        assert np.array_equal(back.records, backward)
        assert np.array_equal(back.alone, backward)
        assert np.array_equal(back.clocks.offset, there.clocks.offset)

    def test_a_run_without_a_way_back_has_none(self, tmp_path: Path) -> None:
        self.write_timings(tmp_path / "a.h5", 2, np.zeros((2, 3, 3), RECORD))

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.directions == [Pass.FORWARD]

    def test_a_quantity_that_an_older_file_lacks_is_nan(self, tmp_path: Path) -> None:
        self.write_timings(tmp_path / "a.h5", 2, np.zeros((2, 3, 3), RECORD))
        with h5py.File(tmp_path / "a.h5", "r+") as file:
            del file["timings/hops"]

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.has("timings/messages")
            assert not result.has("timings/hops")
            records = result.timings().records
        assert np.isnan(records["hops"]).all()
        assert not records["messages"].any()

    def test_each_quantity_is_a_float64_dataset_with_its_unit(self, tmp_path: Path) -> None:
        self.write_timings(tmp_path / "a.h5", 2, np.zeros((2, 3, 3), RECORD))

        with h5py.File(tmp_path / "a.h5", "r") as file:
            for name, quantity in QUANTITIES.items():
                dataset = file[f"timings/{name}"]
                assert dataset.dtype == np.float64
                assert dataset.shape == (2, 3, 3)
                assert dataset.attrs["unit"] == quantity.unit
                assert dataset.attrs["description"] == quantity.description
                assert [axis.label for axis in dataset.dims] == ["repeat", "rank", "step"]

    def test_the_record_of_a_rank_that_never_reported_is_nan(self, tmp_path: Path) -> None:
        with ResultWriter(tmp_path / "a.h5") as writer:
            writer.records("timings", (1, 3, 2))
            writer.write_records("timings", 1, np.zeros((1, 2), RECORD))
            finish(writer)

        with h5py.File(tmp_path / "a.h5", "r") as file:
            missing = np.isnan(file["timings/started"][0]).all(axis=1)
        assert missing.tolist() == [True, False, True]

    def test_no_repeat_at_all_is_a_table_without_rows(self, tmp_path: Path) -> None:
        self.write_timings(tmp_path / "a.h5", 0, np.zeros((0, 3, 3), RECORD))

        with ResultFile(tmp_path / "a.h5") as result:
            assert result.timings().records.shape == (0, 3, 3)


class TestRefusedPaths:
    def test_a_new_folder_is_made(self, tmp_path: Path) -> None:
        path = tmp_path / "some" / "where" / "a.h5"

        assert refusal(path) is None
        assert_only(path.parent)

    def test_an_existing_file_may_be_replaced(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.h5")

        assert refusal(path) is None
        assert_only(tmp_path, "a.h5")

    def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        found = refusal(tmp_path)

        assert isinstance(found, ConfigError)
        assert f"output={tmp_path}: is a directory" in str(found)

    def test_a_folder_that_is_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()

        found = refusal(tmp_path / "file" / "a.h5")

        assert isinstance(found, ConfigError)
        assert "cannot be written" in str(found)
        assert "use another name" in str(found)

    @pytest.mark.parametrize("content", ["text", "hdf5"])
    def test_a_file_that_is_no_result_is_not_replaced(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "a.h5"
        if content == "text":
            path.write_text("notes")
        else:
            with h5py.File(path, "w") as file:
                file["q"] = 1

        found = refusal(path)

        assert isinstance(found, ConfigError)
        assert "is no result of ringmpi" in str(found)

    def test_a_result_may_be_replaced(self, tmp_path: Path) -> None:
        with ResultWriter(tmp_path / "a.h5") as writer:
            finish(writer)

        assert refusal(tmp_path / "a.h5") is None

    def test_a_name_that_is_too_long_is_refused(self, tmp_path: Path) -> None:
        found = refusal(tmp_path / ("x" * 250 + ".h5"))

        assert "cannot be written: File name too long" in str(found)
