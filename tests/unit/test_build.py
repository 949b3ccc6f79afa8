"""The cache of compiled libraries: what its names depend on, who may fill it, and what goes wrong."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ringmpi.devices import build as module
from ringmpi.devices.build import (
    FLAGS,
    Recipe,
    build,
    compiler_command,
    cpu_kind,
    find,
    folders,
    kernel_sources,
    recipe_here,
)
from ringmpi.errors import MissingCapabilityError

SOURCE = b'#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
HEADER = b"#define ANSWER 42\n"

#: Somebody who is neither root nor us.
STRANGER = 12345


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, of a node that no test has used."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def cache(tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("RINGMPI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Gets a line for each time that the compiler of `recipe` compiles."""
    return tmp_path / "log"


@pytest.fixture
def recipe(tmp_path: Path, cache: Path, log: Path) -> Recipe:
    """Makes a library in no time, with a compiler that keeps a log."""
    (real,) = compiler_command({"PATH": os.environ["PATH"]})
    compiler = script(
        tmp_path / "logging-c++", f'[ "$1" = --version ] || echo compiled >> {log}\nexec {real} "$@"'
    )
    return tiny((compiler,))


def tiny(compiler: Sequence[str], cpu: str = "this one") -> Recipe:
    sources = {"answer.cpp": SOURCE, "answer.h": HEADER}
    return Recipe(tuple(compiler), sources, ("-shared", "-fPIC"), "-O1", cpu)


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def compiled(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


class TestName:
    def test_it_depends_on_everything_in_the_recipe(self, tmp_path: Path) -> None:
        path = script(tmp_path / "cxx", "")
        plain = tiny([path])
        others = {
            "a header": replace(plain, sources={**plain.sources, "answer.h": HEADER + b" "}),
            "a name": replace(plain, sources={"other.cpp": SOURCE, "answer.h": HEADER}),
            "one file more": replace(plain, sources={**plain.sources, "more.h": b""}),
            "a flag": replace(plain, flags=("-shared", "-fPIC", "-g")),
            "flags in another order": replace(plain, flags=("-fPIC", "-shared")),
            "the flag for this CPU": replace(plain, own_cpu=""),
            "another compiler": replace(plain, compiler=(script(tmp_path / "other", ""),)),
            "an option of the compiler": replace(plain, compiler=(path, "-m64")),
            "the CPU": replace(plain, cpu="another one"),
        }

        keys = [recipe.key for recipe in (plain, *others.values())]

        assert len(set(keys)) == len(keys)
        assert tiny([path]).key == plain.key

    def test_a_compiler_behind_another_link_is_another_one(self, tmp_path: Path) -> None:
        link = tmp_path / "c++"
        keys = []
        for version in ("12", "13"):
            link.unlink(missing_ok=True)
            link.symlink_to(script(tmp_path / f"g++-{version}", ""))
            keys.append(tiny([str(link)]).key)

        assert keys[0] != keys[1]

    def test_another_version_at_the_same_path_is_compiled_anew(
        self, tmp_path: Path, cache: Path, recipe: Recipe, log: Path
    ) -> None:
        first = build(recipe)
        text = Path(recipe.compiler[0]).read_text()
        told = '[ "$1" = --version ] && echo 99 && exit\n'
        script(Path(recipe.compiler[0]), text.replace("#!/bin/sh\n", told))

        second = build(recipe)

        assert first.path != second.path
        assert compiled(log) == 2

    def test_a_file_of_an_x86_is_read_without_what_changes_from_core_to_core(
        self, tmp_path: Path
    ) -> None:
        cpuinfo = tmp_path / "cpuinfo"
        core = "processor\t: {0}\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon: the {1}\ncpu MHz\t\t: {0}\n"
        cpuinfo.write_text("".join(core.format(n, "best") + "flags\t\t: sse avx\n\n" for n in range(2)))
        told = cpu_kind(cpuinfo)
        cpuinfo.write_text("".join(core.format(n, "best") + "flags\t\t: sse avx\n\n" for n in (7, 9)))

        assert told == "vendor_id: GenuineIntel\nmodel name: Xeon: the best\nflags: sse avx"
        assert cpu_kind(cpuinfo) == told

    def test_a_file_of_an_arm_is_read(self, tmp_path: Path) -> None:
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp sve\nCPU part\t: 0xd40\n")

        assert cpu_kind(cpuinfo) == "Features: fp sve\nCPU part: 0xd40"

    def test_a_kernel_that_says_nothing_is_no_error(self, tmp_path: Path) -> None:
        assert cpu_kind(tmp_path / "nowhere") == ""

    def test_this_machine_says_something(self) -> None:
        assert cpu_kind()
        assert cpu_kind() in recipe_here().cpu
        assert os.uname().machine in recipe_here().cpu


class TestRecipe:
    def test_sources_are_those_of_the_package(self) -> None:
        here = {path.name for path in (Path(__file__).parents[2] / "kernels").iterdir()}

        assert set(kernel_sources()) == {name for name in here if name.endswith((".cpp", ".h"))}
        assert {"native.cpp", "task.h"} <= set(kernel_sources())
        assert recipe_here().sources == kernel_sources()

    def test_extra_flags_come_last(self) -> None:
        assert recipe_here(["-g"]).flags == (*FLAGS, "-g")

    def test_a_package_without_sources_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "kernel_sources", lambda: {"task.h": b""})

        with pytest.raises(MissingCapabilityError, match=r"no C\+\+ source.*install ringmpi again"):
            recipe_here()

    def test_the_compiler_is_the_one_of_the_machine(self, tmp_path: Path) -> None:
        path = script(tmp_path / "c++", "")

        assert compiler_command({"PATH": str(tmp_path)}) == (path,)
        assert compiler_command({"PATH": str(tmp_path), "CXX": "  "}) == (path,)

    def test_cxx_may_hold_options(self, tmp_path: Path) -> None:
        script(tmp_path / "ccache", "")

        found = compiler_command({"PATH": str(tmp_path), "CXX": "ccache g++ '-DA=b c'"})

        assert found == (str(tmp_path / "ccache"), "g++", "-DA=b c")

    @pytest.mark.parametrize(
        ("environment", "told"),
        [
            ({}, r"no C\+\+ compiler was found \(c\+\+; set CXX\)"),
            ({"CXX": "/nonexistent"}, r"no C\+\+ compiler was found \(CXX=/nonexistent is none\)"),
            ({"CXX": "'g++"}, r"CXX=\"'g\+\+\" cannot be read: No closing quotation"),
        ],
        ids=["none", "none of that name", "half a quotation"],
    )
    def test_no_compiler_is_told(self, tmp_path: Path, environment: dict[str, str], told: str) -> None:
        with pytest.raises(MissingCapabilityError, match=told):
            compiler_command({"PATH": str(tmp_path), **environment})

    def test_flags_of_other_programs_do_not_matter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = recipe_here()
        monkeypatch.setenv("CXXFLAGS", "-march=nocona -O0")

        assert recipe_here() == plain


class TestCache:
    def test_a_library_is_compiled_once_and_found_again(
        self, cache: Path, recipe: Recipe, log: Path
    ) -> None:
        assert find(recipe) is None

        first, again = build(recipe), build(recipe)

        assert answer(first.path) == 42
        assert first.seconds > 0
        assert again == replace(first, seconds=0.0)
        assert find(recipe) == first.path
        assert compiled(log) == 1
        assert left_in(cache) == [first.path.name]

    def test_it_is_for_this_user_alone(self, cache: Path, recipe: Recipe) -> None:
        before = os.umask(0)
        try:
            path = build(recipe).path
        finally:
            os.umask(before)

        assert [oct(place.stat().st_mode & 0o777) for place in (cache, path)] == ["0o700"] * 2

    def test_a_recipe_that_differs_is_compiled(self, recipe: Recipe, log: Path) -> None:
        other = replace(recipe, sources={**recipe.sources, "answer.h": b"#define ANSWER 43\n"})

        assert [answer(build(made).path) for made in (recipe, other)] == [42, 43]
        assert compiled(log) == 2

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data[: len(data) // 2],
            lambda data: b"",
            lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
            lambda data: data[:-1],
        ],
        ids=["half", "nothing", "a bit", "without its last byte"],
    )
    def test_a_damaged_library_is_made_anew(
        self, recipe: Recipe, log: Path, damage: Callable[[bytes], bytes]
    ) -> None:
        path = build(recipe).path
        path.write_bytes(damage(path.read_bytes()))
        assert find(recipe) is None

        again = build(recipe)

        assert again.path == path
        assert answer(path) == 42
        assert compiled(log) == 2

    def test_the_newest_of_several_versions_is_found_without_asking(
        self, cache: Path, recipe: Recipe
    ) -> None:
        path = build(recipe).path
        newer = path.with_name(path.name[:-4] + "x.so")
        newer.write_bytes(path.read_bytes())
        os.utime(newer, (time.time() + 60, time.time() + 60))

        assert find(recipe) == newer

    def test_one_that_another_node_has_put_there_meanwhile_stays(
        self, cache: Path, recipe: Recipe
    ) -> None:
        path = build(recipe).path
        before, mine = path.stat().st_ino, cache / "mine"
        mine.write_bytes(path.read_bytes())

        module._put_into_place(mine, path)

        assert path.stat().st_ino == before

    def test_a_file_system_without_links_is_fine(
        self, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*paths: Path) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(os, "link", refuse)

        assert answer(build(recipe).path) == 42


class TestFolders:
    def test_the_first_one_is_what_the_environment_says(self, node: Path) -> None:
        last = node / f"ringmpi-{os.geteuid()}"
        home = {"HOME": "/home/me"}

        assert folders({**home, "RINGMPI_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == [Path("/a"), last]
        assert folders({**home, "XDG_CACHE_HOME": "/b"}) == [Path("/b/ringmpi"), last]
        assert folders({**home, "XDG_CACHE_HOME": "b"})[0].parts[-2:] == (".cache", "ringmpi")

    def test_without_a_home_it_is_where_temporary_files_go(
        self, node: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("RINGMPI_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)

        def nobody() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", nobody)

        path = build(recipe).path

        assert path.parent == node / f"ringmpi-{os.geteuid()}"
        assert oct(path.parent.stat().st_mode & 0o777) == "0o700"
        assert answer(path) == 42

    @pytest.mark.parametrize("place", ["file/cache", "/proc/ringmpi"])
    def test_one_that_cannot_be_written_to_gives_way(
        self,
        tmp_path: Path,
        node: Path,
        recipe: Recipe,
        place: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("RINGMPI_CACHE", str(tmp_path / place))

        first, again = build(recipe), build(recipe)

        assert first.path.is_relative_to(node)
        assert again.seconds == 0

    def test_one_that_is_full_gives_way(
        self, cache: Path, node: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = Path.write_bytes

        def limited(path: Path, data: bytes) -> int:
            if path.parent == cache:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            return write(path, data)

        monkeypatch.setattr(Path, "write_bytes", limited)

        path = build(recipe).path

        assert path.is_relative_to(node)
        assert answer(path) == 42
        assert left_in(cache) == []

    def test_no_place_to_compile_in_is_told(
        self, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(prefix: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(tempfile, "TemporaryDirectory", full)

        with pytest.raises(MissingCapabilityError, match=r"No space left on device; set TMPDIR"):
            build(recipe)

    def test_a_read_only_one_serves_what_is_in_it(
        self, cache: Path, node: Path, recipe: Recipe
    ) -> None:
        path = build(recipe).path
        cache.chmod(0o500)

        try:
            assert build(recipe).path == path
        finally:
            cache.chmod(0o700)

    def test_no_place_at_all_is_told(
        self, tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RINGMPI_CACHE", "/proc/ringmpi")
        monkeypatch.setattr(module, "node_folder", lambda: Path("/proc/node"))

        with pytest.raises(
            MissingCapabilityError, match=r"/proc/ringmpi: .*/proc/node: .*RINGMPI_CACHE"
        ):
            build(recipe)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file or folder belong to somebody else."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
        return
    plain = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        found = plain(self, **options)
        if self != path:
            return found
        return os.stat_result((*found[:4], STRANGER, *found[5:]))

    monkeypatch.setattr(Path, "stat", stat)


class TestInTheJobOfAScheduler:
    """Its nodes share a home, and each has a folder of its own."""

    @pytest.fixture
    def home(self, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.delenv("RINGMPI_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        return tmp_path / "home" / "ringmpi"

    @pytest.fixture
    def own(self, node: Path) -> Path:
        return node / f"ringmpi-{os.geteuid()}"

    @pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"])
    def test_the_nodes_own_folder_comes_first(self, own: Path, variable: str) -> None:
        places = {"XDG_CACHE_HOME": "/b"}

        assert folders(places) == [Path("/b/ringmpi"), own]
        assert folders(places | {variable: "17"}) == [own, Path("/b/ringmpi")]
        assert folders(places | {variable: "17", "RINGMPI_CACHE": "/a"}) == [Path("/a"), own]

    def test_what_is_compiled_is_kept_for_other_jobs_too(
        self, home: Path, own: Path, recipe: Recipe, log: Path
    ) -> None:
        built = build(recipe)

        assert built.path.parent == own
        assert left_in(home) == [built.path.name]
        assert (home / built.path.name).read_bytes() == built.path.read_bytes()
        assert build(recipe) == replace(built, seconds=0.0)
        assert compiled(log) == 1

    @pytest.mark.parametrize("before", ["nothing", "half of one"])
    def test_one_of_the_home_is_copied_and_loaded_from_the_node(
        self, home: Path, own: Path, recipe: Recipe, log: Path, before: str
    ) -> None:
        first = build(recipe).path
        first.unlink()
        if before == "half of one":
            first.write_bytes((home / first.name).read_bytes()[:99])

        again = build(recipe)

        assert again.path == first
        assert again.seconds == 0.0
        assert find(recipe) == first
        assert answer(first) == 42
        assert compiled(log) == 1
        assert [name for name in left_in(own) if name.endswith(".tmp")] == []

    def test_a_node_that_keeps_nothing_takes_that_of_the_home(
        self, home: Path, own: Path, recipe: Recipe, log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = build(recipe).path.name
        (own / name).unlink()

        def full(data: bytes, target: Path) -> str:
            return f"{target.parent}: No space left on device"

        monkeypatch.setattr(module, "_keep", full)

        assert build(recipe).path == home / name
        assert compiled(log) == 1

    def test_a_home_that_takes_nothing_is_no_hindrance(
        self, home: Path, own: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc")

        assert build(recipe).path.parent == own

    def test_outside_a_job_nothing_is_copied(
        self, home: Path, own: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SLURM_JOB_ID")

        path = build(recipe).path

        assert path.parent == home
        assert [name for name in left_in(own) if name.endswith(".so")] == []


class TestTrust:
    def test_a_library_of_another_user_is_not_loaded(
        self, recipe: Recipe, log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = build(recipe).path
        give_away(path, monkeypatch)

        assert find(recipe) is None
        assert "another user" in (module.distrust(path) or "")

    def test_a_folder_of_another_user_is_not_used(
        self, cache: Path, node: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        build(recipe)
        give_away(cache, monkeypatch)

        path = build(recipe).path

        assert path.is_relative_to(node)

    @pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777], ids=oct)
    def test_a_folder_that_others_can_write_to_is_not_used(
        self, cache: Path, node: Path, recipe: Recipe, mode: int
    ) -> None:
        build(recipe)
        cache.chmod(mode)

        assert find(recipe) is None
        assert build(recipe).path.is_relative_to(node)
        assert f"chmod go-w {cache}" in (module.distrust(cache) or "")

    def test_a_library_that_others_can_write_to_is_not_loaded(self, recipe: Recipe) -> None:
        path = build(recipe).path
        path.chmod(0o722)

        assert find(recipe) is None

    def test_one_of_root_is_trusted(self, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        path = build(recipe).path
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)

        # As whom we have made it, root or another one.
        assert (find(recipe) == path) == (os.getuid() == 0)

    def test_a_planted_folder_for_temporary_files_is_not_used(
        self, cache: Path, node: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RINGMPI_CACHE", "/proc/ringmpi")
        planted = node / f"ringmpi-{os.geteuid()}"
        planted.mkdir()
        give_away(planted, monkeypatch)

        with pytest.raises(MissingCapabilityError, match=r"ringmpi-\d+ belongs to another user"):
            build(recipe)


class TestFailure:
    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("echo 'a.cpp:1:2: error: no such thing' >&2; echo more; exit 1", "error: no such thing"),
            ("echo 'In file a.h'; echo 'fatal Error: b.h'; exit 1", "fatal Error: b.h"),
            ("echo 'License expired'; exit 1", "License expired"),
            ("exit 3", "exit code 3"),
            ("kill -9 $$", "exit code -9"),
            ("true", "left no library"),
        ],
        ids=["error", "fatal error", "message", "silent", "killed", "nothing made"],
    )
    def test_what_the_compiler_says_is_told_in_one_line(
        self, tmp_path: Path, cache: Path, text: str, told: str
    ) -> None:
        compiler = script(tmp_path / "broken", f'[ "$1" = --version ] && exit\n{text}')

        with pytest.raises(MissingCapabilityError, match=told) as raised:
            build(tiny([compiler]))

        assert "\n" not in str(raised.value)
        assert compiler in str(raised.value)
        assert left_in(cache) == []

    def test_a_compiler_that_does_not_tell_its_version_is_none(
        self, tmp_path: Path, cache: Path
    ) -> None:
        compiler = script(tmp_path / "broken", "echo 'no license'; exit 1")

        with pytest.raises(MissingCapabilityError, match="--version failed: no license"):
            build(tiny([compiler]))

    def test_what_is_no_program_is_no_compiler(self, tmp_path: Path, cache: Path) -> None:
        path = tmp_path / "text"
        path.write_text("text")
        path.chmod(0o755)

        with pytest.raises(MissingCapabilityError, match="Exec format error"):
            build(tiny([str(path)]))

    @pytest.mark.parametrize("when", ["always", "as it compiles"])
    def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(
        self, tmp_path: Path, cache: Path, when: str
    ) -> None:
        first = "" if when == "always" else '[ "$1" = --version ] && exit\n'
        compiler = script(tmp_path / "hangs", f"{first}sleep 300 &\necho $! > {tmp_path}/pid\nwait")
        started = time.monotonic()

        with pytest.raises(MissingCapabilityError, match=r"given up after 2 s"):
            build(tiny([compiler]), limit=2.0)

        assert time.monotonic() - started < 60
        assert is_gone(int((tmp_path / "pid").read_text()))
        assert left_in(cache) == []

    def test_a_job_that_ends_waits_for_no_compiler(self, tmp_path: Path, cache: Path) -> None:
        compiler = script(tmp_path / "hangs", "sleep 300")

        with pytest.raises(MissingCapabilityError, match="since the job ends"):
            build(tiny([compiler]), stopped=lambda: True)

    def test_the_flag_for_this_cpu_is_left_away_where_it_is_refused(
        self, tmp_path: Path, cache: Path, recipe: Recipe, log: Path
    ) -> None:
        text = Path(recipe.compiler[0]).read_text()
        refusal = 'case "$*" in *-mown=native*) echo "unknown option -mown=native"; exit 1;; esac\n'
        script(Path(recipe.compiler[0]), text.replace("exec", f"{refusal}exec"))

        path = build(replace(recipe, own_cpu="-mown=native")).path

        assert answer(path) == 42
        assert compiled(log) == 2

    def test_other_errors_are_not_tried_again(self, recipe: Recipe, log: Path) -> None:
        with pytest.raises(MissingCapabilityError, match=r"answer\.cpp.*error"):
            build(replace(recipe, sources={"answer.cpp": b"no C++", "answer.h": HEADER}))

        assert compiled(log) == 1


def is_gone(pid: int) -> bool:
    """Return whether a process ends soon, apart from what nobody has reaped."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


#: What each of many processes does: wait until all are there, build, and load what it has got.
PROGRAM = """
import fcntl, os, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from unit.test_build import tiny, answer
from ringmpi.devices.build import build
from ringmpi.errors import MissingCapabilityError
{before}
(Path({gate!r}) / str(os.getpid())).touch()
while len(list(Path({gate!r}).iterdir())) < {count}:
    time.sleep(0.01)
try:
    built = build(tiny([{compiler!r}]))
    print(answer(built.path), built.seconds > 0)
except MissingCapabilityError as error:
    print("failed", error)
"""


AtOnce = Callable[..., list[str]]


@pytest.fixture
def at_once(tmp_path: Path) -> Iterator[AtOnce]:
    """Build in so many processes at once; return what each has printed."""
    processes: list[subprocess.Popen[str]] = []

    def run(count: int, compiler: str, before: str = "") -> list[str]:
        gate = tmp_path / "gate"
        gate.mkdir()
        tests = str(Path(__file__).parents[1])
        program = PROGRAM.format(
            tests=tests, compiler=compiler, before=before, gate=str(gate), count=count
        )
        for _ in range(count):
            command = [sys.executable, "-c", program]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return [process.communicate(timeout=100)[0].strip() for process in processes]

    yield run
    for process in processes:
        process.kill()


@pytest.fixture
def slow(recipe: Recipe) -> str:
    """A compiler that takes long enough for the others to come and find it at work."""
    text = Path(recipe.compiler[0]).read_text()
    return script(
        Path(recipe.compiler[0]), text.replace("exec", '[ "$1" = --version ] || sleep 1\nexec')
    )


class TestManyProcesses:
    def test_one_compiles_and_the_others_wait(
        self, at_once: AtOnce, cache: Path, slow: str, log: Path
    ) -> None:
        found = at_once(8, slow)

        assert found == ["42 True"] * 8
        assert compiled(log) == 1
        assert len(left_in(cache)) == 1

    def test_without_locks_each_compiles_for_itself(
        self, at_once: AtOnce, cache: Path, slow: str, log: Path
    ) -> None:
        no_locks = "def refuse(*a): raise OSError(37, 'No locks available')\nfcntl.flock = refuse"

        found = at_once(3, slow, no_locks)

        assert found == ["42 True"] * 3
        assert compiled(log) == 3
        assert len(left_in(cache)) == 1

    def test_nodes_share_a_home_and_no_lock(
        self, at_once: AtOnce, cache: Path, slow: str, log: Path
    ) -> None:
        names = "import socket, random\nsocket.gethostname = lambda: f'node{os.getpid()}'"

        found = at_once(3, slow, names)

        assert found == ["42 True"] * 3
        assert compiled(log) == 3
        assert len(left_in(cache)) == 1

    @pytest.mark.parametrize("home", ["missing", "read-only", "unset"])
    def test_any_home_will_do(
        self,
        at_once: AtOnce,
        tmp_path: Path,
        node: Path,
        slow: str,
        log: Path,
        home: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.delenv("RINGMPI_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path / "nowhere" / "me"))
        before = ""
        if home == "read-only":
            monkeypatch.setenv("HOME", "/proc")
        if home == "unset":
            monkeypatch.delenv("HOME")
            # Nor an entry in the password file.
            before = "import pwd\ndef nobody(uid): raise KeyError(uid)\npwd.getpwuid = nobody"

        found = at_once(3, slow, before)

        assert found == ["42 True"] * 3
        assert compiled(log) == 1

    def test_what_one_has_failed_with_is_told_by_all(
        self, at_once: AtOnce, tmp_path: Path, cache: Path, log: Path
    ) -> None:
        text = f"echo compiled >> {log}; sleep 1; echo 'error: no such thing'; exit 1"
        compiler = script(tmp_path / "broken", f'[ "$1" = --version ] && exit\n{text}')

        found = at_once(4, compiler)

        assert len(set(found)) == 1
        assert found[0].startswith("failed")
        assert found[0].endswith("error: no such thing")
        assert compiled(log) == 1

    def test_an_earlier_failure_does_not_stand(self, cache: Path, recipe: Recipe) -> None:
        good = dict(recipe.sources)
        bad = replace(recipe, sources=good)
        compiler = Path(recipe.compiler[0])
        text = compiler.read_text()
        script(compiler, text.replace("exec", '[ "$1" = --version ] || exit 1\nexec'))
        with pytest.raises(MissingCapabilityError):
            build(bad)
        script(compiler, text.removeprefix("#!/bin/sh\n"))

        assert answer(build(recipe).path) == 42

    def test_a_wait_for_another_process_ends(
        self, node: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_take", lambda lock: False)
        started = time.monotonic()

        with pytest.raises(MissingCapabilityError, match=r"for too long; remove .*\.lock"):
            build(recipe, limit=1.0)

        assert 1 <= time.monotonic() - started < 60
