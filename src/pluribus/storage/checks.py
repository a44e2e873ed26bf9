"""Checks of what files of JSON hold: anybody may have written them, or a disk may have damaged them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pluribus.errors import DamagedFileError
from pluribus.internal.digits import is_whole
from pluribus.storage.files import read_json, read_lines

Check = Callable[[Any], bool]
MOST = 2**63  # of a count


def read_table(path: Path, is_value: Check, remedy: str) -> dict[str, Any]:
    """The table in a JSON file, or an empty one if there is no file. `remedy` says what to do with a damaged one."""
    found = read_json(path) if path.exists() else {}
    if not is_table(is_text, is_value)(found):
        raise DamagedFileError(f"{path} is damaged: it cannot hold {found!r:.80}. {remedy}")
    return dict(found)


def read_checked_lines(path: Path, problem: Callable[[Any], str | None], remedy: str) -> list[Any]:
    """The lines of a JSON file. `remedy` says what to do with one that has a problem."""
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        if wrong := problem(line):
            raise DamagedFileError(f"{path} is damaged in line {number}: {wrong}. {remedy}")
    return lines


def first_wrong(line: Any, checks: Mapping[str, Check], closed: bool = False) -> str | None:
    """What is wrong with a table, or with the fields of it that are checked. `closed`: it has no others."""
    if not isinstance(line, dict):
        return f"it is {line!r:.40}"
    for name, check in checks.items():
        if name not in line:
            return f"'{name}' is missing"
        if not check(line[name]):
            return f"'{name}' cannot be {line[name]!r:.40}"
    return next((f"'{name:.40}' is unknown" for name in line if name not in checks), None) if closed else None


def is_table(is_key: Check, is_value: Check) -> Check:
    """A check of tables, by their keys and values."""
    return lambda table: isinstance(table, dict) and all(is_key(k) and is_value(v) for k, v in table.items())


def is_text(value: Any) -> bool:
    """Whether this is a text."""
    return isinstance(value, str)


def is_list(is_value: Check) -> Check:
    """A check of lists, by their values."""
    return lambda values: isinstance(values, list) and all(map(is_value, values))


def is_client(key: Any) -> bool:
    """Whether this is the number of a client or of a round, as the key of a table."""
    return is_whole(key) and key.isascii()


def is_count(value: Any) -> bool:
    """Whether this is a whole number of at least 0."""
    return type(value) is int and 0 <= value < MOST


def is_count_or_none(value: Any) -> bool:
    """Whether this is a whole number of at least 0, or nothing."""
    return value is None or is_count(value)


def is_number(value: Any) -> bool:
    """Whether this is a finite number."""
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < MOST)


def is_number_or_none(value: Any) -> bool:
    """Whether this is a finite number, or nothing."""
    return value is None or is_number(value)
