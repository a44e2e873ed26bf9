"""Types and ranges of the fields of a dataclass, for values from Python, files and the command line.

This module does not import torch, so that some commands answer at once.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from operator import ge, gt, le, lt
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pluribus.errors import FormatError, RangeError, UnknownNameError, unknown

T = TypeVar("T")

# The values that a field of each type accepts, and their name. A `bool` is an Integral too, so it is checked apart.
_KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str | os.PathLike, "text"),
    Path: (str | os.PathLike, "a path"),
    tuple: (list | tuple, "a list"),
    dict: (dict, "a table"),
}

# Renamed choices, by field and former name.
FORMER = {("distribution", "paper"): "any-depth"}


@dataclass(frozen=True)
class Setting:
    """What a field declares besides its type, its default and its docstring."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    symbol: str = ""  # in papers
    group: str = ""  # of flags in the help
    simulated: bool = False  # whether it is for simulations only, although real sites take others of its group

    def holds(self, value: Any) -> bool:
        """Whether a value is in the range. NaN fails if there is a bound. None and words are no numbers, and pass."""
        bounds = (ge, self.at_least), (gt, self.above), (le, self.at_most), (lt, self.below)
        return isinstance(value, str | None) or all(bound is None or compare(value, bound) for compare, bound in bounds)

    def range(self) -> str:
        """The range in words. Empty if there is no bound."""
        if self.at_least is not None and self.at_most is not None:
            return f"from {self.at_least} to {self.at_most}"
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        words = ["finite" if n == math.inf else f"{word} {n}" for word, n in bounds.items() if n is not None]
        return " and ".join(words)

    def explain(self, about: str) -> str:
        """The docstring of a field, after its symbol and before its range."""
        if self.symbol:
            about = f"{self.symbol}: {about[:1].lower()}{about[1:]}"
        known = self.range().removesuffix(" and finite")
        return f"{about} {known.capitalize()}." if known else about


def setting(
    default: T,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    symbol: str = "",
    group: str = "",
    simulated: bool = False,
) -> T:
    """Declare a field of a dataclass with a range, a symbol in papers and a group.

    The range is checked for values from Python, config files and flags. Help and documentation show it.
    """
    declared = Setting(at_least, above, at_most, below, symbol, group, simulated)
    return dataclasses.field(default=default, metadata={Setting: declared})


@cache
def settings_of(cls: type) -> dict[str, Setting]:
    """The settings of a dataclass by field."""
    return {field.name: field.metadata.get(Setting, Setting()) for field in dataclasses.fields(cls)}


def group_names(cls: type) -> dict[str, tuple[str, ...]]:
    """The names of a dataclass's fields by group. Fields without a group are left out."""
    groups = dict.fromkeys(one.group for one in settings_of(cls).values() if one.group)
    return {group: tuple(name for name, one in settings_of(cls).items() if one.group == group) for group in groups}


def convert_fields(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to the types of a dataclass's fields. Other types and values out of range are refused."""
    found = {name: _convert(name, value, _hints(cls)[name]) for name, value in values.items()}
    for name, value in found.items():
        if not settings_of(cls)[name].holds(value):
            raise RangeError(f"{flag_name(name)} must be {settings_of(cls)[name].range()}, not {value}.")
    return found


_hints = cache(get_type_hints)


def _convert(name: str, value: Any, hint: Any) -> Any:
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for choice in choices:
        kind = get_origin(choice) or choice
        if kind is Literal:
            if value in get_args(choice):
                return value
        elif kind is NoneType:
            if value is None:
                return value
        elif kind not in _KINDS:
            return value
        elif isinstance(value, _KINDS[kind][0]) and isinstance(value, bool) == (kind is bool):
            return _convert_items(name, value, choice) if kind is tuple else _convert_one(name, value, kind)
    wanted = " or ".join(_describe(choice) for choice in choices if choice is not NoneType)
    now = FORMER.get((name, value)) if isinstance(value, str) else None
    renamed = f" '{value}' was renamed to '{now}'." if now else ""
    misnamed = isinstance(value, str) and any(get_origin(choice) is Literal for choice in choices)
    refusal = UnknownNameError if misnamed else FormatError
    raise refusal(f"{flag_name(name)} must be {wanted}, not {value!r}.{renamed}")


def _convert_items(name: str, values: Sequence[Any], choice: Any) -> tuple[Any, ...]:
    """The values of a list, of which each has the type that the list declares."""
    hint = (get_args(choice) or (Any,))[0]
    return tuple(_convert(name, value, hint) for value in values)


def _convert_one(name: str, value: Any, kind: Any) -> Any:
    try:
        return kind(value)
    except OverflowError:  # a whole number that no float holds
        raise RangeError(f"{flag_name(name)} is too large: {value!s:.20}...") from None


def _describe(choice: Any) -> str:
    if get_origin(choice) is Literal:
        words = ", ".join(map(str, get_args(choice)))
        return f"one of {words}" if len(get_args(choice)) > 1 else words
    return _KINDS[get_origin(choice) or choice][1]


def check_names(given: Any, known: Any, kind: str, look: str) -> None:
    """Refuse a name that is not known."""
    known = list(known)
    for name in given:
        if name not in known:
            raise unknown(kind, name, known, look)


def flag_name(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")
