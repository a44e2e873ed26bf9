"""Packages that are functions, too, because a package and a function cannot share a name otherwise."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def make_callable(package: str, name: str) -> None:
    """Calling the package calls the function `name` of its module `name`."""

    class Callable(ModuleType):
        """A package that can be called."""

        def __call__(self, *args: Any, **settings: Any) -> Any:
            return getattr(import_module(f"{package}.{name}"), name)(*args, **settings)

    sys.modules[package].__class__ = Callable
