"""The GPU's kernels in the cache: what their names depend on, who compiles them, and what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ringmpi.devices import cupy, nvrtc
from ringmpi.devices.build import sealed_content
from ringmpi.devices.launch import Variant
from ringmpi.errors import MissingCapabilityError

PLAIN, TENSOR = Variant("float32", 64, "Plain"), Variant("bfloat16", 64, "Tensor")

#: Seconds for processes that each sleep while they compile.
LIMIT = 60


@dataclass
class Compiler:
    """Compiles to the options that it is given."""

    known: Sequence[int] = (75, 80, 90)
    number: tuple[int, int] = (12, 9)
    complaint: str = ""
    compiled: list[tuple[str, ...]] = field(default_factory=list)

    def version(self) -> tuple[int, int]:
        return self.number

    def architectures(self) -> Sequence[int]:
        return self.known

    def compile(self, sources: dict[str, str], options: tuple[str, ...]) -> bytes:
        assert nvrtc.SOURCE in sources
        if self.complaint:
            raise MissingCapabilityError(self.complaint)
        self.compiled.append(options)
        return "\n".join(options).encode()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a node that no test has used."""
    (tmp_path / "node").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("RINGMPI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_module_is_compiled_once_and_kept_whole() -> None:
    compiler = Compiler()

    first, second = (nvrtc.module(PLAIN, (8, 0), compiler) for _ in range(2))

    assert len(compiler.compiled) == 1
    assert first.path == second.path
    assert (first.seconds > 0, second.seconds) == (True, 0.0)
    assert sealed_content(first.path).decode().split("\n") == ["-arch=sm_80", *PLAIN.options]
    first.path.write_bytes(first.path.read_bytes()[:-1])  # A damaged one is compiled anew.
    nvrtc.module(PLAIN, (8, 0), compiler)
    assert len(compiler.compiled) == 2


def test_its_name_depends_on_all_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        nvrtc.module(variant, capability, Compiler(number=version)).path
        for variant in (PLAIN, TENSOR)
        for capability in ((8, 0), (9, 0))
        for version in ((12, 9), (13, 0))
    ]
    sources = nvrtc.kernel_sources()
    changed = sources | {"softmax.cuh": sources["softmax.cuh"] + " "}
    monkeypatch.setattr(nvrtc, "kernel_sources", lambda: changed)
    found.append(nvrtc.module(PLAIN, (8, 0), Compiler()).path)

    assert len(set(found)) == 9


def test_every_cuda_source_is_among_those_that_are_compiled() -> None:
    folder = Path(__file__).parents[2] / "kernels"

    assert set(nvrtc.kernel_sources()) == {
        f.name for f in folder.iterdir() if f.suffix in (".cu", ".cuh")
    }


@pytest.mark.parametrize(
    ("capability", "right"), [((7, 5), "sm_75"), ((8, 6), "compute_80"), ((12, 0), "compute_90")]
)
def test_a_newer_gpu_gets_what_its_driver_compiles_on(capability: tuple[int, int], right: str) -> None:
    assert nvrtc.target(capability, [75, 80, 90]) == right
    assert nvrtc.module(PLAIN, capability, Compiler()).path.suffix == (
        ".cubin" if right.startswith("sm_") else ".ptx"
    )


def test_a_gpu_that_the_compiler_has_dropped_is_refused_with_the_way_out() -> None:
    with pytest.raises(MissingCapabilityError, match=r"sm_60 and .*sm_75 and newer; .*cuda12"):
        nvrtc.target((6, 0), [75, 80])


def test_what_the_compiler_says_is_told_and_nothing_is_kept(cache: Path) -> None:
    with pytest.raises(MissingCapabilityError, match="expected a semicolon"):
        nvrtc.module(PLAIN, (8, 0), Compiler(complaint="expected a semicolon"))

    assert list(cache.glob("*.cubin")) == []
    assert (
        nvrtc.first_complaint("a warning\nx.cu(3): error: expected\n\nmore")
        == "x.cu(3): error: expected"
    )
    assert nvrtc.first_complaint("") == "no reason given"


SEVERAL = """
import sys, time
from ringmpi.devices import nvrtc
from ringmpi.devices.launch import Variant
class Compiler:
    def version(self): return 12, 9
    def architectures(self): return [80]
    def compile(self, sources, options):
        with open(sys.argv[1], "a") as log: log.write("compiled\\n")
        time.sleep(1)
        return b"code"
built = nvrtc.module(Variant("float32", 64, "Plain"), (8, 0), Compiler())
assert built.path.read_bytes()[:-32] == b"code"
"""


def test_of_several_processes_of_a_node_one_compiles(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", SEVERAL, str(log)]

    started = [subprocess.Popen(command, env=dict(os.environ)) for _ in range(4)]
    codes = [process.wait(timeout=LIMIT) for process in started]

    assert codes == [0] * 4
    assert log.read_text().splitlines() == ["compiled"]


class FakeNvrtc:
    """NVRTC's functions as CuPy has them."""

    class NVRTCError(Exception):
        pass

    def __init__(self) -> None:
        self.destroyed: list[int] = []
        self.made: dict[str, Any] = {}

    def getVersion(self) -> tuple[int, int]:  # noqa: N802 - NVRTC's names
        return 12, 9

    def getSupportedArchs(self) -> tuple[int, ...]:  # noqa: N802
        return 80, 90

    def createProgram(self, source: str, name: str, headers: Any, names: Any) -> int:  # noqa: N802
        found = {
            n.decode(): h.decode() for n, h in zip(names, headers, strict=True)
        }  # str has no decode
        self.made = {"source": source, "name": name, "headers": found}
        return 7

    def compileProgram(self, program: int, options: Any) -> None:  # noqa: N802
        if "bad" in options:
            raise self.NVRTCError

    def getProgramLog(self, program: int) -> str:  # noqa: N802
        return "attention.cu(1): error: bad option"

    def getCUBIN(self, program: int) -> bytes:  # noqa: N802
        return b"cubin"

    def getPTX(self, program: int) -> str:  # noqa: N802
        return "ptx"

    def destroyProgram(self, program: int) -> None:  # noqa: N802
        self.destroyed.append(program)


def test_cupys_nvrtc_is_given_all_headers_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvrtc()
    monkeypatch.setattr(cupy, "_nvrtc", lambda: library)
    compiler, sources = cupy.CupyNvrtc(), nvrtc.kernel_sources()

    assert compiler.compile(sources, ("-arch=sm_80",)) == b"cubin"
    assert compiler.compile(sources, ("-arch=compute_80",)) == b"ptx"
    with pytest.raises(
        MissingCapabilityError, match=r"could not compile the kernels: attention.cu\(1\)"
    ):
        compiler.compile(sources, ("-arch=sm_80", "bad"))
    assert library.made["source"] == sources["attention.cu"]
    assert set(library.made["headers"]) == set(sources) - {"attention.cu"}
    assert library.destroyed == [7, 7, 7]
