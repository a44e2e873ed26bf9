"""A comparison as people use it: tidy rows, files, a figure, a few lines in a notebook."""

from __future__ import annotations

import html
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import pluribus
from conftest import new_folder, tiny
from pluribus.errors import FileAccessError, FormatError, PackageError
from pluribus.evaluate import choose
from pluribus.internal.frames import make_frame
from pluribus.study.standings import Comparison, Run
from pluribus.study.tidy import tidy
from refusals import refused


@pytest.fixture(scope="module")
def found() -> Comparison:
    settings = tiny(models="mlp-64", clients=3, rounds=3, out=new_folder())
    return pluribus.compare({"a&b": "local", "gh": "fedgh"}, seeds=2, jobs=1, progress=False, **settings)


@pytest.fixture
def _without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # an import of it fails


@pytest.mark.usefixtures("_without_pandas")
def test_a_frame_has_one_row_per_value(found: Comparison) -> None:
    rows = found.frame()
    assert list(rows[0]) == ["label", "seed", "round", "client", "view", "split", "metric", "value"]
    views = {"a&b": {"after"}, "gh": {"after", "before"}}
    assert {label: {row["view"] for row in rows if row["label"] == label} for label in views} == views
    assert len(rows) == (1 + 2) * 2 * 3 * 3  # views, seeds, clients, metrics
    run = found.runs["gh"][1]
    wanted = {"label": "gh", "seed": 1, "client": 2, "view": "before", "split": "test", "metric": "accuracy"}
    (one,) = [row for row in rows if wanted.items() <= row.items()]
    chosen = choose(run.history, "before")[2]
    assert (one["round"], one["value"]) == (chosen.selected_round, chosen.selected["test"])
    values = [
        row["value"] for row in rows if {**wanted, "view": "after", "client": row["client"]}.items() <= row.items()
    ]
    assert sum(values) / 3 == pytest.approx(run.scores["mean"])


def test_the_selected_round_is_that_of_validation() -> None:
    """Round 0 is better on validation data, round 1 on test data."""
    scores = {"val": 0.9, "test": 0.7}, {"val": 0.5, "test": 0.8}
    history = [{"round": t, "clients": {"3": {"after": metrics}}} for t, metrics in enumerate(scores)]
    run = Run("local", 5, None, {"summary": {"after": {}}}, history)
    where = {"label": "a", "seed": 5, "round": 0, "client": 3, "view": "after"}
    assert list(tidy({"a": [run]})) == [
        {**where, "split": "val", "metric": "accuracy", "value": 0.9},
        {**where, "split": "test", "metric": "accuracy", "value": 0.7},
    ]


@pytest.mark.usefixtures("_without_pandas")
def test_a_frame_may_have_every_round(found: Comparison) -> None:
    rows = found.frame(rounds=True)
    assert len(rows) == 3 * (1 + 2) * 2 * 3 * 3
    wanted = {"label": "gh", "seed": 0, "round": 1, "client": 0, "view": "after"}
    metrics = {(row["split"], row["metric"]): row["value"] for row in rows if wanted.items() <= row.items()}
    told = found.runs["gh"][0].history[1]["clients"]["0"]["after"]
    assert metrics == {("val", "accuracy"): told["val"], ("test", "accuracy"): told["test"]} | {
        ("test", "loss"): told["test_loss"]
    }


def test_pandas_makes_the_frame_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pandas:
        @staticmethod
        def DataFrame(rows: Any) -> Any:
            return "frame", rows

    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    assert make_frame([{"a": 1}]) == ("frame", [{"a": 1}])


@pytest.mark.parametrize("kind", ["csv", "latex", "markdown"])
def test_text_is_returned_and_written(found: Comparison, kind: str, tmp_path: Path) -> None:
    write = getattr(found, f"to_{kind}")
    text = write()
    assert write(tmp_path / "table") == text == (tmp_path / "table").read_text()
    assert "gh" in text
    with refused(FileAccessError, tmp_path / "no" / "table"):
        write(tmp_path / "no" / "table")


def test_a_plot_has_a_line_and_a_band_per_row(found: Comparison, tmp_path: Path) -> None:
    axes = found.plot()
    means = [sum(run.history[1]["mean"]["after"]["test"]["mean"] for run in runs) / 2 for runs in found.runs.values()]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 2, 3]] * 2
    assert [line.get_ydata()[1] for line in axes.lines] == pytest.approx(means)
    assert len(axes.collections) == 2
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a&b", "gh"]
    assert found.plot(tmp_path / "a.png", ax=axes) is axes
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with refused(FormatError, "a.jpeg", ".png"):
        found.plot(tmp_path / "a.jpeg")
    with refused(FileAccessError, tmp_path / "no"):
        found.plot(tmp_path / "no" / "a.png")


def test_one_evaluated_round_has_error_bars() -> None:
    once = pluribus.compare(
        ["local", "fedgh"], seeds=2, jobs=1, progress=False, **tiny(models="mlp-64", clients=2, evaluate_every=2)
    )
    axes = once.plot()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["local", "fedgh"]
    heights = [container.lines[0].get_ydata()[0] for container in axes.containers]
    assert heights == pytest.approx([row.scores["mean"].mean for row in once.rows])


def test_without_matplotlib_there_is_a_sentence(found: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pluribus.internal.axes.find_spec", lambda name: None)
    with refused(PackageError, "Matplotlib", "pluribus[report]"):
        found.plot()
    assert importlib.util.find_spec("matplotlib") is not None


def test_a_notebook_shows_a_small_table(found: Comparison) -> None:
    page = found._repr_html_()
    assert page.count("<table>") == 2
    assert ">a&amp;b</td>" in page
    assert "<li>±: standard deviation over 2 seeds (0 to 1).</li>" in page
    told = [note for note in found.notes if not note.startswith("Not every seed reached")]  # its table is left out
    assert [html.unescape(note) for note in re.findall("<li>(.*?)</li>", page)] == told
    assert "<script" not in page
    shown = repr(found)
    assert shown.splitlines()[0] == "Comparison of 2 rows over 2 seeds, mean test accuracy"
    assert shown.splitlines()[2].startswith("gh   0.")
    assert len(shown) < 200
