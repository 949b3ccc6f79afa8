"""The GPU device on an emulated GPU: what it computes, what it refuses, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dense import DTYPES, assert_exact_up_to_rounding
from emulated import kernels
from emulated.driver import EmulatedDriver, EmulatedPlatform, Exported
from numpy.typing import NDArray

from ringmpi.devices import Block, Gradients, Outcome, Queries, cuda, make_device
from ringmpi.devices.base import Sizes
from ringmpi.devices.cuda import CudaDevice
from ringmpi.devices.launch import ARGUMENTS, CHORES, Variant, variant
from ringmpi.devices.region import Region, callers_array
from ringmpi.devices.streams import Sync
from ringmpi.errors import MissingCapabilityError, ShapeError
from ringmpi.mask import Mask
from ringmpi.softmax import State, state_dtype

from .attending import TALLIES, Backward, Case, attend, cut, striped

Array = NDArray[Any]


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(**options: Any) -> EmulatedPlatform:
        platform = EmulatedPlatform(**options)
        monkeypatch.setattr(cuda._Here, "platform", platform)
        monkeypatch.setattr(cuda._Here, "seconds", 0.0)
        return platform

    return made


def driver_of(device: CudaDevice) -> EmulatedDriver:
    assert isinstance(device.driver, EmulatedDriver)
    return device.driver


def done(work: Any) -> Any:
    while not work.advance():
        pass
    return work


def both_passes(device: Any, case: Case, blocks: Sequence[NDArray[np.int64]]) -> None:
    """Attend to blocks and back, and hold both against dense attention."""
    backward = Backward.of(case)
    q, k, v = backward.q, backward.k, backward.v
    dtype, state = q.dtype, state_dtype(q.dtype)
    placed = {name: device.place(array, array.dtype) for name, array in backward.inputs().items()}
    queries = Queries(placed["q"], case.positions)
    outcome = Outcome(
        placed["dout"], placed["lse"], device.delta(placed["dout"], device.place(backward.out, dtype))
    )
    parts = []
    for names in (("acc", "row_max", "row_sum"),) * 2:
        values = {"row_max": -np.inf}
        shapes = {"acc": q.shape}
        parts.append(
            State(
                **{
                    n: device.full(shapes.get(n, q.shape[:-1]), values.get(n, 0.0), state)
                    for n in names
                }
            )
        )
    dq = device.full(q.shape, 0.0, state)
    grads: dict[str, Array] = {name: np.zeros(k.shape, state) for name in ("dk", "dv")}
    for number, at in enumerate(blocks):
        block = Block(device.place(k[:, :, at], dtype), device.place(v[:, :, at], dtype), at)
        done(device.attend(queries, block, parts[number % 2]))
        sums = Gradients(dq, *(device.full(block.k.shape, 0.0, state) for _ in range(2)))
        done(device.attend_backward(queries, outcome, block, sums))
        for name in grads:
            grads[name][:, :, at] = device.give(getattr(sums, name), q)
    device.merge(*parts)
    out, lse = device.finish(parts[0], dtype)
    found = (device.give(out, q), device.give(lse, q))
    assert_exact_up_to_rounding(found, (q, k, v), case.allowed, case.scale)
    backward.assert_exact((device.give(dq, q), grads["dk"], grads["dv"]))


CASES = {
    "odd": (Case(head_dim=5), cut(17, 0, 1, 3)),
    "grouped": (Case(tokens=37, heads=4, kv_heads=2, head_dim=8, batch=2, causal=True), striped(37, 3)),
    "no queries": (Case(tokens=9, queries=0, causal=True), cut(9, 4)),
    "masks": (Case(tokens=70, causal=True, window=20, documents=(0, 30, 70)), cut(70, 33)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "blocks"), CASES.values(), ids=CASES)
def test_blocks_give_dense_attention_and_its_gradients(
    emulate: Any, case: Case, blocks: list[NDArray[np.int64]], dtype: str
) -> None:
    case = replace(case, dtype=dtype)
    emulate(seed=case.tokens)

    both_passes(make_device("cuda", case.mask, case.scale), case, blocks)


def test_arrays_with_gaps_are_updated_where_they_lie_and_nowhere_else(emulate: Any) -> None:
    case = Case(tokens=10, heads=6, kv_heads=3, batch=2, head_dim=4)
    emulate(seed=1)
    device = CudaDevice(case.mask, case.scale)
    q, k, v = case.tensors()
    whole = {
        "acc": device.full((2, 8, 12, 4), 7.0, np.dtype(np.float32)),
        "row_max": device.full((2, 8, 12), -np.inf, np.dtype(np.float32)),
        "row_sum": device.full((2, 8, 12), 0.0, np.dtype(np.float32)),
    }
    cuts = np.s_[:, 1:7, 2:12]
    device.fill(whole["acc"][cuts], 0.0)
    state = State(**{name: array[cuts] for name, array in whole.items()})
    placed = [device.place(array, q.dtype) for array in (q, k, v)]

    done(device.attend(Queries(placed[0], case.positions), Block(*placed[1:], np.arange(10)), state))

    found = device.finish(state, q.dtype)
    out, lse = (device.fetch(array) for array in found)
    assert_exact_up_to_rounding((out, lse), (q, k, v), case.allowed, case.scale)
    around = np.ones((2, 8, 12), np.bool_)
    around[cuts] = False
    assert (device.fetch(whole["acc"])[around] == 7).all()
    assert np.isneginf(device.fetch(whole["row_max"])[around]).all()


@pytest.mark.parametrize("name", TALLIES)
def test_pairs_and_flops_are_counted_as_on_other_devices(emulate: Any, name: str) -> None:
    case = TALLIES[name]
    emulate()
    device, other = CudaDevice(case.mask, case.scale), make_device("numpy", case.mask, case.scale)
    blocks = striped(case.tokens, 2)
    _, _, expected = attend(other, case, case.tensors(), blocks)  # type: ignore[arg-type]
    q, k, v = case.tensors()
    state = State.identity(q.shape, np.dtype(np.float32))
    state = State(*(device.place(array, array.dtype) for array in vars(state).values()))
    for at, right in zip(blocks, expected, strict=True):
        block = Block(device.place(k[:, :, at], k.dtype), device.place(v[:, :, at], v.dtype), at)
        tally = done(
            device.attend(Queries(device.place(q, q.dtype), case.positions), block, state)
        ).tally
        assert (tally.pairs, tally.flops) == (right.pairs, right.flops)
        assert tally.pairs <= tally.computed_pairs <= q.shape[0] * q.shape[1] * q.shape[2] * len(at)
        assert tally.device_time > 0


class TestWhatIsRefused:
    @pytest.fixture
    def device(self, emulate: Any) -> CudaDevice:
        emulate()
        return CudaDevice(Mask(), 0.5)

    def attend(self, device: CudaDevice, **wrong: Any) -> None:
        shapes = {"q": (1, 4, 3, 8), "k": (1, 2, 5, 8), "v": (1, 2, 5, 8), "acc": (1, 4, 3, 8)}
        shapes |= {"row_max": (1, 4, 3), "row_sum": (1, 4, 3)}
        given = {
            n: device.full(shape, 0.0, np.dtype(np.float32)) for n, shape in shapes.items()
        } | wrong
        state = State(*(given[name] for name in ("acc", "row_max", "row_sum")))
        device.attend(
            Queries(given["q"], np.arange(3)), Block(given["k"], given["v"], np.arange(5)), state
        )

    def test_nothing_where_all_is_right(self, device: CudaDevice) -> None:
        self.attend(device)

    @pytest.mark.parametrize(
        ("name", "shape", "dtype", "told"),
        [
            ("k", (1, 2, 5, 8), "float16", r"k is float16 .*must be float32"),
            ("v", (1, 2, 4, 8), "float32", r"v is float32 \(1, 2, 4, 8\): must be"),
            ("acc", (1, 4, 3, 8), "float64", r"acc is float64"),
            ("row_max", (1, 4, 3, 1), "float32", r"row_max is float32 \(1, 4, 3, 1\)"),
            ("k", (1, 3, 5, 8), "float32", r"must divide num_heads"),
        ],
    )
    def test_another_dtype_or_shape(
        self, device: CudaDevice, name: str, shape: tuple[int, ...], dtype: str, told: str
    ) -> None:
        with pytest.raises(ShapeError, match=told):
            self.attend(device, **{name: device.full(shape, 0.0, np.dtype(dtype))})

    def test_an_array_of_the_host(self, device: CudaDevice) -> None:
        with pytest.raises(ShapeError, match="k is a ndarray in host memory"):
            self.attend(device, k=np.zeros((1, 2, 5, 8), np.float32))

    def test_an_array_of_another_gpu(self, device: CudaDevice) -> None:
        k = replace(device.full((1, 2, 5, 8), 0.0, np.dtype(np.float32)), device=2)
        with pytest.raises(ShapeError, match="k is on GPU 2, and the kernels run on GPU 0"):
            self.attend(device, k=k)

    def test_an_address_that_no_item_may_have(self, device: CudaDevice) -> None:
        whole = device.allocate(4 * 80 + 2)
        k = replace(whole[2:322].view(np.dtype(np.float32)).reshape((1, 2, 5, 8)))
        with pytest.raises(ShapeError, match="k: its address is no multiple of 4"):
            self.attend(device, k=k)

    def test_a_placed_array_of_another_dtype(self, device: CudaDevice) -> None:
        array = device.full((3,), 0.0, np.dtype(np.float32))
        with pytest.raises(ShapeError, match="is float32 and must be float64"):
            device.place(array, np.dtype(np.float64))


class TestCallers:
    """Arrays that the caller has on the GPU, written and read by kernels of the caller's."""

    def result(self, emulate: Any, seed: int, dropped: Sync | None) -> tuple[Array, Array]:
        """Let the caller write an array, us double it, and the caller read it; also return what is right."""
        emulate(seed=seed, dropped=dropped)
        device = CudaDevice(Mask(), 0.5)
        driver = driver_of(device)
        right = np.arange(6.0)
        region = device.allocate(right.nbytes).view(right.dtype)
        driver.run_all()
        place = kernels.memory_at(region.address, right.shape, right.dtype)
        driver.do(lambda: np.copyto(place, right), driver.default)
        given = callers_array(Exported(region, driver))
        array = device.place(given, right.dtype)
        device.add(array, array)
        return device.give(array, given).get(), 2 * right

    @pytest.mark.parametrize("seed", range(10))
    def test_they_are_read_once_they_are_written_and_the_other_way_round(
        self, emulate: Any, seed: int
    ) -> None:
        found, right = self.result(emulate, seed, None)

        assert found.tolist() == right.tolist()

    @pytest.mark.parametrize("dropped", [Sync.CALLER_WROTE, Sync.CALLER_READS], ids=lambda s: s.name)
    def test_without_the_wait_the_result_is_wrong(self, emulate: Any, dropped: Sync) -> None:
        wrong = [not np.array_equal(*self.result(emulate, seed, dropped)) for seed in range(10)]

        assert any(wrong)

    def test_they_are_used_where_they_are(self, emulate: Any) -> None:
        emulate()
        device = CudaDevice(Mask(), 0.5)
        region = device.allocate(80).view(np.dtype(np.float32)).reshape((4, 5))

        whole = device.place(callers_array(Exported(region, driver_of(device))), region.dtype)
        part = device.place(callers_array(Exported(region[:, 1:3], driver_of(device))), region.dtype)

        assert whole.address == region.address
        assert part.address != region.address + 4
        assert part.is_contiguous


def test_kernels_are_compiled_before_the_first_attend_and_their_time_is_told(emulate: Any) -> None:
    platform = emulate()
    device = CudaDevice(Mask(), 0.5)
    wide = Sizes(1, 32, 32, 2**22, 2**22, 128)

    device.prepare([replace(wide, queries=64, keys=64), wide], np.dtype(np.float32))

    assert [found.index for found in platform.driver.loaded] == ["int", "long long"]
    assert cuda.compile_seconds() == 0.5


def test_without_a_gpu_it_is_refused_with_the_way_out(emulate: Any) -> None:
    emulate(missing="there is no NVIDIA driver here (libcuda.so.1)")

    with pytest.raises(
        MissingCapabilityError, match=r"device=cuda: there is no NVIDIA .*--device native"
    ):
        make_device("cuda", Mask(), 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", ["int", "long long"])
def test_every_scalar_is_of_the_kernels_own_type(dtype: str, index: str) -> None:
    sizes = Sizes(1, 2, 1, 3, 3, 8)
    chosen = replace(variant(sizes, dtype, (8, 0)), index=index)
    given = chosen.scalars(sizes, Mask(), 0.5)

    for kernel, names in ARGUMENTS.items():
        kernels.check_types(chosen, kernel, [given.get(name, np.uint64(0)) for name in names])


def test_a_scalar_of_another_type_is_noticed_by_the_emulated_gpu() -> None:
    chosen = Variant("float32", 64, "Plain")
    right = [np.uint64(0), np.int64(3), np.float32(0)]
    kernels.check_types(chosen, "ringmpi_fill", right)

    for wrong in (
        [np.uint64(0), np.int32(3), np.float32(0)],
        [np.uint64(0), np.int64(3), np.float64(0)],
    ):
        with pytest.raises(AssertionError, match="must be"):
            kernels.check_types(chosen, "ringmpi_fill", wrong)


@pytest.mark.parametrize("kernel", [*ARGUMENTS, *CHORES])
def test_arguments_have_the_names_and_the_order_of_the_source(kernel: str) -> None:
    names = [name for _, name in kernels.declared(kernel)]
    expected = list((ARGUMENTS | CHORES)[kernel])
    if "backward" in kernel:
        expected = ["gradient" if name in ("dq", "dk", "dv") else name for name in expected]

    assert names == expected


def test_rows_are_copied_between_arrays_with_gaps(emulate: Any) -> None:
    emulate()
    device = CudaDevice(Mask(), 0.5)
    numbers = np.arange(2 * 3 * 5 * 4, dtype=np.float32).reshape(2, 3, 5, 4)
    source = device.place(numbers, numbers.dtype)
    cuts = (np.s_[:, 1:3, 2:4], np.s_[1:2, :, :], np.s_[:, :, 4:5], np.s_[:, :, 0:0], np.s_[:, 0:1])
    for cut_out in cuts:
        target = device.full(numbers.shape, -1.0, numbers.dtype)
        device.copy(source[cut_out], target[cut_out])
        right = np.full_like(numbers, -1)
        right[cut_out] = numbers[cut_out]
        assert device.fetch(target).tolist() == right.tolist()


def test_items_that_lie_apart_are_refused(emulate: Any) -> None:
    emulate()
    device = CudaDevice(Mask(), 0.5)
    array = device.full((3, 4), 0.0, np.dtype(np.float32))
    turned = Region(array.owner, array.address, (4, 3), (4, 16), array.dtype, array.device)

    with pytest.raises(ShapeError, match="must not lie apart"):
        device.place(turned, array.dtype)
