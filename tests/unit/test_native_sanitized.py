"""The C++ under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, in processes of its own."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from ringmpi.devices.build import build, recipe_here
from ringmpi.errors import MissingCapabilityError

from .matrix_units import emulation_flags

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-O1")
RACE_FLAGS = ("-fsanitize=thread", "-g1", "-O1")

#: What the compiler is told to leave out, for vectors of other widths than this machine's widest.
VECTORS: dict[str, tuple[str, ...]] = {"all that this machine has": ()}
if platform.machine() == "x86_64":
    VECTORS |= {"at most AVX2": ("-mno-avx512f",)}

#: Reads one element behind an array, or shifts by more than there is.
FAULTY = b"""
extern "C" int read_behind(const int *numbers, long count) { return numbers[count]; }
extern "C" int shift(int by) { return 1 << by; }
"""

#: Two threads count with one number.
RACY = b"""
#include <thread>
extern "C" int count() {
    int counted = 0;
    const auto more = [&] { for (int i = 0; i < 1000; ++i) ++counted; };
    std::thread first(more), second(more);
    first.join();
    second.join();
    return counted;
}
"""

#: Seconds for a compiler that instruments everything, on a busy core.
TEST_LIMIT = 600


@pytest.fixture(scope="module")
def runtime() -> str:
    """The library of the address sanitizer."""
    return runtime_library("libasan.so")


@pytest.fixture(scope="module")
def race_runtime() -> str:
    """The library of the thread sanitizer."""
    return runtime_library("libtsan.so")


def runtime_library(name: str) -> str:
    """Return a sanitizer's library, which must be loaded before all others."""
    try:
        compiler = recipe_here().compiler
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    asked = [*compiler, f"-print-file-name={name}"]
    path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"{compiler[0]} has no {name}")
    return str(Path(path).resolve())


def run(runtime: str, *words: str) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).parents[1]
    own = {
        "LD_PRELOAD": runtime,
        # Python leaves much to the end of the process.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # Of many races the first one tells enough, and each takes its time to be told.
        "TSAN_OPTIONS": "halt_on_error=1",
        "PYTHONPATH": str(tests),
        "PYTHONMALLOC": "malloc",
    }
    return subprocess.run(
        [*in_order(), sys.executable, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **own},
        check=False,
        timeout=TEST_LIMIT,
    )


@cache
def in_order() -> tuple[str, ...]:
    """Return how to start a process whose memory lies where ThreadSanitizer expects it, where allowed."""
    words = ("setarch", "--addr-no-randomize")
    if shutil.which(words[0]) is None:
        return ()
    tried = subprocess.run([*words, "true"], capture_output=True, check=False, timeout=TEST_LIMIT)
    return words if tried.returncode == 0 else ()


@pytest.mark.timeout(TEST_LIMIT)
@pytest.mark.parametrize("less", VECTORS.values(), ids=VECTORS.keys())
def test_odd_shapes_are_computed_within_their_memory(runtime: str, less: tuple[str, ...]) -> None:
    flags = less or emulation_flags()
    library = build(recipe_here((*FLAGS, *flags))).path

    ended = run(runtime, str(Path(__file__).with_name("sanitized.py")), str(library))

    assert ended.returncode == 0, ended.stderr[-5000:]
    assert ended.stdout.strip().endswith("cases")
    assert "Sanitizer" not in ended.stderr


@pytest.mark.timeout(TEST_LIMIT)
def test_threads_touch_nothing_at_once(race_runtime: str) -> None:
    library = build(recipe_here((*RACE_FLAGS, *emulation_flags()))).path

    ended = run(race_runtime, str(Path(__file__).with_name("raced.py")), str(library))

    assert ended.returncode == 0, ended.stderr[-5000:]
    assert ended.stdout.strip().endswith("cases")
    assert "Sanitizer" not in ended.stderr


def test_a_race_would_be_seen(
    race_runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGMPI_CACHE", str(tmp_path / "cache"))
    library = build(replace(recipe_here(RACE_FLAGS), sources={"racy.cpp": RACY})).path

    ended = run(race_runtime, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}).count()")

    assert ended.returncode != 0
    assert "data race" in ended.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="units of x86")
@pytest.mark.parametrize("cpu", ["cooperlake", "sapphirerapids"])
def test_units_that_this_cpu_lacks_compile(cpu: str) -> None:
    """Dot products of bfloat16, without and with AMX."""
    recipe = recipe_here()
    source = Path(__file__).parents[2] / "kernels" / "native.cpp"
    words = [*recipe.compiler, "-std=c++17", f"-march={cpu}", "-fsyntax-only"]

    def compiled(file: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*words, "-xc++", file], capture_output=True, text=True, check=False, timeout=TEST_LIMIT
        )

    if compiled(os.devnull).returncode != 0:
        pytest.skip(f"{recipe.compiler[0]} knows no {cpu}")
    done = compiled(str(source))

    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            "numpy.zeros(100, 'i4'); library.read_behind(numbers.ctypes.data_as(P), 100)",
            "heap-buffer-overflow",
        ),
        ("0; library.shift(40)", "shift exponent 40"),
    ],
    ids=["read", "shift"],
)
def test_a_fault_would_be_seen(
    runtime: str, call: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGMPI_CACHE", str(tmp_path / "cache"))
    library = build(replace(recipe_here(FLAGS), sources={"faulty.cpp": FAULTY})).path
    program = (
        "import ctypes, numpy\n"
        "P = ctypes.POINTER(ctypes.c_int)\n"
        f"library = ctypes.CDLL({str(library)!r})\n"
        "library.read_behind.argtypes = P, ctypes.c_long\n"
        f"numbers = {call}\n"
    )

    ended = run(runtime, "-c", program)

    assert ended.returncode != 0
    assert told in ended.stderr
