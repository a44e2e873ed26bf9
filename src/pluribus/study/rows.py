"""Rows: what comparisons, studies, searches and tables of papers run, each under a label."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pluribus.errors import FormatError, MissingSettingError, unknown
from pluribus.method import Method, find, name_of

AnyMethod = str | Method | type[Method]
LONGEST = 100  # characters of a label, which is part of a folder's name
UNSAFE = re.compile(r"[/\\:*?\"<>|\x00-\x1f]|^[-.\s]|\s$")  # in the name of a folder, on any system


@dataclass(frozen=True)
class Row:
    """A method with settings of its own, under a label."""

    label: str
    method: AnyMethod
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters and training settings of this row alone."""

    @property
    def method_name(self) -> str:
        return name_of_any(self.method)


R = TypeVar("R", bound=Row)
AnyRow = AnyMethod | Row | tuple[AnyMethod, Mapping[str, Any]] | Mapping[str, Any]
AnyRows = AnyMethod | Sequence[AnyMethod | Row] | Mapping[str, AnyRow]


def name_of_any(method: AnyMethod) -> str:
    """Name of a method that is given by name, class or instance."""
    if isinstance(method, str):
        return method
    return name_of(method if isinstance(method, type) else type(method))


def to_rows(given: AnyRows) -> list[Row]:
    """Rows from methods, whose names are the labels, or from a mapping of labels to methods with their settings."""
    if isinstance(given, Mapping):
        return [_to_row(label, value) for label, value in given.items()]
    methods: Iterable[AnyMethod | Row] = [given] if isinstance(given, str | Method | type) else given
    return [one if isinstance(one, Row) else Row(name_of_any(_check_method("", one)), one) for one in methods]


def _to_row(label: str, value: Any) -> Row:
    if isinstance(value, Row):
        return replace(value, label=label)
    settings: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2:
        value, settings = value
    elif isinstance(value, Mapping):
        if "method" not in value:
            raise MissingSettingError(f"row '{label}' has no method: set method.")
        settings = {name: one for name, one in value.items() if name not in ("method", "settings")}
        settings, value = {**_table(label, value.get("settings", {})), **settings}, value["method"]
    return Row(label, _check_method(f"row '{label}': ", value), _table(label, settings))


def _check_method(where: str, value: Any) -> AnyMethod:
    if not (isinstance(value, str | Method) or (isinstance(value, type) and issubclass(value, Method))):
        wanted = "a name, a Method class or an instance of one"
        raise FormatError(f"{where}a method is {wanted}, not {value!r}. Settings go with it: (method, settings).")
    return value


def _table(label: str, settings: Any) -> Mapping[str, Any]:
    if not isinstance(settings, Mapping):
        raise FormatError(f"row '{label}': settings are a table of names and values, not {settings!r}.")
    return settings


def check_rows(rows: Sequence[Row]) -> None:
    """Refuse an unknown method, and labels that are equal or that cannot be part of a folder's name."""
    if not rows:
        raise MissingSettingError("name at least one method. pluribus list methods shows all.")
    seen = set[str]()
    for row in rows:
        find(row.method_name)
        check_label(row.label)
        if row.label.lower() in seen:  # some file systems ignore case
            raise FormatError(
                f"{row.label} is given twice. Give every row a label of its own: "
                f'{{"a": "{row.method_name}", "b": ("{row.method_name}", {{...}})}} in Python, '
                f"'--row b={row.method_name}:NAME=VALUE' on the command line."
            )
        seen.add(row.label.lower())


def check_label(label: Any) -> None:
    """Refuse a label that cannot be part of a folder's name."""
    if not isinstance(label, str) or not label or len(label) > LONGEST or UNSAFE.search(label):
        raise FormatError(
            f"{label!r} cannot be a label, because a folder is named after it: use 1 to {LONGEST} letters, digits, "
            'spaces and signs except / \\ : * ? " < > |, and begin with none of - and the dot.'
        )


def choose_rows(rows: Sequence[R], only: Iterable[str], where: str, look: str) -> tuple[R, ...]:
    """Rows by label, in any case. Without labels, all rows."""
    by_label = {row.label.lower(): row for row in rows}
    wanted = {label.lower(): label for label in only}
    for key, label in wanted.items():
        if key not in by_label:
            raise unknown(f"row of {where}", label, [row.label for row in rows], look)
    return tuple(row for key, row in by_label.items() if not wanted or key in wanted)
