"""What a sweep consists of, who runs which part of it, and what its table says; nothing is run here."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest
from synthetic import PASSED, Rule, write_result

from ringmpi.errors import ConfigError
from ringmpi.sweep import Share, Sweep, _new_log

#: A task of ``sbatch --array=2-8:3``.
TASK = {
    "SLURM_ARRAY_TASK_ID": "5",
    "SLURM_ARRAY_TASK_MIN": "2",
    "SLURM_ARRAY_TASK_MAX": "8",
    "SLURM_ARRAY_TASK_COUNT": "3",
}


@pytest.fixture
def launcher(tmp_path: Path) -> str:
    path = tmp_path / "mpiexec"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("of_all", [1, 2, 3, 5, 9])
def test_shares_have_each_point_once(of_all: int, tmp_path: Path, launcher: str) -> None:
    def points(share: str | None) -> list[str]:
        made = Sweep({"seq_len": 8}, "1,2,3", ["seed=0,1"], str(tmp_path), launcher, share=share)
        return [point.path.name for point in made._own()]

    shared = [points(f"{number + 1}/{of_all}") for number in range(of_all)]

    assert sorted(itertools.chain(*shared)) == sorted(points(None))
    assert max(map(len, shared)) - min(map(len, shared)) <= 1


def test_a_task_of_an_array_has_a_share_whatever_the_numbers_are() -> None:
    assert Share.parse("array", TASK) == Share(2, 3)
    assert Share.parse("array", TASK | {"SLURM_ARRAY_TASK_ID": "8"}) == Share(3, 3)
    alone = dict.fromkeys(TASK, "7") | {"SLURM_ARRAY_TASK_COUNT": "1"}
    assert Share.parse("array", alone) == Share(1, 1)


@pytest.mark.parametrize(
    ("text", "environment", "told"),
    [
        ("0/3", {}, "share=0/3: use I/N"),
        ("4/3", {}, "share=4/3: use I/N"),
        ("1", {}, "share=1: use I/N"),
        ("a/b", {}, "share=a/b: use I/N"),
        ("-1/3", {}, "share=-1/3: use I/N"),
        ("array", {}, "no task of a Slurm job array"),
        # --array=2,5,9
        ("array", TASK | {"SLURM_ARRAY_TASK_MAX": "9"}, "not evenly spaced; use an array such as 0-2"),
        # --array=2,4,8
        ("array", TASK | {"SLURM_ARRAY_TASK_ID": "4"}, "not evenly spaced"),
    ],
)
def test_what_is_no_share_is_refused(text: str, environment: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Share.parse(text, environment)

    assert told in str(refusal.value)


def test_the_problem_grows_with_the_ranks(tmp_path: Path, launcher: str) -> None:
    sweep = Sweep({}, "1,2,5", ["seed=0,1"], str(tmp_path), launcher, tokens_per_rank=7)

    found = [(point.ranks, point.experiment.seq_len) for point in sweep.points]
    assert found == [(1, 7), (2, 14), (5, 35)] * 2
    assert [row["seq_len"] for row in sweep._rows()] == ["7", "14", "35"] * 2


@pytest.mark.parametrize(
    ("given", "vary", "tokens", "told"),
    [
        ({"seq_len": 8}, [], 7, "so does seq_len"),
        ({}, ["seq_len=8,9"], 7, "so does seq_len"),
        ({"documents": (0, 7)}, [], 7, "so does documents"),
        ({}, [], 0, "tokens_per_rank=0"),
        ({}, [], -3, "tokens_per_rank=-3"),
    ],
)
def test_a_length_that_is_told_twice_or_none_is_refused(
    given: dict[str, Any], vary: list[str], tokens: int, told: str, tmp_path: Path, launcher: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        Sweep(given, "1,2", vary, str(tmp_path), launcher, tokens_per_rank=tokens)

    assert told in str(refusal.value)


def test_a_log_is_never_written_twice(tmp_path: Path) -> None:
    for attempt in ("first", "second", "third"):
        with _new_log(tmp_path / "a.b-p2.h5") as log:
            log.write(attempt)

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "a.b-p2.log": "first",
        "a.b-p2.2.log": "second",
        "a.b-p2.3.log": "third",
    }


def written(sweep: Sweep, which: int, rule: Rule) -> None:
    """Write the result of a point, as a run would."""
    point = sweep.points[which]
    options = {name: value for name, value in vars(point.experiment).items() if value is not None}
    write_result(point.path, point.ranks, rule=rule, verdicts=[PASSED], **options)


class TestTable:
    def test_efficiency_is_flops_of_a_rank(self, tmp_path: Path, launcher: str) -> None:
        """With as many tokens a rank, two ranks have four times the FLOPs, in twice the time at best."""
        sweep = Sweep({}, "1,2", [], str(tmp_path), launcher, tokens_per_rank=64)
        for which, flops in enumerate((1e9, 0.8e9)):
            written(sweep, which, Rule(flops=flops, transfer=0.0))

        one, two = sweep._rows()
        assert one["efficiency"] == "100%"
        # Two steps of each of two ranks, as long as the one step of one rank, at 0.8 times its speed.
        assert two["efficiency"] == "80%"

    def test_a_share_waits_for_no_other_one_and_says_so(
        self, tmp_path: Path, launcher: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sweep = Sweep({"seq_len": 8}, "1,2", [], str(tmp_path), launcher, share="1/2")
        written(sweep, 0, Rule())

        assert sweep._conclude() == 0
        told = capsys.readouterr().out
        assert "# sweep: 1 points, all OK, 1 of other shares without a result yet" in told

    def test_the_last_to_write_has_all_that_is_there(
        self, tmp_path: Path, launcher: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another share is done, and its table there, while this one writes what it knew before."""
        sweep = Sweep({"seq_len": 8}, "1,2", [], str(tmp_path), launcher, share="1/2")
        written(sweep, 0, Rule())
        write = Sweep._write

        def overtaken(self: Sweep, rows: list[dict[str, str]]) -> None:
            if not self.points[1].path.exists():
                written(self, 1, Rule())
                write(self, self._rows())
            write(self, rows)

        monkeypatch.setattr(Sweep, "_write", overtaken)
        sweep._conclude()

        with (tmp_path / "sweep.csv").open(newline="") as file:
            assert [row["verdict"] for row in csv.DictReader(file)] == ["OK", "OK"]

    def test_a_table_takes_the_place_of_another_as_a_whole(
        self, tmp_path: Path, launcher: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sweep = Sweep({"seq_len": 8}, "1,2", [], str(tmp_path), launcher)
        sweep._conclude()
        before = (tmp_path / "sweep.csv").read_bytes()

        def interrupted(*rows: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(csv.DictWriter, "writerows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sweep._conclude()
        assert (tmp_path / "sweep.csv").read_bytes() == before
