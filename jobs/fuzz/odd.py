"""Values that nobody should give, and some that one may."""

from __future__ import annotations

import random

#: Texts for options: no numbers, odd numbers, numbers beyond every range, names of odd files, markup.
TEXTS = (
    *(
        "",
        " ",
        "-",
        "--",
        "-1",
        "0",
        "-0",
        "+3",
        "1",
        "2",
        "3",
        "7",
        "1.5",
        "1e3",
        "1_000",
        "0x10",
        "1,2",
        ",",
        ",,",
    ),
    *(
        "nan",
        "inf",
        "-inf",
        "1e309",
        "1e-320",
        "9007199254740993",
        "18446744073709551616",
        "9" * 400,
        "9" * 5000,
    ),
    *(
        "\N{SUPERSCRIPT TWO}",
        "\N{FULLWIDTH DIGIT FOUR}",
        "\N{ARABIC-INDIC DIGIT SEVEN}",
        "\udcff",
        "é",
        "\n",
        "a\nb",
    ),
    *(
        "true",
        "None",
        "none",
        "auto",
        "full",
        "[red]",
        "%s",
        "{0}",
        "'",
        '"',
        "\\",
        "*",
        "~",
        "$HOME",
        "x" * 300,
    ),
    *(
        "/",
        ".",
        "..",
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/proc/self/mem",
        "/nowhere/x.h5",
        "x.toml",
        "x.h5",
    ),
    *(
        "0,4,8",
        "0,8",
        "8,0",
        "0,0,8",
        "-1,8",
        "0:2",
        "1:0",
        "9:2",
        "0:nan",
        "1:1e999",
        "2:2:2",
        "sample:0",
        "sample:4",
    ),
    *(
        "1Gbit/s,1ms",
        "1bit/s,1s",
        "0Mbit/s,1ms",
        "1Gbit/s",
        "1e400Gbit/s,1ms",
        "1Gbit/s,-1ms",
        "nanGbit/s,1ms",
    ),
    *(
        "2:1Gbit/s,1us:1Mbit/s,1ms",
        "0:1Gbit/s,1us:1Mbit/s,1ms",
        "2:1Gbit/s,1us",
        "2:1Gbit/s,1us:1Mbit/s,1ms:0-0=x",
    ),
    *(
        "2:1Gbit/s,1us:1Mbit/s,1ms:0-1=1Gbit/s,1ms",
        "float32",
        "float32,",
        "float8",
        "ring",
        "rign",
        "zigzag",
    ),
)


def text(of: random.Random) -> str:
    """Return a text for an option: one of `TEXTS`, or one of them damaged."""
    chosen = of.choice(TEXTS)
    if of.random() < 0.8 or not chosen:
        return chosen
    at = of.randrange(len(chosen))
    return (
        chosen[:at]
        + of.choice(("", ",", "-", "9", ":", "\x01", chosen))
        + chosen[at + of.randrange(2) :]
    )


def toml_value(of: random.Random, depth: int = 0) -> str:
    """Return a TOML value of any kind."""
    plain = (
        "true",
        "1",
        "0",
        "-3",
        "1.5",
        "-0.0",
        "nan",
        "inf",
        "-inf",
        "1e300",
        "1e-300",
        "9007199254740993",
    )
    more = (
        "9223372036854775808",
        "0xff",
        "1_0",
        "1979-05-27",
        "07:32:00",
        '""',
        '"ring"',
        '"float32"',
        '"\\u0000"',
    )
    if depth < 3 and of.random() < 0.25:
        inner = [toml_value(of, depth + 1) for _ in range(of.randrange(4))]
        if of.random() < 0.3:
            return "{" + ", ".join(f"k{n} = {value}" for n, value in enumerate(inner)) + "}"
        return "[" + ", ".join(inner) + "]"
    if of.random() < 0.2:
        return (
            '"'
            + text(of).encode("unicode_escape").decode().replace('"', "").replace("\\x", "x")[:80]
            + '"'
        )
    return of.choice(plain + more)


def damaged(data: bytes, of: random.Random) -> bytes:
    """Return bytes cut off, overwritten, doubled or with some bits turned."""
    kind = of.randrange(6)
    at = of.randrange(len(data) + 1)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return (
            data[:at] + of.randbytes(of.choice((1, 2, 8, 64))) + data[at + of.choice((1, 2, 8, 64)) :]
        )
    if kind == 2:
        return data[:at] + bytes(of.choice((1, 16, 512))) + data[at:]
    if kind == 3:
        return data[:at] + data[at + of.choice((1, 16, 512)) :]
    flipped = bytearray(data)
    for _ in range(of.choice((1, 1, 3, 30)) if flipped else 0):
        flipped[of.randrange(len(flipped))] ^= 1 << of.randrange(8)
    return bytes(flipped)
