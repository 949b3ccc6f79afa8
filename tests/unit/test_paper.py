"""The Ring Attention paper's tables again: what is a misprint is known, and all else agrees."""

from __future__ import annotations

import pytest

from ringmpi.model.paper import Cell, figure_5, findings, flops_ratio, table_1, table_2, table_3


def found(cells: list[Cell], row: str, column: str) -> Cell:
    (cell,) = (cell for cell in cells if cell.row.startswith(row) and cell.column == column)
    return cell


def disagreeing(cells: list[Cell]) -> set[tuple[str, str]]:
    return {(cell.row, cell.column) for cell in cells if not cell.agrees}


def test_table_1_agrees_but_for_a_letter_and_for_bytes_of_a_ring() -> None:
    cells = table_1()

    assert len(cells) == 12
    assert disagreeing(cells) == {
        ("Vanilla", "total"),
        ("Ring Attention", "self-attention"),
        ("Ring Attention", "total"),
    }


#: Printed tables 2, and 6 F / B by hand.
TABLE_2 = {
    "A100 NVLink": ("1.0", "6.2", True),
    "A100 InfiniBand": ("25.0", "149.8", False),
    "TPU v3": ("1.1", "6.6", True),
    "TPU v4": ("1.0", "6.2", True),
    "TPU v5e": ("1.1", "6.3", True),
}


@pytest.mark.parametrize("host", TABLE_2)
def test_table_2_agrees_but_for_infiniband(host: str) -> None:
    block, sequence, agrees = TABLE_2[host]
    cells = table_2()

    assert (found(cells, host, "block").ours, found(cells, host, "sequence").ours) == (block, sequence)
    assert found(cells, host, "block").agrees is agrees
    assert found(cells, host, "sequence").agrees is agrees


def test_table_2_prints_what_the_paper_prints() -> None:
    printed = {cell.row: cell.printed for cell in table_2() if cell.column == "block"}
    assert printed["A100 InfiniBand"] == "24.5"
    assert {cell.printed for cell in table_2() if cell.column == "sequence"} == {
        *("6.2", "149.5", "6.6", "6.3")
    }


def test_contexts_of_table_3_scale_with_the_devices_on_gpus_only() -> None:
    cells = table_3()

    assert all(cell.agrees for cell in cells if cell.column == "gain")
    wrong = {row for row, column in disagreeing(cells)}
    assert len(cells) == 26
    assert len(wrong) == 8
    assert all(row.startswith("TPU") for row in wrong)
    assert found(cells, "32x A100 InfiniBand 7B", "context").ours == "4096"
    assert found(cells, "TPUv4-1024 30B", "context").ours == "8192"


def test_figure_5_agrees_in_every_cell() -> None:
    cells = figure_5()

    assert len(cells) == 54
    assert disagreeing(cells) == set()


@pytest.mark.parametrize(
    ("hidden", "context", "ratio"),
    [(4096, 2**20, 37.4), (5120, 3072 * 4096, 362.3), (36_864, 2**13, 1.0), (12_288, 2**27, 1725.6)],
)
def test_ratios_of_flops(hidden: int, context: int, ratio: float) -> None:
    exact = (6 * hidden + context) / (6 * hidden + 4096)

    assert flops_ratio(hidden, context) == pytest.approx(exact, rel=1e-12)
    assert round(flops_ratio(hidden, context), 1) == ratio


def test_every_disagreement_is_among_the_findings() -> None:
    places = " | ".join(finding.place for finding in findings())

    for words in (
        "table 1, vanilla",
        "table 1, ring",
        "A100 InfiniBand, block",
        "InfiniBand, sequence",
    ):
        assert words in places
    assert "table 3" in places


@pytest.mark.parametrize(
    ("place", "printed", "ours"),
    [
        ("table 2, A100 InfiniBand, block", "24.5", "24.96"),
        ("table 2, A100 InfiniBand, sequence", "149.5", "149.76"),
        ("figure 5, hidden size of 13B", "5140", "5120"),
        ("sections 1 and 2", "over 1000 GB for 1e8 tokens, h = 1024", "204.8 GB"),
        ("appendix A", "512 / 8 leaves 32", "64"),
        ("appendix C", "B / F = 2.4, at least 2 needed", "2.37e-03"),
        ("section 5.1", "TPUv4-512, over 30 million tokens", "16.4 million"),
        ("table 1, vanilla, total", "2bhs^2", "2bns^2"),
    ],
)
def test_what_the_paper_s_formulas_do_not_give_is_named(place: str, printed: str, ours: str) -> None:
    (finding,) = (finding for finding in findings() if finding.place == place)

    assert (finding.printed, finding.ours) == (printed, ours)


def test_the_text_s_hidden_size_of_13b_does_not_give_what_is_printed() -> None:
    """5140 gives 30.9 for 1M, where 31.0 is printed."""
    assert f"{flops_ratio(5140, 2**20):.1f}" == "30.9"
    (finding,) = (finding for finding in findings() if "13B" in finding.place)
    assert "3 of 9 differ" in finding.why


def test_the_number_of_sequences_that_table_3_needs_is_named() -> None:
    (finding,) = (finding for finding in findings() if finding.place.startswith("table 3"))

    assert "TPUv3-512: 2 (7B), 4 (13B)" in finding.why
    assert "TPUv4-1024: 2 (3B), 2 (7B), 4 (13B), 4 (30B)" in finding.why
    assert "TPUv5e-256: 2 (3B), 2 (7B)" in finding.why
