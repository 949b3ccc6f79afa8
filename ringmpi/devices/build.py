"""The library of the native device: compiled with this machine's own compiler at first use, and kept.

A name in the cache says all that the library depends on: sources, flags, compiler and CPU. A library appears
under its name as a whole, sealed with its own digest; it is loaded only from where nobody else can have put
it. Of the processes of a node one compiles, and the others wait for it. In a scheduler's job, whose nodes
share a home, it is loaded from the node's own folder, where it is copied once. Starts processes, so all but
`find` must come before MPI is initialised.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ringmpi.errors import MissingCapabilityError

#: The compiler where CXX names none: every Unix calls its own so.
COMPILER = "c++"

#: No value is looked at for an error number or a trap, which lets comparisons and roots be vectors; nothing
#: here lets a NaN or an infinity be anything else than it is. A product and a sum are one instruction, with
#: one rounding, also where a compiler would do that only when asked.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)

#: What makes a compiler use all that this machine's CPU has, by the kernel's name of the machine (GCC's
#: manual: -march takes native on x86, -mcpu on Arm and POWER).
OWN_CPU = {
    "x86_64": "-march=native",
    "i686": "-march=native",
    "aarch64": "-mcpu=native",
    "ppc64le": "-mcpu=native",
}

#: Lines of /proc/cpuinfo that tell one kind of CPU from another, on x86, Arm, POWER and RISC-V.
CPU_LINES = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
    *("cpu", "isa", "uarch"),
)

#: Seconds after which a compiler is given up: ten times what it takes on a busy core, for slow file systems.
COMPILE_LIMIT = 300.0

#: Seconds for a compiler to tell its version, which may have to come over a network first.
VERSION_LIMIT = 20.0

#: Seconds between looks at the lock or the compiler.
NAP = 0.02

#: Set in the job of a scheduler: Slurm, PBS and Torque, LSF.
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")

#: Bytes of SHA-256, which ends every library.
SEAL = 32

#: Characters of a digest in a name; 16 hex digits meet by accident once in 2**32 libraries.
DIGITS = 16

Stopped = Callable[[], bool]


@dataclass(frozen=True)
class Recipe:
    """All that a library depends on, apart from the compiler's version, which only a process can tell.

    Attributes
    ----------
    compiler : tuple of str
        The command, its first word a path.
    sources : mapping of str to bytes
        By file name.
    flags : tuple of str
    own_cpu : str
        The flag that a compiler may refuse; empty for none.
    cpu : str
        What tells this kind of CPU from others.
    """

    compiler: tuple[str, ...]
    sources: Mapping[str, bytes]
    flags: tuple[str, ...]
    own_cpu: str
    cpu: str

    @property
    def key(self) -> str:
        """A digest of everything in it."""
        path = str(Path(self.compiler[0]).resolve())
        told = [*self.compiler, path, "", *self.flags, self.own_cpu, self.cpu]
        for name, source in sorted(self.sources.items()):
            told += [name, hashlib.sha256(source).hexdigest()]
        return digest(told)


@dataclass(frozen=True)
class Built:
    """A library in the cache.

    Attributes
    ----------
    path : Path
    seconds : float
        Spent on compiling it, or on waiting for that; 0 where it was there.
    """

    path: Path
    seconds: float


class _GivenUpError(MissingCapabilityError):
    """The job ends, which says nothing about the compiler."""


def _never() -> bool:
    return False


def recipe_here(extra_flags: Sequence[str] = ()) -> Recipe:
    """Return what the library would be made of on this machine. Local; starts no process.

    Parameters
    ----------
    extra_flags : sequence of str
        Put behind all others.

    Raises
    ------
    MissingCapabilityError
        If there is no compiler, or no source.
    """
    compiler = compiler_command()
    sources = kernel_sources()
    if not any(name.endswith(".cpp") for name in sources):
        raise MissingCapabilityError("no C++ source is in ringmpi.kernels; install ringmpi again")
    machine = os.uname().machine
    flags = (*FLAGS, *extra_flags)
    return Recipe(compiler, sources, flags, OWN_CPU.get(machine, ""), f"{machine}\n{cpu_kind()}")


def compiler_command(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the command of the C++ compiler, its first word a path. Local.

    ``CXX`` may hold options too, as in ``CXX="ccache g++"``. ``CXXFLAGS`` is not read: environments of conda
    set it to a CPU of 2004.

    Raises
    ------
    MissingCapabilityError
        If there is none.
    """
    told = environment.get("CXX", "").strip()
    try:
        words = shlex.split(told) or [COMPILER]
    except ValueError as error:
        raise MissingCapabilityError(f"CXX={told!r} cannot be read: {error}") from error
    path = shutil.which(words[0], path=environment.get("PATH"))
    if path is None:
        named = f"CXX={words[0]} is none" if told else f"{words[0]}; set CXX"
        raise MissingCapabilityError(f"no C++ compiler was found ({named})")
    return (str(Path(path).absolute()), *words[1:])


def kernel_sources() -> dict[str, bytes]:
    """Return the C++ files that ship with the package, by name. Local."""
    files = resources.files("ringmpi.kernels").iterdir()
    return {file.name: file.read_bytes() for file in files if file.name.endswith((".cpp", ".h"))}


def cpu_kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return what tells this kind of CPU from others; empty where the kernel does not say. Local."""
    found: dict[str, str] = {}
    with suppress(OSError), cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in CPU_LINES:
                found[name.strip()] = value.strip()
            if found and not line.strip():
                break  # All cores of a node are alike.
    return "\n".join(f"{name}: {value}" for name, value in found.items())


def find(recipe: Recipe, version: str | None = None) -> Path | None:
    """Return the library in the cache, or None. Local; starts no process.

    Parameters
    ----------
    recipe : Recipe
    version : str, optional
        Of the compiler; without it, the newest library that any version of it has made.
    """
    return find_named(_name(recipe, "*" if version is None else digest([version])))


def find_named(pattern: str) -> Path | None:
    """Return the newest file of the cache whose name matches, if it may be loaded and is whole. Local."""
    for folder in folders():
        if distrust(folder) is not None:
            continue
        found = [path for path in folder.glob(pattern) if _is_sound(path)]
        if found:
            return max(found, key=lambda path: path.stat().st_mtime)
    return None


def build(recipe: Recipe, limit: float = COMPILE_LIMIT, stopped: Stopped = _never) -> Built:
    """Return the library, compiled unless it is there. Local; starts processes.

    Parameters
    ----------
    recipe : Recipe
    limit : float
        Seconds after which a compiler, or a wait for another process that compiles, is given up.
    stopped : callable
        Says whether there is no use in going on, such as after a signal.

    Raises
    ------
    MissingCapabilityError
        If it cannot be had, with the reason.
    """
    since = time.time()
    version = compiler_version(recipe.compiler, min(limit, VERSION_LIMIT), stopped)
    name = _name(recipe, digest([version]))
    return build_named(name, lambda: _compile(recipe, limit, stopped), limit, stopped, since)


def build_named(
    name: str,
    compile_it: Callable[[], bytes],
    limit: float = COMPILE_LIMIT,
    stopped: Stopped = _never,
    since: float | None = None,
) -> Built:
    """Return a file of the cache, compiled unless it is there: by one process of a node. Local.

    Parameters
    ----------
    name : str
        Says all that the file depends on.
    compile_it : callable
        Returns what to keep under that name.
    limit : float
        Seconds after which a wait for another process that compiles is given up.
    stopped : callable
        Says whether there is no use in going on.
    since : float, optional
        What another process of the node has failed with since then, in seconds of `time.time`, is not tried
        again; now by default.

    Raises
    ------
    MissingCapabilityError
        If it cannot be had, with the reason.
    """
    started, since = time.monotonic(), time.time() if since is None else since
    before = find_named(name)
    if before is not None and _is_near(before):
        return Built(before, 0.0)
    with _one_at_a_time(name, started + limit, stopped):
        found = find_named(name)
        if found is None:
            _heed_failure(name, since)
            try:
                found = _make(name, compile_it)
            except _GivenUpError:
                raise
            except MissingCapabilityError as error:
                _note_failure(name, str(error))
                raise
        else:
            found = _brought_near(found)
    return Built(found, 0.0 if before is not None else time.monotonic() - started)


def sealed_content(path: Path) -> bytes:
    """Return what was kept in a file of the cache, without its seal. Local."""
    return path.read_bytes()[:-SEAL]


def compiler_version(compiler: Sequence[str], limit: float, stopped: Stopped = _never) -> str:
    """Return what a compiler says of itself. Local; starts a process.

    Raises
    ------
    MissingCapabilityError
        If it does not say it.
    """
    code, text = _run([*compiler, "--version"], limit, stopped)
    if code != 0:
        raise MissingCapabilityError(
            f"{shlex.join(compiler)} --version failed: {_first_error(text, code)}"
        )
    return text.strip()


def folders(environment: Mapping[str, str] | None = None) -> list[Path]:
    """Return where libraries may lie, the preferred place first. Local.

    In the job of a scheduler that is the node's own folder, unless ``RINGMPI_CACHE`` names one.
    """
    environment = os.environ if environment is None else environment
    found = []
    if environment.get("RINGMPI_CACHE"):
        found.append(Path(environment["RINGMPI_CACHE"]).absolute())
    elif Path(environment.get("XDG_CACHE_HOME", "")).is_absolute():
        found.append(Path(environment["XDG_CACHE_HOME"]) / "ringmpi")
    else:
        with suppress(RuntimeError):  # No HOME, and no entry for this user either.
            found.append(Path.home() / ".cache" / "ringmpi")
    with suppress(OSError):  # No folder for temporary files either.
        near_first = _in_job(environment) and not environment.get("RINGMPI_CACHE")
        found.insert(0 if near_first else len(found), node_folder())
    return found


def _in_job(environment: Mapping[str, str]) -> bool:
    return any(name in environment for name in JOB_VARIABLES)


def _is_near(library: Path) -> bool:
    """Return whether there is no use in a copy of a library in the node's own folder."""
    preferred = folders()[:1]
    return preferred == [library.parent] or preferred != [_lock_place()]


def _brought_near(library: Path) -> Path:
    """Return a library where this node has it for itself; as it is where it cannot be copied there.

    From a home over a network every process of every node would map it, and lose it with the home.
    """
    if _is_near(library):
        return library
    near = folders()[0] / library.name
    try:
        data = library.read_bytes()[:-SEAL]
    except OSError:
        return library
    return near if _keep(data, near) is None and _is_sound(near) else library


def passed_over(path: Path) -> list[str]:
    """Return why a library does not lie in a folder that would be preferred. Local."""
    preferred = folders()
    last = preferred.index(path.parent) if path.parent in preferred else 0
    return [reason for reason in map(distrust, preferred[:last]) if reason is not None]


def node_folder() -> Path:
    """Return the place of this user on this node, where temporary files go. Local."""
    return Path(tempfile.gettempdir()) / f"ringmpi-{os.geteuid()}"


def distrust(path: Path) -> str | None:
    """Return why nothing may be loaded from a file or folder, or None. Local.

    Somebody else may have put it there: a library runs with all rights of the one who loads it.
    """
    try:
        found = path.stat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    # Whoever is root needs no library to do harm.
    if found.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written to by others; chmod go-w {path}"
    return None


def _name(recipe: Recipe, version: str) -> str:
    return f"native-{recipe.key}-{version}.so"


def digest(texts: Iterable[str]) -> str:
    """Return a short name for what depends on all of some texts. Local."""
    joined = "\0".join(texts).encode("utf-8", "surrogateescape")
    return hashlib.sha256(joined).hexdigest()[:DIGITS]


def _is_sound(path: Path) -> bool:
    """Return whether a library may be loaded and is whole; half of one can end the process as it loads."""
    if distrust(path) is not None:
        return False
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return len(data) > SEAL and hashlib.sha256(data[:-SEAL]).digest() == data[-SEAL:]


def _make(name: str, compile_it: Callable[[], bytes]) -> Path:
    """Compile, and put what comes of it into the first folder that takes it."""
    try:
        data = compile_it()
    except OSError as error:
        raise MissingCapabilityError(
            f"no folder to compile in: {error.strerror}; set TMPDIR to one"
        ) from error
    refused = []
    for folder in folders():
        refusal = _unusable(folder) or _keep(data, folder / name)
        if refusal is None:
            _keep_for_later(data, name)
            return folder / name
        refused.append(refusal)
    told = "; ".join(refused) or "no home and no temporary files"
    raise MissingCapabilityError(f"no folder to keep it in ({told}); set RINGMPI_CACHE to one")


def _keep_for_later(data: bytes, name: str) -> None:
    """Where the node's own folder comes first, put a library also where other nodes and later jobs look."""
    near, *others = folders()
    if near != _lock_place():
        return
    for folder in others:
        if _unusable(folder) is None and not _is_sound(folder / name):
            _keep(data, folder / name)


def _unusable(folder: Path) -> str | None:
    """Return why no library can be put into a folder, or None; makes it, for this user alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return distrust(folder)


def _keep(data: bytes, target: Path) -> str | None:
    """Write a library under its name, whole and sealed; return why that cannot be done, or None."""
    temporary = _temporary(target.parent)
    try:
        temporary.touch(mode=0o700, exist_ok=False)
        temporary.chmod(0o700)  # Whatever the umask takes away.
        temporary.write_bytes(data + hashlib.sha256(data).digest())
        _put_into_place(temporary, target)
    except OSError as error:
        return f"{target.parent}: {error.strerror}"
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return None


def _temporary(folder: Path) -> Path:
    return folder / f".{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"


def _put_into_place(temporary: Path, target: Path) -> None:
    """Give a library its name; a sound one that another node has put there in the meantime stays.

    That one may be mapped already, and a network file system takes it away from under those who use it.
    """
    try:
        os.link(temporary, target)
    except OSError:  # It is there, or this file system has no links.
        if not _is_sound(target):
            temporary.replace(target)


def _compile(recipe: Recipe, limit: float, stopped: Stopped) -> bytes:
    """Compile copies of the very sources that the name was made of, and return the library."""
    with tempfile.TemporaryDirectory(prefix="ringmpi-") as folder:
        for name, source in recipe.sources.items():
            Path(folder, name).write_bytes(source)
        library = Path(folder, "library.so")
        units = [str(Path(folder, name)) for name in sorted(recipe.sources) if name.endswith(".cpp")]
        rest = ["-o", str(library), *units]
        own = [recipe.own_cpu] if recipe.own_cpu else []
        code, text = _run([*recipe.compiler, *recipe.flags, *own, *rest], limit, stopped)
        if code != 0 and own and recipe.own_cpu.partition("=")[0] in text:
            code, text = _run([*recipe.compiler, *recipe.flags, *rest], limit, stopped)
        command = shlex.join(recipe.compiler)
        if code != 0:
            raise MissingCapabilityError(f"{command} could not compile it: {_first_error(text, code)}")
        if not library.exists():
            raise MissingCapabilityError(f"{command} compiled it and left no library")
        return library.read_bytes()


def _run(command: list[str], limit: float, stopped: Stopped) -> tuple[int, str]:
    """Run a command, and return its exit code and all that it printed; give it up at the limit."""
    # A file, not a pipe: what a compiler started may outlive it, and would hold a pipe open.
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as error:
            raise MissingCapabilityError(f"{command[0]}: {error.strerror}") from error
        try:
            _await(process, command[0], limit, stopped)
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(0)
        return process.returncode, printed.read().decode("utf-8", "replace")


def _await(process: subprocess.Popen[bytes], name: str, limit: float, stopped: Stopped) -> None:
    until = time.monotonic() + limit
    while process.poll() is None:
        if stopped():
            raise _GivenUpError(f"{name} was given up, since the job ends")
        if time.monotonic() > until:
            raise MissingCapabilityError(f"{name} was given up after {limit:g} s; set CXX to another")
        time.sleep(NAP)


def _first_error(text: str, code: int) -> str:
    """Return the line that says what is wrong, as far as that can be guessed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [f"exit code {code}"])[0]


@contextmanager
def _one_at_a_time(name: str, until: float, stopped: Stopped) -> Iterator[None]:
    """Hold what only one process of a node has; without it where the node has no place for a lock.

    Then every process compiles for itself, under a name of its own.
    """
    place = _lock_place()
    try:
        lock = None if place is None else (place / f"{socket.gethostname()}-{name}.lock").open("a")
    except OSError:
        lock = None
    try:
        while lock is not None and not _take(lock.fileno()):
            if stopped():
                raise MissingCapabilityError(
                    "the wait for its compiler was given up, since the job ends"
                )
            if time.monotonic() > until:
                raise MissingCapabilityError(
                    f"another process of this node compiles it for too long; remove {lock.name}"
                )
            time.sleep(NAP)
        yield
    finally:
        if lock is not None:
            lock.close()


def _lock_place() -> Path | None:
    """Return the folder of this user on this node, if there can be one."""
    try:
        folder = node_folder()
    except OSError:
        return None
    return folder if _unusable(folder) is None else None


def _take(lock: int) -> bool:
    """Return whether the lock is ours now; True also where the file system knows no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _note_failure(name: str, reason: str) -> None:
    """Leave word for those who wait, so that not each of them fails in its turn."""
    place = _lock_place()
    if place is not None:
        with suppress(OSError):
            (place / f"{socket.gethostname()}-{name}.failed").write_text(reason, encoding="utf-8")


def _heed_failure(name: str, since: float) -> None:
    """Raise what another process of this node has failed with since we began."""
    place = _lock_place()
    if place is None:
        return
    note = place / f"{socket.gethostname()}-{name}.failed"
    with suppress(OSError):
        if note.stat().st_mtime >= since:
            raise MissingCapabilityError(note.read_text(encoding="utf-8"))
