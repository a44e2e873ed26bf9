"""Import user code (a method, model or data set) by its dotted path."""

from __future__ import annotations

import importlib
from typing import Any

from pluribus.errors import UserCodeError
from pluribus.internal.blame import at


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
