"""`pluribus study`: rows over axes, one table, one correction for all tests, runs that are shared, kept or not."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_comparison import comparison as compared
from test_comparison import made_up

import pluribus
from conftest import few_digits, new_folder, tiny
from pluribus.errors import (
    ConflictError,
    FileAccessError,
    FormatError,
    MismatchError,
    MissingSettingError,
    OtherRunError,
    PluribusError,
    RangeError,
    UnfinishedError,
    UnknownNameError,
)
from pluribus.methods.fedgh import FedGH
from pluribus.study.definition import Study, to_study
from pluribus.study.merged import StudyResult
from pluribus.study.reproduce import paper
from pluribus.study.rows import Row
from pluribus.study.significance import holm
from refusals import refused
from terminal import Terminal

pytestmark = pytest.mark.xdist_group("study")  # one process makes what tests share

ROWS = {"alone": "local", "class": FedGH(), "client": ("fedgh", {"server_step": "client"})}
AXES = {"alpha": [1.0, 10.0], "server_lr": [0.01, 0.5]}


def study_tiny(source: Any = ROWS, **settings: Any) -> StudyResult:
    settings = {"seeds": 2, "models": "mlp-64", "clients": 2, "rounds": 1, "jobs": 1} | settings
    return pluribus.study(source, progress=False, **tiny(**settings))


@pytest.fixture(scope="module")
def found() -> StudyResult:
    return study_tiny(axes=AXES, out=new_folder())


# ---- points and runs -------------------------------------------------------------------------------------------------


def test_every_combination_is_a_point(found: StudyResult) -> None:
    assert [point.label for point in found.points] == [
        "alpha=1.0, server_lr=0.01",
        "alpha=1.0, server_lr=0.5",
        "alpha=10.0, server_lr=0.01",
        "alpha=10.0, server_lr=0.5",
    ]
    told = [[(e.alpha, e.hyper.get("server_lr")) for e in one.experiments.values()] for one in found.comparisons]
    assert told[1] == [(1.0, None), (1.0, 0.5), (1.0, 0.5)]
    assert told[2] == [(10.0, None), (10.0, 0.01), (10.0, 0.01)]
    assert [one.hyper.get("server_step") for one in found.comparisons[3].experiments.values()] == [
        None,
        "class",
        "client",
    ]


def test_a_row_that_an_axis_does_not_change_runs_once(found: StudyResult) -> None:
    assert found.folder is not None
    runs = {str(path.parent.relative_to(found.folder)) for path in found.folder.glob("*/*/result.json")}
    alone = {f"alpha={alpha},server_lr=0.01/alone-{seed}" for alpha in ("1.0", "10.0") for seed in (0, 1)}
    assert {run for run in runs if "alone" in run} == alone
    assert len(runs) == 4 + 2 * 4 * 2
    one, other = (found.comparisons[i].runs["alone"] for i in (0, 1))
    assert one == other


def test_a_point_is_an_ordinary_comparison(found: StudyResult) -> None:
    rows = {**ROWS, "class": FedGH(server_lr=0.5), "client": FedGH(server_lr=0.5, server_step="client")}
    settings = tiny(models="mlp-64", clients=2, rounds=1, alpha=10.0)
    alone = pluribus.compare(rows, seeds=2, jobs=1, progress=False, **settings)
    for label, runs in alone.runs.items():
        for mine, other in zip(found.comparisons[3].runs[label], runs, strict=True):
            assert mine.result["summary"] == other.result["summary"]


def records(found: StudyResult) -> Any:
    """The rows of its frame, with pandas or without."""
    frame = found.frame()
    return frame if isinstance(frame, list) else frame.to_dict("records")


def test_the_same_command_goes_on(found: StudyResult) -> None:
    out = Path(shutil.copytree(str(found.folder), new_folder(), dirs_exist_ok=True))
    (out / "study.json").unlink()
    shutil.rmtree(out / "alpha=10.0,server_lr=0.5" / "class-1")
    (out / "alpha=1.0,server_lr=0.01" / "alone-0" / "result.json").unlink()
    kept = (out / "alpha=1.0,server_lr=0.01" / "class-0" / "metrics.jsonl").read_text()
    again = study_tiny(axes=AXES, out=out)
    assert records(again) == records(found)
    assert (out / "alpha=1.0,server_lr=0.01" / "class-0" / "metrics.jsonl").read_text() == kept
    assert json.loads((out / "study.json").read_text())["labels"] == ["alone", "class", "client"]
    with refused(OtherRunError, "alone-0 ", "--lr", "--out"):
        study_tiny(axes=AXES, out=out, lr=0.1)


def test_without_out_nothing_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one = study_tiny(["local"], axes={"alpha": [1.0, 10.0]}, seeds=1)
    assert (one.folder, one.comparisons[1].folder, one.to_json()["folder"]) == (None, None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_the_finished_points(tmp_path: Path) -> None:
    with refused(UnfinishedError, "lr=1e+30/class-0 failed", f"--out {tmp_path}") as caught:
        settings = {"clients": 2, "models": "mlp-64", "rounds": 1, "data": few_digits(), "device": "cpu"}
        rows, axes = {"a": "local", "class": "fedgh"}, {"lr": [0.05, 1e30]}
        pluribus.study(rows, axes=axes, seeds=1, out=tmp_path, jobs=1, progress=False, **settings)
    assert [point.label for point in caught.value.partial.points] == ["lr=0.05"]
    assert not (tmp_path / "study.json").exists()


# ---- one table, one correction ---------------------------------------------------------------------------------------


def test_the_table_has_rows_and_points(found: StudyResult) -> None:
    table, against = found.tables
    assert table.columns == ("row", *(point.label for point in found.points))
    assert [row[0].text for row in table.rows] == ["alone", "class", "client"]
    for number, comparison in enumerate(found.comparisons, 1):
        assert [row[number].text for row in table.rows] == [str(row.scores["mean"]) for row in comparison.rows]
        best = max(row.scores["mean"].mean for row in comparison.rows)
        assert [row[number].best for row in table.rows] == [row.scores["mean"].mean == best for row in comparison.rows]
    assert [row[0].text for row in against.rows][:4] == [
        found.points[0].label,
        "  class",
        "  client",
        found.points[1].label,
    ]


def test_p_values_are_corrected_for_all_points(found: StudyResult) -> None:
    raw = [one.difference.p for comparison in found.comparisons for one in comparison.differences if one.difference]
    assert len(raw) == 8
    assert [one.p for some in found.differences for one in some] == holm(raw)
    told = found.to_json()["points"]
    assert [one["p_holm"] for point in told for one in point["differences"]] == holm(raw)
    lines = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [float(line["p_holm"]) for line in lines if line["p_holm"]] == holm(raw)
    assert any("corrected for 8 tests" in note for note in found.notes)


def test_a_correction_by_hand() -> None:
    """Six clients that are all better: 2 of 64 patterns of signs are as far from 0. Two points are two tests."""
    base = [0.5 + 0.01 * k for k in range(6)]
    runs = {"base": (made_up("base", 0, [base]),), "a": (made_up("a", 0, [[one + 0.1 for one in base]]),)}
    described = to_study({"base": "local", "a": "local"}, axes={"alpha": [1.0, 2.0]}, seeds=1)
    one = compared(runs, "base")
    assert [(other.p, other.verdict) for other in one.differences] == [(2 / 64, "better")]
    both = StudyResult(described, tuple(described.points), (one, one), None)
    assert [[(other.p, other.verdict) for other in some] for some in both.differences] == [
        [(4 / 64, "no difference shown")],
        [(4 / 64, "no difference shown")],
    ]
    assert [row[-2].text for row in both.tables[1].rows] == ["", "0.062", "", "0.062"]


def test_different_views_have_no_best_and_no_test() -> None:
    one = study_tiny(["local", "fedavg"], axes={"alpha": [1.0, 10.0]}, seeds=1, view="before")
    assert not any(cell.best for row in one.tables[0].rows for cell in row)
    assert {compared.verdict for some in one.differences for compared in some} == {"different views"}


def test_it_fits_a_narrow_terminal(found: StudyResult) -> None:
    for width in (80, 60):
        console = Console(file=(text := io.StringIO()), width=width, highlight=False)
        replace(found, folder=None).table(console)
        lines = text.getvalue().splitlines()
        assert max(map(len, lines[1:])) <= width
        shown = [cell.text for row in found.tables[0].rows for cell in row[1:]]
        assert all(figure in text.getvalue() for figure in shown)
        assert sum(line.startswith(" row ") for line in lines) == (2 if width == 80 else 4)


def test_without_axes_it_is_a_comparison() -> None:
    one = study_tiny({"a": "local", "b": "fedgh"}, out=(out := new_folder()))
    assert (Path(out) / "b-1" / "result.json").exists()
    assert [point.label for point in one.points] == [""]
    assert [table.to_markdown() for table in one.tables] == [t.to_markdown() for t in one.comparisons[0].tables]
    assert one.to_json()["axes"] == {}


# ---- files and figures -----------------------------------------------------------------------------------------------


def test_a_frame_begins_with_the_settings_of_the_point(found: StudyResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = found.frame()
    assert list(rows[0])[:5] == ["alpha", "server_lr", "label", "seed", "round"]
    assert {(row["alpha"], row["server_lr"]) for row in rows} == {(1.0, 0.01), (1.0, 0.5), (10.0, 0.01), (10.0, 0.5)}
    assert len(rows) == sum(len(one.frame()) for one in found.comparisons)


@pytest.mark.parametrize("kind", ["csv", "latex", "markdown"])
def test_text_is_returned_and_written(found: StudyResult, kind: str, tmp_path: Path) -> None:
    write = getattr(found, f"to_{kind}")
    assert write(tmp_path / "table") == write() == (tmp_path / "table").read_text()
    assert "client" in write()


def test_a_notebook_shows_a_small_table(found: StudyResult) -> None:
    page = found._repr_html_()
    assert page.count("<table>") == 2
    assert page.count("<li>") == len(found.notes) > 0
    assert len(repr(found).splitlines()) == 5


def test_a_figure_has_a_line_per_row_over_the_first_numeric_axis(found: StudyResult) -> None:
    axes = found.plot()
    assert axes.get_xlabel() == "alpha"
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["alone", *(f"{row}, server_lr={lr}" for lr in (0.01, 0.5) for row in ("class", "client"))]
    assert list(axes.lines[0].get_xdata()) == [1.0, 10.0]
    means = [found.comparisons[i].rows[0].scores["mean"].mean for i in (0, 2)]
    assert list(axes.lines[0].get_ydata()) == pytest.approx(means)
    assert len(axes.collections) == 5  # bands


def test_words_are_places_of_a_figure() -> None:
    axes = study_tiny(["local"], axes={"partition": ["iid", "dirichlet"]}, seeds=1).plot()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["partition=iid", "partition=dirichlet"]


# ---- what a study is made of -----------------------------------------------------------------------------------------


def test_a_file_a_dict_and_arguments_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(
        'title = "mine"\nseeds = 4\nbaseline = "b"\n[settings]\nclients = 3\nserver_lr = 0.2\n[settings.models]\n'
        '0 = "mlp-64"\n[axes]\nalpha = [0.1, 1]\n[rows.a]\nmethod = "local"\nlr = 0.1\n[rows.b]\nmethod = "fedgh"\n'
        'settings = {server_step = "client"}\n'
    )
    read = to_study(str(file))
    assert read.rows == (Row("a", "local", {"lr": 0.1}), Row("b", "fedgh", {"server_step": "client"}))
    assert read.settings == {"clients": 3, "server_lr": 0.2, "models": {0: "mlp-64"}}
    rows = {"a": ("local", {"lr": 0.1}), "b": {"method": "fedgh", "server_step": "client"}}
    written = {"title": "mine", "seeds": 4, "baseline": "b", "settings": dict(read.settings), "axes": dict(read.axes)}
    assert to_study(written | {"rows": rows}) == read
    given = to_study(rows, axes={"alpha": [0.1, 1]}, seeds=4, baseline="b", settings=dict(read.settings))
    assert replace(given, title="mine") == read
    changed = to_study(file, seeds=1, settings={"alpha": 0.5, "clients": 5}).choose(["A"])
    assert (changed.seeds, changed.axes, changed.settings["clients"]) == (1, {}, 5)
    assert (changed.labels, changed.baseline) == (["a"], "")  # what a row is tested against is not there any more


def test_a_paper_table_is_a_study() -> None:
    table = paper.find("claim-fedl2g-ablation")
    assert isinstance(table, Study)
    assert table.baseline == "FedL2G-l (frozen)"
    table.check()
    assert [point.label for point in table.points] == [""]


def test_the_example_is_the_one_on_its_page() -> None:
    root = Path(__file__).resolve().parents[2]
    example = (root / "examples" / "study.toml").read_text()
    assert f"```toml\n{example}```" in (root / "docs" / "study.md").read_text()
    assert to_study(root / "examples" / "study.toml").labels == ["alone", "class", "client"]


def test_values_of_an_axis_have_different_words() -> None:
    study = to_study(["local"], axes={"data": ["a/x.npz", "b/x.npz"], "models": [["mlp-64", "cnn-16"], "small"]})
    assert [point.label for point in study.points][:2] == ["data=x-0, models=mlp-64+cnn-16", "data=x-0, models=small"]
    odd = to_study(["local"], axes={"mass": ["8:1:1"]})
    assert [(point.label, point.folder) for point in odd.points] == [("mass=8:1:1", "mass=8_1_1")]
    for values in (["8:1:1", "8_1_1"], ["x", "X"], ["x", "x", "x-1"], ["a" * 200, "a" * 201]):
        points = to_study(["local"], axes={"mass": values}).points
        assert len({point.folder.lower() for point in points}) == len({point.label for point in points}) == len(values)
        assert max(len(point.folder) for point in points) <= 100
    arrays = to_study(["local"], axes={"alpha": np.array([0.5, 2.0]), "clients": range(2, 4)})
    assert [dict(point.settings) for point in arrays.points][:2] == [
        {"alpha": 0.5, "clients": 2},
        {"alpha": 0.5, "clients": 3},
    ]


def test_an_axis_of_rows_that_are_left_out_is_left_out() -> None:
    study = to_study({"a": "local", "b": "fedgh"}, axes={"alpha": [1.0], "server_lr": [0.1, 0.2]})
    assert list(study.choose(["a"]).axes) == ["alpha"]
    assert list(study.choose(["b"]).axes) == ["alpha", "server_lr"]


WRITTEN: dict[str, Any] = {
    "rows": {"a": {"method": "fedgh"}, "b": {"method": "local"}},
    "settings": {"data": few_digits(), "clients": 2, "rounds": 1},
    "seeds": 1,
}
BAD: dict[str, tuple[dict[str, Any], type[PluribusError], list[object]]] = {
    "key": ({"seedss": 3}, UnknownNameError, ["'seedss'", "'seeds'"]),
    "seeds": ({"seeds": "many"}, FormatError, ["--seeds", "'many'"]),
    "no seed": ({"seeds": 0}, RangeError, ["--seeds", 1, 0]),
    "view": ({"view": "head"}, UnknownNameError, ["--view", "'head'"]),
    "baseline": ({"baseline": "c"}, UnknownNameError, ["--baseline", "a, b", " c"]),
    "no rows": ({"rows": {}}, MissingSettingError, ["method"]),
    "method": ({"rows": {"a": {"method": "fedg"}}}, UnknownNameError, ["'fedg'", "'fedgh'"]),
    "setting of a row": ({"rows": {"a": {"method": "fedgh", "servr_lr": 1}}}, UnknownNameError, ["'servr_lr'"]),
    "setting": ({"settings": {"cliens": 3}}, UnknownNameError, ["'cliens'", "'clients'"]),
    "value": ({"settings": {"clients": "x"}}, FormatError, ["--clients", "'x'"]),
    "seed as setting": ({"settings": {"seed": 3}}, ConflictError, ["seed "]),
    "axis": ({"axes": {"alpa": [1]}}, UnknownNameError, ["'alpa'", "'alpha'"]),
    "hyper of nobody": ({"axes": {"mu": [1]}}, UnknownNameError, ["'mu'"]),
    "no list": ({"axes": {"alpha": 0.1}}, FormatError, ["alpha", "list", "0.1"]),
    "empty": ({"axes": {"alpha": []}}, FormatError, ["alpha", "list"]),
    "word": ({"axes": {"partition": "iid"}}, FormatError, ["partition", "'iid'"]),
    "seed as axis": ({"axes": {"seed": [1, 2]}}, ConflictError, ["seed "]),
    "twice": ({"axes": {"clients": [1, 2]}}, ConflictError, ["clients"]),
    "of each row": (
        {"axes": {"server_lr": [1]}, "rows": {"a": ("fedgh", {"server_lr": 1})}},
        ConflictError,
        ["server_lr"],
    ),
    "last value": ({"axes": {"alpha": [1.0, -1.0]}}, RangeError, ["--alpha", -1.0]),
    "needs": ({"axes": {"models": ["mlp-64", "small"]}, "rows": {"a": "fedavg"}}, MismatchError, ["fedavg"]),
    "no table": ({"axes": [1]}, FormatError, ["axes", "[axes]"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_study_is_checked_wholly_before_anything_runs(case: str, tmp_path: Path) -> None:
    change, kind, facts = BAD[case]
    with refused(kind, *facts):
        pluribus.study({**WRITTEN, **change}, jobs=1, progress=False, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(
        f'title = "mine"\nseeds = 2\n[settings]\ndata = "{few_digits()}"\nclients = 2\nrounds = 2\nmodels = "mlp-64"\n'
        'lr = 0.05\ndevice = "cpu"\n[axes]\nalpha = [1.0, 10.0]\n[rows.alone]\nmethod = "local"\n'
        '[rows.gh]\nmethod = "fedgh"\n'
    )
    return path


def test_the_command_prints_saves_and_writes(terminal: Terminal, file: Path, tmp_path: Path) -> None:
    names = {"--markdown": "a.md", "--csv": "a.csv", "--latex": "a.tex", "--plot": "a.png"}
    where = [word for flag, name in names.items() for word in (flag, tmp_path / name)]
    argv = ["study", file, "--rounds", "1", "--jobs", "1", "--out", tmp_path / "runs", "--track", "tensorboard"]
    answer = terminal(*argv, *where)
    assert answer.code == 0
    assert "study   mine   2 points   2 seeds" in answer.out
    assert f" Saved {tmp_path / 'runs'}\n" in answer.out
    assert "alpha=10.0/gh-1" in answer.err
    assert (tmp_path / "a.md").read_text().startswith("| row | alpha=1.0 | alpha=10.0 |")
    assert (tmp_path / "a.csv").read_text().startswith("alpha,label,method,mean,")
    assert (tmp_path / "a.tex").read_text().startswith("\\begin{tabular}{lrr}")
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert list((tmp_path / "runs" / "alpha=1.0" / "gh-0" / "tensorboard").iterdir())
    told = terminal(*argv[:-2], "--json").json
    assert told == json.loads((tmp_path / "runs" / "study.json").read_text())
    assert (told["axes"], told["points"][1]["point"]) == ({"alpha": [1.0, 10.0]}, {"alpha": 10.0})
    assert [point["rounds"] for point in told["points"]] == [1, 1]


def test_the_command_runs_less(terminal: Terminal, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    less = ["--only", "gh", "--seeds", "1", "--rounds", "1", "--jobs", "1"]
    told = terminal("study", file, *less, "--json").json
    assert (told["labels"], told["seeds"], told["baseline"]) == (["gh"], [0], "gh")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-study-my")
    assert "study FILE" in terminal("--help").out


@pytest.mark.parametrize(
    ("words", "kind", "facts"),
    [
        ([], MissingSettingError, ["pluribus study FILE"]),
        (["no.toml"], FileAccessError, ["no.toml"]),
        (["FILE", "--only", "g"], UnknownNameError, ["'g'", "'gh'"]),
        (["FILE", "--jobs", "0"], RangeError, ["--jobs", 0]),
        (["FILE", "--plot", "a.gif"], FormatError, ["a.gif", ".png"]),
        (["FILE", "--csv", "no/such/a.csv"], FileAccessError, ["no/such/a.csv"]),
        (["FILE", "--track", "tensorbord"], UnknownNameError, ["'tensorbord'"]),
        (["FILE", "--baseline", "fedgh"], UnknownNameError, ["--baseline", "alone, gh"]),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    terminal: Terminal, file: Path, words: list[str], kind: type[PluribusError], facts: list[object]
) -> None:
    os.chdir(file.parent)
    terminal.refused("study", *(file if word == "FILE" else word for word in words)).check(kind, *facts)
    assert [path.name for path in file.parent.iterdir()] == ["my.toml"]


def test_python_has_it_too() -> None:
    """The first time it is the function, and once the package of the same name is imported, that package."""
    assert pluribus.__getattr__("study") is sys.modules["pluribus.study.study"].study
    assert pluribus.study is sys.modules["pluribus.study"]
    with refused(MissingSettingError, "method"):
        pluribus.study([])
