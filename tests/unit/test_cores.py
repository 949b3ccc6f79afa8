from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringmpi.comm.cores import Cores, affinity, available_cores, cores_here, cpu_quota


def test_cores_are_those_that_this_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 0, 5})

    assert affinity() == (0, 5, 7)
    assert available_cores() == 3


@pytest.mark.parametrize(
    ("cores", "of_job", "usable"),
    [
        (Cores((0, 1, 2, 3)), 4, 4),
        (Cores((2, 3), given=(0, 1, 2, 3)), 4, 2),
        (Cores((0, 1, 2, 3), quota=2.5), 2, 2),
        (Cores((0, 1), given=(0, 1, 2, 3), quota=8.0), 4, 2),
        (Cores((0, 1), quota=0.3), 1, 1),
    ],
    ids=["all", "bound", "less time than cores", "more time than cores", "less than a core"],
)
def test_cores_of_a_job_and_of_a_process(cores: Cores, of_job: int, usable: int) -> None:
    assert (cores.of_job, cores.usable) == (of_job, usable)


@pytest.mark.parametrize(
    ("started_by", "given"), [({0, 1, 2, 3}, (0, 1, 2, 3)), ({0, 1}, ()), (None, ())], ids=str
)
def test_cores_of_who_started_us_count_where_they_hold_ours(
    monkeypatch: pytest.MonkeyPatch, started_by: set[int] | None, given: tuple[int, ...]
) -> None:
    def may_run_on(pid: int) -> set[int]:
        if pid == os.getppid() and started_by is None:
            raise ProcessLookupError(pid)
        return {2, 3} if pid == 0 else started_by or set()

    monkeypatch.setattr(os, "sched_getaffinity", may_run_on)

    assert (cores_here().own, cores_here().given) == ((2, 3), given)


@pytest.mark.skipif(available_cores() < 2, reason="needs two cores")
def test_a_bound_process_sees_that_its_starter_has_more() -> None:
    program = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from ringmpi.comm.cores import cores_here
print(len(cores_here().own), len(cores_here().given))
"""

    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert told.stdout.split() == ["1", str(available_cores())]


class TestQuota:
    @pytest.fixture
    def groups(self, tmp_path: Path) -> Path:
        return tmp_path / "cgroup"

    def second_version(self, folder: Path, text: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(text)

    def first_version(self, folder: Path, quota: str, period: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.cfs_quota_us").write_text(quota)
        (folder / "cpu.cfs_period_us").write_text(period)

    @pytest.mark.parametrize(
        ("text", "quota"),
        [("150000 100000\n", 1.5), ("max 100000\n", 0.0), ("", 0.0), ("1 0", 0.0), ("many", 0.0)],
    )
    def test_version_2(self, tmp_path: Path, groups: Path, text: str, quota: float) -> None:
        groups.write_text("0::/job/step\n")
        self.second_version(tmp_path / "sys/job/step", text)

        assert cpu_quota(groups, tmp_path / "sys") == quota

    def test_the_tightest_group_on_the_way_up_counts(self, tmp_path: Path, groups: Path) -> None:
        groups.write_text("0::/job/step\n")
        self.second_version(tmp_path / "sys/job/step", "400000 100000\n")
        self.second_version(tmp_path / "sys/job", "200000 100000\n")
        self.second_version(tmp_path / "sys", "max 100000\n")

        assert cpu_quota(groups, tmp_path / "sys") == 2.0

    def test_a_path_that_is_not_there_inside_a_container(self, tmp_path: Path, groups: Path) -> None:
        groups.write_text("0::/docker/0123abcd\n")
        self.second_version(tmp_path / "sys", "300000 100000\n")

        assert cpu_quota(groups, tmp_path / "sys") == 3.0

    @pytest.mark.parametrize(("quota", "expected"), [("250000", 2.5), ("-1", 0.0)])
    def test_version_1(self, tmp_path: Path, groups: Path, quota: str, expected: float) -> None:
        groups.write_text("5:memory:/x\n4:cpu,cpuacct:/x\n")
        self.first_version(tmp_path / "sys/cpu,cpuacct/x", quota, "100000")
        self.first_version(tmp_path / "sys/memory/x", "1", "100000")

        assert cpu_quota(groups, tmp_path / "sys") == expected

    def test_no_control_groups_are_no_limit(self, tmp_path: Path) -> None:
        assert cpu_quota(tmp_path / "none", tmp_path) == 0.0
