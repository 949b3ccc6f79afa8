"""The counts of a soak, as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from drawing import FAULTS, RANKS, Plan
from trial import FINDINGS, Outcome


@dataclass
class Tally:
    """What was found over all runs so far.

    Attributes
    ----------
    runs : list of (Plan, Outcome)
    staying : list of str
        What killed jobs have left and no later one has removed.
    """

    runs: list[tuple[Plan, Outcome]] = field(default_factory=list)
    staying: list[str] = field(default_factory=list)

    @property
    def left(self) -> set[str]:
        """What killed jobs could not remove."""
        return {name for _, outcome in self.runs for name in outcome.left}

    @property
    def findings(self) -> int:
        """How much was found that should not be."""
        return sum(len(outcome.found) for _, outcome in self.runs) + len(self.staying)

    def page(self, facts: Sequence[str]) -> str:
        """Return the page in Markdown; `facts` say where and how it was made."""
        about = (
            f"Short runs of `ringmpi run` on {RANKS} ranks, one after the other in the same folder, with "
            f"options mixed by seed, and what was done to them."
        )
        lines = ["# Soak", "", about, "", *facts, "", *self._counts(), "", *self._findings(), ""]
        lines += [
            f"A job that is killed at once cannot tidy up: {len(self.left)} temporary files and segments of "
            f"shared memory were left by such jobs. Of these {len(self.left) - len(self.staying)} were "
            f"removed by a later run, as all must be.",
            "",
            "What the runs were made of: " + "; ".join(self._mix()) + ".",
            "",
        ]
        return "\n".join(lines)

    def _counts(self) -> list[str]:
        columns = (
            "runs",
            "struck in time",
            "exit codes",
            "new file",
            "older file",
            "no file",
            *FINDINGS,
        )
        rows = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
        for fault, told in FAULTS.items():
            rows.append(_row(told, [outcome for plan, outcome in self.runs if plan.fault == fault]))
        rows.append(_row("all", [outcome for _, outcome in self.runs]))
        return rows

    def _findings(self) -> list[str]:
        told = [
            f"* run {plan.number}, {FAULTS[plan.fault]}: {kind}: {words} (`{plan.options}`)"
            for plan, outcome in self.runs
            for kind, words in outcome.found
        ]
        told += [
            f"* {name}: left by a killed job, and no later run has removed it" for name in self.staying
        ]
        return ["Found:", "", *told] if told else ["Nothing was found that should not be."]

    def _mix(self) -> list[str]:
        found = []
        for option in ("method", "layout", "dtype", "progress", "device", "verify"):
            counts: Counter[str] = Counter()
            for plan, _ in self.runs:
                words = plan.options.split()
                counts[
                    words[words.index(f"--{option}") + 1] if f"--{option}" in words else "default"
                ] += 1
            found.append(f"{option} " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
        flags = (
            "causal",
            "window",
            "documents",
            "query-len",
            "backward",
            "check-transfers",
            "store-inputs",
        )
        for flag in (*flags, "link", "link-map"):
            found.append(f"{flag} {sum(f'--{flag}' in plan.options.split() for plan, _ in self.runs)}")
        return found


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    codes = Counter(code for outcome in outcomes for code in outcome.codes)
    files = Counter(outcome.file for outcome in outcomes)
    kinds = Counter(kind for outcome in outcomes for kind, _ in outcome.found)
    cells = [
        len(outcomes),
        sum(outcome.struck for outcome in outcomes),
        ", ".join(f"{code}: {n}" for code, n in sorted(codes.items())) or "-",
        *(files[kind] for kind in ("new", "older", "none")),
        *(kinds[kind] for kind in FINDINGS),
    ]
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"
