"""Whole numbers in texts that users write, and that files hold."""

from __future__ import annotations

MOST_DIGITS = 20  # of a number of 64 bits; Python itself refuses thousands of digits with an error of its own


def is_whole(text: object) -> bool:
    """Whether this is the text of a whole number of at most 20 digits, without a sign.

    >>> is_whole("12"), is_whole("-1"), is_whole("9" * 5000)
    (True, False, False)
    """
    return isinstance(text, str) and text.isdecimal() and len(text) <= MOST_DIGITS
