"""Rows of results as a data frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any


def make_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame if pandas is installed, otherwise a list of dicts."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        return [dict(row) for row in rows]
    return pandas.DataFrame(list(rows))
