"""Makes blocks of code of the examples in docstrings, for the page of the API: `>>>` is a quotation in Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .+(?:\n.+)*", re.MULTILINE)  # up to an empty line
FOR_TESTS = re.compile(r" *# doctest: .*$", re.MULTILINE)


class Examples(griffe.Extension):
    """Is given every object that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of its docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)


def fenced(example: re.Match[str]) -> str:
    """A block of code without what is said to the tests."""
    return f"```pycon\n{FOR_TESTS.sub('', example[0])}\n```"
