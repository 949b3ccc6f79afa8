"""What only the native device does; what it computes is in test_devices_attend.py."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dense import DTYPES
from numpy.typing import NDArray

from ringmpi.devices import Block, NativeDevice, Outcome, Queries, native, prepare
from ringmpi.devices.build import Recipe, build, compiler_command
from ringmpi.devices.native import Library, compile_seconds, is_missing, library, uses_matrix_unit
from ringmpi.errors import MissingCapabilityError, RingMPIError, ShapeError
from ringmpi.mask import Mask
from ringmpi.softmax import State
from ringmpi.trace import Tally

from .attending import KINDS, Backward, Case, attend, cut, native_device, state_of

pytestmark = pytest.mark.skipif("native" not in KINDS, reason="no C++ compiler")

Array = NDArray[Any]

CASE = Case(tokens=40, batch=2, heads=4, kv_heads=2, head_dim=12, causal=True, window=30)


def device_of(case: Case, **options: Any) -> NativeDevice:
    return NativeDevice(case.mask, case.scale, **options)


def give(case: Case, **others: Array) -> tuple[Queries, Block, State]:
    """Return what attends and is attended to, some of the arrays replaced."""
    q, k, v = case.tensors()
    at = np.arange(case.tokens)
    arrays = {"q": q, "k": k, "v": v, **vars(state_of(q)), **others}
    state = State(arrays["acc"], arrays["row_max"], arrays["row_sum"])
    return Queries(arrays["q"], at), Block(arrays["k"], arrays["v"], at), state


def unaligned(array: Array) -> Array:
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
    odd = raw.view(array.dtype).reshape(array.shape)
    odd[...] = array
    return odd


Q, K, V = CASE.tensors()
STATE = state_of(Q)

REFUSED: dict[str, tuple[str, Array, str]] = {
    "k of another dtype": ("k", K.astype(np.float64), r"k is float64 .* must be float32"),
    "v of fewer tokens": (
        "v",
        V[:, :, 1:],
        r"v is float32 \(2, 2, 39, 12\): must be .*\(2, 2, 40, 12\)",
    ),
    "k of a narrower head": ("k", K[..., 1:], r"k is .*\(2, 2, 40, 11\)"),
    "q of fewer tokens": ("q", Q[:, :, 1:], r"q is .*\(4, 39|q is .*39, 12"),
    "three heads on two": ("q", Q[:, :3], r"num_kv_heads must divide num_heads"),
    "q without batch": ("q", Q[0], r"must be \[batch, heads, tokens, head_dim\]"),
    "q of integers": ("q", Q.astype(np.int32), r"q of dtype int32: use one of float64"),
    "state of another batch": ("acc", STATE.acc[:1], r"acc is .*\(1, 4, 40, 12\)"),
    "state that is narrow": ("acc", STATE.acc.astype(np.float16), r"acc is float16"),
    "row_sum that is wide": ("row_sum", STATE.row_sum.astype(np.float64), r"row_sum is float64"),
    "foreign byte order": ("k", K.astype(K.dtype.newbyteorder()), r"k: .*native byte order"),
    "unaligned": ("v", unaligned(V), r"v: .*aligned"),
    "spread head_dim": ("q", np.repeat(Q, 2, axis=-1)[..., ::2], r"q: its last axis .*contiguous"),
    "backward head_dim": ("k", K[..., ::-1], r"k: its last axis must be contiguous"),
    "spread row_max": (
        "row_max",
        np.repeat(STATE.row_max, 2, axis=-1)[..., ::2],
        r"row_max: its last axis must be contiguous",
    ),
    "read-only state": ("acc", np.broadcast_to(np.float32(0), STATE.acc.shape), r"acc: "),
}


@pytest.mark.parametrize(("name", "array", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_arrays_whose_addresses_must_not_be_used_are_refused(
    name: str, array: Array, told: str
) -> None:
    queries, block, state = give(CASE, **{name: array})

    with pytest.raises(ShapeError, match=told):
        device_of(CASE).attend(queries, block, state)


def test_a_read_only_state_is_refused() -> None:
    queries, block, state = give(CASE)
    state.acc.flags.writeable = False

    with pytest.raises(ShapeError, match="acc: is read-only"):
        device_of(CASE).attend(queries, block, state)


@pytest.mark.parametrize("name", ["dout", "lse", "delta"])
def test_outcomes_that_do_not_fit_are_refused(name: str) -> None:
    backward = Backward.of(CASE)
    setattr(backward, name, getattr(backward, name)[:, :, 1:])

    with pytest.raises(ShapeError, match=f"{name} is "):
        backward.run(device_of(CASE), [np.arange(40)])


ODD = {
    "heads inside tokens": lambda a: a.swapaxes(1, 2).copy().swapaxes(1, 2),
    "batch last but one": lambda a: np.moveaxis(np.moveaxis(a, 0, 2).copy(), 2, 0),
    "every other token": lambda a: np.repeat(a, 2, axis=2)[:, :, ::2],
    "tokens backwards": lambda a: a[:, :, ::-1].copy()[:, :, ::-1],
    "a part of a wider head": lambda a: np.concatenate([a, a], axis=-1)[..., : a.shape[-1]],
    "read-only": lambda a: np.broadcast_to(a, a.shape),
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_strides_of_other_axes_do_not_matter(odd: Callable[[Array], Array], dtype: str) -> None:
    case = replace(CASE, dtype=dtype)
    backward = Backward.of(case)
    strange = replace(
        backward, **{name: odd(getattr(backward, name)) for name in ("q", "k", "v", "dout")}
    )
    tensors = strange.q, strange.k, strange.v
    device, blocks = device_of(case), [np.arange(40)]

    found = whole_block(device, case, tensors)
    expected = whole_block(device, case, case.tensors())
    gradients, _ = strange.run(device, blocks)
    exact, _ = backward.run(device, blocks)

    assert found == expected
    assert [a.tobytes() for a in gradients] == [a.tobytes() for a in exact]


def whole_block(device: NativeDevice, case: Case, tensors: tuple[Array, Array, Array]) -> list[bytes]:
    """Attend to all keys at once, where they lie."""
    q, k, v = tensors
    at, state = np.arange(case.tokens), state_of(q)
    work = device.attend(Queries(q, at), Block(k, v, at), state)
    while not work.advance():
        pass
    return [array.tobytes() for array in vars(state).values()]


@pytest.mark.parametrize("nothing", ["queries", "keys", "both"])
def test_nothing_to_do_is_done_at_once(nothing: str) -> None:
    q, k, v = CASE.tensors()
    of_q, of_k = (slice(0, 0 if nothing in (name, "both") else None) for name in ("queries", "keys"))
    at = np.arange(40)
    state = state_of(q[:, :, of_q])
    queries, block = Queries(q[:, :, of_q], at[of_q]), Block(k[:, :, of_k], v[:, :, of_k], at[of_k])

    work = device_of(CASE).attend(queries, block, state)

    assert work.advance()
    assert work.advance()
    assert work.tally == Tally()
    assert np.isneginf(state.row_max).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "numpy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_threads_nor_slices_change_a_bit(
    dtype: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        tokens=333, queries=200, batch=2, heads=6, kv_heads=2, head_dim=20, causal=True, dtype=dtype
    )
    unit = "on" if "matrix" in kind else "off"
    backward, blocks = Backward.of(case), cut(333, 3, 200)
    found = set()

    for threads, seconds in ((1, 1e9), (1, 0.0), (2, 1e9), (3, 0.0), (7, 1e-4)):
        monkeypatch.setattr(native, "SLICE_S", seconds)
        device = native_device(case, threads, unit)
        out, lse, tallies = attend(device, case, case.tensors(), blocks)
        gradients, more = backward.run(device, blocks)
        bits = [array.tobytes() for array in (out, lse, *gradients)]
        found.add((*bits, str(tallies), str(more)))

    assert len(found) == 1


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=1500, heads=3, kv_heads=3, head_dim=256, causal=True),
        Case(tokens=8000, queries=20, batch=1, heads=1, kv_heads=1, head_dim=256),
    ],
    ids=["many rows", "few rows"],
)
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(dtype, "native") for dtype in ("float64", "float32", "bfloat16")]
    + [("bfloat16", kind) for kind in KINDS if "matrix" in kind],
)
def test_many_units_are_computed_in_one_order(
    dtype: str, kind: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells of some 250 rows by 200 keys, of KV heads of which only two have room; segments of a strip."""
    case = replace(case, dtype=dtype)
    backward, blocks = Backward.of(case), cut(case.tokens)
    found = set()

    for threads, seconds in ((1, 1e9), (2, 1e9), (3, 0.0), (7, 1e-4)):
        monkeypatch.setattr(native, "SLICE_S", seconds)
        device = native_device(case, threads, "on" if "matrix" in kind else "off")
        out, lse, tally = attend(device, case, case.tensors(), blocks)
        gradients, more = backward.run(device, blocks)
        found.add((*(array.tobytes() for array in (out, lse, *gradients)), str(tally), str(more)))

    assert len(found) == 1


def test_works_that_overlap_on_one_device_do_not_disturb_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(tokens=700, heads=4, kv_heads=4, head_dim=32, causal=True)
    q, k, v = case.tensors()
    at = np.arange(case.tokens)
    monkeypatch.setattr(native, "SLICE_S", 0.0)
    device = device_of(case, threads=3)
    alone, *states = (state_of(q) for _ in range(4))
    work = device.attend(Queries(q, at), Block(k, v, at), alone)
    while not work.advance():
        pass

    works = [device.attend(Queries(q, at), Block(k, v, at), state) for state in states]
    left = list(works)
    while left:
        left = [work for work in left if not work.advance()]

    assert {state.acc.tobytes() for state in states} == {alone.acc.tobytes()}
    assert {work.tally.tiles for work in works} == {work.tally.tiles}


def test_an_advance_ends_after_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=600, heads=8, kv_heads=8, head_dim=64)
    monkeypatch.setattr(native, "SLICE_S", 0.0)
    work = device_of(case).attend(*give(case))

    advances = 1
    while not work.advance():
        assert work.tally == Tally()
        advances += 1

    # 8 heads of 600 x 600 pairs are 1.5 GFLOP, and a unit is to take less than a millisecond.
    assert advances > 8
    assert work.tally.pairs == 8 * 600**2


def test_other_threads_of_python_run_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=3000, heads=4, kv_heads=4, head_dim=64)
    monkeypatch.setattr(native, "SLICE_S", 0.5)
    work = device_of(case).attend(*give(case))
    computing = threading.Thread(target=work.advance)
    beats = 0

    computing.start()
    while computing.is_alive():
        time.sleep(0.001)
        beats += 1
    computing.join()

    # With the GIL held there would be one beat in it.
    assert beats > 5


class TestMemory:
    def test_a_work_that_nobody_finishes_is_given_back(self) -> None:
        case = Case(tokens=300)
        device = device_of(case)
        work = device.attend(*give(case))
        end, pool = work._end, weakref.ref(device.pool)
        assert end.alive

        del work
        gc.collect()
        assert not end.alive
        assert pool() is not None

        del device
        gc.collect()
        assert pool() is None

    def test_a_finished_work_is_given_back_at_once(self) -> None:
        work = device_of(CASE).attend(*give(CASE))
        while not work.advance():
            pass

        assert not work._end.alive
        assert work.advance()

    def test_a_work_may_outlive_its_device_and_its_arrays(self) -> None:
        queries, block, state = give(CASE)
        work = device_of(CASE).attend(
            Queries(queries.q.copy(), queries.positions),
            Block(block.k.copy(), block.v.copy(), block.positions),
            state,
        )
        gc.collect()
        np.full(10**6, np.nan)  # Where the copies lay, had they been given back.
        while not work.advance():
            pass

        found = [array.tobytes() for array in vars(state).values()]
        assert found == whole_block(device_of(CASE), CASE, CASE.tensors())

    def test_a_lack_of_memory_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = device_of(CASE)
        monkeypatch.setitem(library()._call, "start", lambda *_: None)
        with pytest.raises(MemoryError, match="to attend"):
            device.attend(*give(CASE))
        monkeypatch.setitem(library()._call, "open", lambda *_: None)
        with pytest.raises(MemoryError, match=r"3 thread"):
            device_of(CASE, threads=3)


class TestMatrixUnit:
    def test_it_is_refused_where_there_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library(), "has_matrix_unit", False)

        assert not uses_matrix_unit("auto")
        assert not uses_matrix_unit("off")
        with pytest.raises(MissingCapabilityError, match=r"matrix_unit=on: .*use auto"):
            device_of(CASE, matrix_unit="on")

    def test_it_is_used_where_there_is_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library(), "has_matrix_unit", True)

        assert [uses_matrix_unit(word) for word in ("auto", "on", "off")] == [True, True, False]


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing was compiled, as far as this process knows, and the cache is empty."""
    monkeypatch.setattr(native._Here, "library", None)
    monkeypatch.setattr(native._Here, "missing", None)
    monkeypatch.setattr(native._Here, "seconds", 0.0)
    monkeypatch.setenv("RINGMPI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ringmpi.devices.build.node_folder", lambda: tmp_path / "node")
    # Another test of this process may have initialised MPI, after which nothing is compiled.
    idle = SimpleNamespace(Is_initialized=lambda: False, Is_finalized=lambda: False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", idle)
    return


TINY = 'extern "C" {{ long long ringmpi_task_nbytes() {{ return {nbytes}; }} {more} }}'


def tiny_recipe(nbytes: int, more: str = "") -> Recipe:
    source = TINY.format(nbytes=nbytes, more=more).encode()
    return Recipe(compiler_command(), {"tiny.cpp": source}, ("-shared", "-fPIC"), "", "")


@pytest.mark.usefixtures("nothing_known")
class TestPreparing:
    def test_what_was_not_compiled_is_not_compiled_in_passing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: Any, **options: Any) -> None:
            raise AssertionError("a process was started")

        monkeypatch.setattr("subprocess.Popen", refuse)

        assert "call ringmpi.prepare() before MPI" in (is_missing() or "")
        assert "ringmpi doctor" in (is_missing() or "")
        with pytest.raises(MissingCapabilityError):
            device_of(CASE)

    def test_a_prepared_library_is_found_by_the_next_process(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(native, "recipe_here", lambda: own_recipe())

        assert prepare() is None
        assert compile_seconds() > 0
        first = library().path
        monkeypatch.setattr(native._Here, "library", None)
        monkeypatch.setattr(native._Here, "seconds", 0.0)

        assert library().path == first
        assert prepare() is None
        assert compile_seconds() == 0

    def test_a_failure_is_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "/nonexistent")

        told = prepare()

        assert told == "no C++ compiler was found (CXX=/nonexistent is none)"
        monkeypatch.delenv("CXX")
        assert is_missing() == told

    def test_it_is_too_late_once_mpi_is_initialised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        up = SimpleNamespace(Is_initialized=lambda: True, Is_finalized=lambda: False)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", up)

        with pytest.raises(RingMPIError, match=r"MPI is initialised already.*ringmpi doctor"):
            prepare()

    @pytest.mark.parametrize(("initialised", "finalised"), [(False, False), (True, True)])
    def test_it_is_not_too_late_where_mpi_is_only_loaded(
        self, initialised: bool, finalised: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        idle = SimpleNamespace(Is_initialized=lambda: initialised, Is_finalized=lambda: finalised)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", idle)
        monkeypatch.setenv("CXX", "/nonexistent")

        assert prepare() is not None

    def test_a_library_of_another_ringmpi_is_refused(self) -> None:
        names = [name for name in native._SIGNATURES if name != "task_nbytes"]
        more = " ".join(f"void ringmpi_{name}() {{}}" for name in names)

        with pytest.raises(MissingCapabilityError, match=r"tasks of 7 bytes .*install ringmpi again"):
            Library(build(tiny_recipe(7, more)).path)

    def test_a_library_that_lacks_a_function_is_refused(self) -> None:
        with pytest.raises(MissingCapabilityError, match=r"undefined symbol: ringmpi_instruction_set"):
            Library(build(tiny_recipe(7)).path)

    def test_what_is_no_library_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "text.so"
        path.write_text("text")

        with pytest.raises(MissingCapabilityError, match=r"cannot be loaded.*set RINGMPI_CACHE"):
            Library(path)


def own_recipe() -> Recipe:
    """Return a library that does nothing, of the right kind, which is compiled in no time."""
    names = [name for name in native._SIGNATURES if name not in ("task_nbytes", "instruction_set")]
    more = " ".join(f"int ringmpi_{name}() {{ return 0; }}" for name in names)
    more += ' const char *ringmpi_instruction_set() { return "none"; }'
    return tiny_recipe(library_nbytes(), more)


def library_nbytes() -> int:
    return int(native.ctypes.sizeof(native._Task))


def test_outcomes_are_handed_over_by_name() -> None:
    assert set(Outcome.__dataclass_fields__) == {"dout", "lse", "delta"}
    fields = {name for name, _ in native._Task._fields_}
    assert set(Outcome.__dataclass_fields__) < fields
    assert Mask().bounds(np.arange(3), np.arange(2))[0].dtype == np.int64
