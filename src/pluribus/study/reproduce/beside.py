"""Compares our results with the numbers that a paper prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from rich.console import Console

from pluribus.internal.views import AFTER, views_text
from pluribus.study.reproduce.measures import figure, has_view
from pluribus.study.reproduce.paper import PaperRow, PaperTable, Printed
from pluribus.study.reproduce.summary import Finished, decisive
from pluribus.study.significance import LEVEL
from pluribus.study.standings import (
    DIFFERENT_VIEWS,
    ENOUGH_SEEDS,
    NOT_KEPT,
    SAID_OF_VIEWS,
    Compared,
    Run,
    Spread,
    about_steps,
    chosen_text,
    compared,
    corrected_for,
    table_of_differences,
    tables_of_views,
    too_few,
)
from pluribus.study.tables import Cell, Table, markdown_of, show_all


@dataclass(frozen=True)
class Pair:
    """Our result over seeds, and the number in the paper."""

    ours: Spread
    seeds: int
    paper: Printed
    paper_runs: int

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's number, or None if the paper has no number."""
        return None if self.paper.value is None else self.ours.mean - self.paper.value

    @property
    def beyond_noise(self) -> bool:
        """Whether the paper's number is outside the 95 % prediction interval of our runs (Student's t)."""
        if self.difference is None or self.ours.std is None:
            return False
        from scipy.stats import t

        error = self.ours.std * math.sqrt(1 / self.paper_runs + 1 / self.seeds)
        return bool(abs(self.difference) > t.ppf(1 - LEVEL / 2, self.seeds - 1) * error)

    @property
    def cells(self) -> list[Cell]:
        """Cells for our result, the paper's number and the difference."""
        mean, std, gap = self.ours.mean, self.ours.std, self.difference
        ours = f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"
        shown = "-" if gap is None else f"{gap:+.2f}{'*' if self.beyond_noise else ''}"
        return [Cell(ours), Cell(self.paper.text), Cell(shown)]


@dataclass(frozen=True)
class Beside:
    """A table of a paper with the results of our runs. Rows without a run are left out."""

    table: PaperTable
    rounds: int
    runs: Mapping[str, tuple[Finished, ...]]
    """Runs in the order of seeds, by row."""
    view: str = AFTER
    """The view in which rows are tested against each other, if they have it."""

    @classmethod
    def of(
        cls,
        table: PaperTable,
        rows: Iterable[PaperRow],
        found: Iterable[Finished],
        rounds: int | None,
        view: str = AFTER,
    ) -> Beside:
        """Select the runs of some rows with this number of rounds. None: the largest number found."""
        found = list(found)
        by_row = {row.name: of_row(table, row, found) for row in rows}
        most = max((one.rounds for runs in by_row.values() for one in runs), default=table.rounds)
        rounds = rounds or most
        runs = {name: tuple(one for one in runs if one.rounds == rounds) for name, runs in by_row.items()}
        return cls(table, rounds, {name: some for name, some in runs.items() if some}, view)

    @cached_property
    def pairs(self) -> dict[str, dict[str, Pair]]:
        """Our result and the paper's number, by row and column."""
        return {row.name: dict(self._pairs(row)) for row in self.table.rows if row.name in self.runs}

    def _pairs(self, row: PaperRow) -> Iterator[tuple[str, Pair]]:
        for column, name in self.table.figures.items():
            values = [figure(name, one) for one in self.runs[row.name]]
            known = [value for value in values if value is not None]
            if len(known) == len(values):  # if a seed never reached a target, there is no mean
                printed = row.figures.get(column, Printed("-"))
                yield column, Pair(Spread.of(known), len(known), printed, self.table.paper_runs)

    @cached_property
    def differences(self) -> list[Compared]:
        """Rows compared with the baseline by the selected test accuracy per client and seed."""
        return compared(self._viewed, self.table.baseline) if self.table.baseline in self.runs else []

    @cached_property
    def _viewed(self) -> dict[str, list[Run]]:
        return {name: [replace(one.run, wanted=self.view) for one in runs] for name, runs in self.runs.items()}

    # ---- as text ---------------------------------------------------------------------------------------------------

    @property
    def heading(self) -> str:
        """Title and number of rounds, with the paper's number if ours is smaller."""
        length = f"{self.rounds:,} rounds"
        if self.rounds != self.table.rounds:
            whose = "the paper's " if self.table.printed else ""
            length = f"{self.rounds:,} of {whose}{self.table.rounds:,} rounds"
        return f"{self.table.title}   {length}"

    @property
    def tables(self) -> list[Table]:
        """The table of results, and tables of differences and views if rows were compared."""
        return [self._results(list(self.table.figures)), *self._against()]

    def _results(self, columns: list[str]) -> Table:
        headings = ["", "seeds"]
        for column in columns:
            headings += [column, "paper", "difference"] if self.table.prints(column) else [column]
        rows = []
        for name, pairs in self.pairs.items():
            shown = [cell for column in columns for cell in self._cells(pairs, column)]
            rows.append((Cell(name), Cell(str(len(self.runs[name]))), *shown))
        return Table(tuple(headings), tuple(rows))

    def _cells(self, pairs: Mapping[str, Pair], column: str) -> list[Cell]:
        cells = pairs[column].cells if column in pairs else [Cell("-")] * 3
        return cells if self.table.prints(column) else cells[:1]

    def _against(self) -> list[Table]:
        if not self.differences:
            return []
        return [
            table_of_differences(self.table.baseline, self.differences),
            *tables_of_views(("mean by view", "tested"), self._viewed, with_cost=True),
        ]

    @property
    def notes(self) -> list[str]:
        """What a reader must know about the results."""
        return [*self._about_results(), *self._about_differences(), *self.table.notes]

    def _about_results(self) -> Iterator[str]:
        columns = ", ".join(f"{column} is '{name}'" for column, name in self.table.figures.items())
        yield f"Ours: {columns}." if self.table.printed else f"{columns}."
        yield f"±: standard deviation over seeds.{self._about_paper()}"
        yield from self._about_views()
        missing = [row.name for row in self.table.rows if row.name not in self.runs]
        if missing:
            yield f"Not measured: {', '.join(missing)}."
        where = sorted(
            {f"{one.device}, torch {one.run.result['torch']}" for runs in self.runs.values() for one in runs}
        )
        if where:
            yield f"Ran on {'; '.join(where)}."

    def _about_paper(self) -> str:
        if not self.table.printed:
            return ""
        of = "one run" if self.table.paper_runs == 1 else f"the mean of {self.table.paper_runs} runs"
        return f" *: the paper's number, taken as {of}, is outside the 95 % prediction interval of our runs."

    def _about_views(self) -> Iterator[str]:
        """Name the rows that lack the view of a column and show their own view instead."""
        for column, name in self.table.figures.items():
            lacking = {row: runs[0].run.headline for row, runs in self.runs.items() if not has_view(name, runs[0])}
            if lacking:
                own = ", ".join(f"{row} ({view})" for row, view in lacking.items())
                yield f"{column}: these rows lack this view and show their own: {own}."

    def _about_differences(self) -> Iterator[str]:
        if not self.differences:
            return
        corrected = corrected_for(self.differences, "rows")
        chosen = chosen_text(run for runs in self._viewed.values() for run in runs)
        when = views_text({name: runs[0].view for name, runs in self._viewed.items()})
        yield (
            f"Differences between rows: test accuracy {chosen}, {when}, per client and seed that both rows have. "
            f"p: sign-flip test{corrected}. Interval: bootstrap over seeds, then clients. Better or worse: p below "
            f"{LEVEL} and an interval without 0."
        )
        yield from about_steps(self.differences, self.table.baseline)
        if any(one.why == DIFFERENT_VIEWS for one in self.differences):
            yield SAID_OF_VIEWS
        if missing := [one.method for one in self.differences if one.why == NOT_KEPT]:
            names = ", ".join(missing)
            yield f"{NOT_KEPT.capitalize()}: results per client in this view, of {names} or of the baseline."
        fewest = min((one.difference.seeds for one in self.differences if one.difference), default=ENOUGH_SEEDS)
        if fewest < ENOUGH_SEEDS:
            yield too_few(fewest)

    def show(self, console: Console | None = None) -> None:
        tables = (
            *(self._results([column]) for column in self.table.figures),
            *self._against(),
        )  # a table per column fits the width
        show_all(self.heading, tables, self.notes, console or Console(highlight=False))

    def to_markdown(self) -> str:
        """Write the tables and notes in Markdown."""
        return markdown_of(self.tables, self.notes)

    def to_json(self) -> dict[str, Any]:
        return {
            "table": self.table.name,
            "title": self.table.title,
            "rounds": self.rounds,
            "paper_rounds": self.table.rounds,
            "view": self.view,
            "rows": [
                {
                    "row": name,
                    "seeds": [one.run.seed for one in self.runs[name]],
                    "by_view": {view: asdict(one) for view, one in Spread.by_view(self._viewed[name]).items()},
                    "figures": {
                        column: {
                            "mean": pair.ours.mean,
                            "std": pair.ours.std,
                            "paper": pair.paper.text,
                            "difference": pair.difference,
                            "beyond_noise": pair.beyond_noise,
                        }
                        for column, pair in pairs.items()
                    },
                }
                for name, pairs in self.pairs.items()
            ],
            "differences": [{"row": one.method, **one.to_json()} for one in self.differences],
            "notes": self.notes,
        }


def of_row(table: PaperTable, row: PaperRow, found: Iterable[Finished]) -> list[Finished]:
    """Runs with the settings of a row and any number of rounds, in the order of seeds."""
    wanted = decisive(table.experiment(row)) | {"rounds": None}
    mine = [one for one in found if {**one.settings, "rounds": None} == wanted]
    return sorted(mine, key=lambda one: one.run.seed)
