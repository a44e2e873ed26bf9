"""Tables of figures: the same cells in every format, and no name that breaks one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pluribus.internal.tables import Cell, Table, cells, html_of, latex, markdown

TABLE = Table(
    ("method", "mean", "95 % interval"),
    (
        (Cell("my_method|x"), Cell("0.900 ± 0.010", best=True), Cell("-0.010 to +0.020")),
        (Cell("[b]local"), Cell("0.800 ± 0.100"), Cell("<0.001")),
    ),
)


def test_markdown_by_the_letter() -> None:
    assert TABLE.to_markdown() == (
        "| method | mean | 95 % interval |\n"
        "| --- | ---: | ---: |\n"
        "| my\\_method\\|x | **0.900 ± 0.010** | -0.010 to +0.020 |\n"
        "| \\[b\\]local | 0.800 ± 0.100 | &lt;0.001 |\n"
    )


def test_latex_keeps_what_indents_a_row() -> None:
    assert latex("  client") == r"\quad client"


def test_html_by_the_letter() -> None:
    left, right = 'style="text-align: left"', 'style="text-align: right"'
    assert TABLE.to_html() == (
        f"<table><thead><tr><th {left}>method</th><th {right}>mean</th><th {right}>95 % interval</th></tr></thead>"
        f"<tbody><tr><td {left}>my_method|x</td><td {right}><b>0.900 ± 0.010</b></td>"
        f"<td {right}>-0.010 to +0.020</td></tr>"
        f"<tr><td {left}>[b]local</td><td {right}>0.800 ± 0.100</td><td {right}>&lt;0.001</td></tr></tbody></table>"
    )


def test_html_keeps_the_indentation_of_a_row() -> None:
    table = Table(("", "mean"), [[Cell("  <a> b"), Cell("1")]])
    assert '<td style="text-align: left">&nbsp;&nbsp;&lt;a&gt; b</td>' in table.to_html()


def test_html_has_cautions_before_and_notes_after_the_tables() -> None:
    assert html_of([TABLE], ["p < 1"], ["a & b"]) == (
        f"<ul><li>a &amp; b</li></ul>{TABLE.to_html()}<ul><li>p &lt; 1</li></ul>"
    )
    assert html_of([TABLE], []) == TABLE.to_html()


def test_latex_by_the_letter() -> None:
    assert TABLE.to_latex() == (
        "\\begin{tabular}{lrr}\n"
        "\\toprule\n"
        "method & mean & 95 \\% interval \\\\\n"
        "\\midrule\n"
        "my\\_method$|$x & \\textbf{0.900 $\\pm$ 0.010} & $-$0.010 to +0.020 \\\\\n"
        "{[}b{]}local & 0.800 $\\pm$ 0.100 & $<$0.001 \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
    )


def test_the_terminal_shows_names_as_they_are() -> None:
    text = io.StringIO()
    TABLE.show(Console(file=text, width=100))
    rows = [line.split() for line in text.getvalue().splitlines()]
    assert rows[0] == ["method", "mean", "95", "%", "interval"]
    assert rows[2] == ["[b]local", "0.800", "±", "0.100", "<0.001"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\\b", "a\\textbackslash{}b"),
        ("{~^}", "\\{\\textasciitilde{}\\textasciicircum{}\\}"),
        ("$&%#_", "\\$\\&\\%\\#\\_"),
        ("fedl2g-f", "fedl2g-f"),
        ("cnn-16 -1", "cnn-16 $-$1"),
    ],
)
def test_latex_has_no_character_that_means_something(text: str, expected: str) -> None:
    assert latex(text) == expected


def test_markdown_has_none_either() -> None:
    assert markdown("`*_[]<>|#\\") == "\\`\\*\\_\\[\\]&lt;&gt;\\|\\#\\\\"


def test_the_best_is_marked_where_there_is_a_choice() -> None:
    assert [cell.best for cell in cells(["a", "b", "c"], [0.1, None, 0.2], 0.2)] == [False, False, True]
    assert [cell.best for cell in cells(["a", "b"], [0.2, 0.2], 0.2)] == [True, True]
    assert [cell.best for cell in cells(["a", "b"], [None, 0.2], 0.2)] == [False, False]
