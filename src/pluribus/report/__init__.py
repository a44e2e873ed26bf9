"""Reports: run folders as one web page that needs nothing from elsewhere, and as figures for papers.

numbers.py        run folders -> plain numbers
embeddings.py     the features of their models
plots.py          numbers -> what each plot shows
page.py           plots -> one HTML page
figures.py        plots -> PNG and PDF files
watch.py          the page of a run that goes on
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pluribus.errors import PackageError

if TYPE_CHECKING:
    from pluribus.report.embeddings import How


def write_report(
    runs: Iterable[str | Path],
    out: str | Path = "report.html",
    figures: str | Path | None = None,
    embeddings: How = "pca",
) -> list[Path]:
    """Write a page about these runs, and perhaps their figures as files; returns all files that were written.

    `runs` are run folders, or folders that hold some.

    >>> write_report(["runs/a", "runs/b"], out="report.html", figures="figures")     # doctest: +SKIP
    """
    check_packages("jinja2", "plotly", *(["matplotlib"] if figures else []))
    from pluribus.report.embeddings import embed
    from pluribus.report.numbers import read_runs
    from pluribus.report.page import page
    from pluribus.report.plots import sections
    from pluribus.storage.files import write_text

    read = read_runs([runs] if isinstance(runs, str | Path) else runs)
    shown = sections(read, *embed(read, embeddings))
    write_text(Path(out), page(read, shown))
    if figures is None:
        return [Path(out)]
    from pluribus.report.figures import write_figures

    return [Path(out), *write_figures(shown, Path(figures))]


def check_packages(*names: str) -> None:
    """Refuse where a package of the extra is missing."""
    from importlib.util import find_spec

    if missing := [name for name in names if find_spec(name) is None]:
        raise PackageError(f"reports need {' and '.join(missing)}: pip install 'pluribus[report]'.")
