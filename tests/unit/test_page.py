"""The page as text: one file, nothing from elsewhere, the file's numbers, and texts that cannot break out."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import PASSED, Rule, write_result

from ringmpi.metrics import compute_time, stall_time
from ringmpi.report import page
from ringmpi.report.kinds import KINDS
from ringmpi.report.page import write_page
from ringmpi.report.page.data import page_data
from ringmpi.report.page.markup import embedded
from ringmpi.report.tables import report
from ringmpi.report.text import make_console
from ringmpi.schedule import Pass
from ringmpi.store import ResultFile


class Seen(HTMLParser):
    """What a browser makes of a page: elements with their attributes, and the texts in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            continue

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def inside(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def seen(folder: Path, *paths: Path) -> Seen:
    write_page([ResultFile(path) for path in paths], folder / "page.html")
    return Seen((folder / "page.html").read_text("utf-8"))


def data_of(found: Seen) -> dict[str, Any]:
    scripts = found.inside("script")
    told: dict[str, Any] = json.loads(scripts[0])
    return told


def test_views_hold_the_numbers_of_the_file(tmp_path: Path) -> None:
    path = write_result(
        tmp_path / "a.h5",
        4,
        rule=Rule(lambda rank, step: 0.003 * (rank + 1)),
        backward=True,
        offsets=(0, 4, 5, 6),
    )
    (file,) = data_of(seen(tmp_path, path))["files"]
    assert [found["direction"] for found in file["passes"]] == ["forward", "backward"]
    for direction, told in zip(Pass, file["passes"], strict=True):
        with ResultFile(path) as result:
            timings = result.timings(direction)
        assert [view["repeat"] for view in told["views"]] == [2, 1, 3]
        for view in told["views"]:
            records = timings.records[view["repeat"] - 1]
            columns = {name: np.array(view[name], float).reshape(records.shape) for name in COLUMNS}
            # Whole nanoseconds, of moments that are rounded each: within one.
            compute = columns["compute_done"] - columns["launched"]
            assert np.abs(compute - compute_time(records) * 1e9).max() <= 1.01
            stall = columns["waited"] - columns["compute_done"]
            assert np.abs(stall - stall_time(records) * 1e9).max() <= 1.01
            for name in ("bytes_sent", "pairs", "flops"):
                assert (columns[name] == records[name].round()).all()
            begins = timings.clocks.corrected(records["started"])
            assert np.abs(columns["started"] - (begins - begins.min()) * 1e9).max() <= 1.01


COLUMNS = ("started", "launched", "compute_done", "waited", "step_end", "bytes_sent", "pairs", "flops")


def test_the_page_says_what_the_terminal_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_result(tmp_path / "a.h5", 3, backward=True, oversubscribed=True, interrupted=15)
    with ResultFile(path) as result:
        report(result, make_console())
    words = capsys.readouterr().out.split()
    texts = " ".join(text for _, text in seen(tmp_path, path).texts).split()
    assert len(words) > 100
    assert set(words) - {"#", "verdict:", f"{path}"} <= set(texts)


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    found = seen(tmp_path, *[write_result(tmp_path / f"{size}.h5", size) for size in (1, 2)])
    for tag, attributes in found.elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form")
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
        assert "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
    (style,), (_, script) = found.inside("style"), found.inside("script")
    assert "url(" not in style and "@import" not in style
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)|fetch\(|XMLHttpRequest|import ", script)
    (policy,) = [a["content"] for t, a in found.elements if t == "meta" and "http-equiv" in a]
    for text in (style, script):
        assert f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in str(policy)
    assert str(policy).startswith("default-src 'none'")


WICKED = "</script><script>alert(1)</script><b>&amp;\u2028\u2029\"'"


def test_texts_of_files_cannot_break_out(tmp_path: Path) -> None:
    path = write_result(tmp_path / "<b>&.h5", 2, command=f"ringmpi run --output '{WICKED}'")
    found = seen(tmp_path, path)
    tags = [tag for tag, _ in found.elements]
    assert tags.count("script") == 2
    assert "b" not in tags
    assert any(WICKED in text for text in found.inside("dd"))
    assert data_of(found)["files"][0]["name"] == "<b>&.h5"


def test_embedded_json_is_ascii_and_says_the_same() -> None:
    text = embedded({WICKED: [1.5, None]})
    assert text.isascii()
    assert not set("<>&\n") & set(text)
    assert json.loads(text) == {WICKED: [1.5, None]}
    with pytest.raises(ValueError, match="JSON"):
        embedded(float("nan"))


def test_blames_and_hops_name_rows_and_kinds(tmp_path: Path) -> None:
    path = write_result(
        tmp_path / "a.h5", 3, rule=Rule(lambda rank, step: 0.03 if rank == 1 else 0.003)
    )
    told = data_of(seen(tmp_path, path))
    view = told["files"][0]["passes"][0]["views"][0]
    blamed = {(row, told["kinds"][kind]["name"], who) for row, _, kind, *_, who in view["blames"]}
    assert (2, "stall: late sender", "rank 1") in blamed
    assert [kind["colour"] for kind in told["kinds"]] == [kind.colour for kind in KINDS]
    # 64 tokens on 3 ranks; k and v of 2 heads of 4 float32.
    assert sorted(map(tuple, view["hops"]))[0] == (0, 0, 1, 0, 22 * 64, "kv of 0")


def test_of_what_is_too_large_a_part_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write_result(tmp_path / f"{name}.h5", 6, repeats=4) for name in "ab"]
    data = page.data
    monkeypatch.setattr(data, "STEPS_OF_VIEW", 20)
    monkeypatch.setattr(data, "STEPS_OF_PAGE", 60)
    monkeypatch.setattr(data, "MOST_HOPS", 2)
    found = page_data([ResultFile(path) for path in paths])["files"]
    views = [file["passes"][0]["views"] for file in found]
    # 3 of 6 ranks of 6 steps each fit into a view, and three such views into the page: the median ones first.
    assert [[view["repeat"] for view in those] for those in views] == [[3, 1], [3]]
    assert all(
        view["ranks"] == [0, 2, 5] or len(view["ranks"]) == 3 for those in views for view in those
    )
    assert all(len(view["hops"]) <= 2 for those in views for view in those)
    assert [file["passes"][0]["repeats"] for file in found] == [4, 4]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {"alone": False, "repeats": 1}),
        (3, {"repeats": 0, "interrupted": 15}),
        (3, {"kind": "simulated", "backward": True}),
        (2, {"verdicts": ()}),
        (2, {"verdicts": (PASSED, PASSED), "documents": (0, 3, 64), "causal": True}),
        (5, {"seq_len": 3, "rule": Rule(lambda rank, step: 0.0)}),
    ],
    ids=["one rank", "nothing timed", "simulated", "unverified", "documents", "empty shards"],
)
def test_any_file_gives_a_page(tmp_path: Path, size: int, options: dict[str, Any]) -> None:
    found = seen(tmp_path, write_result(tmp_path / "a.h5", size, **options))
    told = data_of(found)
    repeats = options.get("repeats", 3)
    for one in told["files"][0]["passes"]:
        assert len(one["views"]) == one["repeats"] == repeats
        for view in one["views"]:
            assert len(view["started"]) == size * view["steps"]
    assert options.get("kind", "measured") in found.inside("span")
    if "interrupted" in options:
        assert any("ended early by signal 15" in text for text in found.inside("dd"))


def test_charts_are_on_the_page_with_a_table_each(tmp_path: Path) -> None:
    paths = [
        write_result(tmp_path / f"{size}-{length}-{method}.h5", size, seq_len=length, method=method)
        for size, length, method in (
            (1, 64, "ring"),
            (2, 64, "ring"),
            (2, 128, "ring"),
            (2, 64, "allgather"),
        )
    ]
    found = seen(tmp_path, *paths)
    charts = data_of(found)["charts"]
    assert [chart["figure"] for chart in charts] == ["stall", "scaling", "scaling", "methods"]
    assert found.inside("figcaption") == [chart["title"] for chart in charts]
    points = [p for chart in charts for series in chart["series"] for p in series["points"]]
    rows = [tag for tag, _ in found.elements].count("tr")
    ranks = 1 + 2 + 2 + 2
    verdicts = 4
    assert rows == len(points) + len(charts) + ranks + verdicts + 2 * len(paths)
