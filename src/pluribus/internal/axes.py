"""Axes of Matplotlib to draw on. Matplotlib is imported when the first figure is drawn."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from rich.console import Console

from pluribus.errors import PackageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (5.0, 3.2)  # inches


def check_matplotlib() -> None:
    """Refuse to draw without Matplotlib."""
    if find_spec("matplotlib") is None:
        raise PackageError("a plot needs Matplotlib: pip install 'pluribus[report]'.")


def new_axes() -> Axes:
    """New axes. A notebook shows their figure below the cell."""
    check_matplotlib()
    if Console().is_jupyter:
        from matplotlib import pyplot

        return pyplot.subplots(figsize=SIZE)[1]
    from matplotlib.figure import Figure

    return Figure(figsize=SIZE).add_subplot()  # without pyplot, which keeps every figure
