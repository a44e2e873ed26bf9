"""Metrics by hand, against scikit-learn, and as what decides: selection, verdicts, searches and tables."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn import metrics as reference
from torch import Tensor

import pluribus
from conftest import assemble_tiny, new_folder, run_tiny
from pluribus.assembly import assemble
from pluribus.data import Dataset
from pluribus.errors import ConflictError, FormatError, MismatchError, MissingDataError, RangeError, UnknownNameError
from pluribus.evaluate import choose
from pluribus.experiment import experiment
from pluribus.internal.metrics import METRICS, choose_metrics, measure_all, parse_metrics
from pluribus.result import Result
from pluribus.targets import CLASSES, Target
from pluribus.terminal import _cells, print_table
from processes import start
from refusals import refused

LABELS, NUMBERS = Target("labels"), Target("numbers")


def measured(name: str, target: Target, scores: Any, y: Any) -> float | None:
    values = torch.tensor(y) if target.kind == "classes" else torch.tensor(y, dtype=torch.float32)
    given = scores if isinstance(scores, Tensor) else torch.tensor(scores, dtype=torch.float32)
    return measure_all([name], target, given, values)[name]


def voting(*predicted: int, classes: int = 3) -> Tensor:
    """Scores by which these classes are predicted."""
    return torch.eye(classes)[list(predicted)]


# ---- by hand ---------------------------------------------------------------------------------------------------------

# class 0 is found in 2 of 3 rows, class 1 in 1 of 2; class 2 is missing, but is predicted once
TRUE, PREDICTED = [0, 0, 0, 1, 1], voting(0, 0, 1, 1, 2)


def test_accuracy_by_hand() -> None:
    assert measured("accuracy", CLASSES, PREDICTED, TRUE) == 3 / 5
    assert measured("accuracy", LABELS, [[1.0, -1.0], [1.0, 1.0]], [[1, 0], [0, 1]]) == 3 / 4


def test_of_equal_scores_the_first_is_predicted() -> None:
    tie = torch.tensor([[1.0, 1.0, 0.0]])
    assert measured("accuracy", CLASSES, tie, [0]) == 1
    assert measured("accuracy", CLASSES, tie, [1]) == 0


def test_balanced_accuracy_leaves_a_missing_class_out() -> None:
    assert measured("balanced_accuracy", CLASSES, PREDICTED, TRUE) == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_f1_counts_a_class_that_is_only_predicted_as_0() -> None:
    assert measured("f1", CLASSES, PREDICTED, TRUE) == pytest.approx((4 / 5 + 2 / 4 + 0) / 3)
    assert measured("f1", CLASSES, voting(0, 1), [0, 1]) == 1  # nobody means class 2


def test_f1_of_labels_by_hand() -> None:
    """Label 0: one of two is found, one other is wrong. Label 1: nobody has it, nobody says so. Label 2: all right."""
    scores = [[1.0, -1.0, 2.0], [-1.0, -1.0, 3.0], [1.0, -1.0, -1.0]]
    assert measured("f1", LABELS, scores, [[1, 0, 1], [1, 0, 1], [0, 0, 0]]) == pytest.approx((1 / 2 + 1) / 2)
    assert measured("f1", LABELS, [[-1.0], [-1.0]], [[0], [0]]) is None
    assert measured("f1", LABELS, [[1.0], [-1.0]], [[1], [1]]) == pytest.approx(2 / 3)  # of one label, not of 0 and 1


def test_auroc_by_hand_with_a_tie() -> None:
    """Rows of class 1 have the shares 0.8 and 0.4, the others 0.4 and 0.2: 3 of 4 pairs are in order, one is equal."""
    scores = torch.tensor([[1 - share, share] for share in (0.8, 0.4, 0.4, 0.2)]).log()
    assert measured("auroc", CLASSES, scores, [1, 1, 0, 0]) == pytest.approx(3.5 / 4)
    labels = torch.tensor([[0.8, 9.0], [0.4, 9.0], [0.4, 9.0], [0.2, 9.0]])
    assert measured("auroc", LABELS, labels, [[1, 1], [1, 1], [0, 1], [0, 1]]) == pytest.approx(3.5 / 4)


def test_auroc_is_over_the_classes_that_the_rows_have() -> None:
    scores = torch.tensor([[2.0, 1.0, 9.0], [1.0, 2.0, 9.0], [1.0, 2.0, 9.0]])
    found = measured("auroc", CLASSES, scores, [0, 1, 1])
    assert found == 1
    assert measured("auroc", CLASSES, scores, [1, 1, 1]) is None


def test_the_auroc_of_confident_scores_has_no_ties() -> None:
    """In float32, the softmax of both rows is 1."""
    assert measured("auroc", CLASSES, [[30.0, 0.0], [31.0, 0.0]], [0, 1]) == 0


def test_the_calibration_error_by_hand() -> None:
    """Two rows of confidence 0.9, one of them right: 1.8 - 1. One of 0.55 is right: 0.55 - 1. All in their own bin."""
    scores = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.55, 0.45]]).log()
    assert measured("ece", CLASSES, scores, [0, 1, 0]) == pytest.approx((0.8 + 0.45) / 3)
    sure = torch.tensor([[1.0, 0.0], [0.0, 1.0]]) * 1000  # confidence 1 is in the last bin
    assert measured("ece", CLASSES, sure, [0, 1]) == 0
    assert measured("ece", CLASSES, sure, [1, 1]) == 0.5


def test_errors_of_numbers_by_hand() -> None:
    assert measured("rmse", NUMBERS, [[3.0], [6.0]], [[0], [2]]) == pytest.approx(math.sqrt((9 + 16) / 2))
    assert measured("mae", NUMBERS, [[3.0], [-2.0]], [[0], [2]]) == pytest.approx(3.5)
    two = [[3.0, 0.0], [4.0, 1.0]]  # of two numbers per row, the mean of both errors
    assert measured("rmse", NUMBERS, two, [[0, 0], [0, 0]]) == pytest.approx((math.sqrt(12.5) + math.sqrt(0.5)) / 2)
    assert measured("r2", NUMBERS, [[1.0], [2.0], [6.0]], [[1], [2], [3]]) == pytest.approx(1 - 9 / 2)
    assert measured("r2", NUMBERS, [[1.0]], [[1]]) is None  # one row has no variance


@pytest.mark.parametrize("name", METRICS)
def test_what_cannot_be_measured_is_none(name: str) -> None:
    target = Target(METRICS[name].targets[0])
    y = torch.zeros(0, dtype=torch.int64) if target.kind == "classes" else torch.zeros(0, 2)
    assert measure_all([name], target, torch.zeros(0, 2), y) == {name: None}
    if name != "accuracy":
        y = torch.tensor([0, 1]) if target.kind == "classes" else torch.eye(2)
        assert measure_all([name], target, torch.tensor([[math.nan, 1.0], [0.0, 1.0]]), y) == {name: None}


# ---- against scikit-learn --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_classes_as_scikit_learn_measures_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, y = rng.normal(size=(40, 4)).astype(np.float32), rng.integers(4, size=40)
    found = measure_all(["balanced_accuracy", "f1", "auroc"], CLASSES, torch.tensor(scores), torch.tensor(y))
    shares = torch.tensor(scores).double().softmax(1).numpy()
    assert found == pytest.approx(
        {
            "balanced_accuracy": reference.balanced_accuracy_score(y, scores.argmax(1)),
            "f1": reference.f1_score(y, scores.argmax(1), average="macro"),
            "auroc": reference.roc_auc_score(y, shares, multi_class="ovr"),
        }
    )


@pytest.mark.parametrize("seed", range(3))
def test_labels_and_numbers_as_scikit_learn_measures_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, y = rng.normal(size=(30, 3)), rng.integers(2, size=(30, 3))
    found = measure_all(["accuracy", "f1", "auroc"], LABELS, torch.tensor(scores), torch.tensor(y).float())
    assert found == pytest.approx(
        {
            "accuracy": 1 - reference.hamming_loss(y, scores > 0),
            "f1": reference.f1_score(y, scores > 0, average="macro"),
            "auroc": reference.roc_auc_score(y, scores, average="macro"),
        }
    )
    values = rng.normal(size=(30, 3))
    found = measure_all(["rmse", "mae", "r2"], NUMBERS, torch.tensor(scores), torch.tensor(values))
    of = reference.root_mean_squared_error, reference.mean_absolute_error, reference.r2_score
    assert list(found.values()) == pytest.approx([one(values, scores) for one in of])


def test_the_default_imports_no_library_for_metrics() -> None:
    code = (
        "import sys, torch; from pluribus.internal.metrics import measure_all; from pluribus.targets import Target\n"
        "measure_all(['accuracy'], Target(), torch.eye(2), torch.arange(2))\n"
        "measure_all(['rmse'], Target('numbers'), torch.eye(2), torch.eye(2))\n"
        "measure_all(['f1'], Target('labels'), torch.eye(2), torch.eye(2))\n"
        "assert 'sklearn' not in sys.modules"
    )
    process = start(program=code)
    assert process.wait() == 0, process.err


# ---- the setting -----------------------------------------------------------------------------------------------------


def test_names_of_metrics() -> None:
    assert parse_metrics("f1, auroc,f1") == parse_metrics(["f1", "auroc"]) == ("f1", "auroc")
    assert experiment("local", metrics=("f1", "ece")).metrics == "f1,ece"
    usual = {target: choose_metrics("auto", target) for target in ("classes", "labels", "numbers")}  # type: ignore[arg-type]
    assert usual == {"classes": ("accuracy",), "labels": ("f1",), "numbers": ("rmse",)}
    assert choose_metrics("auto,mae,rmse", "numbers") == ("rmse", "mae")
    assert choose_metrics("ece,confusion,auto", "classes") == ("ece", "accuracy")


def test_names_that_cannot_be() -> None:
    with refused(UnknownNameError, "'acuracy'", "'accuracy'"):
        experiment("local", metrics="acuracy")
    with refused(FormatError, "metrics", "empty"):
        experiment("local", metrics="")
    with refused(ConflictError, "confusion"):
        experiment("local", metrics="confusion,f1")


@pytest.mark.parametrize(("metrics", "wrong"), [("rmse", "rmse"), ("accuracy,r2", "r2"), ("auto,mae,confusion", "mae")])
def test_a_metric_of_numbers_does_not_fit_classes(metrics: str, wrong: str) -> None:
    with refused(MismatchError, f"metric {wrong}", "classes", "balanced_accuracy"):
        assemble_tiny("local", metrics=metrics)


@pytest.mark.parametrize("wrong", ["accuracy", "auto,confusion", "rmse,f1"])
def test_a_metric_of_classes_does_not_fit_numbers(wrong: str) -> None:
    with refused(MismatchError, "numbers", "rmse, mae, r2"):
        assemble(experiment("local", data=heights(), metrics=wrong, **REGRESSION))


# ---- runs ------------------------------------------------------------------------------------------------------------

REGRESSION: dict[str, Any] = {
    "models": "mlp-64",
    "clients": 3,
    "partition": "iid",
    "rounds": 4,
    "lr": 0.02,
    "device": "cpu",
}


def heights(outputs: int = 1, rows: int = 120) -> Dataset:
    """Images whose brightness is to be told."""
    x = torch.randint(0, 256, (rows, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    y = torch.stack([x.float().mean((1, 2, 3)) / 32 + n for n in range(outputs)], 1)
    return Dataset("heights", x, y, tuple(f"h{n}" for n in range(outputs)))


def tags(rows: int = 300) -> Dataset:
    """Images with two labels at once: whether the upper half is bright, and the lower one."""
    x = torch.randint(0, 256, (rows, 1, 4, 4), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    halves = x.float().view(rows, 2, 8).mean(2)
    return Dataset("tags", x, (halves > 128).to(torch.uint8), ("upper", "lower"))


@pytest.fixture(scope="module")
def regression() -> Result:
    return pluribus.run("local", data=heights(), metrics="auto,mae,r2", out=new_folder(), progress=False, **REGRESSION)


def test_numbers_are_selected_by_the_smallest_error(regression: Result) -> None:
    assert (regression.metric, regression.accuracy) == ("rmse", None)
    for k, one in regression.per_client().items():
        vals = [record["clients"][str(k)]["after"]["val"] for record in regression.history]
        assert one.selected_round == vals.index(min(vals))
        assert one.selected["val"] == min(vals) < max(vals)
    selected = [one.selected["test"] for one in regression.per_client().values()]
    assert regression.score == pytest.approx(sum(selected) / 3)
    over = regression.summary["after"]["selected"]["test"]
    assert (over["best"], over["worst"], over["worst_decile"]) == (min(selected), max(selected), max(selected))
    assert over["deviation"] == pytest.approx(np.std(selected))
    r2 = [one.selected["test_r2"] for one in regression.per_client().values()]
    assert regression.summary["after"]["selected"]["test_r2"]["worst"] == min(r2)


def test_records_of_numbers(regression: Result) -> None:
    record = regression.history[0]
    assert record["metric"] == "rmse"
    keys = ["val", "test", "test_loss", "val_mae", "test_mae", "val_r2", "test_r2"]
    assert list(record["clients"]["0"]["after"]) == keys
    tests, over = [views["after"]["test"] for views in record["clients"].values()], record["mean"]["after"]["test"]
    assert (over["best"], over["worst"]) == (min(tests), max(tests))
    told = json.loads((regression.folder / "result.json").read_text())
    assert (told["metric"], told["score"], told["accuracy"]) == ("rmse", regression.score, None)
    assert told["score_is"].startswith("test RMSE, mean over clients, selected on validation")
    again = pluribus.load_result(regression.folder)
    assert (again.metric, again.score, again.summary) == ("rmse", regression.score, regression.summary)


def test_predicted_numbers_are_kept(regression: Result) -> None:
    for k, one in regression.per_client().items():
        rows = records(regression.predictions(k))
        assert list(rows[0]) == ["row", "label", "predicted"]
        errors = np.array([row["predicted"] - row["label"] for row in rows])
        assert one.selected["test"] == pytest.approx(math.sqrt((errors**2).mean()), rel=1e-5)
        assert one.selected["test_loss"] == pytest.approx((errors**2).mean(), rel=1e-5)
        assert one.selected["test_mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
        held, whole = [row["row"] for row in rows], heights()
        named = {name: one.selected[f"test_{name}"] for name in ("mae", "r2", "loss")} | {"rmse": one.selected["test"]}
        assert regression.evaluate(whole.x[held], whole.y[held], client=k) == pytest.approx(named)
    for table in (regression.confusion, regression.per_class):
        with refused(MismatchError, "numbers", "predictions()"):
            table()


def records(frame: Any) -> list[dict[str, Any]]:
    return frame if isinstance(frame, list) else frame.to_dict("records")


def test_several_numbers_have_columns_each() -> None:
    result = pluribus.run("local", data=heights(2), progress=False, **REGRESSION | {"rounds": 1})
    row = records(result.predictions(0))[0]
    assert list(row) == ["row", "label h0", "label h1", "predicted h0", "predicted h1"]
    assert row["label h1"] == pytest.approx(row["label h0"] + 1)


def test_tables_of_numbers_name_the_metric(regression: Result, capsys: pytest.CaptureFixture[str]) -> None:
    print_table([regression, regression], Console(width=100, force_terminal=False))
    assert "test RMSE, selected on validation" in capsys.readouterr().out
    assert [cell.startswith("[green]") for cell in _cells([2.0, None, 1.0], METRICS["rmse"])] == [False, False, True]
    assert [cell.startswith("[green]") for cell in _cells([2.0, None, 1.0], METRICS["r2"])] == [True, False, False]
    assert "RMSE" in repr(regression)
    assert "accuracy" not in repr(regression) + regression.to_markdown()
    axes = regression.curve(ax=pytest.importorskip("matplotlib.figure").Figure().add_subplot())
    assert axes.get_ylabel().startswith("RMSE")
    found = {(row["split"], row["metric"]) for row in records(regression.frame())}
    assert found == {(split, name) for split in ("val", "test") for name in ("rmse", "mae", "r2")} | {("test", "loss")}


def test_a_run_of_numbers_resumes_to_the_same_end(regression: Result) -> None:
    out = new_folder()
    settings = {"data": heights(), "metrics": "auto,mae,r2", "out": out, "checkpoint_every": 1, **REGRESSION}

    class Stop:
        def round(self, record: Any, ledger: Any) -> None:
            if record["round"] == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pluribus.run("local", progress=False, observers=[Stop()], **settings)
    again = pluribus.resume(out, data=heights(), progress=False)
    assert [record["clients"] for record in again.history] == [record["clients"] for record in regression.history]
    assert {k: one.selected_round for k, one in again.per_client().items()} == {
        k: one.selected_round for k, one in regression.per_client().items()
    }
    assert again.score == regression.score


def test_labels_are_measured_by_f1() -> None:
    result = pluribus.run("local", data=tags(), progress=False, metrics="auto,accuracy", **REGRESSION)
    assert result.metric == "f1"
    assert result.accuracy == result.summary["after"]["selected"]["test_accuracy"]["mean"]
    for k, one in result.per_client().items():
        rows = records(result.predictions(k))
        sets = [[set(row[name].split(", ")) for row in rows] for name in ("label", "predicted")]
        truth, predicted = (np.array([[n in one for n in ("upper", "lower")] for one in some]) for some in sets)
        wanted = reference.f1_score(truth, predicted, average="macro", zero_division=np.nan)
        assert one.selected["test"] == pytest.approx(wanted)
        assert one.selected["test_accuracy"] == pytest.approx((truth == predicted).mean())
        assert [row["correct"] for row in rows] == (truth == predicted).all(1).tolist()
        by_label = records(result.per_class(k))
        assert [row["class"] for row in by_label] == ["upper", "lower"]
        assert [row["support"] for row in by_label] == truth.sum(0).tolist()
        assert [row["recall"] for row in by_label] == pytest.approx(
            list(reference.recall_score(truth, predicted, average=None))
        )
    with refused(MismatchError, "several labels"):
        result.confusion()


ALL = "f1,accuracy,balanced_accuracy,auroc,ece,confusion"


@pytest.fixture(scope="module")
def classes() -> Result:
    return run_tiny("fedgh", metrics=ALL, rounds=3)


def test_classes_are_measured_by_all_that_was_asked(classes: Result) -> None:
    names = ("accuracy", "balanced_accuracy", "auroc", "ece")
    keys = ["val", "test", "test_loss", *(f"{split}_{name}" for name in names for split in ("val", "test"))]
    for record in classes.history:
        assert record["metric"] == "f1"
        assert all(list(metrics) == keys for views in record["clients"].values() for metrics in views.values())
    assert classes.accuracy == classes.summary["after"]["selected"]["test_accuracy"]["mean"]
    for k, one in classes.per_client().items():
        rows = records(classes.predictions(k))
        truth, predicted = ([row[name] for row in rows] for name in ("label", "predicted"))
        assert one.selected["test"] == pytest.approx(reference.f1_score(truth, predicted, average="macro"))
        assert one.selected["test_accuracy"] == pytest.approx(reference.accuracy_score(truth, predicted))


def test_the_same_training_is_measured(classes: Result) -> None:
    """What is measured changes nothing else."""
    plain = run_tiny("fedgh", rounds=3)
    for one, other in zip(plain.history, classes.history, strict=True):
        assert one["loss"] == other["loss"]
        for k, views in one["clients"].items():
            for view, metrics in views.items():
                assert metrics["test"] == other["clients"][k][view]["test_accuracy"]
                assert metrics["test_loss"] == other["clients"][k][view]["test_loss"]


def test_the_confusion_matrix_is_in_the_result(classes: Result) -> None:
    told = json.loads((classes.folder / "result.json").read_text())
    rows = [row for k in classes.clients for row in records(classes.predictions(k))]
    truth, predicted = ([row[name] for row in rows] for name in ("label", "predicted"))
    names = list(classes.classes)
    counts = reference.confusion_matrix(truth, predicted, labels=names)
    assert told["confusion"]["counts"] == counts.tolist()
    recall = [counts[n, n] / counts[n].sum() if counts[n].sum() else None for n in range(len(names))]
    assert told["confusion"]["recall"] == pytest.approx(dict(zip(names, recall, strict=True)))
    assert pluribus.load_result(classes.folder).with_confusion


def test_by_default_records_are_as_they_were() -> None:
    result = run_tiny("fedgh", rounds=1)
    record = result.history[0]
    assert "metric" not in record
    assert [list(metrics) for metrics in record["clients"]["0"].values()] == [["val", "test", "test_loss"]] * 2
    told = json.loads((result.folder / "result.json").read_text())
    assert "confusion" not in told
    assert (told["metric"], told["score"]) == ("accuracy", told["accuracy"])
    assert list(told["clients"]["0"]["selected"]) == ["val", "test", "test_loss"]


def test_domains_are_measured_by_the_headline() -> None:
    settings = {"data": "rotated-digits", "partition": "domain", "clients": 4, "models": "mlp-64", "rounds": 1}
    result = run_tiny("local", metrics="f1,accuracy", **settings)
    plain = run_tiny("local", **settings)
    for k, views in result.history[0]["clients"].items():
        found, accuracy = views["after"], plain.history[0]["clients"][k]["after"]
        assert list(found) == ["val", "test", "acc", "bwt", "fwt", "val_accuracy", "test_accuracy"]
        assert (found["acc"], found["test_accuracy"]) == (found["test"], accuracy["test"])
        assert found["bwt"] != accuracy["bwt"]
        rows = records(result.predictions(int(k)))
        truth, predicted = ([row[name] for row in rows] for name in ("label", "predicted"))
        assert found["bwt"] == pytest.approx(reference.f1_score(truth, predicted, average="macro"))


# ---- several runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison() -> Any:
    rows = {"slow": ("local", {"lr": 1e-4}), "fast": ("local", {"lr": 0.02})}
    settings = {name: value for name, value in REGRESSION.items() if name != "lr"}
    return pluribus.compare(rows, data=heights(), seeds=2, progress=False, jobs=1, **settings)


def test_of_errors_the_smaller_is_better(comparison: Any) -> None:
    slow, fast = comparison.rows
    assert fast.scores["mean"].mean < slow.scores["mean"].mean
    (difference,) = comparison.differences
    assert difference.difference.mean < 0
    assert difference.verdict == "better"
    table = comparison.tables[0]
    assert [[cell.best for cell in row[1:]] for row in table.rows] == [[False] * 4, [True] * 4]
    assert comparison.to_json()["metric"] == "rmse"
    assert "test RMSE over clients" in " ".join(comparison.notes)
    assert "RMSE" in repr(comparison)
    assert {"deviation", "worst_decile", "best"} <= set(fast.scores)
    assert fast.scores["best"].mean <= fast.scores["mean"].mean <= fast.scores["worst"].mean


def test_a_target_is_reached_from_above(comparison: Any) -> None:
    slow, fast = comparison.rows
    assert comparison.target == slow.scores["mean"].mean
    assert fast.rounds_to_target == 1
    means = [value for _, value in comparison.runs["fast"][0].curve]
    assert comparison.runs["fast"][0].reached(min(means))[0] == means.index(min(means)) + 1
    assert comparison.runs["fast"][0].reached(min(means) / 2) is None


def test_a_figure_names_the_metric(comparison: Any) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    assert comparison.plot(ax=figure.add_subplot()).get_ylabel() == "test RMSE"


def test_a_target_that_no_value_can_reach() -> None:
    settings = REGRESSION | {"rounds": 1}
    with refused(RangeError, "--target", "rmse", "[0, inf]"):
        pluribus.compare(["local"], data=heights(), target=-1.0, progress=False, **settings)
    with refused(RangeError, "--target", "f1", "[0, 1]"):
        pluribus.compare(["local"], metrics="f1", target=2.0, progress=False, **settings)


def test_a_metric_that_nobody_has_cannot_be_compared() -> None:
    """With one class per client, no test set can tell an AUROC."""
    settings = {"partition": "pathological", "classes_per_client": 1, "clients": 4, "rounds": 1, "models": "mlp-64"}
    with refused(MissingDataError, "auroc", "--metrics"):
        pluribus.compare(["local"], seeds=1, metrics="auroc", jobs=1, progress=False, **settings)


def test_a_search_takes_the_smallest_error() -> None:
    pytest.importorskip("optuna")
    settings = REGRESSION | {"rounds": 1}
    (found,) = pluribus.tune("local", data=heights(), trials=3, space="lr=1e-5:1e-1:log", progress=False, **settings)
    scores = [trial["score"] for trial in found.trials]
    assert (found.metric, found.score) == ("rmse", min(scores))
    assert found.settings == found.trials[scores.index(min(scores))]["settings"]
    assert min(scores) < max(scores)


def test_a_search_calls_a_diverged_trial_the_worst() -> None:
    assert METRICS["accuracy"].worst == 0
    assert METRICS["ece"].worst == 1
    assert METRICS["rmse"].worst > 1e300
    assert METRICS["r2"].worst < -1e300
    assert all(math.isfinite(one.worst) for one in METRICS.values())


# ---- reports and trackers --------------------------------------------------------------------------------------------


def test_a_report_of_numbers_and_of_confusion(classes: Result, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    from pluribus.report.numbers import read_runs
    from pluribus.report.page import page
    from pluribus.report.plots import sections

    runs = read_runs([classes.folder])
    found = {one.key: one for one in sections(runs, why_not="no")}
    assert found["accuracy"].title == "Macro F1"
    by_class, plot = found["confusion"].plots
    (heat,) = plot.series
    assert sum(int(mark) for row in heat.marks for mark in row) == sum(one.test for one in classes.clients.values())
    recall = {one["class"]: one["recall"] for one in classes.per_class().to_dict("records")}
    names = [by_class.y_names[round(y)] for y in by_class.series[0].y]
    assert dict(zip(names, by_class.series[0].x, strict=True)) == pytest.approx(
        {name: value for name, value in recall.items() if value is not None and value == value}
    )
    assert (plot.x, plot.y, plot.x_names) == ("predicted class", "true class", list(classes.classes))
    shown = page(runs, list(found.values()))
    assert "Test macro F1 is selected on validation" in shown
    assert "worst decile" in shown
    plain = read_runs([run_tiny("local", rounds=1).folder])
    assert not next(one for one in sections(plain, why_not="no") if one.key == "confusion").plots


def test_a_report_sorts_clients_by_their_error(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    from pluribus.report.groups import group_runs
    from pluribus.report.numbers import read_runs
    from pluribus.report.plots.clients import per_client

    result = pluribus.run("local", data=heights(), out=tmp_path / "run", progress=False, **REGRESSION)
    (run,) = read_runs([tmp_path / "run"])
    assert run.metric.name == "rmse"
    worst = max(result.per_client().items(), key=lambda one: one[1].selected["test"])[0]
    (plot,) = per_client(group_runs([run])).plots
    assert plot.y_names[0] == run.client(worst)
    assert plot.x == "test RMSE"


def test_a_tracker_logs_the_headline_by_its_name(regression: Result) -> None:
    from pluribus.track.tracker import final_metrics

    found = final_metrics(regression)
    assert found["rmse"] == regression.score
    assert "accuracy" not in found
    assert found["selected/after/test_mae/mean"] == regression.summary["after"]["selected"]["test_mae"]["mean"]


def test_the_foot_of_a_table_has_fairness_for_ten_clients(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (run_tiny("local", clients=n, rounds=1, models="mlp-64", min_samples=5) for n in (9, 10))
    few.table()
    assert "decile" not in capsys.readouterr().out
    many.table()
    shown = capsys.readouterr().out
    over = many.summary["after"]["selected"]["test"]
    lines = {line[:14].strip(): line.split()[-1] for line in shown.splitlines()}
    assert lines["worst decile"] == f"{over['worst_decile']:.3f}"
    assert lines["deviation"] == f"{over['deviation']:.3f}"


def test_rounds_of_a_history_are_chosen_by_the_metric_that_it_names() -> None:
    history = [
        {"round": t, "metric": "rmse", "clients": {"0": {"after": {"val": val, "test": float(t)}}}}
        for t, val in enumerate([3.0, 1.0, 1.0, 2.0])
    ]
    assert choose(history, "after")[0].selected_round == 1
    plain = [{name: value for name, value in record.items() if name != "metric"} for record in history]
    assert choose(plain, "after")[0].selected_round == 0


def test_workers_measure_the_same() -> None:
    settings = {"metrics": "f1,auroc", "rounds": 1, "threads": 1}
    one, two = (run_tiny("local", workers=n, **settings) for n in (1, 2))
    assert one.history[0]["clients"] == two.history[0]["clients"]
    assert dataclasses.asdict(one.per_client()[0]) == dataclasses.asdict(two.per_client()[0])
