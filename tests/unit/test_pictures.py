"""Pictures of results: drawn for any file, with the colours and the numbers that they should have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic import Rule, write_result

from ringmpi.errors import ConfigError, MissingCapabilityError
from ringmpi.report.kinds import KINDS
from ringmpi.report.show import Asked, report_files
from ringmpi.report.view import Views
from ringmpi.schedule import Pass
from ringmpi.store import ResultFile

COLOURS = {kind.name: kind.colour for kind in KINDS}


def drawn(folder: Path, *paths: Path, **asked: Any) -> str:
    """Return the SVG of a picture."""
    report_files([str(path) for path in paths], Asked(plot=str(folder / "p.svg"), **asked))
    return (folder / "p.svg").read_text("utf-8")


def test_a_timeline_has_a_bar_for_every_piece_in_its_colour(tmp_path: Path) -> None:
    # A ring of 3, in which rank 1 is slow, so that rank 2 waits for it.
    path = write_result(
        tmp_path / "a.h5", 3, rule=Rule(lambda rank, step: 0.03 if rank == 1 else 0.003)
    )
    svg = drawn(tmp_path, path)
    assert "stall: late sender" in svg
    assert "stall: progress" not in svg
    with ResultFile(path) as result:
        pieces = Views(result, Pass.FORWARD).view().pieces()["kind"].tolist()
    # The legend has what there is, its squares filled and edged.
    expected = {kind: pieces.count(at) + 2 for at, kind in enumerate(COLOURS) if at in pieces}
    assert {kind: svg.count(colour) for kind, colour in COLOURS.items() if colour in svg} == expected
    assert {"compute", "overhead", "late sender"} <= expected.keys()
    assert "a: 91.8 ms" in svg  # Three steps of 30.3 ms, and of 0.3 ms beside them.


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        (1, {"alone": False}, ["a: 10."]),
        (3, {"backward": True, "kind": "simulated"}, ["a, simulated: ", "a, backward, simulated: "]),
        (70, {"repeats": 1}, ["64 of 70 ranks shown", "transfers, those with the longest stalls"]),
    ],
    ids=["one rank", "simulated, backward", "many ranks"],
)
def test_any_file_can_be_drawn(
    tmp_path: Path, size: int, options: dict[str, Any], words: list[str]
) -> None:
    svg = drawn(tmp_path, write_result(tmp_path / "a.h5", size, **options))
    for word in words:
        assert word in svg


def test_many_steps_become_pixels_in_an_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringmpi.report.plots import timeline

    path = write_result(tmp_path / "a.h5", 8)
    assert "<image" not in drawn(tmp_path, path)
    monkeypatch.setattr(timeline, "MOST_SHAPES", 20)
    assert "<image" in drawn(tmp_path, path)


def test_figures_of_several_files(tmp_path: Path) -> None:
    paths = [
        write_result(tmp_path / f"{size}-{length}.h5", size, seq_len=length, oversubscribed=size == 2)
        for size, length in ((1, 64), (2, 64), (2, 128), (2, 16), (3, 64))
    ]
    paths.append(write_result(tmp_path / "m.h5", 2, seq_len=64, method="bidirectional"))
    stall = drawn(tmp_path, *paths, figure="stall")
    assert "Stall against block length, forward" in stall
    assert "Hollow: " in stall
    scaling = drawn(tmp_path, *paths, figure="scaling")
    assert "Parallel efficiency, forward" in scaling
    assert "strong, 64 tokens" in scaling
    methods = drawn(tmp_path, *paths, figure="methods")
    assert "bidirectional" in methods


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"figure": "scalling", "plot": "p.png"}, "did you mean 'scaling'"),
        ({"figure": "stall", "plot": ""}, "one picture of all files; give --plot PICTURE a name"),
        ({"figure": "stall"}, "one picture of all files"),
        ({"html": "a.h5"}, "must be a file name that ends with .html"),
        ({"perfetto": "a.h5"}, "must be a file name that ends with .json"),
    ],
)
def test_what_cannot_be_meant_is_refused(asked: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Asked(**asked)


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"figure": "stall"}, "needs results that differ in --seq-len alone"),
        ({"figure": "scaling"}, "needs results that differ in the number of ranks"),
        ({"figure": "methods"}, "needs results of one problem by several methods"),
    ],
)
def test_one_file_is_too_few_for_figures_of_several(
    tmp_path: Path, asked: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule):
        drawn(tmp_path, write_result(tmp_path / "a.h5", 2), **asked)


def test_results_that_scaling_leaves_out_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_result(tmp_path / f"{size}.h5", size, oversubscribed=size > 2) for size in (1, 2, 3)]
    svg = drawn(tmp_path, *paths, figure="scaling")
    left_out = "Left out, having more ranks or threads than cores: 1 (3.h5)."
    assert left_out in svg
    told = [line for line in capsys.readouterr().out.splitlines() if "Left out" in line]
    assert told == [f"# {left_out}"]
    drawn(tmp_path, *paths[:2], figure="scaling")
    assert "Left out" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"needs .*\. Left out, .*: 1 \(3\.h5\)\."):
        drawn(tmp_path, paths[0], paths[2], figure="scaling")


def test_nothing_timed_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.h5 has no timed repeat"):
        drawn(tmp_path, write_result(tmp_path / "a.h5", 2, repeats=0, interrupted=15))


def test_unknown_endings_and_places_are_refused(tmp_path: Path) -> None:
    path = str(write_result(tmp_path / "a.h5", 2))
    before = Path(path).read_bytes()
    with pytest.raises(ConfigError, match=r"plot=.*a\.h5: cannot be written: Format 'h5'"):
        report_files([path], Asked(plot=path))
    assert Path(path).read_bytes() == before
    for option, name in (("html", "x.html"), ("perfetto", "x.json"), ("plot", "x.png")):
        with pytest.raises(ConfigError, match=f"{option}=.*cannot be written"):
            report_files([path], Asked(**{option: str(tmp_path / "a.h5" / name)}))


def test_without_names_files_appear_beside_each_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(write_result(tmp_path / f"{name}.h5", 2)) for name in "ab"]
    report_files(paths, Asked(plot="", html="", perfetto=""))
    names = [
        f"{name}{ending}" for name in "ab" for ending in (".h5", ".html", ".perfetto.json", ".png")
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    told = capsys.readouterr().out
    assert f"# page: {tmp_path / 'b.html'}" in told
    assert f"# trace for ui.perfetto.dev: {tmp_path / 'a.perfetto.json'}" in told


def test_without_matplotlib_pages_and_traces_are_made_and_pictures_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_result(tmp_path / "a.h5", 2))
    for name in [name for name in sys.modules if name.startswith("ringmpi.report.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report_files([path], Asked(html="", perfetto=""))
    with pytest.raises(MissingCapabilityError, match="matplotlib is not installed"):
        report_files([path], Asked(plot=""))
