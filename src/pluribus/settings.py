"""What the fields of a dataclass take, from a file or a command line. No torch here: some commands answer at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pluribus.errors import FormatError, UnknownNameError, unknown

# What a field of a type takes, and what that is called. `bool` would pass for a number.
_KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str | os.PathLike, "text"),
    Path: (str | os.PathLike, "a path"),
    tuple: (list | tuple, "a list"),
    dict: (dict, "a table"),
}

# Choices that were renamed: by field and former name.
FORMER = {("distribution", "paper"): "any-depth"}


def fitted(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values in the types that a dataclass declares for its fields; what does not fit is refused."""
    return {name: _fitted(name, value, _hints(cls)[name]) for name, value in values.items()}


_hints = cache(get_type_hints)


def _fitted(name: str, value: Any, hint: Any) -> Any:
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
            return kind(value)
    wanted = " or ".join(_described(choice) for choice in choices if choice is not NoneType)
    now = FORMER.get((name, value)) if isinstance(value, str) else None
    renamed = f" '{value}' is called '{now}' now." if now else ""
    misnamed = isinstance(value, str) and any(get_origin(choice) is Literal for choice in choices)
    refusal = UnknownNameError if misnamed else FormatError
    raise refusal(f"{flag_name(name)} must be {wanted}, not {value!r}.{renamed}")


def _described(choice: Any) -> str:
    if get_origin(choice) is Literal:
        return f"one of {', '.join(map(str, get_args(choice)))}"
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
