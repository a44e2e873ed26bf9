"""A paper's table: its rows, their common settings, the printed numbers, and our metrics for them.

A table is a TOML file in this folder. Its numbers are text, exactly as the paper prints them. A table without numbers
of a paper tests a claim of the paper on other data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from pluribus.errors import unknown
from pluribus.experiment import Experiment, experiment
from pluribus.storage.toml import read_toml
from pluribus.study.definition import Study
from pluribus.study.rows import Row, choose_rows

LOOK = "pluribus reproduce"


@dataclass(frozen=True)
class Printed:
    """A number exactly as a paper prints it."""

    text: str

    @property
    def value(self) -> float | None:
        """The number without the part after ±, or None if the paper has a dash."""
        return None if self.text == "-" else float(self.text.partition("±")[0])


@dataclass(frozen=True)
class PaperRow(Row):
    """A row of a table: its label is the name in the paper."""

    figures: Mapping[str, Printed] = field(default_factory=dict)  # printed numbers by column


@dataclass(frozen=True, kw_only=True)
class PaperTable(Study):
    """A table of a paper: a study whose printed figures are known."""

    name: str
    paper: str
    rows: tuple[PaperRow, ...]
    figures: Mapping[str, str] = field(default_factory=dict)
    """Our metric (see `measures.py`) for every column of the paper, and for columns that only we have."""
    own: str = ""  # the row of the paper's own method; default: the baseline
    paper_runs: int = 1  # number of runs that the paper's numbers are the mean of
    needs: str = ""  # data and hardware that it needs, and its measured time
    notes: tuple[str, ...] = ()

    @property
    def data(self) -> str:
        return str(self.settings["data"])

    @property
    def rounds(self) -> int:
        """Rounds of the paper, or of our own table."""
        return int(self.settings["rounds"])

    @property
    def printed(self) -> bool:
        """Whether the paper prints any number of this table. If not, all columns are ours alone."""
        return any(row.figures for row in self.rows)

    def prints(self, column: str) -> bool:
        """Whether the paper has this column. If not, it is ours alone."""
        return any(column in row.figures for row in self.rows)

    def chosen(self, only: Iterable[str] = ()) -> tuple[PaperRow, ...]:
        """Rows by name, in any case. Without names, all rows."""
        return choose_rows(self.rows, only, self.name, LOOK)

    def experiment(self, row: PaperRow, **settings: Any) -> Experiment:
        """The experiment of a row. `settings` override those of the table."""
        return experiment(row.method, **{**self.settings, **row.settings, **settings})


def names() -> list[str]:
    """Names of all tables, in the order of papers and numbers."""
    files = [file.name for file in resources.files("pluribus.study.reproduce").iterdir()]
    by_number = {name.removesuffix(".toml"): [int(n) for n in re.findall(r"\d+", name)] for name in files}
    return sorted((n for n in by_number if f"{n}.toml" in files), key=lambda n: (n.partition("-")[0], by_number[n], n))


def find(name: str) -> PaperTable:
    """Load the table of this name."""
    if name not in names():
        raise unknown("table", name, names(), LOOK)
    with resources.as_file(resources.files("pluribus.study.reproduce") / f"{name}.toml") as path:
        return parse(name, read_toml(path))


def _parse_row(
    label: str, method: str = "", settings: Mapping[str, Any] = {}, paper: Mapping[str, str] = {}
) -> PaperRow:
    return PaperRow(label, method, settings, {column: Printed(text) for column, text in paper.items()})


def parse(name: str, written: Mapping[str, Any]) -> PaperTable:
    """Build a table from the contents of its file."""
    rows = tuple(_parse_row(row, **entry) for row, entry in written["rows"].items())
    return PaperTable(name=name, **{**written, "rows": rows, "notes": tuple(written.get("notes", ()))})
