"""The results of a study: a comparison per point, and one table, one figure and one set of tests over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from pluribus.errors import to_words
from pluribus.evaluate import evaluated_clients
from pluribus.internal.frames import make_frame
from pluribus.internal.tables import Cell, Table, cells, csv_of, html_of, latex_of, markdown_of, print_tables, write_to
from pluribus.internal.views import views_text
from pluribus.study import standings
from pluribus.study.definition import Point, Study
from pluribus.study.figure import Line, draw_lines, draw_rounds, save
from pluribus.study.significance import holm
from pluribus.study.standings import Compared, Comparison
from pluribus.study.tidy import tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
LOG = 50  # from this ratio of the largest to the smallest value, an axis of a figure is logarithmic


@dataclass(frozen=True, repr=False)
class StudyResult:
    """The comparison at every point of a study."""

    study: Study
    points: tuple[Point, ...]
    comparisons: tuple[Comparison, ...]
    """In the order of `points`. Their p-values are corrected for the rows of one point."""
    folder: Path | None
    """Folder of the runs. None: they were not kept."""

    @property
    def baseline(self) -> str:
        return self.comparisons[0].baseline

    @property
    def metric_text(self) -> str:
        """The headline metric in words; several if it is an axis of the study."""
        return " or ".join(_unique(one.metric.text for one in self.comparisons))

    @property
    def labels(self) -> list[str]:
        """Labels of the rows that have results at some point."""
        return [label for label in self.study.labels if any(label in one.runs for one in self.comparisons)]

    @cached_property
    def differences(self) -> list[list[Compared]]:
        """By point, rows compared with the baseline. P-values are corrected for the tests at all points (Holm)."""
        every = [one for comparison in self.comparisons for one in comparison.differences]
        corrected = iter(holm([one.difference.p for one in every if one.difference is not None]))
        return [
            [one if one.difference is None else replace(one, p=next(corrected)) for one in comparison.differences]
            for comparison in self.comparisons
        ]

    # ---- as text ---------------------------------------------------------------------------------------------------

    @property
    def tables(self) -> list[Table]:
        """The metric of rows by point, and differences. With one point, the tables of its comparison."""
        if len(self.points) == 1:
            return self.comparisons[0].tables
        return [self._scores(), *self._against()]

    def _scores(self) -> Table:
        columns = []
        for comparison in self.comparisons:
            known = {row.label: row.scores["mean"] for row in comparison.rows}
            means = [known[label].mean if label in known else None for label in self.labels]
            texts = [str(known.get(label, "-")) for label in self.labels]
            best = comparison.metric.best(means) if comparison.one_view else None
            columns.append(cells(texts, means, best))
        names = [Cell(label) for label in self.labels]
        return Table((self._what, *(point.label for point in self.points)), list(zip(names, *columns, strict=True)))

    def _against(self) -> list[Table]:
        """One table of differences, with a line above those of each point."""
        rows: list[Sequence[Cell]] = []
        for point, some in zip(self.points, self.differences, strict=True):
            if some:
                rows.append([Cell(point.label), *[Cell("")] * 4])
                rows += [[Cell(f"  {one.label}"), *one.cells[1:]] for one in some]
        return [replace(standings.differences_table(self.baseline, []), rows=rows)] if rows else []

    @property
    def _what(self) -> str:
        return "row" if any(one.what == "row" for one in self.comparisons) else "method"

    @property
    def cautions(self) -> list[str]:
        """What a reader must know before the results."""
        return _unique(text for one in self.comparisons for text in one.cautions)

    @property
    def notes(self) -> list[str]:
        if len(self.points) == 1:
            return self.comparisons[0].notes
        training = (text for one in self.comparisons for text in one.about_training())
        texts = [*self._about_results(), *training, *self._about_differences(), *self._warnings()]
        return _unique(map(to_words, texts))

    def _about_results(self) -> Iterator[str]:
        first = self.comparisons[0]
        yield from first.about_rows(without=self.study.axes)
        runs = [run for one in self.comparisons for some in one.runs.values() for run in some]
        when = views_text({label: some[0].view for one in self.comparisons for label, some in one.runs.items()})
        whose = evaluated_clients(run.history for run in runs)
        yield f"Test {self.metric_text}, mean over {whose}, {standings.selection_note(runs)}, {when}."
        yield first.about_seeds()

    def _about_differences(self) -> Iterator[str]:
        every = [one for some in self.differences for one in some]
        if any(one.why == standings.DIFFERENT_VIEWS for one in every):
            yield standings.SAID_OF_VIEWS
        if all(one.difference is None for one in every):
            return
        yield f"Differences are per client and seed. {standings.how_tested(every, 'tests')}"
        for point, some in zip(self.points, self.differences, strict=True):
            yield from (f"{text} ({point.label})" for text in standings.note_steps(some, self.baseline))
        if self.study.seeds < standings.ENOUGH_SEEDS:
            yield standings.note_few_seeds(self.study.seeds)

    def _warnings(self) -> Iterator[str]:
        for point, one in zip(self.points, self.comparisons, strict=True):
            yield from (f"{point.label}, {text}" for text in one.about_warnings())

    @property
    def heading(self) -> str:
        """Title, number of points and seeds."""
        some = [(len(self.points), "point"), (self.study.seeds, "seed")]
        counts = "   ".join(f"{number} {word}{'s' if number > 1 else ''}" for number, word in some)
        return "   ".join(filter(None, ["study", self.study.title, counts]))

    def table(self, console: Console | None = None) -> None:
        """Print the tables. The results are printed in parts if there are too many points for the terminal."""
        console = console or Console(highlight=False)
        tables = self.tables
        shown = tables if len(self.points) == 1 else [*tables[0].split(console.width), *tables[1:]]
        print_tables(self.heading, shown, self.notes, console, self.cautions)
        if self.folder is not None:
            console.print(f"\n Saved {self.folder}", markup=False, soft_wrap=True)

    def __repr__(self) -> str:
        lines = [f"StudyResult of {', '.join(self.labels)}, mean test {self.metric_text}"]
        for point, one in zip(self.points, self.comparisons, strict=True):
            known = ", ".join(f"{row.label} {row.scores['mean']}" for row in one.rows)
            lines.append(f"{point.label}: {known}" if point.label else known)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The table of the metric, the differences and the notes, for notebooks."""
        if len(self.points) == 1:
            return self.comparisons[0]._repr_html_()
        return html_of(self.tables, self.notes, self.cautions)

    # ---- as data ---------------------------------------------------------------------------------------------------

    def frame(self, rounds: bool = False) -> Any:
        """Tidy rows: the settings of the point, then label, seed, round, client, view, split, metric and value.

        The frame is a pandas DataFrame, or a list of dicts if pandas is not installed.
        """
        return make_frame(
            [
                {**_plain(point), **row}
                for point, one in zip(self.points, self.comparisons, strict=True)
                for row in tidy(one.runs, rounds)
            ]
        )

    def to_markdown(self, path: str | Path | None = None) -> str:
        """The tables in Markdown, also written to a file if there is a path."""
        return write_to(path, markdown_of(self.tables, self.notes, self.cautions))

    def to_latex(self, path: str | Path | None = None) -> str:
        """The tables for LaTeX with the package booktabs, also written to a file. The notes are comments."""
        return write_to(path, latex_of(self.tables, self.notes, self.cautions))

    def to_csv(self, path: str | Path | None = None) -> str:
        """One line per point and row with all metrics, unrounded, also written to a file if there is a path."""
        lines = [
            {**_plain(point), **line}
            for point, one, some in zip(self.points, self.comparisons, self.differences, strict=True)
            for line in one.lines(some)
        ]
        return write_to(path, csv_of(lines))

    def to_json(self) -> dict[str, Any]:
        """Plain values. `points` has the results of each comparison, with p-values corrected for all points."""
        return {
            "title": self.study.title,
            "labels": self.labels,
            "axes": {name: _unique(_plain(point)[name] for point in self.points) for name in self.study.axes},
            "seeds": list(range(self.study.seed, self.study.seed + self.study.seeds)),
            "metrics": _unique(one.metric.name for one in self.comparisons),
            "view": self.study.view,
            "baseline": self.baseline,
            "points": [
                {"point": _plain(point), **one.to_json(some)}
                for point, one, some in zip(self.points, self.comparisons, self.differences, strict=True)
            ],
            "cautions": self.cautions,
            "notes": self.notes,
            "folder": None if self.folder is None else str(self.folder),
        }

    # ---- as a figure -----------------------------------------------------------------------------------------------

    def plot(self, path: str | Path | None = None, ax: Axes | None = None) -> Axes:
        """Draw the mean test metric of every row with a band of one standard deviation over seeds. Needs matplotlib.

        With one point it is drawn over rounds, otherwise over the first axis with several numbers. Without such an axis
        it is drawn over points.
        """
        axes = draw_rounds(self.comparisons[0].runs, ax) if len(self.points) == 1 else self._draw_points(ax)
        if path is not None:
            save(axes, path)
        return axes

    def _draw_points(self, ax: Axes | None) -> Axes:
        axis = next((name for name, values in self.study.axes.items() if _are_numbers(values)), None)
        rows = {row.label: [name for name in self.study.axes_of(row) if name != axis] for row in self.study.rows}
        lines: dict[str, dict[Any, list[float]]] = {}
        for place, (point, one) in enumerate(zip(self.points, self.comparisons, strict=True)):
            for label, runs in one.runs.items():
                others = [] if axis is None else [f"{name}={point.texts[name]}" for name in rows[label]]
                where = place if axis is None else point.settings[axis]
                lines.setdefault(", ".join([label, *others]), {})[where] = [run.scores["mean"] for run in runs]
        drawn: dict[str, Line] = {label: sorted(line.items()) for label, line in lines.items()}
        axes = draw_lines(drawn, axis or "", f"test {self.metric_text}", ax)
        if axis is None:
            axes.set_xticks(range(len(self.points)), [point.label for point in self.points])
        elif min(self.study.axes[axis]) > 0 and max(self.study.axes[axis]) >= LOG * min(self.study.axes[axis]):
            axes.set_xscale("log")
        return axes


def _are_numbers(values: Sequence[Any]) -> bool:
    return len(values) > 1 and all(isinstance(value, Real) and not isinstance(value, bool) for value in values)


def _plain(point: Point) -> dict[str, Any]:
    """The settings of a point. What is not a plain value is told in words."""
    plain = (str, int, float)
    return {name: one if isinstance(one, plain) else point.texts[name] for name, one in point.settings.items()}


def _unique(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
