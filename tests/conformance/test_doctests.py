"""Every example in a docstring is true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import pluribus

MODULES = ["pluribus", *(found.name for found in pkgutil.walk_packages(pluribus.__path__, "pluribus."))]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_examples_are_found():
    assert doctest.testmod(importlib.import_module("pluribus.internal.batches")).attempted > 0
