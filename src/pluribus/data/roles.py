"""Which column of a file is what: the label, an input, the text, who holds a row, its time, its split."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pluribus.data.reading import DEFAULT, LIMITS, ROLES, Reading
from pluribus.errors import (
    ConflictError,
    DataError,
    MismatchError,
    MissingSettingError,
    RangeError,
    UnknownNameError,
    unknown,
)
from pluribus.inputs import Kind
from pluribus.settings import flag_name
from pluribus.targets import TARGETS

LABEL = "label"  # the column to predict, if the user names none
# Roles that a column has by its name alone, and what they mean. Each such column is noted.
BY_NAME = {
    "client": "says who holds each row, and is no input",
    "group": "says which rows belong together, and is no input",
    "time": "says when each row was recorded, and is no input",
    "split": "says which rows train, validate and test, and is no input",
}
TEXT = {"text": "is the text of each row"}
MOST_NAMES = 20  # in a sentence


class Roles(NamedTuple):
    """The columns of each role."""

    inputs: tuple[str, ...]
    text: str | None
    label: tuple[str, ...]
    client: str | None
    group: str | None
    time: str | None
    split: str | None
    ignore: tuple[str, ...]
    """Columns that are not used."""
    notes: tuple[str, ...]

    def table(self) -> dict[str, list[str]]:
        """The columns of each role that has any."""
        found = {role: getattr(self, role) for role in ROLES}
        return {role: [those] if isinstance(those, str) else list(those) for role, those in found.items() if those}


def find_roles(names: Sequence[str], path: str, reading: Reading) -> Roles:
    """Give every column a role: what the user says first, then what a name says, and all other columns are inputs."""
    given = {role: columns for role, columns in reading.columns if columns}
    role_of = _check_given(given, names, path)
    notes: list[str] = []
    if LABEL not in given:
        if LABEL not in names or LABEL in role_of:
            raise MissingSettingError(
                f"{path} has no column '{LABEL}': name the column to predict with --columns label=NAME. "
                f"Its columns are {list_names(names)}.{_delimiter_hint(names)}"
            )
        role_of[LABEL] = LABEL
    by_name = BY_NAME if "inputs" in given or reading.window is not None else BY_NAME | TEXT
    for role, meaning in by_name.items():
        if role in names and role not in role_of and role not in given:
            role_of[role] = role
            notes.append(f"the column '{role}' {meaning} (--columns).")
    of = {role: tuple(name for name in names if role_of.get(name) == role) for role in ROLES}
    free = tuple(name for name in names if name not in role_of)
    text = next(iter(of["text"]), None)
    inputs = given.get("inputs", () if text else free)
    unused = tuple(name for name in free if name not in inputs)
    if text and unused:
        many = len(unused) > 1
        notes.append(
            f"the {'columns' if many else 'column'} {list_names(unused)} {'are' if many else 'is'} not used: the input "
            f"is the text in '{text}'."
        )
    notes += [f"the column '{name}' is an input." for name in inputs if name in BY_NAME and "inputs" not in given]
    if not inputs and not text:
        raise DataError(f"{path} has no column that could be an input: its columns are {list_names(names)}.")
    one = {role: next(iter(of[role]), None) for role in BY_NAME}
    return Roles(inputs, text, given.get("label", of["label"]), **one, ignore=of["ignore"] + unused, notes=tuple(notes))


def _check_given(given: dict[str, tuple[str, ...]], names: Sequence[str], path: str) -> dict[str, str]:
    """The role of each column that the user names."""
    role_of: dict[str, str] = {}
    for role, columns in given.items():
        for name in columns:
            if name not in names:
                raise UnknownNameError(f"{path} has no column '{name}'. Its columns are {list_names(names)}.")
            if name in role_of:
                both = f"{role_of[name]} and {role}" if role_of[name] != role else f"{role} twice"
                raise ConflictError(f"--columns gives the column '{name}' the role {both}: keep one of them.")
            role_of[name] = role
    if "text" in given and "inputs" in given:
        raise ConflictError("--columns names a text and inputs: a row is a text or a row of inputs, not both.")
    return role_of


def kind_of_rows(names: Sequence[str], reading: Reading) -> Kind:
    """What a row of a file with these columns becomes."""
    given = {role for role, columns in reading.columns if columns}
    if "text" in given:
        return "tokens"
    if reading.window is not None:
        return "signal"
    named = {name for _, columns in reading.columns for name in columns}
    return "tokens" if "text" in names and "text" not in named and "inputs" not in given else "table"


def check_settings(kind: Kind, reading: Reading) -> None:
    """Refuse settings out of range, and those that have no meaning for this kind of rows."""
    for name, (least, most) in LIMITS.items():
        if (value := getattr(reading, name)) is not None and not least <= value <= most:
            raise RangeError(f"{flag_name(name)} must be from {least} to {most}, not {value}.")
    if reading.label_kind not in ("auto", *TARGETS):
        raise unknown("--label-kind", reading.label_kind, ("auto", *TARGETS), "pluribus run --help")
    if reading.stride is not None and reading.window is None:
        raise ConflictError("--stride is the distance of windows, so it needs --window.")
    if kind == "tokens":
        if reading.window is not None:
            raise ConflictError("--window is for signals, but the rows are texts: leave it out.")
        return
    for name in ("tokenizer", "vocabulary", "length"):
        if getattr(reading, name) != getattr(DEFAULT, name):
            raise MismatchError(
                f"{flag_name(name)} is for texts, but no column is a text: leave it out, or name one with --columns "
                "text=NAME."
            )


def columns_flag(role: str, name: str) -> str:
    """The flag that gives a column a role, as it is typed."""
    return f"--columns {shlex.quote(f'{role}={name}')}"


def list_names(names: Iterable[str]) -> str:
    """Names in a sentence, not more than a person reads."""
    known = list(names)
    more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
    return ", ".join(known[:MOST_NAMES]) + more


def _delimiter_hint(names: Sequence[str]) -> str:
    """Spreadsheets may write CSV with semicolons, which gives one column."""
    if len(names) == 1 and any(mark in names[0] for mark in ";\t"):
        return " CSV has commas between cells, and TSV tabs."
    return ""
