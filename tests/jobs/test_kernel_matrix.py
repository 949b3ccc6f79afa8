"""The script that asks compilers about the GPU's kernels, apart from compiling."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "jobs" / "kernels"))

import matrix  # noqa: E402
from nvrtc import Figures, read_log  # noqa: E402
from occupancy import MULTIPROCESSORS, Occupancy, occupancy  # noqa: E402

LOG = """ptxas info    : 194 bytes gmem, 400 bytes cmem[4]
ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas info    : Function properties for one
ptxas         .     24 bytes stack frame, 16 bytes spill stores, 72 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 24 bytes cumulative stack size, 436 bytes cmem[0]
ptxas info    : Compile time = 8019.616 ms
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas info    : Function properties for two
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 1 barriers, 512 bytes smem, 436 bytes cmem[0]
"""


def test_figures_are_read_from_what_the_compiler_prints() -> None:
    assert read_log(LOG) == {"one": Figures(128, 24, 16, 72, 0), "two": Figures(20, 0, 0, 0, 512)}


def test_a_compiler_that_prints_otherwise_is_refused() -> None:
    with pytest.raises(SystemExit, match="does not tell what was expected of two"):
        read_log(LOG.replace("Used 20 registers", "Took 20 registers"))


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "expected"),
    [
        # 64 KiB of registers: 168 * 32 are 21 pieces of 256 a warp, so 12 warps, so 3 blocks of 4.
        ("sm_80", 128, 168, 0, Occupancy(3, 12 / 64, "registers")),
        # 33 registers are given as 40, in pieces of 256 a warp: 51 warps, of which whole fours are 48.
        ("sm_80", 256, 33, 0, Occupancy(6, 48 / 64, "registers")),
        # 54 KiB and 1 KiB of CUDA's own: 2 of them in 164 KiB... and 3, since 165 are too many.
        ("sm_80", 128, 32, 54 * 1024, Occupancy(2, 8 / 64, "shared memory")),
        ("sm_80", 128, 32, 53 * 1024, Occupancy(3, 12 / 64, "shared memory")),
        # The same without CUDA's own.
        ("sm_75", 128, 32, 32 * 1024, Occupancy(2, 8 / 32, "shared memory")),
        ("sm_75", 1024, 32, 0, Occupancy(1, 1.0, "threads")),
        ("sm_86", 32, 16, 0, Occupancy(16, 16 / 48, "blocks")),
        ("sm_90", 256, 255, 0, Occupancy(1, 8 / 64, "registers")),
        ("sm_120", 128, 32, 99 * 1024, Occupancy(1, 4 / 48, "shared memory")),
    ],
)
def test_what_is_scarcest_limits_the_blocks(
    arch: str, threads: int, registers: int, shared: int, expected: Occupancy
) -> None:
    assert occupancy(arch, threads, registers, shared) == expected


def test_a_few_modules_meet_all_that_there_is() -> None:
    few = matrix.sample()

    for cuda in ("12", "13"):
        assert {module.arch for module in few if module.cuda == cuda} == {*MULTIPROCESSORS}
    assert {module.variant.dtype for module in few} == {"float64", "float32", "float16", "bfloat16"}
    assert {module.variant.head_size for module in few} == {64, 128, 256}
    assert {module.variant.unit for module in few} == {"Plain", "Tensor"}
    assert {module.variant.rounds_weights for module in few} == {False, True}
    assert len(few) == len(set(few)) == 14


ROW = dict.fromkeys(matrix.COLUMNS, "0") | {
    "arch": "sm_80",
    "kernel": "ringmpi_forward",
    "shared_nbytes": "65536",
    "blocks_per_sm": "2",
}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"spill_stores": "4"}, "spills 4 bytes"),
        ({"spill_loads": "8"}, "spills"),
        ({"shared_nbytes": "166913"}, "166913 bytes of shared memory, and 166912 are there"),
        ({"blocks_per_sm": "0", "limited_by": "registers"}, "does not fit for want of registers"),
    ],
    ids=["stores", "loads", "shared memory", "registers"],
)
def test_what_must_not_be_is_told(changed: dict[str, str], told: str) -> None:
    assert list(matrix.faults(ROW)) == []
    (line,) = matrix.faults(ROW | changed)
    assert told in line


def test_a_file_that_says_otherwise_is_found(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    other = ROW | {"registers": "1"}
    matrix.write([ROW, ROW | {"arch": "sm_90"}], path)

    assert matrix.differences([ROW], path) == []
    assert len(matrix.differences([ROW, other], path)) == 1
    path.write_text(path.read_text().replace(matrix.digest(), "0" * 16))
    (line,) = matrix.differences([ROW], path)
    assert "belongs to other sources or compilers" in line


def test_comments_make_no_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in [*matrix.KERNELS.glob("*.cu"), *matrix.KERNELS.glob("*.cuh")]:
        (tmp_path / source.name).write_bytes(source.read_bytes())
    before, softmax = matrix.digest(), tmp_path / "softmax.cuh"
    monkeypatch.setattr(matrix, "KERNELS", tmp_path)

    softmax.write_text("// A comment.\n" + softmax.read_text().replace("// The online", "// An online"))
    commented = matrix.digest()
    softmax.write_text(softmax.read_text().replace("T sum = 0;", "T sum = 1;"))

    assert matrix.digest() != before
    assert commented.strip() == before


def test_the_kept_figures_are_of_these_sources_and_without_fault() -> None:
    lines = (ROOT / "results" / "kernels.csv").read_text().splitlines()

    assert matrix.digest() in lines[0].split()
    rows = list(matrix.csv.DictReader(lines[1:]))
    assert len(rows) == sum(len(module.kernels) for module in matrix.modules())
    assert {row["kernel"] for row in rows} >= {*matrix.CHORES}
    assert [line for row in rows for line in matrix.faults(row)] == []
