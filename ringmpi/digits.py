"""Whole numbers as people write them into options."""

from __future__ import annotations

#: Beyond them no rank, step, row or block has a number; and Python refuses to read thousands of them.
MOST_DIGITS = 9


def whole_number(text: str) -> int | None:
    """Return the number that some digits are, None for any other text and for too many digits. Local.

    >>> whole_number("12"), whole_number("-1"), whole_number(""), whole_number("1" * 5000)
    (12, None, None, None)
    """
    plain = text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS
    return int(text) if plain else None
