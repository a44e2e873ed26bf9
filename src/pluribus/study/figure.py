"""Figures of several runs: a line per row with a band, or error bars, over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pluribus.errors import FileAccessError, FormatError
from pluribus.internal.axes import check_matplotlib, new_axes
from pluribus.internal.system import sync
from pluribus.storage.files import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pluribus.study.standings import Run

KINDS = (".png", ".pdf", ".svg")
MOST_INSIDE = 4  # lines whose legend has room inside a figure
Line = Sequence[tuple[Any, Sequence[float]]]
"""Points of a line: where, and the values over seeds."""


def check_plot(path: str | Path | None) -> None:
    """Refuse a file that cannot be written, before anything runs."""
    check_matplotlib()
    if path is not None:
        check_writable(Path(path))
        if Path(path).suffix not in KINDS:
            raise FormatError(f"a plot is written as {', '.join(KINDS)}, not as {Path(path).name}.")


def curves(runs: Mapping[str, Sequence[Run]]) -> dict[str, Line]:
    """Mean test metric by round and seed, by label. Only rounds that were evaluated with every seed count."""
    found: dict[str, Line] = {}
    for label, some in runs.items():
        by_seed = [dict(run.curve) for run in some]
        rounds = [number for number in by_seed[0] if all(number in one for one in by_seed)]
        found[label] = [(number + 1, [one[number] for one in by_seed]) for number in rounds]
    return found


def draw_rounds(runs: Mapping[str, Sequence[Run]], ax: Axes | None = None) -> Axes:
    """Draw the mean test metric over rounds. With one evaluated round, draw the selected metric of each row."""
    lines, ylabel = curves(runs), f"test {next(iter(runs.values()))[0].metric.text}"
    if max(map(len, lines.values())) > 1:
        axes = draw_lines(lines, "round", ylabel, ax)
        if ax is None:
            axes.locator_params(axis="x", integer=True)
        return axes
    axes = new_axes() if ax is None else ax
    for place, some in enumerate(runs.values()):
        _point(axes, place, [run.scores["mean"] for run in some])
    axes.set_xticks(range(len(runs)), [_escape(label) for label in runs])
    axes.set_ylabel(ylabel)
    return axes


def draw_lines(lines: Mapping[str, Line], xlabel: str, ylabel: str, ax: Axes | None = None) -> Axes:
    """Draw a line per label through the means over seeds, with a band of one standard deviation."""
    axes = new_axes() if ax is None else ax
    for label, line in lines.items():
        places, means = [where for where, _ in line], [statistics.fmean(values) for _, values in line]
        (drawn,) = axes.plot(places, means, marker="o" if len(line) < 15 else "", markersize=3, label=_escape(label))
        stds = [_std(values) for _, values in line]
        if any(stds):
            low, high = ([m + sign * s for m, s in zip(means, stds, strict=True)] for sign in (-1, 1))
            axes.fill_between(places, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel(_escape(xlabel))
    axes.set_ylabel(ylabel)
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if len(lines) > MOST_INSIDE else {}
    axes.legend(**beside)
    return axes


def save(axes: Axes, path: str | Path) -> None:
    """Write the figure of some axes."""
    check_plot(path)
    temporary = Path(path).with_name(f"{Path(path).name}.tmp")
    try:
        axes.get_figure().savefig(temporary, format=Path(path).suffix[1:], dpi=200, bbox_inches="tight")  # type: ignore[union-attr]
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        raise FileAccessError(f"cannot write {path}: {error.strerror}.") from error


def _point(axes: Axes, place: float, values: Sequence[float]) -> None:
    axes.errorbar(place, statistics.fmean(values), yerr=_std(values) or None, fmt="o", capsize=3)


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _escape(text: str) -> str:
    """Escape a dollar sign, which starts a formula in Matplotlib."""
    return text.replace("$", r"\$")
