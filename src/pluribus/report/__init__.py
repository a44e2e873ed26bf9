"""Reports about run folders: one self-contained web page, and figures for papers.

numbers.py        run folders -> numbers
groups.py         runs that differ only in the seed -> groups
embeddings.py     the features of their models
plots/            groups -> what each section shows
page.py           sections -> one HTML page
figures.py        plots -> PNG and PDF files
watch.py          the page of a running run, and of all runs below a folder
overview.py       the list of these runs
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pluribus.errors import MissingSettingError, PackageError

if TYPE_CHECKING:
    from pluribus.report.embeddings import How
    from pluribus.result import Result
    from pluribus.storage.code import Allow


def write_report(
    runs: Iterable[str | Path | Result],
    out: str | Path = "report.html",
    figures: str | Path | None = None,
    embeddings: How = "pca",
    *,
    allow_code: Allow = False,
) -> list[Path]:
    """Write a page about some runs, and the figures as files if a folder is given. Return the paths of all files.

    `runs` are run folders, folders that contain run folders, or results of runs that have a folder. `allow_code` lets
    them name your own code, which features and numbers of parameters need: all of it, or a list of dotted paths.

    >>> write_report(["runs/a", "runs/b"], out="report.html", figures="figures")     # doctest: +SKIP
    """
    check_packages("jinja2", *(["matplotlib"] if figures else []))
    from pluribus.report.embeddings import embed
    from pluribus.report.numbers import read_runs
    from pluribus.report.page import page
    from pluribus.report.plots import sections
    from pluribus.result import Result
    from pluribus.storage.files import check_writable, write_text

    check_writable(Path(out))
    several = [runs] if isinstance(runs, str | Path | Result) else runs
    read = read_runs([_find_folder(one) if isinstance(one, Result) else one for one in several], allow_code)
    shown = sections(read, *embed(read, embeddings, allow_code))
    write_text(Path(out), page(read, shown))
    if figures is None:
        return [Path(out)]
    from pluribus.report.figures import write_figures

    return [Path(out), *write_figures(shown, Path(figures))]


def _find_folder(result: Result) -> Path:
    if result.folder is None:
        raise MissingSettingError(f"the run of {result.method} has no folder to report on: run it with --out.")
    return result.folder


def check_packages(*names: str) -> None:
    """Raise an error if a package of the extra is missing."""
    from importlib.util import find_spec

    if missing := [name for name in names if find_spec(name) is None]:
        raise PackageError(f"reports need {' and '.join(missing)}: pip install 'pluribus[report]'.")
