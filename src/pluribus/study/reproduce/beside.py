"""Compares our results with the numbers that a paper prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from rich.console import Console

from pluribus.internal.tables import Cell, Table, markdown_of, print_tables
from pluribus.internal.views import AFTER, views_text
from pluribus.study import standings
from pluribus.study.reproduce.measures import has_view, measure
from pluribus.study.reproduce.paper import PaperRow, PaperTable, Printed
from pluribus.study.reproduce.summary import Finished, decisive
from pluribus.study.significance import LEVEL


@dataclass(frozen=True)
class Pair:
    """Our result over seeds, and the number in the paper."""

    ours: standings.Spread
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
        from scipy.stats import t  # here, because its import takes half a second

        error = self.ours.std * math.sqrt(1 / self.paper_runs + 1 / self.seeds)
        return bool(abs(self.difference) > t.ppf(1 - LEVEL / 2, self.seeds - 1) * error)

    @property
    def cells(self) -> list[Cell]:
        mean, std, gap = self.ours.mean, self.ours.std, self.difference
        ours = f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"
        shown = "-" if gap is None else f"{gap:+.2f}{'*' if self.beyond_noise else ''}"
        return [Cell(ours), Cell(self.paper.text), Cell(shown)]

    def to_json(self) -> dict[str, Any]:
        paper = {"paper": self.paper.text, "difference": self.difference, "beyond_noise": self.beyond_noise}
        return asdict(self.ours) | paper


@dataclass(frozen=True)
class Beside:
    """A table of a paper with the results of our runs. Rows without a run are left out."""

    table: PaperTable
    rounds: int
    runs: Mapping[str, tuple[Finished, ...]]  # runs in the order of seeds, by row
    view: str = AFTER  # the view in which rows are tested against each other, if they have it

    @classmethod
    def of(
        cls, table: PaperTable, rows: Iterable[PaperRow], found: Sequence[Finished], rounds: int | None, view: str
    ) -> Beside:
        """Select the runs of some rows with this number of rounds. None: the largest number found."""
        by_row = {row.label: of_row(table, row, found) for row in rows}
        rounds = rounds or max((one.rounds for runs in by_row.values() for one in runs), default=table.rounds)
        runs = {name: tuple(one for one in runs if one.rounds == rounds) for name, runs in by_row.items()}
        return cls(table, rounds, {name: some for name, some in runs.items() if some}, view)

    @cached_property
    def pairs(self) -> dict[str, dict[str, Pair]]:
        """Our result and the paper's number, by row and column."""
        return {row.label: dict(self._pairs(row)) for row in self.table.rows if row.label in self.runs}

    def _pairs(self, row: PaperRow) -> Iterator[tuple[str, Pair]]:
        for column, name in self.table.figures.items():
            values = [measure(name, one) for one in self.runs[row.label]]
            known = [value for value in values if value is not None]
            if len(known) == len(values):  # if a seed never reached a target, there is no mean
                printed = row.figures.get(column, Printed("-"))
                yield column, Pair(standings.Spread.of(known), len(known), printed, self.table.paper_runs)

    @cached_property
    def differences(self) -> list[standings.Compared]:
        """Rows compared with the baseline by the selected test metric per client and seed."""
        return (
            standings.compare_with_baseline(self._viewed, self.table.baseline)
            if self.table.baseline in self.runs
            else []
        )

    @cached_property
    def _viewed(self) -> dict[str, list[standings.Run]]:
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
        return [self._results(list(self.table.figures)), *self._against()]

    def _results(self, columns: list[str]) -> Table:
        headings = ["", "seeds"]
        for column in columns:
            headings += [column, "paper", "difference"] if self.table.prints(column) else [column]
        rows = []
        for name, pairs in self.pairs.items():
            shown = [cell for column in columns for cell in self._cells(pairs, column)]
            rows.append((Cell(name), Cell(str(len(self.runs[name]))), *shown))
        return Table(tuple(headings), rows)

    def _cells(self, pairs: Mapping[str, Pair], column: str) -> list[Cell]:
        cells = pairs[column].cells if column in pairs else [Cell("-")] * 3
        return cells if self.table.prints(column) else cells[:1]

    def _against(self) -> list[Table]:
        if not self.differences:
            return []
        return [
            standings.differences_table(self.table.baseline, self.differences),
            *standings.view_tables(("mean by view", "tested"), self._viewed, with_cost=True),
        ]

    @property
    def notes(self) -> list[str]:
        return [*self._about_results(), *self._about_differences(), *self.table.notes]

    def _about_results(self) -> Iterator[str]:
        columns = ", ".join(f"{column} is '{name}'" for column, name in self.table.figures.items())
        yield f"Ours: {columns}." if self.table.printed else f"{columns}."
        yield f"±: standard deviation over seeds.{self._about_paper()}"
        yield from self._about_views()
        if missing := [row.label for row in self.table.rows if row.label not in self.runs]:
            yield f"Not measured: {', '.join(missing)}."
        if where := {f"{one.device}, torch {one.run.result['torch']}" for runs in self.runs.values() for one in runs}:
            yield f"Ran on {'; '.join(sorted(where))}."

    def _about_paper(self) -> str:
        if not self.table.printed:
            return ""
        of = "one run" if self.table.paper_runs == 1 else f"the mean of {self.table.paper_runs} runs"
        return f" *: the paper's number, taken as {of}, is outside the 95 % prediction interval of our runs."

    def _about_views(self) -> Iterator[str]:
        """Name the rows that lack the view of a column and show their own view instead."""
        for column, name in self.table.figures.items():
            lacking = {row: runs[0].run.headline for row, runs in self.runs.items() if not has_view(name, runs[0])}
            if own := ", ".join(f"{row} ({view})" for row, view in lacking.items()):
                yield f"{column}: these rows lack this view and show their own: {own}."

    def _about_differences(self) -> Iterator[str]:
        if not self.differences:
            return
        chosen = standings.selection_note(run for runs in self._viewed.values() for run in runs)
        when = views_text({name: runs[0].view for name, runs in self._viewed.items()})
        tested, metric = standings.how_tested(self.differences, "rows"), self._viewed[self.table.baseline][0].metric
        where = f"{chosen}, {when}, per client and seed that both rows have"
        yield f"Differences between rows: test {metric.text} {where}. {tested}"
        yield from standings.note_steps(self.differences, self.table.baseline)
        if any(one.why == standings.DIFFERENT_VIEWS for one in self.differences):
            yield standings.SAID_OF_VIEWS
        if missing := ", ".join(one.label for one in self.differences if one.why == standings.NOT_KEPT):
            yield f"Not kept: results per client in this view, of {missing} or of the baseline."
        seeds = [one.difference.seeds for one in self.differences if one.difference]
        if seeds and min(seeds) < standings.ENOUGH_SEEDS:
            yield standings.note_few_seeds(min(seeds))

    def show(self, console: Console | None = None) -> None:
        by_column = [self._results([column]) for column in self.table.figures]  # they fit the width
        print_tables(self.heading, [*by_column, *self._against()], self.notes, console or Console(highlight=False))

    def to_markdown(self) -> str:
        return markdown_of(self.tables, self.notes)

    def to_json(self) -> dict[str, Any]:
        return {
            "table": self.table.name,
            "title": self.table.title,
            "rounds": self.rounds,
            "paper_rounds": self.table.rounds,
            "view": self.view,
            "rows": [self._row_to_json(name) for name in self.pairs],
            "differences": [{"row": one.label, **one.to_json()} for one in self.differences],
            "notes": self.notes,
        }

    def _row_to_json(self, name: str) -> dict[str, Any]:
        by_view = standings.Spread.by_view(self._viewed[name])
        return {
            "row": name,
            "seeds": [one.run.seed for one in self.runs[name]],
            "by_view": {view: asdict(one) for view, one in by_view.items()},
            "figures": {column: pair.to_json() for column, pair in self.pairs[name].items()},
        }


def of_row(table: PaperTable, row: PaperRow, found: Iterable[Finished]) -> list[Finished]:
    """Runs with the settings of a row and any number of rounds, in the order of seeds."""
    wanted = decisive(table.experiment(row)) | {"rounds": None}
    mine = [one for one in found if {**one.settings, "rounds": None} == wanted]
    return sorted(mine, key=lambda one: one.run.seed)
