"""Hyper-parameters of the user's own methods: fields of a frozen dataclass. What would be ignored is refused."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from typing import Any, ClassVar, get_origin

from pluribus.errors import UserCodeError
from pluribus.internal.hooks import classes_below, unused_names

ALMOST = 0.88  # least similarity of a plain attribute to one that the library reads: need and needs
CURE = "put @dataclass(frozen=True) above the class"


def check_fields(cls: type, base: type) -> None:
    """Refuse annotated attributes that are no hyper-parameters of the method, and hyper-parameters that are lost."""
    classes = classes_below(cls, base)[::-1]
    for one in classes:
        for name in _annotated(one):
            if hasattr(base, name):
                _refuse_taken(one, base, name)
    for one in classes:
        _check_decorated(one, cls, base)
        _check_overridden(one)
    _check_plain(cls, base)


def _refuse_taken(cls: type, base: type, name: str) -> None:
    if callable(getattr(base, name)):
        raise UserCodeError(f"{cls.__name__}.{name} is a hyper-parameter with the name of a hook. Rename it.")
    raise UserCodeError(
        f"{cls.__name__}.{name} is annotated, which makes it a hyper-parameter. Write {name} = ... without a type."
    )


def _check_decorated(one: type, cls: type, base: type) -> None:
    """Refuse a class whose fields the constructor does not take."""
    if "__dataclass_fields__" in vars(one):
        if not vars(one)["__dataclass_params__"].frozen:
            raise UserCodeError(f"{one.__name__} is a dataclass that is not frozen: {CURE}.")
        return
    known = getattr(cls, "__dataclass_fields__", {})
    dropped = _annotated(one)
    if not issubclass(one, base):  # a mixin may say which fields it expects
        dropped = [name for name in dropped if name not in known]
    if dropped:
        raise UserCodeError(
            f"{one.__name__}.{dropped[0]} is no hyper-parameter, because {one.__name__} is not a dataclass: {CURE}."
        )
    if arguments := _arguments(vars(one).get("__init__")):
        raise UserCodeError(
            f"{one.__name__}.__init__ takes {arguments[0]}, which a run would not know. Make it a hyper-parameter: "
            f"{CURE}, and write {arguments[0]} as a field with its type and default instead of __init__."
        )


def _check_overridden(cls: type) -> None:
    """Refuse a new default of an inherited field without a type, which a dataclass ignores."""
    bases = [base for base in cls.__bases__ if dataclasses.is_dataclass(base)]
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    for name in sorted(inherited & vars(cls).keys() - {*inspect.get_annotations(cls)}):
        raise UserCodeError(
            f"{cls.__name__}.{name} does not change the default of the hyper-parameter, because it has no type. "
            f"Write {name}: TYPE = ..., and {CURE}."
        )


def _check_plain(cls: type, base: type) -> None:
    """Refuse a plain attribute whose name is almost one that the library reads."""
    read = [name for name in dir(base) if not (name.startswith("_") or callable(getattr(base, name)))]
    for owner, name, value in unused_names(cls, base):
        near = difflib.get_close_matches(name, read, n=1, cutoff=ALMOST)
        if near and name not in _annotated(owner) and not hasattr(value, "__get__"):
            raise UserCodeError(f"{owner.__name__}.{name} is never read. Did you mean {near[0]}? Rename it.")


def _annotated(cls: type) -> list[str]:
    """The public attributes that a dataclass takes for fields."""
    hints = inspect.get_annotations(cls).items()
    return [name for name, hint in hints if not name.startswith("_") and not _is_class_var(hint)]


def _is_class_var(hint: Any) -> bool:
    if isinstance(hint, str):  # under `from __future__ import annotations`
        return re.match(r"(\w+\.)?ClassVar\b", hint) is not None
    return hint is ClassVar or get_origin(hint) is ClassVar


def _arguments(init: Any) -> list[str]:
    return list(inspect.signature(init).parameters)[1:] if inspect.isfunction(init) else []
