"""Which view a comparison asks for, and which one a method then shows. No torch here: command lines need it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from pluribus.errors import UnknownNameError

View = Literal["after", "before", "own"]
AFTER: View = "after"
ABOUT = "The model that is asked: after local training, before it, or each method's own headline."


def check_view(wanted: str) -> None:
    """Refuse a view that cannot be asked for."""
    if wanted not in get_args(View):
        raise UnknownNameError(f"--view must be one of {', '.join(get_args(View))}, not {wanted!r}.")


def shown(views: Iterable[str], wanted: str) -> str:
    """The view that is asked for where a method has it, and its headline where it does not.

    >>> shown(("before", "after"), "after"), shown(("before", "head"), "after"), shown(("before", "after"), "own")
    ('after', 'before', 'before')
    """
    views = tuple(views)
    return wanted if wanted in views else views[0]
