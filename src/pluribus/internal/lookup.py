"""Find user code (a method, model, data set or partition) by its dotted path, and name objects that have none."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from pluribus.errors import UnknownNameError, UserCodeError
from pluribus.internal.blame import at

GIVEN = "given:"  # begins the name of an object that was given in Python and that no dotted path leads to


_from_working_folder = False


def import_from_working_folder() -> None:
    """From now on, dotted paths lead to modules in the working folder too, as in a script there."""
    global _from_working_folder
    _from_working_folder = True


def import_dotted(path: str, kind: str) -> Any:
    """Import `package.module.name`. The error says why it cannot be imported."""
    module, _, name = path.rpartition(".")
    if not is_dotted(path):
        raise UserCodeError(f"{kind} '{path}' is neither a known name nor a dotted path, package.module.name.")
    if _from_working_folder and "" not in sys.path:  # not before: a file there could take the place of a library
        sys.path.insert(0, "")
    try:
        with at(f"{kind} {path}"):
            return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise UserCodeError(f"{kind} '{path}' cannot be imported: {error}.") from error
    except AttributeError:
        raise UserCodeError(f"{kind} '{path}' does not exist: module '{module}' has no '{name}'.") from None


def is_dotted(path: str) -> bool:
    """Whether this may be the dotted path of an object in a module. Nothing else is ever imported."""
    return "." in path and all(re.fullmatch(r"[^\W\d][\w-]*", part) for part in path.split("."))


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
