"""Tables of figures: the same cells in every format, and no name that breaks one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pluribus.internal.tables import Cell, Table, cells, latex, markdown

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


def test_html_by_the_letter() -> None:
    assert TABLE.to_html() == (
        "<table><thead><tr><th>method</th><th>mean</th><th>95 % interval</th></tr></thead><tbody>"
        "<tr><td>my_method|x</td><td><b>0.900 ± 0.010</b></td><td>-0.010 to +0.020</td></tr>"
        "<tr><td>[b]local</td><td>0.800 ± 0.100</td><td>&lt;0.001</td></tr>"
        "</tbody></table>"
    )


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
