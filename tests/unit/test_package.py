from __future__ import annotations

import os
import subprocess
import sys

import pytest

import ringmpi
from ringmpi.cli import main
from ringmpi.comm.policy import PROGRESS
from ringmpi.config import options
from ringmpi.devices import DEVICES, MATRIX_UNIT
from ringmpi.layout import LAYOUTS
from ringmpi.schedule import METHODS
from ringmpi.softmax import DTYPES, WEIGHTS

HEAVY = ("numpy", "mpi4py", "h5py", "cupy", "matplotlib", "rich", "ml_dtypes")


def loaded_by(program: str) -> set[str]:
    """Return which of the heavy packages a program has loaded at its end."""
    answer = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return {name for name in HEAVY if name in answer.stdout.split()}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import ringmpi; ringmpi.__version__") == set()


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    assert loaded_by("import ringmpi.cli") == set()


@pytest.mark.parametrize(
    "room",
    [
        *(
            "config",
            "layout",
            "mask",
            "schedule",
            "devices",
            "metrics",
            "timeline",
            "blame",
            "verify",
            "comparison",
            "tensors",
        ),
        *(
            "workspace",
            "model.travel",
            "model.plan",
            "comm.link",
            "report.compare",
            "report.plan",
            "sweep",
        ),
    ],
)
def test_rooms_that_never_know_mpi_do_not_load_it(room: str) -> None:
    assert "mpi4py" not in loaded_by(f"import ringmpi.{room}")


def test_the_public_names_are_these_and_no_more() -> None:
    assert sorted(ringmpi.__all__) == ["RingAttention", "__version__", "prepare", "ring_attention"]
    assert ringmpi.__version__.count(".") == 2


def test_preparing_needs_no_mpi() -> None:
    assert "mpi4py" not in loaded_by("import ringmpi; ringmpi.prepare()")


def test_a_name_that_is_not_there_is_told() -> None:
    with pytest.raises(AttributeError, match="'ringmpi' has no attribute 'RingAtention'"):
        _ = ringmpi.RingAtention


def test_public_names_are_found_where_mpi_is_loaded() -> None:
    program = (
        "import mpi4py; mpi4py.rc.initialize = False; mpi4py.rc.finalize = False\n"
        "from ringmpi import RingAttention, ring_attention\n"
        "print(RingAttention.__name__, ring_attention.__name__)"
    )

    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert answer.stdout.split() == ["RingAttention", "ring_attention"]


@pytest.fixture
def help_of_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # The command line sets thread counts.
    with pytest.raises(SystemExit) as end:
        main(["run", "--help"])
    assert end.value.code == 0
    return " ".join(capsys.readouterr().out.split())


REGISTRIES = {
    "layout": LAYOUTS,
    "method": METHODS,
    "device": DEVICES,
    "matrix_unit": MATRIX_UNIT,
    "weights": WEIGHTS,
    "progress": PROGRESS,
    "dtype": DTYPES,
}


@pytest.mark.parametrize("option", REGISTRIES)
def test_every_registered_name_is_offered_by_the_command_line(option: str, help_of_run: str) -> None:
    flag = option.replace("_", "-")
    offered = help_of_run.split(f" --{flag} ")[-1].split(" --")[0]

    for name in REGISTRIES[option]:
        assert name in offered.replace(",", " ").split()
        assert name in options()[option].metadata["choices"]


def test_every_parameter_is_an_option_of_the_command_line(help_of_run: str) -> None:
    flags = {"--" + name.replace("_", "-") for name in options()}

    assert flags - set(help_of_run.replace("[", " ").replace("]", " ").split()) == set()
