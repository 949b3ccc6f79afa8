from __future__ import annotations

from typing import Any

import pytest

from ringmpi.devices import (
    DEVICES,
    PACED,
    PREFERENCE,
    check_device,
    check_matrix_unit,
    chosen_device,
    device_facts,
    make_device,
    native,
    native_facts,
    why_missing,
)
from ringmpi.errors import ConfigError, MissingCapabilityError
from ringmpi.mask import Mask

from .attending import KINDS

NO_COMPILER = "no C++ compiler was found (c++; set CXX)"

#: Those that this machine offers.
OFFERED = sorted({kind.partition(",")[0] for kind in KINDS})


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler."""
    monkeypatch.setattr(native._Here, "library", None)
    monkeypatch.setattr(native._Here, "missing", NO_COMPILER)


@pytest.mark.parametrize("name", OFFERED)
def test_a_device_is_made_by_its_name(name: str) -> None:
    device = make_device(name, Mask(), 0.5)

    assert device.name == name
    assert chosen_device(name) == name
    assert why_missing(name) is None


def test_every_device_that_computes_is_known_to_auto() -> None:
    assert {*PREFERENCE, PACED} == set(DEVICES)
    assert PACED not in PREFERENCE


def test_auto_takes_the_first_device_that_there_is() -> None:
    expected = next(name for name in PREFERENCE if name in OFFERED)

    assert chosen_device("auto") == expected
    assert make_device("auto", Mask(), 0.5).name == expected


@pytest.mark.usefixtures("no_native")
class TestWithoutACompiler:
    def test_auto_takes_numpy(self) -> None:
        assert chosen_device("auto") == "numpy"
        assert make_device("auto", Mask(), 0.5).name == "numpy"

    def test_native_is_refused_with_the_reason(self) -> None:
        with pytest.raises(MissingCapabilityError, match=r"device=native: no C\+\+ compiler .*numpy"):
            make_device("native", Mask(), 0.5)

    @pytest.mark.parametrize(
        ("threads", "unit", "told"), [(2, "auto", "threads=2"), (1, "on", "matrix_unit=on")]
    )
    def test_what_only_native_has_is_refused_with_the_reason(
        self, threads: int, unit: str, told: str
    ) -> None:
        with pytest.raises(MissingCapabilityError, match=rf"{told}: only .*none: no C\+\+ compiler"):
            chosen_device("auto", threads, unit)

    def test_the_doctor_tells_why(self) -> None:
        assert list(native_facts()) == [("native", f"not offered: {NO_COMPILER}")]

    def test_facts_are_those_of_numpy(self) -> None:
        facts = device_facts("numpy", 1, "auto", "bfloat16")

        assert facts["device"] == "numpy"
        assert facts["instruction_set"] == ""
        assert facts["matrix_unit"] == "off"
        assert "threads" not in facts


BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "name": (("nunpy", 1, "auto"), r"device='nunpy'.*auto, .*did you mean 'numpy'"),
    "unit": (("native", 1, "of"), r"matrix_unit='of'.*did you mean 'off'"),
    "no thread": (("native", 0, "auto"), r"threads=0: must be from 1 to \d+"),
    "too many threads": (("auto", 2**31, "auto"), r"threads=2147483648: must be from 1 to \d+"),
    "threads of numpy": (("numpy", 2, "auto"), r"threads=2: .*OMP_NUM_THREADS.*use --device native"),
    "unit of numpy": (("numpy", 1, "on"), r"matrix_unit=on: .*use --device native"),
}


@pytest.mark.parametrize(("given", "told"), BAD.values(), ids=BAD.keys())
def test_what_no_machine_could_offer_is_refused(given: tuple[Any, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_device(*given)
    with pytest.raises(ConfigError, match=told):
        chosen_device(*given)


@pytest.mark.parametrize("name", [name for name in OFFERED if name == "native"])
def test_facts_tell_what_the_native_device_is(name: str) -> None:
    facts = device_facts(name, 3, "off", "bfloat16")

    assert facts == {
        "device": "native",
        "instruction_set": native.library().instruction_set,
        "matrix_unit": "off",
        "weights": "exact",
        "paced_flops": 0.0,
        "compile_s": native.compile_seconds(),
        "gpu": "",
        "gpu_identity": "",
        "gpu_sharing": 0,
        "threads": 3,
    }
    assert facts["instruction_set"]
    told = dict(native_facts())
    assert facts["instruction_set"] in told["native"]
    assert str(native.library().path) in told["library"]


@pytest.mark.parametrize("name", [name for name in OFFERED if name == "native"])
def test_a_matrix_unit_is_told_where_it_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.library(), "has_matrix_unit", True)
    asked = [("auto", "bfloat16"), ("auto", "float32"), ("off", "bfloat16"), ("on", "bfloat16")]

    told = [device_facts(name, 1, unit, dtype)["matrix_unit"] for unit, dtype in asked]

    assert told == ["on", "off", "off", "on"]
    assert dict(native_facts())["native"].endswith("matrix unit: for bfloat16")


def test_a_matrix_unit_with_nothing_to_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"matrix_unit=on with dtype=float16: .*bfloat16.*use auto"):
        check_matrix_unit("on", "float16")
    check_matrix_unit("on", "bfloat16")
    check_matrix_unit("auto", "float16")


@pytest.mark.parametrize("nbytes", [0, 1, 3, 17, 4096])
@pytest.mark.parametrize("name", OFFERED)
def test_buffers_have_the_length_asked_for_and_start_on_a_cache_line(name: str, nbytes: int) -> None:
    device = make_device(name, Mask(), 0.5)

    buffers = [device.allocate(nbytes) for _ in range(5)]

    assert [buffer.nbytes for buffer in buffers] == [nbytes] * 5
    assert all(buffer.ctypes.data % 64 == 0 for buffer in buffers if nbytes)
    assert all(buffer.flags.writeable and buffer.flags.c_contiguous for buffer in buffers)
