"""Find user code (a method, model, data set or partition) by its dotted path, and name objects that have none."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from pluribus.errors import UnknownNameError, UserCodeError
from pluribus.internal.blame import at

GIVEN = "given:"  # begins the name of an object that was given in Python and that no dotted path leads to


def import_dotted(path: str, kind: str) -> Any:
    """Import `package.module.name`. The error says why it cannot be imported."""
    module, _, name = path.rpartition(".")
    try:
        with at(f"{kind} {path}"):
            return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise UserCodeError(f"{kind} '{path}' cannot be imported: {error}.") from error
    except AttributeError:
        raise UserCodeError(f"{kind} '{path}' does not exist: module '{module}' has no '{name}'.") from None


def dotted_path(value: object) -> str | None:
    """The dotted path of a function or class, if another process can import it by this path."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module is None or module in ("__main__", "__mp_main__") or not name.isidentifier():
        return None
    return f"{module}.{name}" if getattr(sys.modules.get(module), name, None) is value else None


def object_name(value: object) -> str:
    """The name of a function or class, or that of an object's class."""
    return str(getattr(value, "__name__", type(value).__name__))


def given_name(name: str) -> str:
    """The name, in files, of an object that no dotted path leads to."""
    return GIVEN + (re.sub(r"[^\w-]+", "-", name).strip("-") or "object")


def refuse_given(kind: str, name: str) -> None:
    """Refuse the name of an object, which a file has in place of the object itself."""
    if is_given(name):
        raise UnknownNameError(f"{kind} '{name}' was an object in Python, which no file can name: give it again.")


def is_given(name: object) -> bool:
    """Whether this is the name of an object that was given in Python."""
    return isinstance(name, str) and name.startswith(GIVEN)
