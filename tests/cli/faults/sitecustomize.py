"""Faults for the ranks of a test's job, put in from outside: Python imports this before anything else.

``RINGMPI_TEST_FAULT`` holds faults separated by ``;``, each ``action:key=value:...``, such as
``raise:rank=1:place=attend:call=2``. Keys: `rank` (a number, ``all``, or ``none`` for a process that no
launcher started), `size` (only in jobs of that many ranks), `place` (see `PLACES`), `call` (which call of
the place, from 0; ``each``) and `seconds`. ``RINGMPI_TEST_MARKS`` is a folder in which every process notes
its id, and every fault the moment at which it struck.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import Any

LAUNCHED_BY = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
MARKS = os.environ.get("RINGMPI_TEST_MARKS", "")


def _launch() -> tuple[str, str]:
    for rank, size in LAUNCHED_BY:
        if rank in os.environ:
            return os.environ[rank], os.environ.get(size, "1")
    return "none", "1"


RANK, SIZE = _launch()


def mark(name: str, text: str = "") -> None:
    """Note that something happened, and when."""
    if MARKS:
        path = Path(MARKS) / f"{name}-{RANK}"
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(text or repr(time.time()))
        unfinished.replace(path)


class Fault:
    """One fault of this process."""

    def __init__(self, text: str) -> None:
        self.action, *pairs = text.split(":")
        told = dict(pair.split("=", 1) for pair in pairs)
        self.place = told.get("place", "")
        self.call = told.get("call", "0")
        self.seconds = float(told.get("seconds", "0"))
        self.here = told.get("rank", "all") in ("all", RANK) and told.get("size", SIZE) == SIZE
        self.calls = 0

    def due(self) -> bool:
        """Count a call of the place; True if it is the one."""
        self.calls += 1
        return self.call in ("each", str(self.calls - 1))


def _raise() -> None:
    raise RuntimeError("a fault of the test")


def _no_memory() -> None:
    raise MemoryError("a fault of the test")


def _fork() -> None:
    import subprocess

    subprocess.run(["true"], check=False)


def _pickle() -> None:
    import pickle

    pickle.dumps(bytes(100_000))


#: What a fault does when its place is reached. `flip`, `scale` and `scale-backward` are done by the places
#: themselves.
ACTIONS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "memory": _no_memory,
    "exit": lambda: sys.exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "fork": _fork,
    "pickle": _pickle,
    "mark": lambda: None,
    "flip": lambda: None,
}

FAULTS = [Fault(text) for text in os.environ.get("RINGMPI_TEST_FAULT", "").split(";") if text]
FAULTS = [fault for fault in FAULTS if fault.here]


def reached(place: str) -> bool:
    """Let the faults of a place strike; True if data shall be flipped."""
    flip = False
    for fault in FAULTS:
        if fault.place == place and fault.due():
            mark(fault.action)
            if fault.action == "sleep":
                time.sleep(fault.seconds)
            else:
                ACTIONS[fault.action]()
            flip |= fault.action == "flip"
    return flip


def _before(owner: Any, name: str, place: str) -> None:
    """Make every call of a function a call of a place."""
    original = getattr(owner, name)

    def wrapper(*args: Any, **options: Any) -> Any:
        reached(place)
        return original(*args, **options)

    setattr(owner, name, wrapper)


def _device(name: str, work: str) -> Callable[[Any], None]:
    """``attend``: the first advance of each block. ``scale`` makes scores 1 % too large.

    ``scale-backward`` does so in the backward pass only.
    """

    def patch(module: Any) -> None:
        of_work, of_device = getattr(module, work), getattr(module, name)
        original = of_work.advance

        def advance(self: Any) -> Any:
            if not getattr(self, "was_here", False):
                self.was_here = True
                reached("attend")
            return original(self)

        of_work.advance = advance
        if any(fault.action == "scale" for fault in FAULTS):
            make = of_device.__init__

            def too_large(self: Any, mask: Any, softmax_scale: float, *options: Any) -> None:
                make(self, mask, softmax_scale * 1.01, *options)

            of_device.__init__ = too_large
        if any(fault.action == "scale-backward" for fault in FAULTS):
            attend_backward = of_device.attend_backward

            def go_back(self: Any, *given: Any) -> Any:
                wrong = copy.copy(self)
                wrong.softmax_scale = self.softmax_scale * 1.01
                return attend_backward(wrong, *given)

            of_device.attend_backward = go_back

    return patch


def _exchange(module: Any) -> None:
    """``start`` and ``finish`` of each step, and ``send`` of each part that is checked.

    A flip at ``start`` damages what is about to be sent, at ``send`` what is on its way.
    """
    start, write_note = module.Exchange.start, module.Exchange._write_note

    def damaged(self: Any, transfers: Any) -> None:
        if reached("start"):
            for transfer in transfers:
                if transfer.direction is module.Direction.SEND:
                    self.slot(transfer.part, transfer.slot)[-1] ^= 1
        start(self, transfers)

    def damaged_later(self: Any, flight: Any, data: Any) -> None:
        write_note(self, flight, data)
        if reached("send"):
            data[-1] ^= 1

    module.Exchange.start = damaged
    module.Exchange._write_note = damaged_later
    _before(module.Exchange, "finish", "finish")


def _attention(module: Any) -> None:
    """``forward`` and ``backward``: each pass; a flip alters one bit of out, and of dk."""
    forward, backward = module.RingAttention.forward, module.RingAttention.backward

    def altered(self: Any, *arrays: Any) -> Any:
        out, lse = forward(self, *arrays)
        return _flipped(out) if reached("forward") else out, lse

    def altered_back(self: Any, *arrays: Any) -> Any:
        dq, dk, dv = backward(self, *arrays)
        return dq, _flipped(dk) if reached("backward") else dk, dv

    module.RingAttention.forward = altered
    module.RingAttention.backward = altered_back


def _flipped(array: Any) -> Any:
    array = array.copy()
    array.reshape(-1).view("u1")[0] ^= 1
    return array


def _job(module: Any) -> None:
    """With the action ``funneled``, MPI is initialised for one thread that calls it."""
    if not any(fault.action == "funneled" for fault in FAULTS):
        return
    load_mpi = module.load_mpi

    def load_for_one_thread() -> Any:
        mpi = load_mpi()
        init_thread = mpi.Init_thread
        mpi.Init_thread = lambda: init_thread(mpi.THREAD_FUNNELED)
        return mpi

    module.load_mpi = load_for_one_thread


def _run(module: Any) -> None:
    """``begin``, once rank 0 has begun a file. Watched: memory of a run, without modules loaded before."""
    _before(module, "_begin", "begin")
    if "memory" not in WATCHED:
        return
    run = module.run

    def weighed(*args: Any) -> Any:
        import tracemalloc

        tracemalloc.start()
        try:
            return run(*args)
        finally:
            mark("peak", str(tracemalloc.get_traced_memory()[1]))

    module.run = weighed


PLACES: dict[str, Callable[[Any], None]] = {
    "ringmpi.devices.numpy": _device("NumpyDevice", "TileWork"),
    "ringmpi.devices.native": _device("NativeDevice", "NativeWork"),
    "ringmpi.comm.exchange": _exchange,
    "ringmpi.comm.job": _job,
    "ringmpi.attention": _attention,
    "ringmpi.problem": lambda module: _before(module, "shard_of", "shards"),
    "ringmpi.experiment": _run,
    "ringmpi.verify": lambda module: _before(module, "verify", "verify"),
    "ringmpi.shards": lambda module: _before(module.ShardWriter, "write", "write"),
    "ringmpi.parallel_hdf5": lambda module: _before(module, "write_together", "write"),
    "ringmpi.store": lambda module: _before(module.ResultWriter, "commit", "commit"),
}


class _Patching(Loader):
    """Loads a module and puts the places of faults into it."""

    def __init__(self, loader: Any, patch: Callable[[Any], None]) -> None:
        self.loader = loader
        self.patch = patch

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        self.patch(module)


class _Finder(MetaPathFinder):
    """Finds the modules that faults concern, and refuses those that a test forbids."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if RANK == "none" and name in os.environ.get("RINGMPI_TEST_FORBID", "").split(","):
            raise AssertionError(f"{name} was imported")
        if name not in PLACES or not (FAULTS or WATCHED):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Patching(spec.loader, PLACES[name])
        return spec


def _watch_processes() -> None:
    """Raise where a process is started after MPI was initialised."""

    def hook(event: str, _: Any) -> None:
        starts = ("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "subprocess.Popen")
        if event in starts:
            mpi = sys.modules.get("mpi4py.MPI")
            if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
                raise RuntimeError(f"{event} after MPI was initialised")

    sys.addaudithook(hook)


def _watch_pickles() -> None:
    """Raise where something is pickled that is large enough to be a block."""
    import pickle

    dumps = pickle.dumps

    def small(*args: Any, **options: Any) -> bytes:
        data = dumps(*args, **options)
        if len(data) > 64 * 1024:
            raise RuntimeError(f"{len(data)} bytes were pickled")
        return data

    pickle.dumps = small


WATCHES = {"processes": _watch_processes, "pickles": _watch_pickles}
WATCHED = [name for name in os.environ.get("RINGMPI_TEST_WATCH", "").split(",") if name]

if MARKS:
    mark("pid", str(os.getpid()))
    sys.meta_path.insert(0, _Finder())
    for watch in WATCHED:
        WATCHES.get(watch, lambda: None)()
