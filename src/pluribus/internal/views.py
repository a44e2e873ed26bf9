"""Views: which model of a method is evaluated. The command line needs this module, so it does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from pluribus.errors import UnknownNameError

View = Literal["after", "before", "global", "group", "own"]
AFTER: View = "after"
ABOUT = (
    "The model that is evaluated: after local training, before it, the server's (global, or group: one per "
    "architecture), or each method's own headline."
)
SERVER_VIEWS = {"global": "the server's model", "group": "the server's model of the architecture"}


def check_view(wanted: str) -> None:
    """Refuse a view that does not exist."""
    if wanted not in get_args(View):
        raise UnknownNameError(f"--view must be one of {', '.join(get_args(View))}, not {wanted!r}.")


def choose_view(views: Iterable[str], wanted: str) -> str:
    """The wanted view if a method has it, otherwise its headline view.

    >>> choose_view(("before", "after"), "after"), choose_view(("before", "after"), "own")
    ('after', 'before')
    >>> choose_view(("before", "head"), "after")
    'before'
    """
    views = tuple(views)
    return wanted if wanted in views else views[0]


def view_text(view: str) -> str:
    """A view in words."""
    return f"{view} local training" if view in ("after", "before") else SERVER_VIEWS.get(view, view)


def views_text(views: Mapping[str, str]) -> str:
    """The views of several methods in words; if they differ, with the names of the methods.

    >>> views_text({"local": "after", "fedgh": "after"})
    'after local training'
    >>> views_text({"local": "after", "fedavg": "before", "fedgh": "after"})
    'after local training (local, fedgh), before local training (fedavg)'
    """
    methods: dict[str, list[str]] = {}
    for name, view in views.items():
        methods.setdefault(view_text(view), []).append(name)
    return ", ".join(f"{view} ({', '.join(names)})" if len(methods) > 1 else view for view, names in methods.items())
