"""Tables of results, printed on a terminal or written as Markdown, LaTeX or HTML."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as RichTable

from pluribus.storage.files import write_text

_LATEX = {
    **{character: f"\\{character}" for character in "$&%#_{}"},
    **{character: f"${character}$" for character in "<>|"},
    **{character: f"{{{character}}}" for character in "[]"},  # LaTeX reads [ at the start of a row as an option
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "†": r"$\dagger$",
}


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and whether it is the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells. The first column names the row, the others are right-aligned."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]

    def show(self, console: Console) -> None:
        """Print the table, with the best cells in green."""
        table = RichTable(box=None)
        for number, column in enumerate(self.columns):
            table.add_column(escape(column), justify="right" if number else "left")
        for row in self._texts(escape, "[green]{}[/]"):
            table.add_row(*row)
        console.print(table)

    def split(self, width: int) -> list[Table]:
        """Tables that fit a width, with some of the columns each. The first column is in all of them."""
        widths = [
            max(len(column), *(len(row[i].text) for row in self.rows)) + 2 for i, column in enumerate(self.columns)
        ]
        parts: list[list[int]] = [[0]]
        for number in range(1, len(widths)):
            if len(parts[-1]) > 1 and sum(widths[i] for i in parts[-1]) + widths[number] > width:
                parts.append([0])
            parts[-1].append(number)
        return [Table(tuple(self.columns[i] for i in p), [[row[i] for i in p] for row in self.rows]) for p in parts]

    def _texts(self, escape: Callable[[str], str], best: str) -> list[list[str]]:
        """The escaped texts of all rows. `best` is the format of the best cells."""
        return [[best.format(escape(one.text)) if one.best else escape(one.text) for one in row] for row in self.rows]

    def to_markdown(self) -> str:
        """Write a Markdown table, with the best cells in bold."""
        ruler = ["---", *["---:"] * (len(self.columns) - 1)]
        rows = self._texts(markdown, "**{}**")
        return "".join(f"| {' | '.join(row)} |\n" for row in (map(markdown, self.columns), ruler, *rows))

    def to_latex(self) -> str:
        """Write a tabular for the package booktabs, with the best cells in bold."""
        rows = [" & ".join(row) + " \\\\\n" for row in self._texts(latex, r"\textbf{{{}}}")]
        heading = " & ".join(map(latex, self.columns)) + " \\\\\n"
        start = f"\\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}\n\\toprule\n"
        return f"{start}{heading}\\midrule\n{''.join(rows)}\\bottomrule\n\\end{{tabular}}\n"

    def to_html(self) -> str:
        """Write an HTML table, with the best cells in bold."""
        body = "".join(_html_row("td", row) for row in self._texts(_html, "<b>{}</b>"))
        heading = _html_row("th", list(map(_html, self.columns)))
        return f"<table><thead>{heading}</thead><tbody>{body}</tbody></table>"


def _html_row(tag: str, texts: Sequence[str]) -> str:
    """A row of cells. Each says its alignment, because notebooks differ in theirs."""
    sides = ["left", *["right"] * (len(texts) - 1)]
    cells = (f'<{tag} style="text-align: {side}">{text}</{tag}>' for side, text in zip(sides, texts, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


def _html(text: str) -> str:
    """Escape text for HTML, with the spaces that indent it."""
    indent = len(text) - len(text.lstrip(" "))
    return "&nbsp;" * indent + html.escape(text.lstrip(" "))


def print_tables(
    heading: str, tables: Iterable[Table], notes: Iterable[str], console: Console, cautions: Iterable[str] = ()
) -> None:
    """Print a heading, cautions, tables and notes."""
    from pluribus import __version__

    console.print(f"[bold]Pluribus {__version__}[/]   {escape(heading)}\n", soft_wrap=True)
    show_cautions(cautions, console)
    for table in tables:
        table.show(console)
        console.print()
    for note in notes:
        console.print(Padding(escape(note), (0, 0, 0, 1)), style="dim")


def show_cautions(cautions: Iterable[str], console: Console) -> None:
    """Print what a reader must know before the results."""
    cautions = list(cautions)
    for text in cautions:
        console.print(Padding(escape(text), (0, 0, 0, 1)), style="yellow", highlight=False)
    if cautions:
        console.print()


def markdown_of(tables: Iterable[Table], notes: Iterable[str], cautions: Iterable[str] = ()) -> str:
    """Write cautions, tables and notes in Markdown. Cautions and notes are lists."""
    lists = ["".join(f"- {markdown(text)}\n" for text in texts) for texts in (cautions, notes)]
    return "\n".join([*filter(None, lists[:1]), *(table.to_markdown() for table in tables), lists[1]])


def latex_of(tables: Iterable[Table], notes: Iterable[str], cautions: Iterable[str] = ()) -> str:
    """Write tables for LaTeX. Cautions and notes are comments."""
    comments = ["".join(f"% {text}\n" for text in texts) for texts in (cautions, notes)]
    return comments[0] + "\n".join([*(table.to_latex() for table in tables), comments[1]])


def html_of(tables: Iterable[Table], notes: Iterable[str], cautions: Iterable[str] = ()) -> str:
    """Write cautions, tables and notes in HTML. Cautions and notes are lists."""
    lists = ["".join(f"<li>{html.escape(text)}</li>" for text in texts) for texts in (cautions, notes)]
    before, after = (f"<ul>{items}</ul>" if items else "" for items in lists)
    return before + "".join(table.to_html() for table in tables) + after


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as CSV, with a column for every name in any of them."""
    columns, text = dict.fromkeys(name for row in rows for name in row), io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_to(path: str | Path | None, text: str) -> str:
    """Return a text, and write it to a file if there is a path."""
    if path is not None:
        write_text(Path(path), text)
    return text


def cells(texts: Sequence[str], values: Sequence[float | None], best: float | None) -> list[Cell]:
    """Make a column of cells. Mark the cells that equal the best value if there are at least two values."""
    known = [value for value in values if value is not None]
    return [Cell(text, len(known) > 1 and value == best) for text, value in zip(texts, values, strict=True)]


def markdown(text: str) -> str:
    """Escape text for Markdown.

    >>> print(markdown("my_method|a*b"))
    my\\_method\\|a\\*b
    """
    escaped = re.sub(r"([\\`*_\[\]|#])", r"\\\1", text)
    return escaped.replace("<", "&lt;").replace(">", "&gt;")  # not every Markdown accepts a backslash before these two


def latex(text: str) -> str:
    """Escape text for LaTeX. A minus before a number becomes a real minus sign.

    >>> print(latex("my_method 50 % -0.02"))
    my\\_method 50 \\% $-$0.02

    Spaces that indent a text stay.
    """
    indent = (len(text) - len(text.lstrip(" "))) // 2
    escaped = "".join(_LATEX.get(character, character) for character in text.lstrip(" "))
    return r"\quad " * indent + re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)
