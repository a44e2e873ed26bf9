"""Draws the plots of a report as PNG and PDF files for papers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from pluribus.errors import FileAccessError
from pluribus.report.page import COUNTED, MOST_TICKS, PALETTE
from pluribus.report.plots.series import Plot, Section, Series

KINDS = ("png", "pdf")
MARKERS = ["o", "D", "s", "P", "^", "X"]
DASHES = ["-", "--", "-.", (0, (8, 3))]
WIDTH, HEIGHT, ROW = 5.0, 3.2, 0.2  # inches
LARGEST = 200.0  # area of the largest circle in square points
MOST_IN_LEGEND = 20
MOST_MARKED = 15  # rows of a heatmap with texts in its cells


def write_figures(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Write every plot as PNG and PDF. Return the paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [path for name, plot in _names(sections) for path in _write(plot, folder / name)]
    except OSError as error:
        raise FileAccessError(f"cannot write to {folder}: {error.strerror}.") from error


def _names(sections: Sequence[Section]) -> Iterator[tuple[str, Plot]]:
    """A valid and distinct file name for each plot."""
    for section in sections:
        taken = set[str]()
        for number, plot in enumerate(section.plots):
            words = re.sub("[^a-z0-9]+", "-", plot.name.lower()).strip("-")[:60]
            name = f"{section.key}-{words}" if words and words not in taken else f"{section.key}-{number}"
            taken.add(words)
            yield name, plot


def _write(plot: Plot, path: Path) -> Iterator[Path]:
    figure = draw(plot)
    for kind in KINDS:
        file = path.with_name(f"{path.name}.{kind}")
        temporary = file.with_name(f"{file.name}.tmp")
        figure.savefig(temporary, format=kind, dpi=200, bbox_inches="tight")
        temporary.replace(file)
        yield file


def draw(plot: Plot) -> Figure:
    """Draw a plot on a white background."""
    figure = Figure(figsize=(WIDTH, max(HEIGHT, ROW * len(plot.y_names) + 0.6)))
    axes = figure.add_subplot()
    bars = [one for one in plot.series if one.kind == "bars"]
    heights: dict[float, float] = {}
    for one in plot.series:
        if one.kind == "heat":
            _heat(axes, one)
        elif one.kind == "bars" and plot.stacked:
            _stack_across(axes, one, heights)
        elif one.kind == "bars":
            height = 0.8 / len(bars)
            positions = _floats(one.y) - 0.4 + height * (bars.index(one) + 0.5)
            axes.barh(positions, _floats(one.x), height, **_style(one))
        elif one.kind == "stack":
            _stack(axes, one, heights)
        else:
            _points(axes, one, plot)
    _style_axes(axes, plot)
    return figure


def _escape(text: str) -> str:
    """Escape a dollar sign, which starts a formula in Matplotlib."""
    return text.replace("$", r"\$")


def _style(one: Series) -> dict[str, Any]:
    style = {"color": PALETTE["light"][one.color % len(PALETTE["light"])], "label": _escape(one.name)}
    hatched = one.faint and one.kind in ("bars", "stack")
    return style | ({"hatch": "////", "edgecolor": "white"} if hatched else {})


def _points(axes: Axes, one: Series, plot: Plot) -> None:
    turn = one.color // len(PALETTE["light"])
    if one.kind in ("line", "steps"):
        dash, steps = ":" if one.faint else DASHES[turn % len(DASHES)], one.kind == "steps"
        drawn: dict[str, Any] = {"linestyle": dash, "linewidth": 1.4, "drawstyle": "steps-post" if steps else "default"}
        axes.plot(_floats(one.x), _floats(one.y), **drawn, **_style(one))
        if one.low:
            axes.fill_between(_floats(one.x), one.low, one.high, color=_style(one)["color"], alpha=0.18, linewidth=0)
        return
    largest = max((size for other in plot.series for size in other.sizes), default=1.0)
    sizes = [LARGEST * size / largest for size in one.sizes] or 18.0
    fill = _style(one)
    if one.low:
        axes.hlines(_floats(one.y), one.low, one.high, color=fill["color"], linewidth=1.4)
    if one.faint:
        fill |= {"facecolors": "none", "edgecolors": fill.pop("color")}
    axes.scatter(_floats(one.x), _floats(one.y), s=sizes, marker=MARKERS[turn % len(MARKERS)], alpha=0.85, **fill)


def _heat(axes: Axes, one: Series) -> None:
    """Cells from white to the first color, with their texts if there are few."""
    scale = LinearSegmentedColormap.from_list("share", ["white", PALETTE["light"][0]])
    axes.imshow(np.array(one.cells, float), cmap=scale, vmin=0, vmax=1, aspect="auto")
    if len(one.marks) <= MOST_MARKED:
        for y, row in enumerate(one.marks):
            for x, text in enumerate(row):
                axes.text(x, y, _escape(text), ha="center", va="center", fontsize="x-small")


def _stack_across(axes: Axes, one: Series, widths: dict[float, float]) -> None:
    xs, ys = _floats(one.x), _floats(one.y)
    axes.barh(ys, xs, 0.7, left=[widths.get(y, 0.0) for y in ys], **_style(one))
    for x, y in zip(xs, ys, strict=True):
        widths[y] = widths.get(y, 0.0) + x


def _stack(axes: Axes, one: Series, heights: dict[float, float]) -> None:
    xs, ys = _floats(one.x), _floats(one.y)
    axes.bar(xs, ys, 0.9, bottom=[heights.get(x, 0.0) for x in xs], **_style(one))
    for x, y in zip(xs, ys, strict=True):
        heights[x] = heights.get(x, 0.0) + y


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], float)


def _style_axes(axes: Axes, plot: Plot) -> None:
    if plot.zero:
        axes.axvline(0, color="black", linewidth=0.8)
    if plot.log:
        axes.set_xscale("log")
    axes.set_xlabel(_escape(plot.x))
    axes.set_ylabel(_escape(plot.y))
    axes.grid(alpha=0.0 if any(one.kind == "heat" for one in plot.series) else 0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for axis, names in ((axes.xaxis, plot.x_names), (axes.yaxis, plot.y_names)):
        if names:
            shown = range(0, len(names), -(-len(names) // MOST_TICKS))
            axis.set_ticks(list(shown), [_escape(names[at]) for at in shown])
    if plot.y_names:
        axes.set_ylim(len(plot.y_names) - 0.4, -0.6)
    if plot.x in COUNTED:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if plot.bytes:
        axis = axes.xaxis if plot.bytes == "x" else axes.yaxis
        axis.set_major_formatter(EngFormatter(unit="B"))
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if plot.log else MaxNLocator(5))
        axis.set_minor_formatter(NullFormatter())
    if plot.square:
        axes.set_xticks([])
        axes.set_yticks([])
    if 1 < len(plot.series) <= MOST_IN_LEGEND:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize="small")
