"""A paper's table: its rows, the settings that they share, what the paper prints, and which of our figures that is.

A table is a TOML file in this folder. Its figures stand there as text, to the digit as they are printed. A table
without any figure of a paper shows a paper's claim on other data than the paper's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from pluribus.errors import UnknownNameError, unknown
from pluribus.experiment import Experiment, experiment
from pluribus.storage.toml import read_toml

LOOK = "pluribus reproduce"


@dataclass(frozen=True)
class Printed:
    """A figure as a paper prints it."""

    text: str

    @property
    def value(self) -> float | None:
        """As a number, without what stands behind ±; None where the paper has a dash."""
        return None if self.text == "-" else float(self.text.partition("±")[0])


@dataclass(frozen=True)
class PaperRow:
    """A row of a table."""

    name: str
    """As in the paper."""
    figures: Mapping[str, Printed]
    """By column."""
    method: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of this row alone."""


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper."""

    name: str
    title: str
    paper: str
    rows: tuple[PaperRow, ...]
    figures: Mapping[str, str] = field(default_factory=dict)
    """What the paper's columns are called here, in the words of `figures.py`; and columns of ours alone."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of all rows."""
    seeds: int = 3
    paper_runs: int = 1
    """Of how many runs the paper's figures are the mean."""
    baseline: str = ""
    """The row that the others are tested against."""
    needs: str = ""
    """What it takes to run it, as far as that was measured."""
    notes: tuple[str, ...] = ()

    @property
    def data(self) -> str:
        """The data set."""
        return str(self.settings["data"])

    @property
    def rounds(self) -> int:
        """Of the paper, or as many as a table of ours has."""
        return int(self.settings["rounds"])

    @property
    def printed(self) -> bool:
        """Whether the paper prints any figure of this table; all are ours alone where it does not."""
        return any(row.figures for row in self.rows)

    def prints(self, column: str) -> bool:
        """Whether the paper has this column, or it is ours alone."""
        return any(column in row.figures for row in self.rows)

    def chosen(self, only: Iterable[str] = ()) -> tuple[PaperRow, ...]:
        """Rows by their names, in whatever case; all where none is named."""
        by_name = {row.name.lower(): row for row in self.rows}
        for name in only:
            if name.lower() not in by_name:
                raise unknown(f"row of {self.name}", name, [row.name for row in self.rows], LOOK)
        wanted = [name.lower() for name in only] or list(by_name)
        return tuple(row for name, row in by_name.items() if name in wanted)

    def experiment(self, row: PaperRow, **settings: Any) -> Experiment:
        """What a row runs; `settings` are for all rows."""
        return experiment(row.method, **{**self.settings, **row.settings, **settings})


def names() -> list[str]:
    """All tables."""
    files = [file.name for file in resources.files("pluribus.study.reproduce").iterdir()]
    by_number = {name.removesuffix(".toml"): [int(n) for n in re.findall(r"\d+", name)] for name in files}
    return sorted((n for n in by_number if f"{n}.toml" in files), key=lambda n: (n.partition("-")[0], by_number[n], n))


def find(name: str) -> PaperTable:
    """The table of this name."""
    if name not in names():
        raise unknown("table", name, names(), LOOK)
    with resources.as_file(resources.files("pluribus.study.reproduce") / f"{name}.toml") as path:
        return parsed(name, read_toml(path))


def parsed(name: str, written: Mapping[str, Any]) -> PaperTable:
    """A table from what its file says."""
    rows = tuple(
        PaperRow(
            row,
            {column: Printed(text) for column, text in told.get("paper", {}).items()},
            told.get("method", ""),
            told.get("settings", {}),
        )
        for row, told in written["rows"].items()
    )
    table = PaperTable(name=name, **{**written, "rows": rows, "notes": tuple(written.get("notes", ()))})
    if table.baseline and table.baseline not in [row.name for row in rows]:
        raise UnknownNameError(f"the baseline of {name}, {table.baseline}, is none of its rows.")
    return table
