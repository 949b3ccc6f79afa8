"""What several files say together: stall against block length, scaling, methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import PASSED, Rule, write_result

from ringmpi.report.across import FIGURES
from ringmpi.report.across.chart import Chart, Mark, Series
from ringmpi.report.across.stall import threshold
from ringmpi.store import ResultFile

#: Seconds that a rank computes for each token and step, in files of a sweep.
A_TOKEN = 1e-4


def charts(figure: str, paths: list[Path]) -> list[Chart]:
    return FIGURES[figure]([ResultFile(path) for path in paths])


def marked(chart: Chart, mark: Mark) -> list[Series]:
    return [series for series in chart.series if series.mark is mark]


def sweep(folder: Path, lengths: list[int], size: int = 2, name: str = "", **more: Any) -> list[Path]:
    """Write results whose transfers take 4 ms and whose steps compute for a tenth of a ms a token."""
    return [
        write_result(
            folder / f"{name}{length}.h5",
            size,
            rule=Rule(lambda rank, step, length=length: A_TOKEN * length / size),
            repeats=1,
            seq_len=length,
            **more,
        )
        for length in lengths
    ]


class TestStall:
    def test_measured_and_predicted_stand_beside_each_other(self, tmp_path: Path) -> None:
        # k and v of 2 heads of 4 float32 are 64 bytes a token, which take 0.5 ns beside the latency of 4 ms;
        # for 128 tokens 7e-5 ms.
        paths = sweep(tmp_path, [32, 64, 128, 256], link="1Tbit/s,4ms")
        (chart,) = charts("stall", paths)
        (measured,), (predicted,) = marked(chart, Mark.MEASURED), marked(chart, Mark.PREDICTED)
        expected = [(16, 2.4), (32, 0.8), (64, 0.0), (128, 0.0)]
        for found in (measured, predicted):
            assert [(p.x, pytest.approx(p.y, abs=1e-4)) for p in found.points] == expected
        assert measured.group == predicted.group
        (guide,) = chart.guides
        assert guide.x == pytest.approx(40, rel=1e-4)  # Of 0.1 ms each.
        assert guide.label == "40 tokens"

    def test_without_an_emulated_link_the_transfers_made_alone_give_the_bandwidth(
        self, tmp_path: Path
    ) -> None:
        # Alone, the 4 ms of a transfer are those of the stall of a step; so the rate is that of each file.
        (chart,) = charts("stall", sweep(tmp_path, [32, 64, 128]))
        (predicted,) = marked(chart, Mark.PREDICTED)
        assert [p.y for p in predicted.points] == pytest.approx([2.4, 0.8, 0.0], abs=1e-5)

    def test_simulated_files_are_a_series_of_their_own(self, tmp_path: Path) -> None:
        paths = sweep(tmp_path, [32, 64], name="m") + sweep(
            tmp_path, [32, 64], name="s", kind="simulated"
        )
        (chart,) = charts("stall", paths)
        assert len(marked(chart, Mark.SIMULATED)) == len(marked(chart, Mark.MEASURED)) == 1
        assert len(marked(chart, Mark.PREDICTED)) == 2

    def test_links_are_told_apart_and_each_has_its_threshold(self, tmp_path: Path) -> None:
        paths = sweep(tmp_path, [32, 64, 128], name="a", link="1Tbit/s,4ms")
        paths += sweep(tmp_path, [32, 64, 128], name="b", link="1Tbit/s,2ms")
        (chart,) = charts("stall", paths)
        names = [series.name for series in marked(chart, Mark.MEASURED)]
        assert names == ["1Tbit/s,4ms, measured", "1Tbit/s,2ms, measured"]
        assert [guide.x for guide in chart.guides] == pytest.approx([40, 20], rel=1e-3)

    def test_a_threshold_beyond_what_was_run_says_so(self, tmp_path: Path) -> None:
        (chart,) = charts("stall", sweep(tmp_path, [16, 32], link="1Tbit/s,4ms"))
        (guide,) = chart.guides
        assert guide.x == pytest.approx(40, rel=1e-3)
        assert guide.label.endswith("tokens, beyond what was run")

    def test_where_all_is_hidden_no_threshold_is_marked(self, tmp_path: Path) -> None:
        (chart,) = charts("stall", sweep(tmp_path, [128, 256], link="1Tbit/s,4ms"))
        assert chart.guides == ()
        assert any("all is hidden" in note for note in chart.notes)

    def test_gradients_on_their_way_home_are_no_part_of_the_threshold(self, tmp_path: Path) -> None:
        def compute(rank: int, step: int, length: int) -> float:
            return A_TOKEN * length / 2 if step < 2 else 0.0

        paths = [
            write_result(
                tmp_path / f"{length}.h5",
                2,
                rule=Rule(lambda rank, step, length=length: compute(rank, step, length)),
                repeats=1,
                seq_len=length,
                backward=True,
                link="1Tbit/s,4ms",
            )
            for length in (32, 64, 128)
        ]
        _, backward = charts("stall", paths)
        (guide,) = backward.guides
        assert guide.x == pytest.approx(40, rel=1e-3)
        (predicted,) = marked(backward, Mark.PREDICTED)
        assert predicted.points[-1].y == pytest.approx(4.0, abs=1e-3)  # The last hop of all.

    def test_one_length_or_one_rank_is_no_sweep(self, tmp_path: Path) -> None:
        assert charts("stall", sweep(tmp_path, [64])) == []
        assert charts("stall", sweep(tmp_path, [32, 64], size=1, name="one")) == []


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([(100, 0.5), (200, 2.0)], 141.42),
        ([(100, 0.5), (200, 2.0), (400, 0.9), (800, 3.0)], 425.01),  # For good: between the last two.
        ([(100, 0.25), (200, 0.5)], 400.0),
        ([(100, 2.0), (200, 4.0)], None),
        ([(100, 0.5), (200, 0.4)], None),
        ([(100, 0.5)], None),
        ([(100, float("nan")), (200, float("nan"))], None),
    ],
)
def test_threshold(found: list[tuple[float, float]], expected: float | None) -> None:
    assert threshold(found) == (expected if expected is None else pytest.approx(expected, rel=1e-3))


class TestScaling:
    def test_strong_and_weak_scaling_are_recognised(self, tmp_path: Path) -> None:
        # 64 tokens on 1, 2 and 4 ranks, and 64 tokens a rank on 1 and 2.
        paths = [
            write_result(
                tmp_path / f"{size}-{length}.h5",
                size,
                rule=Rule(lambda rank, step, pairs=(length / size) ** 2: 1e-5 * pairs, transfer=0.0),
                seq_len=length,
            )
            for size, length in ((1, 64), (2, 64), (4, 64), (2, 128))
        ]
        speedup, efficiency = charts("scaling", paths)
        strong, weak, ideal = speedup.series
        assert (strong.name, weak.name) == ("strong, 64 tokens", "weak, 64 tokens a rank")
        assert [point.x for point in strong.points] == [1, 2, 4]
        assert [point.x for point in weak.points] == [1, 2]
        # Steps have an overhead of 0.3 ms, beside 41.37, 10.34 and 2.59 ms of compute (the median repeat).
        assert [p.y for p in strong.points] == pytest.approx(
            [1, 41.6696 / (2 * 10.6424), 41.6696 / (4 * 2.8856)], rel=1e-4
        )
        assert [p.y for p in weak.points] == pytest.approx([1, 2], rel=1e-3)
        assert [p.y for p in ideal.points] == [1, 2, 4]
        assert [p.y * p.x for p in efficiency.series[0].points] == pytest.approx(
            [p.y for p in strong.points]
        )

    def test_oversubscribed_results_are_left_out_and_a_note_says_so(self, tmp_path: Path) -> None:
        paths = [
            write_result(tmp_path / f"{size}.h5", size, oversubscribed=size > 2)
            for size in (1, 2, 3, 4, 5, 6)
        ]
        for chart in charts("scaling", paths):
            assert [[point.x for point in series.points] for series in chart.series] == [[1, 2]] * 2
            assert [note for note in chart.notes if note.startswith("Left out")] == [
                "Left out, having more ranks or threads than cores: 4 (3.h5, 4.h5, 5.h5, ...)."
            ]

    def test_nothing_is_said_of_left_out_results_where_there_are_none(self, tmp_path: Path) -> None:
        paths = [write_result(tmp_path / f"{size}.h5", size) for size in (1, 2)]
        for chart in charts("scaling", paths):
            assert not any("Left out" in note for note in chart.notes)

    def test_only_oversubscribed_results_are_no_scaling(self, tmp_path: Path) -> None:
        paths = [write_result(tmp_path / f"{size}.h5", size, oversubscribed=True) for size in (1, 2)]
        assert charts("scaling", paths) == []

    def test_other_problems_are_other_series(self, tmp_path: Path) -> None:
        paths = [
            write_result(tmp_path / f"{size}{causal}.h5", size, causal=causal)
            for size in (2, 4)
            for causal in (False, True)
        ]
        speedup, _ = charts("scaling", paths)
        assert [s.name for s in speedup.series] == [
            "strong, 64 tokens, no causal",
            "strong, 64 tokens, causal",
            "ideal",
        ]
        assert any("against 2 ranks" in note for note in speedup.notes)

    def test_one_number_of_ranks_or_nothing_timed_is_no_scaling(self, tmp_path: Path) -> None:
        assert charts("scaling", [write_result(tmp_path / "a.h5", 2)]) == []
        untimed = [write_result(tmp_path / f"{size}.h5", size, repeats=0) for size in (1, 2)]
        assert charts("scaling", untimed) == []


class TestMethods:
    def results(self, folder: Path) -> list[Path]:
        return [
            write_result(
                folder / f"{method}.h5",
                4,
                method=method,
                backward=True,
                heads=4,
                rule=Rule(transfer=seconds),
            )
            for method, seconds in (("ring", 0.02), ("bidirectional", 0.015), ("ulysses", 0.03))
        ]

    def test_both_passes_of_every_method_of_a_case_are_compared(self, tmp_path: Path) -> None:
        (chart,) = charts("methods", self.results(tmp_path))
        assert chart.title == "Methods compared, 4 ranks"
        assert chart.categories == ("ring", "bidirectional", "ulysses")
        assert [series.name for series in chart.series] == ["forward", "backward"]
        forward = chart.series[0]
        assert [point.x for point in forward.points] == [0, 1, 2]
        # Three steps in which 20 ms are waited for, and one that computes for 10.1 ms; each with 0.3 ms.
        assert forward.points[0].y == pytest.approx(3 * 20 + 10.1 + 4 * 0.3, abs=0.011)
        assert forward.points[0].low <= forward.points[0].y <= forward.points[0].high
        assert any(note.startswith("Fastest forward: bidirectional") for note in chart.notes)

    def test_cases_are_charts_of_their_own(self, tmp_path: Path) -> None:
        longer = [
            write_result(tmp_path / f"{method}2.h5", 4, method=method, seq_len=128)
            for method in ("ring", "passq")
        ]
        found = charts("methods", [*self.results(tmp_path), *longer])
        assert len(found) == 2
        assert "seq_len 128" in found[1].title
        assert found[1].categories == ("ring", "passq")

    def test_wrong_results_have_no_time(self, tmp_path: Path) -> None:
        wrong = write_result(
            tmp_path / "w.h5", 4, method="passq", verdicts=(replace(PASSED, passed=False),)
        )
        right = [write_result(tmp_path / f"{m}.h5", 4, method=m) for m in ("ring", "bidirectional")]
        (chart,) = charts("methods", [wrong, *right])
        assert chart.categories == ("ring", "bidirectional")

    def test_one_method_is_no_comparison(self, tmp_path: Path) -> None:
        assert charts("methods", [write_result(tmp_path / "a.h5", 2)]) == []
