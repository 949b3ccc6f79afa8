"""A result that says one thing of its run and holds another is refused, whoever reads it, in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from synthetic import write_result

from ringmpi.cli import main
from ringmpi.errors import StoreError
from ringmpi.store import ResultFile, refusal

Damage = Callable[[Any], None]


def replaced(name: str, value: Any) -> Damage:
    """Return what puts something else in the place of an object."""

    def damage(file: Any) -> None:
        del file[name]
        if value is not None:
            file[name] = value

    return damage


def marked(name: str, value: Any, where: str = "/") -> Damage:
    def damage(file: Any) -> None:
        file[where].attrs[name] = value

    return damage


def unmarked(name: str, where: str) -> Damage:
    def damage(file: Any) -> None:
        del file[where].attrs[name]

    return damage


def recorded(**changed: Any) -> Damage:
    def damage(file: Any) -> None:
        record = json.loads(file.attrs["config"])
        file.attrs["config"] = json.dumps(record | changed)

    return damage


def huge(name: str, shape: tuple[int, ...]) -> Damage:
    """Return what says that a table has more than any memory holds."""

    def damage(file: Any) -> None:
        del file[name]
        file.create_dataset(name, shape, np.float64)

    return damage


def virtual(name: str) -> Damage:
    def damage(file: Any) -> None:
        shape = file[name].shape
        del file[name]
        layout = h5py.VirtualLayout((shape[0] + 1, *shape[1:]), np.float64)
        layout[:1] = h5py.VirtualSource("gone.h5", "x", (1, *shape[1:]))
        file.create_virtual_dataset(name, layout)

    return damage


#: What is done to a result, and what its refusal must say.
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no time": (replaced("timings/started", None), "timings/started"),
    "times of another rank count": (
        replaced("timings/posted", np.zeros((3, 2, 3))),
        "timings/posted has shape",
    ),
    "times of more steps": (
        replaced("timings/started", np.zeros((3, 3, 4))),
        "has shape",
    ),
    "times that are texts": (replaced("timings/sent", ["a", "b"]), "timings/sent"),
    "times that are a group": (replaced("timings/sent", h5py.SoftLink("/timings")), "timings/sent"),
    "times that are elsewhere": (
        replaced("timings/sent", h5py.SoftLink("/timings/posted")),
        "timings/sent",
    ),
    "times that go round": (replaced("timings/sent", h5py.SoftLink("/timings/sent")), "timings/sent"),
    "times in another file": (
        replaced("timings/sent", h5py.ExternalLink("x.h5", "/x")),
        "timings/sent",
    ),
    "times that nobody wrote": (huge("timings/started", (10**6, 3, 3)), "are there"),
    "times beyond memory": (huge("timings/started", (2**50, 3, 3)), "are there"),
    "times from a file that is gone": (virtual("timings/started"), "timings/"),
    "a rank that there is not": (replaced("timings/waited_for", np.full((3, 3, 3), 7.0)), "waited_for"),
    "bytes that are unknown": (
        replaced("timings/bytes_sent", np.full((3, 3, 3), np.nan)),
        "bytes_sent",
    ),
    "no bytes": (replaced("timings/bytes_sent", None), "bytes_sent"),
    "an end that never comes": (replaced("timings/step_end", np.full((3, 3, 3), np.inf)), "step_end"),
    "a clock that is lost": (replaced("clocks/offset", np.full((2, 3), np.nan)), "clocks/"),
    "no ranks": (replaced("ranks/hostname", None), "ranks/hostname"),
    "clocks of another rank count": (
        replaced("clocks/offset", np.zeros((2, 4))),
        "clocks/offset has shape",
    ),
    "clocks compared too often": (replaced("clocks/measured_at", np.zeros((9, 3))), "clocks/"),
    "a record that is no JSON": (marked("config", "{"), "damaged"),
    "a record that is deep": (marked("config", "[" * 100_000), "damaged"),
    "a record that is a list": (marked("config", "[1]"), "what it says of the run"),
    "a record of another type": (marked("config", 3), "damaged"),
    "an option that is none": (recorded(sead=3), "sead: no such option"),
    "an option of another type": (recorded(heads=None), "heads=None"),
    "an option beyond its range": (recorded(head_dim=-1), "head_dim=-1"),
    "groups that do not fit": (marked("inner_ranks", 2, "machine"), "3 ranks in groups of 2"),
    "facts that are tables": (marked("oversubscribed", np.zeros(3), "machine"), "oversubscribed"),
    "another kind": (marked("kind", "guessed"), "'guessed'"),
    "a verdict without a bound": (unmarked("bound", "verification/out"), "damaged"),
    "verdicts that are a table": (replaced("verification", np.zeros(5)), "verification is a table"),
    "a verdict of texts": (marked("rows", "many", "verification/out"), "damaged"),
}


@pytest.mark.parametrize("command", ["report", "report --compare"])
@pytest.mark.parametrize(("damage", "told"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_result_is_refused_in_one_line(
    command: str, damage: Damage, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_result(tmp_path / "r.h5", 3)
    with h5py.File(path, "r+") as file:
        damage(file)

    code = main([*command.split(), str(path)])

    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert (code, line.startswith("ringmpi: ")) == (2, True)
    assert str(path) in line


@pytest.mark.parametrize(("command", "more"), [("report", 3 + 1), ("report --compare", 1)])
def test_what_was_not_counted_is_a_dash(
    command: str, more: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FLOP/s of three ranks and of the whole, and messages; there may be other dashes."""
    path = write_result(tmp_path / "r.h5", 3)
    assert main([*command.split(), str(path)]) == 0
    before = capsys.readouterr().out.split().count("-")
    with h5py.File(path, "r+") as file:
        del file["timings/flops"], file["timings/messages"]

    assert main([*command.split(), str(path)]) == 0

    assert capsys.readouterr().out.split().count("-") == before + more


def test_a_wrong_byte_among_the_first_is_refused_or_does_not_matter(tmp_path: Path) -> None:
    """HDF5 keeps the root group and what it says of it there, and has many errors for it."""
    sound = write_result(tmp_path / "r.h5", 3).read_bytes()
    path, refused = tmp_path / "wrong.h5", 0
    kept = 0
    for at in range(1000):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 0xFF]) + sound[at + 1 :])
        kept += refusal(path) is not None  # Another run's output may not take its place.
        try:
            with ResultFile(path):
                pass
        except StoreError:
            refused += 1

    assert refused > 100
    assert 0 < kept <= refused


def test_a_sound_result_is_not_refused(tmp_path: Path) -> None:
    assert main(["report", str(write_result(tmp_path / "r.h5", 3))]) == 0


@pytest.mark.parametrize("seq_len", [63, 2**50])
def test_outputs_of_another_shape_are_refused_before_anything_is_computed(
    seq_len: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_result(tmp_path / "r.h5", 3)
    with h5py.File(path, "r+") as file:
        file["outputs/out"] = np.zeros((1, 2, 64, 4), np.float32)
        file["outputs/lse"] = np.zeros((1, 2, 64), np.float32)
        recorded(seq_len=seq_len)(file)

    assert main(["verify", str(path)]) == 2
    assert "outputs/out has shape (1, 2, 64, 4)" in capsys.readouterr().err


def test_inputs_beyond_every_sum_fail_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_result(tmp_path / "r.h5", 3, dtype="float64", backward=True)
    with h5py.File(path, "r+") as file:
        for name in "qkv":
            file[f"inputs/{name}"] = np.full((1, 2, 64, 4), 1e300)
        for name in ("out", "dq", "dk", "dv"):
            file[f"outputs/{name}"] = np.full((1, 2, 64, 4), 1e300)
        file["outputs/lse"] = np.zeros((1, 2, 64))

    assert main(["verify", str(path)]) == 1
    assert capsys.readouterr().err == ""


def test_a_message_is_one_line_whatever_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "a\nb.h5"]) == 2
    assert capsys.readouterr().err == "ringmpi: a\\nb.h5: is no file; name a result of ringmpi run\n"
