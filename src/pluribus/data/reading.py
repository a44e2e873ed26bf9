"""How files become rows: which column is what, how long a window or a text is, and what is predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pluribus.errors import FormatError, UnknownNameError
from pluribus.targets import TargetKind

# What a column of a file may be. Columns without a role are inputs, unless `inputs` names some.
ROLES = ("inputs", "text", "label", "client", "group", "time", "split", "ignore")
Columns = tuple[tuple[str, tuple[str, ...]], ...]  # of each role
LIMITS = {"window": (2, 2**31 - 1), "stride": (1, 2**31 - 1), "vocabulary": (3, 2**24), "length": (1, 2**20)}
SEVERAL = ("inputs", "label", "ignore")  # roles that several columns may have


class Reading(NamedTuple):
    """The settings that say how to read a file with columns. Each is None if the user did not set it."""

    columns: Columns = ()
    """The columns of each role."""
    window: int | None = None
    """Samples of a signal in one row."""
    stride: int | None = None
    """Samples between the starts of two windows. Default: the window."""
    tokenizer: str = "words"
    """`words`, or the name of a tokenizer of Hugging Face."""
    vocabulary: int = 8192
    """Number of ids that words are hashed to."""
    length: int | None = None
    """Most tokens of a row."""
    label_kind: TargetKind | Literal["auto"] = "auto"
    """What is predicted."""

    def named(self, role: str) -> tuple[str, ...]:
        """The columns of a role; empty if the user named none."""
        return dict(self.columns).get(role, ())

    def one(self, role: str) -> str | None:
        """The only column of a role."""
        return next(iter(self.named(role)), None)


DEFAULT = Reading()


def parse_columns(value: str | Mapping[str, Any]) -> Columns:
    """Parse `role=column` pairs with commas between them, or a dict. Several columns of a role have `+` between them.

    >>> parse_columns("label=activity, inputs=x+y")
    (('label', ('activity',)), ('inputs', ('x', 'y')))
    """
    given = _pairs(value) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise FormatError(f"--columns must be ROLE=COLUMN, with commas between pairs, or a table, not {value!r:.80}.")
    found: dict[str, tuple[str, ...]] = {}
    for role, names in given.items():
        if role not in ROLES:
            raise UnknownNameError(f"--columns has no role '{role}': use {', '.join(ROLES)}.")
        columns = tuple(names) if isinstance(names, Sequence) and not isinstance(names, str) else (names,)
        for name in columns:
            if not isinstance(name, str) or not name or any(mark in name for mark in ",=+"):
                raise FormatError(f"--columns names the column {name!r}: names must be text without ',', '=' and '+'.")
        if len(columns) != 1 and role not in SEVERAL:
            raise FormatError(f"--columns gives {role} {len(columns)} columns, but it has one.")
        found[role] = columns
    return tuple(found.items())


def _pairs(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for pair in filter(None, (word.strip() for word in text.split(","))):
        role, equals, names = (part.strip() for part in pair.partition("="))
        if not equals or role in found:
            why = "twice" if equals else "without a column"
            raise FormatError(f"--columns must be ROLE=COLUMN, with commas between pairs, but names '{role}' {why}.")
        found[role] = [name.strip() for name in names.split("+")]
    return found


def write_columns(columns: Columns) -> str:
    """The text that `parse_columns` reads."""
    return ",".join(f"{role}={'+'.join(names)}" for role, names in columns)
