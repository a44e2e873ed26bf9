"""What a plot, a table and a section of a report are. Two back ends draw plots: a web page, and files for papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pluribus.internal.tables import Table

Kind = Literal["line", "steps", "dots", "bars", "stack", "heat"]
Point = tuple[float, float, str]  # x, y, text


@dataclass(frozen=True)
class Series:
    """Points with the same color and one entry in the legend."""

    name: str
    x: Sequence[float | None]
    y: Sequence[float | None]
    color: int  # index into the palette; series with the same color differ by marker or dashes
    kind: Kind = "line"
    text: Sequence[str] = ()  # text of each point, shown on hover
    sizes: Sequence[float] = ()  # areas of the dots; empty: all have the same size
    faint: bool = False  # whether the series is secondary and is drawn dotted, hollow or hatched
    low: Sequence[float] = ()  # lower ends of a band around a line, or of intervals through dots, along x
    high: Sequence[float] = ()
    cells: Sequence[Sequence[float | None]] = ()  # shares from 0 to 1 of a heatmap, by y and x
    marks: Sequence[Sequence[str]] = ()  # texts in the cells


def make_series(name: str, points: Sequence[Point], color: int, kind: Kind, faint: bool = False) -> Series:
    """A series of points with texts."""
    xs, ys, texts = [x for x, _, _ in points], [y for _, y, _ in points], [text for _, _, text in points]
    return Series(name, xs, ys, color, kind, texts, faint=faint)


@dataclass(frozen=True)
class Plot:
    """One plot. If an axis has names, its numbers are positions in that list, and the first is at the top."""

    name: str
    x: str
    y: str
    series: list[Series]
    x_names: list[str] = field(default_factory=list)
    y_names: list[str] = field(default_factory=list)
    bytes: Literal["", "x", "y"] = ""  # the axis in bytes, if any
    log: Literal["", "x"] = ""  # the logarithmic axis, if any
    zero: bool = False  # whether a line marks 0 on the x-axis
    square: bool = False  # whether the axes have no units
    stacked: bool = False  # whether the bars of a row continue each other
    says: str = ""  # what a reader must know of this plot alone


@dataclass(frozen=True)
class Section:
    """Plots and tables of one topic. The page shows one of the plots at a time."""

    key: str
    title: str
    says: str
    plots: list[Plot]
    missing: str  # text if there is neither plot nor table; empty: the section is hidden
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # below the tables
    folded: Mapping[str, str] = field(default_factory=dict)  # long texts by title, which the page shows on demand
    views: Mapping[str, Section] = field(default_factory=dict)  # the same section in other views

    @property
    def text(self) -> str:
        return self.says if self.plots or self.tables else self.missing
