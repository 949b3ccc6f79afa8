"""What is tried: a kind of case is a function of a random generator and a folder; it returns a command."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import hdf5
import odd
from ringmpi import cli
from ringmpi.model.machine import built_in

#: Options of `run` that make it small, whatever comes before them.
SMALL = ("--repeats", "1", "--warmup", "0", "--heads", "2", "--head-dim", "4")

#: Options whose large values are long work that was asked for, and no nonsense.
ENDLESS = ("repeats", "warmup", "seconds", "lengths", "layers")

#: Values that belong to options, so that a case is not refused before it comes to the odd one.
USUAL = {
    "seq_len": "16",
    "heads": "4",
    "kv_heads": "2",
    "head_dim": "4",
    "ranks": "1",
    "machine": "alps",
    "output": "{folder}/o.h5",
    "config": "{folder}/c.toml",
    "method": "ring",
    "layout": "zigzag",
    "dtype": "bfloat16",
    "documents": "0,5,16",
    "window": "3",
    "link": "1Gbit/s,1ms",
    "model": "llama-3-8b",
    "vary": "heads=2,4",
    "threads": "1",
}


@dataclass(frozen=True)
class Option:
    """An option of a command, as its parser declares it."""

    flag: str
    name: str
    takes_value: bool


@cache
def commands() -> dict[str, list[Option]]:
    """Return the options of every command, from the parser itself."""
    (subparsers,) = (action for action in cli._parser()._actions if getattr(action, "choices", None))
    found: dict[str, list[Option]] = {}
    for name, parser in dict(subparsers.choices or {}).items():
        found[name] = [
            Option(action.option_strings[0], action.dest, action.nargs != 0)
            for action in parser._actions
            if action.option_strings and action.dest != "help"
        ]
    return found


def command_line(of: random.Random, folder: Path) -> list[str]:
    """Return a command with some odd options."""
    if of.random() < 0.03:
        return [odd.text(of) for _ in range(of.randrange(4))]
    name = of.choice(sorted(commands()))
    known = commands()[name]
    words = [name]
    needed = {
        "run": ["seq_len"],
        "sweep": ["seq_len", "ranks"],
        "simulate": ["seq_len", "ranks", "machine", "output"],
    }
    chosen = {option.name: option for option in known if option.name in needed.get(name, [])}
    if of.random() < 0.15 and chosen:
        del chosen[of.choice(sorted(chosen))]
    for option in of.sample(known, min(len(known), of.choice((0, 1, 1, 2, 3, 6)))):
        chosen[option.name] = option
    strange = of.sample(sorted(chosen), min(len(chosen), of.choice((1, 1, 1, 2))))
    for option in chosen.values():
        words.append(option.flag)
        if not option.takes_value:
            continue
        usual = (
            USUAL.get(option.name, odd.text(of)).format(folder=folder) if option.name in USUAL else None
        )
        if option.name in strange or usual is None:
            words.append("3" if option.name in ENDLESS else odd.text(of))
        else:
            words.append(usual)
    if "config" in chosen:
        (folder / "c.toml").write_text("batch = 2\n")
    return _bounded(name, words, folder)


def _bounded(name: str, words: list[str], folder: Path) -> list[str]:
    """Return a command line that starts no jobs, writes into the folder alone, and asks for no long work."""
    if name in ("verify", "report"):
        return [*words, str(folder / "there.h5")]
    if name == "sweep":
        return [*words, "--dry-run"]
    if name == "calibrate":
        return [*words, "--lengths", "8", "--seconds", "0.01", "--output", str(folder / "m.toml")]
    if name == "run":
        return [*words, "--repeats", "1", "--warmup", "0", *_output(words, folder)]
    if name == "simulate":
        return [*words, "--repeats", "1", *_output(words, folder)]
    return words


def _output(words: list[str], folder: Path) -> list[str]:
    return [] if "--output" in words else ["--output", str(folder / "o.h5")]


def config_file(of: random.Random, folder: Path) -> list[str]:
    """Return a command with a TOML file of odd options."""
    name = of.choice(("run", "sweep", "plan", "simulate"))
    names = [
        option.name for option in commands()["run"] if option.name not in (*ENDLESS, "config", "output")
    ]
    lines = ["seq_len = 16"] if of.random() < 0.8 else []
    for option in of.sample(names, of.choice((1, 1, 2, 4))):
        key = option if of.random() < 0.9 else odd.text(of)
        lines.append(f"{key} = {odd.toml_value(of)}")
    text = "\n".join(lines) + "\n"
    data = text.encode("utf-8", "surrogateescape")
    (folder / "c.toml").write_bytes(odd.damaged(data, of) if of.random() < 0.2 else data)
    words = [name, "--config", str(folder / "c.toml")]
    if name in ("plan", "simulate"):
        words += ["--machine", "alps"]
    if name in ("sweep", "simulate"):
        words += ["--ranks", "2"]
    return _bounded(name, words, folder)


def machine_file(of: random.Random, folder: Path) -> list[str]:
    """Return a command with an odd machine file."""
    texts = built_in()
    lines = texts[of.choice(sorted(texts))].splitlines()
    for _ in range(of.choice((1, 1, 2, 3))):
        at = of.randrange(len(lines))
        action = of.randrange(4)
        if action == 0:
            del lines[at]
        elif action == 1:
            lines.insert(at, of.choice(lines))
        elif action == 2:
            lines.insert(
                at,
                f"{of.choice(('latency', 'memory', 'kind', 'x', 'relative'))} = {odd.toml_value(of)}",
            )
        else:
            numbers = [n for n, line in enumerate(lines) if re.match(r"\s*\w+ *=", line)]
            if numbers:
                chosen = of.choice(numbers)
                lines[chosen] = f"{lines[chosen].split('=')[0]}= {odd.toml_value(of)}"
        lines = lines or [""]
    data = ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")
    (folder / "m.toml").write_bytes(odd.damaged(data, of) if of.random() < 0.15 else data)
    machine = ["--machine", str(folder / "m.toml")]
    sizes = ["--ranks", of.choice(("1", "2", "8", "16")), "--dtype", of.choice(("bfloat16", "float32"))]
    return of.choice(
        (
            ["plan", *machine, *sizes, "--seq-len", "4096"],
            ["plan", *machine, *sizes, "--json"],
            ["plan", *machine, "--show-machine"],
            [
                "simulate",
                *machine,
                *sizes,
                "--seq-len",
                "256",
                *SMALL,
                "--output",
                str(folder / "o.h5"),
            ],
        )
    )


def input_file(of: random.Random, folder: Path) -> list[str]:
    """Return a run with an odd input file."""
    path = folder / "in.h5"
    hdf5.write_input(path, of)
    _damage(path, of)
    more = of.choice(([], ["--backward"], ["--dtype", "float32"], ["--batch", "1"], ["--causal"]))
    if of.random() < 0.15:
        return ["sweep", "--ranks", "1,2", "--input", str(path), "--dry-run"]
    return [
        "run",
        "--input",
        str(path),
        *more,
        "--repeats",
        "1",
        "--warmup",
        "0",
        "--output",
        str(folder / "o.h5"),
    ]


def result_file(of: random.Random, folder: Path) -> list[str]:
    """Return a command that reads an odd result; `folder` has sound ones of a run and of a simulation."""
    path = folder / "there.h5"
    if of.random() < 0.3:
        path = folder / "simulated.h5"
    _damage(path, of)
    words = [str(path)]
    return of.choice(
        (
            ["verify", *words],
            ["verify", *words, "--verify", "sample:3"],
            ["report", *words],
            ["report", *words, "--html"],
            ["report", *words, "--perfetto"],
            ["report", "--compare", *words, str(folder / "sound.h5"), "--csv", str(folder / "t.csv")],
            [
                "report",
                *words,
                "--plot",
                str(folder / "x.svg"),
                *of.choice(([], ["--figure", "stall"])),
            ],
        )
    )


def _damage(path: Path, of: random.Random) -> None:
    if of.random() < 0.35:
        path.write_bytes(odd.damaged(path.read_bytes(), of))
    else:
        for _ in range(of.choice((1, 1, 1, 2, 4))):
            hdf5.damage(path, of)


#: Every kind of case by name.
KINDS: dict[str, Callable[[random.Random, Path], list[str]]] = {
    "command lines": command_line,
    "configurations": config_file,
    "machine files": machine_file,
    "inputs": input_file,
    "results": result_file,
}
