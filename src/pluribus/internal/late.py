"""Libraries that are imported when they are first needed, because that takes a while: timm and transformers.

A thread of its own imports them. Contexts of torch such as `torch.device("meta")` hold for one thread, and tensors that
a library makes when it is imported need numbers. With torch 2.8 the import of timm fails in such a context.
"""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def import_late(name: str) -> Any:
    """Import a library that imports torchvision."""
    if name in sys.modules:
        return importlib.import_module(name)  # waits until another thread has imported it
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_import, name).result()


def _import(name: str) -> Any:
    from pluribus.internal import torchvision as _torchvision  # noqa: F401  which may need this fix

    return importlib.import_module(name)
