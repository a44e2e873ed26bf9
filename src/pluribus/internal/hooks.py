"""Functions of the user's own classes that the library calls by name. A mistake in them is refused, not ignored."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

from pluribus.errors import UserCodeError

Hooks = Mapping[str, tuple[str, ...]]  # the parameters of each hook, without self

SIMILAR = 0.75  # least similarity of a name to a hook whose parameters it has
ALMOST = 0.9  # the same, whatever its parameters


def hooks_of(base: type) -> dict[str, tuple[str, ...]]:
    """The public functions of a base class and of its own bases."""
    found: dict[str, tuple[str, ...]] = {}
    for name, function in inspect.getmembers(base, inspect.isfunction):
        if not name.startswith("_"):
            found[name] = tuple(inspect.signature(function).parameters)[1:]
    return found


def classes_below(cls: type, base: type) -> list[type]:
    """A class and its bases, without a base class that the library defines and without the bases of that one."""
    return [one for one in cls.__mro__ if one not in base.__mro__]


def check_hooks(cls: type, base: type, hooks: Hooks) -> None:
    """Refuse a hook that cannot be called as the library calls it, and a function whose name is almost a hook."""
    for name, parameters in hooks.items():
        if owner := next((one for one in classes_below(cls, base) if name in vars(one)), None):
            _check_hook(owner, name, parameters)
    for owner, name, value in unused_names(cls, base):
        if name in hooks or not inspect.isfunction(_unwrap(value)):
            continue
        meant = _find_meant(name, value, hooks)
        if meant is not None and meant not in vars(owner):  # a class that has the hook too did not misspell it
            raise UserCodeError(
                f"{owner.__name__}.{name} is never called. Did you mean {meant}? Rename it to "
                f"{_call(meant, hooks[meant])}, or to _{name} if it is a helper of your own."
            )


def unused_names(cls: type, base: type) -> list[tuple[type, str, Any]]:
    """Public attributes that the base class does not have and that no function of the class uses, with their class."""
    classes = classes_below(cls, base)
    used = {name for one in classes for value in vars(one).values() for name in _names_in(value)}
    every = ((one, name, value) for one in reversed(classes) for name, value in vars(one).items())
    return [
        (one, name, value)
        for one, name, value in every
        if not (name.startswith("_") or hasattr(base, name) or name in used)
    ]


def _check_hook(cls: type, name: str, parameters: tuple[str, ...]) -> None:
    hook, wanted = vars(cls)[name], _call(name, parameters)
    function = _unwrap(hook)
    if not (callable(function) and hasattr(function, "__get__")):
        raise UserCodeError(
            f"{cls.__name__}.{name} is {_describe(hook)}, but it is called as {wanted}. Write a function of this name."
        )
    if _is_generator(function):
        raise UserCodeError(f"{cls.__name__}.{name} is a generator, because it has a yield. Return the value instead.")
    if inspect.iscoroutinefunction(function):
        raise UserCodeError(f"{cls.__name__}.{name} is async, but it is called as {wanted}. Write def without async.")
    if not _takes(hook, parameters):
        signature = inspect.signature(function)
        raise UserCodeError(f"{cls.__name__}.{name}{signature} is called as {wanted}. Change its parameters to these.")


def _takes(hook: Any, parameters: tuple[str, ...]) -> bool:
    """Whether a function can be called with these parameters, and has those of the same name at the same position."""
    own = () if isinstance(hook, staticmethod) else ("self",)
    try:
        inspect.signature(_unwrap(hook)).bind(*own, *parameters)
    except TypeError:
        return False
    return all(parameters[i : i + 1] == (word,) for i, word in enumerate(_positional(hook)) if word in parameters)


def _is_generator(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _unwrap(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _positional(function: Any) -> tuple[str, ...]:
    """The names of the positional parameters, without self or cls."""
    parameters = inspect.signature(_unwrap(function)).parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return tuple(names if isinstance(function, staticmethod) else names[1:])


def _find_meant(name: str, function: Any, hooks: Hooks) -> str | None:
    """The hook that a name is almost, if there is one: the most similar."""
    letters, parameters, found = _letters(name.lower().removeprefix("on_")), _positional(function), list[Any]()
    for hook, wanted in hooks.items():
        likeness = difflib.SequenceMatcher(None, letters, _letters(hook)).ratio()
        alike = len(parameters) == len(wanted) and (not wanted or {*parameters} & {*wanted})
        if likeness >= (SIMILAR if alike else ALMOST):
            found.append((likeness, hook))
    return max(found)[1] if found else None


def _letters(name: str) -> str:
    return name.lower().replace("_", "")


def _names_in(value: Any) -> Iterator[str]:
    """The names of attributes and functions that a function uses."""
    for function in (value.fget, value.fset) if isinstance(value, property) else (_unwrap(value),):
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        pending = [code] if code is not None else []
        while pending:
            one = pending.pop()
            yield from one.co_names
            pending += [inner for inner in one.co_consts if isinstance(inner, CodeType)]


def _call(name: str, parameters: tuple[str, ...]) -> str:
    return f"{name}({', '.join(('self', *parameters))})"


def _describe(value: Any) -> str:
    return "a property" if isinstance(value, property) else repr(value).splitlines()[0]
