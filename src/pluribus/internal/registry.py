"""Which registered name may be replaced: one that the same code registers again."""

from __future__ import annotations

from functools import partial
from typing import Any

from pluribus.errors import UserCodeError


def check_free(kind: str, name: str, known: Any, new: Any) -> None:
    """Refuse a name that other code has registered. `known` is the registered class or function, or None.

    A module that is loaded again and a cell of a notebook that runs again replace what they registered. In a notebook
    or script any definition may replace another.
    """
    if known is None:
        return
    (module, qualname), here = _home(known), _home(new)
    if here == (module, qualname) or here[0] == module == "__main__":
        return
    taken = "is built in" if is_built_in(known) else f"is registered already, by {module}.{qualname}"
    raise UserCodeError(f"{kind} '{name}' {taken}. Choose another name.")


def is_built_in(registered: Any) -> bool:
    """Whether a class or function is part of this library."""
    return _home(registered)[0].partition(".")[0] == "pluribus"


def _home(registered: Any) -> tuple[str, str]:
    while isinstance(registered, partial):
        registered = registered.func
    named = registered if hasattr(registered, "__qualname__") else type(registered)
    return named.__module__, named.__qualname__
