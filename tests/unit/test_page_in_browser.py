"""The page in a real browser: it opens from a file, loads nothing, and tells the numbers of the file."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import Rule, write_result

from ringmpi.metrics import compute_time, overhead_time, stall_time
from ringmpi.report.culprits import culprit_name
from ringmpi.report.kinds import KINDS
from ringmpi.report.page import write_page
from ringmpi.report.view import Views
from ringmpi.schedule import Pass
from ringmpi.store import ResultFile

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'ringmpi[browser]'"
)

#: Names of the same browser in different distributions.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

#: Milliseconds within which a page answers, however busy the machine is.
PATIENCE = 30_000

#: Texts tell microseconds: half of one for rounding, and two nanoseconds for moments that are rounded too.
TOLD = 0.0005 + 2e-6


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(
            "there is no Chromium: apt-get install chromium, or another browser of " + str(BROWSERS)
        )
    with playwright.sync_playwright() as driver:
        # The sandbox needs rights that a container, or root, may not have; the page is our own.
        found = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """A page in the browser, with all that it asked for and complained about."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.url = path.as_uri()
        self.page.goto(self.url)

    def point(self, row: int, time: float, timeline: int = 0) -> str:
        """Move the pointer to a moment (in seconds) of a row, and return what the tip tells."""
        canvas = self.page.locator("canvas").nth(timeline)
        canvas.scroll_into_view_if_needed()
        x, y = self.page.evaluate(
            "([n, row, time]) => [timelines[n].x(time), timelines[n].y(row) + timelines[n].rowHeight / 2]",
            [timeline, row, time * 1e9],
        )
        box = canvas.bounding_box()
        self.page.mouse.move(box["x"] + x, box["y"] + y)
        return self.tip()

    def tip(self) -> str:
        tip = self.page.locator(".tip")
        return tip.inner_text() if tip.is_visible() else ""

    def colours(self, places: list[tuple[int, float]]) -> list[str]:
        """Return the colours of the picture at moments of rows, near the lower edge of their bars."""
        found = self.page.evaluate(
            """places => {
                const t = timelines[0], { width, height } = t.canvas;
                const pixels = t.canvas.getContext("2d").getImageData(0, 0, width, height).data;
                return places.map(([row, time]) => {
                    const x = Math.floor(t.x(time) * devicePixelRatio);
                    const y = Math.floor((t.y(row) + t.rowHeight - 6) * devicePixelRatio);
                    return [...pixels.slice(4 * (y * width + x), 4 * (y * width + x) + 3)];
                });
            }""",
            [[row, time * 1e9] for row, time in places],
        )
        return [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in found]

    def range(self) -> list[float]:
        found: list[float] = self.page.evaluate("() => [timelines[0].from, timelines[0].to]")
        return found

    def close(self) -> None:
        self.context.close()


Open = Callable[..., Opened]


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Write a page about results and open it; at the end nothing may have been loaded or complained about."""
    opened = []

    def open_them(*paths: Path, **options: Any) -> Opened:
        write_page([ResultFile(path) for path in paths], tmp_path / "page.html")
        opened.append(Opened(browser, tmp_path / "page.html", **options))
        return opened[-1]

    yield open_them
    for page in opened:
        requests, complaints = page.requests, page.complaints
        page.close()
        assert requests == [page.url]
        assert complaints == []


@pytest.fixture
def slow_rank(tmp_path: Path) -> Path:
    """Three ranks, of which one is slow, forward and backward."""
    return write_result(
        tmp_path / "a.h5", 3, rule=Rule(lambda rank, step: 0.03 if rank == 1 else 0.004), backward=True
    )


def number(tip: str, name: str) -> float:
    """Return the number after a name in a tip."""
    (found,) = re.findall(rf"^{name}\n+([\d.]+)", tip, re.MULTILINE)
    return float(found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pointing_tells_the_numbers_of_the_file(open_page: Open, slow_rank: Path, scheme: str) -> None:
    opened = open_page(slow_rank, color_scheme=scheme)
    with ResultFile(slow_rank) as result:
        made = Views(result, Pass.FORWARD)
    view, records = made.view(), made.timings.records[1]
    assert {blame.cause.value for blame in view.blames} == {"late sender", "link"}
    for rank, step in np.ndindex(records.shape):
        record, shown = records[rank, step], view.records[rank, step]
        tip = opened.point(rank, float(shown["started"] + shown["step_end"]) / 2)
        assert tip.startswith(f"rank {rank}, step {step}\n")
        for name, seconds in (
            ("compute", compute_time(record)),
            ("stall", stall_time(record)),
            ("overhead", overhead_time(record)),
        ):
            assert number(tip, name) == pytest.approx(float(seconds) * 1e3, abs=TOLD), tip
        assert number(tip, "sent") * 1e6 == pytest.approx(record["bytes_sent"], abs=500)
        assert re.sub(r"\u2009", "", tip).find(f"pairs\n{int(record['pairs'])}") > 0
        assert number(tip, "speed") == 1.0
        for blame in view.blames:
            if (blame.rank, blame.step) == (rank, step):
                name = culprit_name(blame.cause, blame.culprit)
                assert f"{blame.cause.value}: {name}\n" in tip


def test_stalls_have_the_colour_of_their_cause(open_page: Open, slow_rank: Path) -> None:
    opened = open_page(slow_rank)
    with ResultFile(slow_rank) as result:
        view = Views(result, Pass.FORWARD).view()
    # Wider than the line that begins a step.
    wide = [piece for piece in view.pieces() if piece["end"] - piece["begin"] > 0.002]
    places = [(int(piece["rank"]), float(piece["begin"] + piece["end"]) / 2) for piece in wide]
    kinds = [KINDS[piece["kind"]] for piece in wide]
    assert opened.colours(places) == [kind.colour for kind in kinds]
    assert {"compute", "late sender"} <= {kind.name for kind in kinds}


def test_where_nothing_was_done_nothing_is_told(open_page: Open, slow_rank: Path) -> None:
    opened = open_page(slow_rank)
    assert opened.point(0, 0.002) != ""
    assert opened.point(0, 0.08) == ""  # Rank 0 ended long before rank 1.


def test_keys_go_from_step_to_step_and_zoom(open_page: Open, slow_rank: Path) -> None:
    opened = open_page(slow_rank)
    canvas, keys = opened.page.locator("canvas"), opened.page.keyboard
    canvas.focus()
    whole = opened.range()
    keys.press("ArrowRight")
    assert opened.tip().startswith("rank 0, step 0\n")
    keys.press("ArrowRight")
    keys.press("ArrowDown")
    assert opened.tip().startswith("rank 1, step 1\n")
    assert opened.page.locator(".readout").inner_text().startswith("rank 1, step 1: compute 30.300 ms")
    for _ in range(9):
        keys.press("ArrowLeft")
    assert opened.tip().startswith("rank 1, step 0\n")
    keys.press("Escape")
    assert opened.tip() == ""
    keys.press("+")
    assert opened.range()[1] - opened.range()[0] == pytest.approx((whole[1] - whole[0]) / 2)
    before = opened.range()
    keys.press("Shift+ArrowRight")
    assert opened.range()[0] > before[0]
    keys.press("0")
    assert opened.range() == whole
    for _ in range(60):
        keys.press("+")
    for _ in range(3):
        keys.press("ArrowRight")
    assert opened.tip().startswith("rank 0, step 2\n")
    assert (
        opened.range()[0]
        <= opened.page.evaluate("() => timelines[0].view.started[2]")
        <= opened.range()[1]
    )


def test_the_wheel_zooms_after_a_click_and_scrolls_before(open_page: Open, slow_rank: Path) -> None:
    opened = open_page(slow_rank)
    mouse, whole = opened.page.mouse, opened.range()
    opened.point(1, 0.03)
    mouse.wheel(0, -300)
    assert opened.range() == whole
    opened.point(1, 0.03)
    mouse.down()
    mouse.up()
    mouse.wheel(0, -300)
    opened.page.wait_for_function(
        "whole => timelines[0].to - timelines[0].from < whole", arg=whole[1] * 0.9
    )
    low, high = opened.range()
    share = (0.03e9 - low) / (high - low)
    assert share == pytest.approx(0.03e9 / whole[1], abs=0.01)  # What the pointer is at stays there.
    mouse.down()
    mouse.move(300, 300, steps=4)
    mouse.up()
    assert opened.range()[0] != low
    assert opened.range()[1] - opened.range()[0] == pytest.approx(high - low)
    opened.page.get_by_role("button", name="show the whole").click()
    assert opened.range() == whole


def test_passes_and_repeats_can_be_chosen(open_page: Open, slow_rank: Path) -> None:
    opened = open_page(slow_rank)
    with ResultFile(slow_rank) as result:
        records = result.timings(Pass.BACKWARD).records[2]
    opened.page.get_by_label("pass", exact=True).select_option("backward")
    labels = opened.page.get_by_label("repeat", exact=True).locator("option").all_inner_texts()
    assert [label.split(":")[0] for label in labels] == ["2 of 3", "1 of 3", "3 of 3"]
    opened.page.get_by_label("repeat", exact=True).select_option(label=labels[2])
    assert "backward pass, 3 ranks, 4 steps" in str(
        opened.page.locator("canvas").get_attribute("aria-label")
    )
    tip = opened.point(1, 0.01)
    assert number(tip, "compute") == pytest.approx(float(compute_time(records[1, 0])) * 1e3, abs=TOLD)


def test_all_steps_are_in_a_table_too(open_page: Open, slow_rank: Path) -> None:
    opened = open_page(slow_rank)
    opened.page.get_by_text("Steps as a table").click()
    opened.page.get_by_label("rank of the table").select_option("2")
    rows = opened.page.locator(".scroll tbody tr").all()
    heads = opened.page.locator(".scroll th").all_inner_texts()
    with ResultFile(slow_rank) as result:
        records = result.timings(Pass.FORWARD).records[1, 2]
    assert len(rows) == len(records) == 3
    for row, record in zip(rows, records, strict=True):
        cells = dict(zip(heads, row.locator("td").all_inner_texts(), strict=True))
        assert float(cells["compute ms"]) == pytest.approx(float(compute_time(record)) * 1e3, abs=TOLD)
        assert float(cells["stall ms"]) == pytest.approx(float(stall_time(record)) * 1e3, abs=TOLD)
        blamed = sum(float(cells[f"{name} ms"]) for name in ("late sender", "link", "unblamed"))
        assert blamed == pytest.approx(float(cells["stall ms"]), abs=4 * TOLD)


def test_charts_tell_their_points_to_pointer_and_keyboard(open_page: Open, tmp_path: Path) -> None:
    paths = [
        write_result(tmp_path / f"{length}{method}.h5", 2, seq_len=length, method=method)
        for length in (64, 128)
        for method in ("ring", "bidirectional")
    ]
    opened = open_page(*paths)
    figures = opened.page.locator("figure")
    assert "Stall against block length" in figures.first.inner_text()
    # Neither stalls, so their points lie on each other, and whoever points at one is told both.
    for mark in ("ring, measured", "bidirectional, measured"):
        figures.first.locator(f"[aria-label^='{mark}']").first.focus()
        assert f"64{mark.split(',')[0]}.h5" in opened.tip()
        assert "tokens of a block\n32" in opened.tip()
        opened.page.locator("h1").click()
    assert opened.tip() == ""
    figures.first.locator("[aria-label^='bidirectional, measured']").first.hover()
    assert "also ring, measured" in opened.tip()
    bars = opened.page.locator("figure", has_text="Methods compared").first
    bars.locator("[tabindex]").first.focus()
    assert "time of the whole, ms" in opened.tip()
    # Folded up, as there are many; unfolded, a timeline is drawn.
    assert opened.page.locator("canvas").count() == 0
    opened.page.locator(".result summary").first.click()
    opened.page.locator("canvas").wait_for()
    assert opened.point(0, 0.005).startswith("rank 0, step 0")


def test_a_long_run_of_many_ranks_opens(open_page: Open, tmp_path: Path) -> None:
    path = write_result(tmp_path / "a.h5", 130, seq_len=130, repeats=2, kind="simulated", alone=False)
    opened = open_page(path)
    note = opened.page.locator(".timeline .note").first.inner_text()
    assert note == "128 of 130 ranks are shown. Of so many steps neither transfers nor blame are told."
    narrow = opened.page.get_by_text("columns show the shares")
    assert not narrow.is_visible()
    with ResultFile(path) as result:
        view = Views(result, Pass.FORWARD, most_ranks=128).view()
    opened.page.set_viewport_size({"width": 320, "height": 900})
    opened.page.wait_for_function("() => timelines[0].width < 240")
    assert narrow.is_visible()  # 130 steps of less than 2 pixels each.
    opened.page.set_viewport_size({"width": 1200, "height": 900})
    opened.page.wait_for_function("() => timelines[0].width > 900")
    assert not narrow.is_visible()
    shown = view.records[100, 87]
    opened.page.evaluate("() => timelines[0].zoom(0.02, 2 / 3)")
    low, high = opened.range()
    assert low < shown["started"] * 1e9 < high
    tip = opened.point(100, float(shown["started"] + shown["step_end"]) / 2)
    assert tip.startswith(f"rank {view.ranks[100]}, step 87\n")
    assert number(tip, "compute") == pytest.approx(float(compute_time(shown)) * 1e3, abs=TOLD)


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        (1, {"alone": False}, "Timeline"),
        (3, {"repeats": 0, "interrupted": 15}, "so there is no timeline"),
        (3, {"rule": Rule(lambda rank, step: 0.0, transfer=1e-6), "seq_len": 2}, "Timeline"),
    ],
    ids=["one rank", "nothing timed", "no work"],
)
def test_any_file_opens(
    open_page: Open, tmp_path: Path, size: int, options: dict[str, Any], words: str
) -> None:
    opened = open_page(write_result(tmp_path / "a.h5", size, **options))
    assert words in opened.page.locator("main").inner_text()


def test_print_is_light_and_has_tables(open_page: Open, slow_rank: Path) -> None:
    opened = open_page(slow_rank, color_scheme="dark")
    page = opened.page
    assert page.evaluate("() => timelines[0].ink.paper") == "#1c2027"
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("() => timelines[0].ink.paper") == "#ffffff"
    page.emulate_media(media="print")
    assert page.locator("table").first.is_visible()
    assert not page.get_by_role("button", name="zoom in").is_visible()
    page.evaluate("() => dispatchEvent(new Event('afterprint'))")
    assert len(page.pdf()) > 10_000
