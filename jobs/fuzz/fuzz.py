"""Thousands of odd command lines and files; each must be taken or refused. Started by jobs/fuzz.sh."""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attempt import Attempt, Worker, alone
from cases import KINDS
from origin import origin

#: What the script may be given.
VARIABLES = ("CASES", "SECONDS_AT_MOST", "SEED")

#: One of so many cases is run by a process of its own.
ALONE = 100

#: What can be found; the columns of the table.
FINDINGS = ("traceback", "exit code", "not one line", "hang", "memory")

#: Findings of a kind that are told in full.
TOLD = 20


@dataclass
class Kind:
    """What came of one kind of case."""

    codes: Counter[int] = field(default_factory=Counter)
    found: list[tuple[str, str, Attempt]] = field(default_factory=list)
    alone: int = 0
    slowest: float = 0.0
    growth: int = 0


def main() -> int:
    """Run all cases, write the page, and return 1 if anything was found."""
    options = parse()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        sound = Path(folder, "sound")
        make_sound(sound)
        if options.only:
            return show(options.only, options.seed, sound, Path(folder))
        kinds = {name: Kind() for name in KINDS}
        worker = Worker()
        for name, number in numbered(options.cases, began + options.seconds):
            alone_too = number % ALONE == 0
            case(
                name,
                number,
                options.seed,
                sound,
                Path(folder),
                worker,
                kinds[name],
                alone_too=alone_too,
            )
        worker.end()
    options.out.mkdir(parents=True, exist_ok=True)
    page = options.out / "fuzz.md"
    page.write_text(told(kinds, time.monotonic() - began))
    findings = sum(len(kind.found) for kind in kinds.values())
    print(
        f"# {findings} finding(s) in {sum(kind.codes.total() for kind in kinds.values())} cases: {page}"
    )
    return 1 if findings else 0


def numbered(cases: int, limit: float) -> Iterator[tuple[str, int]]:
    """Yield kinds in turn with numbers from 1, until a time."""
    for number in range(1, cases + 1):
        for name in KINDS:
            if time.monotonic() > limit:
                return
            yield name, number


def make_sound(folder: Path) -> None:
    """Write what results are made of: of a run with everything in it, and of a simulation."""
    folder.mkdir()
    run = (
        "run --seq-len 9 --batch 2 --heads 4 --kv-heads 2 --head-dim 4 --documents 0,4,9 --causal --backward "
        "--store-inputs --repeats 2 --device numpy --output there.h5"
    )
    simulated = "simulate --machine alps --ranks 8 --seq-len 256 --output simulated.h5"
    for command in (run, simulated):
        words = [sys.executable, "-m", "ringmpi", *shlex.split(command)]
        subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=120)
    shutil.copy(folder / "there.h5", folder / "sound.h5")


def drawn(name: str, number: int, seed: int, sound: Path, folder: Path) -> list[str]:
    """Make the files of a case in a new folder, and return its command line."""
    shutil.copytree(sound, folder)
    of = random.Random(f"{seed}/{name}/{number}")  # noqa: S311 - a draw that can be had again
    return KINDS[name](of, folder)


def case(
    name: str,
    number: int,
    seed: int,
    sound: Path,
    folder: Path,
    worker: Worker,
    kind: Kind,
    *,
    alone_too: bool,
) -> None:
    """Run one case and count it."""
    place = folder / "case"
    arguments = drawn(name, number, seed, sound, place)
    attempts = [worker.attempt(arguments, place)]
    if alone_too and not any("\0" in word for word in arguments):
        attempts.append(alone(arguments, place))
        kind.alone += 1
    for attempt in attempts:
        kind.codes[attempt.code] += 1
        kind.slowest = max(kind.slowest, attempt.seconds)
        kind.growth = max(kind.growth, attempt.growth)
        if attempt.finding:
            kind.found.append((f"{name}/{number}", shlex.join(arguments), attempt))
            last = attempt.told.strip().splitlines()[-1:] or [""]
            print(
                f"{name}/{number} {attempt.finding} ({attempt.code}): {shlex.join(arguments)[:300]}: "
                f"{last[0][:300]}"
            )
    shutil.rmtree(place)


def show(only: str, seed: int, sound: Path, folder: Path) -> int:
    """Run one case by itself and show all that it says."""
    name, _, number = only.partition("/")
    arguments = drawn(name, int(number), seed, sound, folder / "case")
    attempt = alone(arguments, folder / "case")
    print(
        f"ringmpi {shlex.join(arguments)}\n{attempt.told}exit code {attempt.code}: "
        f"{attempt.finding or 'as it must'}"
    )
    return 1 if attempt.finding else 0


def told(kinds: dict[str, Kind], seconds: float) -> str:
    """Return the page in Markdown."""
    columns = ("cases", "alone", "taken (0)", "verdict (1)", "refused (2)", "lacking (3)", *FINDINGS)
    lines = [
        "# Fuzz",
        "",
        "Odd command lines and files, drawn by a seed; each must be taken or refused in one line.",
        "",
        *origin("fuzz.sh", VARIABLES, seconds),
        "",
        "| | " + " | ".join(columns) + " | slowest s | growth MB |",
        "|---|" + "---|" * (len(columns) + 2),
    ]
    for name, kind in kinds.items():
        found = Counter(attempt.finding for _, _, attempt in kind.found)
        cells: Sequence[object] = [
            kind.codes.total(),
            kind.alone,
            *(kind.codes[code] for code in range(4)),
            *(found[finding] for finding in FINDINGS),
            f"{kind.slowest:.1f}",
            round(kind.growth / 1e6),
        ]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    findings = [
        f"* {which}, {attempt.finding}: `{words}`"
        for k in kinds.values()
        for which, words, attempt in k.found[:TOLD]
    ]
    lines += [
        "",
        *(["Found:", "", *findings] if findings else ["Nothing was found that should not be."]),
        "",
    ]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, required=True, help="of each kind")
    parser.add_argument("--seconds", type=float, required=True, help="after which no new case begins")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the page")
    parser.add_argument("--only", help="KIND/NUMBER: run one case and show what it says")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
