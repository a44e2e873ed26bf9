"""The result of one run: its frames, tables and curve, its predictions, and what it shows in a notebook."""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import io
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pluribus
from conftest import few_digits, run_tiny, tiny
from pluribus.data import load
from pluribus.errors import (
    DataError,
    FileAccessError,
    MissingDataError,
    NoModelError,
    PackageError,
    RangeError,
    UnknownNameError,
)
from pluribus.evaluate import class_rows, confusion_rows, tidy_rows
from pluribus.internal import frames
from pluribus.internal.frames import make_frame
from pluribus.result import MOST_ROWS, Result
from pluribus.storage.folder import RunFolder
from refusals import refused

COLUMNS = ("round", "client", "model", "view", "split", "metric", "value")


@pytest.fixture(autouse=True)
def _without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames are lists of dicts here, whatever is installed."""

    def missing(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(frames, "import_module", missing)


@pytest.fixture(scope="module")
def fedgh() -> Result:
    """A run that tests may look at, but not change."""
    return run_tiny("fedgh", rounds=3)


# ---- frames ----------------------------------------------------------------------------------------------------------


def test_tidy_rows_by_hand() -> None:
    metrics = {"val": None, "test": 0.5, "test_loss": 2.0}
    history = [{"round": 0}, {"round": 1, "clients": {"3": {"after": metrics, "before": {"val": 0.25, "test": 0.0}}}}]
    same = {"round": 1, "client": 3, "model": "mlp"}
    assert list(tidy_rows(history, {3: "mlp"})) == [
        same | {"view": "after", "split": "test", "metric": "accuracy", "value": 0.5},
        same | {"view": "after", "split": "test", "metric": "loss", "value": 2.0},
        same | {"view": "before", "split": "val", "metric": "accuracy", "value": 0.25},
        same | {"view": "before", "split": "test", "metric": "accuracy", "value": 0.0},
    ]


def test_domains_are_splits() -> None:
    metrics = {"val": 0.1, "test": 0.2, "acc": 0.2, "bwt": 0.3, "fwt": 0.4}
    rows = tidy_rows([{"round": 0, "clients": {"0": {"after": metrics}}}], {0: "mlp"})
    assert {row["split"]: row["value"] for row in rows} == {
        "val": 0.1,
        "test": 0.2,
        "own domain": 0.3,
        "other domains": 0.4,
    }


def test_the_frame_has_every_metric_of_every_round(fedgh: Result) -> None:
    rows = fedgh.frame()
    assert len(rows) == 3 * 4 * 2 * 3  # rounds, clients, views, metrics
    assert all(tuple(row) == COLUMNS for row in rows)
    found = next(r for r in rows if (r["round"], r["client"], r["view"], r["metric"]) == (2, 1, "before", "loss"))
    assert found["value"] == fedgh.history[2]["clients"]["1"]["before"]["test_loss"]
    assert found["model"] == fedgh.clients[1].model
    assert pluribus.load_result(fedgh.folder).frame() == rows


def test_a_frame_is_one_of_pandas_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, fedgh: Result) -> None:
    class DataFrame:
        def __init__(self, rows: list[dict[str, Any]], index: str = "") -> None:
            self.rows, self.index = rows, index

        def set_index(self, name: str) -> DataFrame:
            return DataFrame(self.rows, name)

    monkeypatch.setattr(frames, "import_module", lambda name: SimpleNamespace(DataFrame=DataFrame))
    assert make_frame(({"a": 1},)).rows == [{"a": 1}]
    assert len(fedgh.frame().rows) == 72
    assert fedgh.confusion().index == "label"


def test_with_the_real_pandas(monkeypatch: pytest.MonkeyPatch, fedgh: Result) -> None:
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr(frames, "import_module", lambda name: pandas)
    frame = fedgh.frame()
    assert tuple(frame.columns) == COLUMNS
    mean = (
        frame[(frame["round"] == 2) & (frame.view == "after") & (frame.split == "test")].groupby("metric").value.mean()
    )
    assert mean["accuracy"] == pytest.approx(fedgh.history[2]["mean"]["after"]["test"]["mean"])
    assert fedgh.confusion(0).to_numpy().sum() == fedgh.clients[0].test
    assert fedgh.per_class().support.sum() == sum(one.test for one in fedgh.clients.values())


# ---- text ------------------------------------------------------------------------------------------------------------


def test_every_format_is_returned_and_written_on_request(fedgh: Result, tmp_path: Path) -> None:
    for write in (fedgh.to_csv, fedgh.to_markdown, fedgh.to_latex):
        text = write()
        assert write(tmp_path / "table.txt") == text
        assert (tmp_path / "table.txt").read_text(encoding="utf-8") == text
        with refused(FileAccessError, tmp_path / "none"):
            write(str(tmp_path / "none" / "table.txt"))
    assert [path.name for path in tmp_path.iterdir()] == ["table.txt"]


def test_csv_is_the_frame(fedgh: Result) -> None:
    rows = list(csv.DictReader(io.StringIO(fedgh.to_csv())))
    assert rows == [{name: str(value) for name, value in row.items()} for row in fedgh.frame()]


def test_tables_have_every_client_and_the_mean(fedgh: Result) -> None:
    lines = fedgh.to_markdown().splitlines()
    for k, one in fedgh.per_client().items():
        assert lines[2 + k].startswith(f"| {k} | {fedgh.clients[k].model} |")
        assert lines[2 + k].endswith(f"| {one.selected['test']:.3f} |")
    mean = f"{fedgh.accuracy:.3f}"
    assert lines[6].split() == ["|", "mean", "|", "|", "|", "|", mean, "|"]
    assert f"mean &  &  &  & {mean} \\\\\n" in fedgh.to_latex()
    assert "% test accuracy, mean over clients, selected on validation" in fedgh.to_latex()


def test_repr_is_a_few_lines(fedgh: Result) -> None:
    text = repr(fedgh)
    assert len(text.splitlines()) < 10
    assert len(text) < 500 + len(str(fedgh.folder))
    for fact in ("fedgh", fedgh.data, f"{fedgh.accuracy:.3f}", "selected on validation", "kB up", str(fedgh.folder)):
        assert fact in text


def test_a_notebook_shows_a_small_table_of_escaped_text(fedgh: Result) -> None:
    facts = {k: dataclasses.replace(fedgh.clients[0], id=k, name="<script>x</script>") for k in range(4)}
    shown = dataclasses.replace(fedgh, clients=facts, method="<b>mine")._repr_html_()
    assert "<script" not in shown
    assert "<b>mine" not in shown
    assert shown.count("&lt;script&gt;") == 4
    assert f">{fedgh.accuracy:.3f}</td>" in shown


def test_a_notebook_shows_some_of_many_clients(fedgh: Result) -> None:
    many = MOST_ROWS + 5
    record = {"round": 0, "clients": {str(k): fedgh.history[0]["clients"]["0"] for k in range(many)}}
    facts = {k: dataclasses.replace(fedgh.clients[0], id=k) for k in range(many)}
    shown = dataclasses.replace(fedgh, clients=facts, history=[record | {"seconds": 1.0}])
    assert shown._repr_html_().count("<tr>") == 1 + MOST_ROWS + 1 + 6
    assert "and 5 more" in shown._repr_html_()
    assert "more" not in shown.to_markdown()


# ---- curve -----------------------------------------------------------------------------------------------------------


def test_a_curve_is_the_mean_accuracy_over_rounds(fedgh: Result) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ax = figure.add_subplot()
    assert fedgh.curve(view="before", ax=ax) is ax
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in ax.get_lines()}
    expected = [record["mean"]["before"]["test"]["mean"] for record in fedgh.history]
    assert lines["fedgh, test"] == [[1, expected[0]], [2, expected[1]], [3, expected[2]]]
    assert len(lines["fedgh, val"]) == 3
    with refused(UnknownNameError, "'head'", "after", "before"):
        fedgh.curve("head")


def test_without_validation_data_a_curve_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    ax = run_tiny("local", val_fraction=0.0).curve()
    assert [line.get_label() for line in ax.get_lines()] == ["local, test"]
    assert all(float(tick).is_integer() for tick in ax.get_xticks())
    pyplot.close("all")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refused(PackageError, "pluribus[report]"):
        run_tiny("local", rounds=1).curve()


# ---- predictions -----------------------------------------------------------------------------------------------------


def test_figures_per_class_by_hand() -> None:
    labels, predicted = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 1, 2])
    assert list(confusion_rows(labels, predicted, ("a", "b", "c", "d"))) == [
        {"label": "a", "a": 2, "b": 1, "c": 0, "d": 0},
        {"label": "b", "a": 0, "b": 1, "c": 1, "d": 0},
        {"label": "c", "a": 0, "b": 0, "c": 0, "d": 0},
        {"label": "d", "a": 0, "b": 0, "c": 0, "d": 0},
    ]
    a, b, c, d = class_rows(labels, predicted, ("a", "b", "c", "d"))
    assert a == {"class": "a", "precision": 1.0, "recall": pytest.approx(2 / 3), "f1": pytest.approx(0.8), "support": 3}
    assert b == {"class": "b", "precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2}
    assert c == {"class": "c", "precision": 0.0, "recall": None, "f1": 0.0, "support": 0}
    assert d == {"class": "d", "precision": None, "recall": None, "f1": None, "support": 0}


def test_figures_per_class_are_those_of_scikit_learn(fedgh: Result) -> None:
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    rows = [row for k in fedgh.clients for row in fedgh.predictions(k)]
    labels, predicted = ([row[name] for row in rows] for name in ("label", "predicted"))
    names = list(fedgh.classes)
    found = [[row[name] for name in names] for row in fedgh.confusion()]
    assert found == confusion_matrix(labels, predicted, labels=names).tolist()
    figures = precision_recall_fscore_support(labels, predicted, labels=names, zero_division=np.nan)
    for name, expected in zip(("precision", "recall", "f1", "support"), figures, strict=True):
        values = [np.nan if row[name] is None else row[name] for row in fedgh.per_class()]
        assert values == pytest.approx(expected.tolist(), nan_ok=True)


@pytest.mark.parametrize("method", ["fedgh", "fedavg", "fedproto"])
def test_predictions_are_those_that_were_measured(method: str) -> None:
    """In the headline view, whatever rule it has; and with the labels and rows of the data set."""
    result = run_tiny(method, **({"models": "mlp-64"} if method == "fedavg" else {}))
    data = load(result.data)
    for k, one in result.per_client().items():
        rows = result.predictions(k)
        assert len(rows) == result.clients[k].test
        assert sum(row["correct"] for row in rows) / len(rows) == one.selected["test"]
        assert [row["label"] for row in rows] == [data.classes[int(data.y[row["row"]])] for row in rows]
        images = data.x[[row["row"] for row in rows]]
        again = pluribus.predict(result.folder, images, k)
        assert [row["predicted"] for row in rows] == [one.label for one in again]


def test_the_confusion_of_all_clients_is_the_sum(fedgh: Result) -> None:
    def counts(client: int | None) -> Counter[tuple[str, str]]:
        rows = fedgh.confusion(client)
        return Counter({(row["label"], name): row[name] for row in rows for name in fedgh.classes})

    assert counts(None) == sum((counts(k) for k in fedgh.clients), Counter())
    assert counts(None).total() == sum(one.test for one in fedgh.clients.values())
    mine = Counter((row["label"], row["predicted"]) for row in fedgh.predictions(0))
    assert +counts(0) == mine


def test_per_class_agrees_with_the_confusion(fedgh: Result) -> None:
    for row, figures in zip(fedgh.confusion(1), fedgh.per_class(1), strict=True):
        assert figures["class"] == row["label"]
        assert figures["support"] == sum(row[name] for name in fedgh.classes)
        if figures["support"]:
            assert figures["recall"] == pytest.approx(row[row["label"]] / figures["support"])


def test_domains_keep_predictions_for_the_own_domain() -> None:
    result = run_tiny("fedh2l", data="rotated-digits", rounds=1, models="mlp-64")
    for k, one in result.per_client().items():
        rows = result.predictions(k)
        assert sum(row["correct"] for row in rows) / len(rows) == one.selected["bwt"]


def test_a_client_without_test_rows_has_no_predictions() -> None:
    result = run_tiny("local", test_fraction=0.0, rounds=1)
    assert result.predictions(0) == []
    assert {row["support"] for row in result.per_class(0)} == {0}
    assert sum(row["0"] for row in result.confusion()) == 0


def test_a_folder_of_a_former_version_has_no_predictions_and_no_class_names(tmp_path: Path) -> None:
    result = run_tiny("local", rounds=1, out=tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    assert saved.pop("classes") == [str(number) for number in range(10)]
    (tmp_path / "run" / "result.json").write_text(json.dumps(saved))
    former = pluribus.load_result(tmp_path / "run")
    assert former.predictions(0) == result.predictions(0)  # whose names are numbers
    assert former.confusion(0)[0]["label"] == "0"
    for path in (tmp_path / "run" / "state" / "selected").iterdir():
        save_file({n: v for n, v in load_file(path).items() if not n.startswith("test/")}, path)
    with refused(NoModelError, "client 0", tmp_path / "run"):
        former.predictions(0)
    state = former.model(0).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in result.model(0).state_dict().items())


def test_a_client_that_was_not_evaluated_is_a_sentence(fedgh: Result) -> None:
    for ask in (fedgh.predictions, fedgh.confusion, fedgh.per_class):
        with refused(RangeError, "client 4", "0, 1, 2, 3"):
            ask(4)


# ---- other rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedgh", "fedproto"])
def test_the_own_test_rows_have_the_reported_accuracy(method: str) -> None:
    result, found = run_tiny(method), {}
    data = load(result.data)
    for k, one in result.per_client().items():
        rows = [row["row"] for row in result.predictions(k)]
        found[k] = result.evaluate(data.x[rows].numpy(), data.y[rows].numpy(), client=k)
        assert found[k] == {"accuracy": one.selected["test"], "loss": pytest.approx(one.selected["test_loss"])}
    rows = [row["row"] for row in result.predictions(0)]
    everyone = result.evaluate(data.x[rows], data.y[rows])
    assert list(everyone) == [0, 1, 2, 3]
    assert everyone[0] == found[0]


def test_rows_that_do_not_fit_are_a_sentence(fedgh: Result) -> None:
    x, y = np.zeros((3, 1, 8, 8), np.uint8), np.zeros(3, np.int64)
    for images, labels, kind, facts in [
        (x.astype(np.float32), y, DataError, ["float32 3 x 1 x 8 x 8"]),
        (x[:, :, :5], y, DataError, ["1 x 8 x 8", "3 x 1 x 5 x 8"]),
        (x, y[:2], DataError, ["3 rows", "2 labels"]),
        (x, y.astype(np.float64), DataError, ["y ", "float64"]),
        (x, y + 10, DataError, ["label 10", "8, 9"]),
        (x, y - 1, DataError, ["label -1", "8, 9"]),
        (x, ["cat", "dog", "cat"], DataError, ["y ", "label cat", "8, 9"]),
        (x.astype(object), y, DataError, ["x ", "numbers"]),
        (x[:0], y[:0], MissingDataError, ["no rows"]),
    ]:
        with refused(kind, *facts):
            fedgh.evaluate(images, labels, client=0)
    with refused(RangeError, "client 9", "0 to 3"):
        fedgh.evaluate(x, y, client=9)


# ---- a result alone --------------------------------------------------------------------------------------------------


def test_a_result_opens_without_code_data_or_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that needs no model works in a folder that another process holds and nobody can write to."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "gone_method.py").write_text("import pluribus\n\nclass Mine(pluribus.Method):\n    pass\n")
    data, folder = tmp_path / "data.npz", tmp_path / "run"
    data.write_bytes(Path(few_digits()).read_bytes())
    result = pluribus.run("gone_method.Mine", progress=False, out=str(folder), **tiny(data=str(data)))
    looks = [
        lambda one: one.to_json(),
        lambda one: one.frame(),
        lambda one: one.to_markdown(),
        lambda one: one._repr_html_(),
        lambda one: one.predictions(1),
        lambda one: one.confusion(),
        lambda one: one.per_class(2),
        repr,
    ]
    before = [look(result) for look in looks]
    data.unlink()
    (tmp_path / "gone_method.py").unlink()
    monkeypatch.delitem(sys.modules, "gone_method")
    held = RunFolder.open(folder)
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for path in (folder, *files):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with pytest.raises(BlockingIOError), (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        again = pluribus.load_result(folder)
        assert [look(again) for look in looks] == before
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == files
    finally:
        for path in (folder, *files):
            path.chmod(0o755 if path.is_dir() else 0o644)
        held.close()
