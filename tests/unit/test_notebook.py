"""The progress bar of a notebook: text that is replaced, without ipywidgets and without a warning."""

from __future__ import annotations

import builtins
import io
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

import pluribus
from conftest import new_folder, tiny
from pluribus.study.board import Board
from pluribus.study.parallel import Failure
from pluribus.terminal import NotebookBar, Progress


class Notebook:
    """IPython's part in a cell: what is displayed, and what takes its place."""

    def __init__(self) -> None:
        self.shown: list[list[str]] = []

    def display(self, *what: Any, raw: bool = False, display_id: bool = False, **_: Any) -> Any:
        if not raw:  # rich prints notes this way
            return None
        self.shown.append([what[0]["text/plain"]])
        return _Handle(self.shown[-1]) if display_id else None


class _Handle:
    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def update(self, what: dict[str, str], raw: bool) -> None:
        assert raw
        self._texts.append(what["text/plain"])


class ZMQInteractiveShell:
    """The class by which a notebook is known."""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made, package, module = Notebook(), ModuleType("IPython"), ModuleType("IPython.display")
    vars(module)["display"] = made.display
    vars(package)["display"] = module
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr("pluribus.terminal.NOTEBOOK_SECONDS", 0.0)
    return made


def test_a_run_replaces_one_line_in_its_cell(notebook: Notebook, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        result = pluribus.run("local", out=new_folder(), **tiny(rounds=3, models="mlp-64"))
    (texts,) = notebook.shown
    assert all(any(f"{done}/3" in text for text in texts) for done in range(4))
    assert f"{result.history[-1]['mean']['after']['test']['mean']:.3f}" in texts[-1]
    assert texts[-1].startswith(" local")
    assert "\n" not in texts[-1]
    assert capfd.readouterr() == ("", "")


def test_fast_rounds_are_not_all_shown_but_the_last_one_is(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pluribus.terminal.NOTEBOOK_SECONDS", 1e9)
    pluribus.run("local", out=new_folder(), **tiny(rounds=4, models="mlp-64", clients=2))
    (texts,) = notebook.shown
    assert len(texts) < 5
    assert "4/4" in texts[-1]


def test_a_search_shows_its_progress(notebook: Notebook) -> None:
    (found,) = pluribus.tune("local", trials=2, **tiny(rounds=1, models="mlp-64", clients=2))
    (texts,) = notebook.shown
    assert any("trial 1" in text for text in texts)
    assert f"local 2 of 2, best {found.score:.3f}" in texts[-1]


def test_a_comparison_shows_a_line_per_run(notebook: Notebook) -> None:
    folder = Path(new_folder())
    experiments = [pluribus.Experiment(method="local", out=str(folder / name)) for name in "ab"]
    with Board(experiments, folder) as board:
        board.finish(experiments[1].out or "", Failure("error", "it failed."))
    (texts,) = notebook.shown
    assert [line.split()[0] for line in texts[-1].splitlines()] == ["a", "b"]
    assert "failed" in texts[-1].splitlines()[1]
    with Board(experiments, folder, shown=False):
        pass
    assert len(notebook.shown) == 1


def test_a_terminal_keeps_its_bar() -> None:
    assert not isinstance(Progress(Console(file=io.StringIO(), force_terminal=True)).bar, NotebookBar)
