"""A table of figures in the formats that people want it in: on a terminal, as Markdown, as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as RichTable

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "±": r"$\pm$",
    "†": r"$\dagger$",
    "[": "{[}",  # at the beginning of a row it would be an option of the line above
    "]": "{]}",
    **{character: f"\\{character}" for character in "$&%#_"},
}


@dataclass(frozen=True)
class Cell:
    """A figure as it is shown; the best of its column stands out."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of figures. The first column names the row, the others are aligned to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def show(self, console: Console) -> None:
        """Print it, the best in green."""
        table = RichTable(box=None, header_style="bold", pad_edge=True)
        for number, column in enumerate(self.columns):
            table.add_column(escape(column), justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*(f"[green]{escape(cell.text)}[/]" if cell.best else escape(cell.text) for cell in row))
        console.print(table)

    def to_markdown(self) -> str:
        """As a Markdown table, the best in bold."""
        ruler = ["---", *["---:"] * (len(self.columns) - 1)]
        rows = [
            [f"**{markdown(cell.text)}**" if cell.best else markdown(cell.text) for cell in row] for row in self.rows
        ]
        return "".join(_markdown_row(row) for row in (map(markdown, self.columns), ruler, *rows))

    def to_latex(self) -> str:
        """As a tabular of the package booktabs, the best in bold."""
        rows = [
            [rf"\textbf{{{latex(cell.text)}}}" if cell.best else latex(cell.text) for cell in row] for row in self.rows
        ]
        return (
            f"\\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}\n\\toprule\n"
            + _latex_row(map(latex, self.columns))
            + "\\midrule\n"
            + "".join(map(_latex_row, rows))
            + "\\bottomrule\n\\end{tabular}\n"
        )


def show_all(
    heading: str, tables: Iterable[Table], notes: Iterable[str], console: Console, cautions: Iterable[str] = ()
) -> None:
    """Print tables below a heading, and what a reader must know of them; cautions stand above."""
    from pluribus import __version__

    console.print(f"[bold]Pluribus {__version__}[/]   {escape(heading)}\n", soft_wrap=True)
    show_cautions(cautions, console)
    for table in tables:
        table.show(console)
        console.print()
    for note in notes:
        console.print(Padding(escape(note), (0, 0, 0, 1)), style="dim")


def show_cautions(cautions: Iterable[str], console: Console) -> None:
    """Print what a reader must know before the figures."""
    cautions = list(cautions)
    for text in cautions:
        console.print(Padding(escape(text), (0, 0, 0, 1)), style="yellow", highlight=False)
    if cautions:
        console.print()


def markdown_of(tables: Iterable[Table], notes: Iterable[str], cautions: Iterable[str] = ()) -> str:
    """Tables in Markdown, their notes as a list below and cautions as one above."""
    lists = ["".join(f"- {markdown(text)}\n" for text in texts) for texts in (cautions, notes)]
    return "\n".join([*filter(None, lists[:1]), *(table.to_markdown() for table in tables), lists[1]])


def cells(texts: Sequence[str], values: Sequence[float | None], best: float | None) -> list[Cell]:
    """A column of figures; those that equal the best one are marked, where there is something to choose from."""
    known = [value for value in values if value is not None]
    return [Cell(text, len(known) > 1 and value == best) for text, value in zip(texts, values, strict=True)]


def _markdown_row(row: Iterable[str]) -> str:
    return f"| {' | '.join(row)} |\n"


def _latex_row(row: Iterable[str]) -> str:
    return " & ".join(row) + " \\\\\n"


def markdown(text: str) -> str:
    """Text that Markdown leaves as it is.

    >>> print(markdown("my_method|a*b"))
    my\\_method\\|a\\*b
    """
    escaped = re.sub(r"([\\`*_\[\]|#])", r"\\\1", text)
    return escaped.replace("<", "&lt;").replace(">", "&gt;")  # not every Markdown knows a backslash before these two


def latex(text: str) -> str:
    """Text that LaTeX leaves as it is; a minus sign is as long as one.

    >>> print(latex("my_method 50 % -0.02"))
    my\\_method 50 \\% $-$0.02
    """
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)
