"""Evaluation: what is measured, and how each number is named.

A *view* says which model is evaluated: `after` local training, or `before` it, with the newest download received. A
*metric* says what is measured: `test` and `val` accuracy on the client's own sets, and with domains also `acc`, `bwt`
and `fwt`. Over clients there are `mean` (each client counts once), `weighted` (each test sample counts once: the
weight of a client is the number of test samples of its metric), `worst` and `best`. Over rounds there are `last` and
`selected`: the test metric of the round in which the client's validation accuracy first reached its maximum. The test
data never select a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus.client import Client
from pluribus.data.federated import Data
from pluribus.internal.steps import Map
from pluribus.internal.views import views_text
from pluribus.method import Method
from pluribus.task import Task

Counts = tuple[int, int, float]  # correct, samples, summed cross-entropy
Metrics = dict[str, float | None]
Exams = tuple[int, int]  # test samples of the client's own domain, and of all domains


def rule_of(method: Method, view: str) -> Map:
    """The function that gives scores in a view."""
    if view == "after" and type(method).predict_after is not Method.predict_after:
        return method.predict_after
    return method.predict  # not wrapped: an engine records each function once


def score(rule: Map, client: Client, data: Data) -> Counts:
    """Number of correct predictions, number of samples and summed cross-entropy on a data set."""
    return _answer(rule, client, data)[0]


def _answer(rule: Map, client: Client, data: Data) -> tuple[Counts, Tensor]:
    """The counts of a data set, and the predicted class of each of its rows."""
    labels = data.labels()
    if not len(data):
        return (0, 0, 0.0), labels
    scores = client.sweep(rule, data)
    loss, predicted = F.cross_entropy(scores, labels, reduction="sum"), scores.argmax(1)
    return (int((predicted == labels).sum()), len(data), float(loss)), predicted


class Tested(NamedTuple):
    """Test rows of a client, and the class that was predicted for each of them."""

    data: Data
    predicted: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Label, predicted class and number in the data set of each row, on the device."""
        values = {"label": self.data.labels(), "predicted": self.predicted, "row": self.data.rows}
        return {name: value.to(torch.int32) for name, value in values.items()}


TESTED_BYTES = 12  # of the tensors of Tested, per row


def measure(rule: Map, client: Client) -> Metrics:
    """All metrics of a client in its current state."""
    return measure_rows(rule, client)[0]


def measure_rows(rule: Map, client: Client) -> tuple[Metrics, Tested]:
    """All metrics of a client in its current state, and its predictions for its test rows.

    With domains, these are the test rows of its own domain.
    """
    if client.exams:
        return _domain_metrics(rule, client)
    val, data = score(rule, client, client.data["val"]), client.data["test"]
    test, predicted = _answer(rule, client, data)
    metrics = {"val": _accuracy(val), "test": _accuracy(test), "test_loss": _mean_loss(test)}
    return metrics, Tested(data, predicted)


def _domain_metrics(rule: Map, client: Client) -> tuple[Metrics, Tested]:
    """FedH2L's metrics: BWT on the test set of the own domain, FWT on those of all others, ACC on all."""
    exams, own = list(client.exams.values()), client.task.domain_of[client.card.id]
    answers = [_answer(rule, client, exam["test"]) for exam in exams]
    vals = [score(rule, client, exam["val"]) for exam in exams]
    tests = [counts for counts, _ in answers]
    acc, bwt, fwt = _accuracy(*tests), _accuracy(tests[own]), _accuracy(*tests[:own], *tests[own + 1 :])
    metrics = {"val": _accuracy(*vals), "test": acc, "acc": acc, "bwt": bwt, "fwt": fwt}
    return metrics, Tested(exams[own]["test"], answers[own][1])


def exam_sizes(task: Task, client: int) -> Exams | None:
    """Number of test samples of a client's own domain and of all domains; None in a run without domains."""
    if not task.exams:
        return None
    sizes = list(task.exams.values())
    return sizes[task.domain_of[client]], sum(sizes)


def _mean_loss(counts: Counts) -> float | None:
    """None also if training diverged: JSON lacks NaN, and a resumed run must read the same value that was written."""
    return counts[2] / counts[1] if counts[1] and math.isfinite(counts[2]) else None


def _accuracy(*counts: Counts) -> float | None:
    samples = sum(c[1] for c in counts)
    return sum(c[0] for c in counts) / samples if samples else None


def metrics_over_clients(
    rows: Mapping[int, Metrics], samples: Mapping[int, int], exams: Mapping[int, Exams | None] | None = None
) -> dict[str, Metrics]:
    """Every metric over clients: name -> `mean`, `weighted`, `worst` and `best`. The best loss is the smallest.

    `samples` has the sizes of the clients' own test sets. In a run with domains, `exams` has those of the domains.
    """
    found: dict[str, Metrics] = {}
    for name in next(iter(rows.values()), {}):
        counts = {k: _sample_count(name, samples[k], (exams or {}).get(k)) for k in rows}
        found[name] = over_clients({k: row[name] for k, row in rows.items()}, counts, loss=is_loss(name))
    return found


def is_loss(metric: str) -> bool:
    """Whether a smaller value of a metric is better."""
    return metric.endswith("loss")


def _sample_count(metric: str, samples: int, exams: Exams | None) -> int:
    """Number of test samples that a client's metric is measured on."""
    if exams is None:
        return samples
    own, everything = exams
    return {"bwt": own, "fwt": everything - own}.get(metric, everything)


def over_clients(values: Mapping[int, float | None], samples: Mapping[int, int], loss: bool = False) -> Metrics:
    """Mean, sample-weighted mean, worst and best of one metric. Clients without it (no test data) are left out."""
    known = {k: v for k, v in values.items() if v is not None}
    weight = sum(samples[k] for k in known)
    if not known:
        return {"mean": None, "weighted": None, "worst": None, "best": None}
    least, most = min(known.values()), max(known.values())
    return {
        "mean": sum(known.values()) / len(known),
        "weighted": sum(v * samples[k] for k, v in known.items()) / weight if weight else None,
        "worst": most if loss else least,
        "best": least if loss else most,
    }


@dataclass(frozen=True)
class Chosen:
    """A client's metrics in its last evaluated round, and in the round that its validation data selects."""

    last: Metrics
    selected: Metrics
    selected_round: int


class Selection(NamedTuple):
    """The round that a client's validation data selects so far, and its validation accuracy in that round."""

    round: int
    val: float | None

    @classmethod
    def of(cls, chosen: Chosen) -> Selection:
        return cls(chosen.selected_round, chosen.selected["val"])


def selects(now: Metrics, best: Selection | None) -> bool:
    """Whether validation data prefers these metrics to those of the best round so far. Ties keep the earliest round."""
    if best is None or best.val is None:  # without validation data, the last round is selected
        return True
    return now["val"] is not None and now["val"] > best.val


def choose(history: Iterable[Mapping[str, Any]], view: str) -> dict[int, Chosen]:
    """Last and selected metrics of every evaluated client."""
    chosen: dict[int, Chosen] = {}
    for record in history:
        for key, views in record.get("clients", {}).items():
            now, before = views[view], chosen.get(int(key))
            if before is None or selects(now, Selection.of(before)):
                chosen[int(key)] = Chosen(now, now, record["round"])
            else:
                chosen[int(key)] = Chosen(now, before.selected, before.selected_round)
    return dict(sorted(chosen.items()))


def summarize(
    history: Sequence[Mapping[str, Any]],
    views: Sequence[str],
    samples: Mapping[int, int],
    exams: Mapping[int, Exams | None] | None = None,
) -> dict[str, dict[str, dict[str, Metrics]]]:
    """Metrics over clients: view -> `last` or `selected` -> metric -> `mean`, `weighted`, `worst` and `best`."""
    chosen = {view: choose(history, view).items() for view in views}
    return {
        view: {
            "last": metrics_over_clients({k: one.last for k, one in rows}, samples, exams),
            "selected": metrics_over_clients({k: one.selected for k, one in rows}, samples, exams),
        }
        for view, rows in chosen.items()
    }


def selection_text(validation: Iterable[float | None]) -> str:
    """How rounds were selected, in words. `validation` has each client's accuracy, or None without validation data.

    >>> selection_text([0.9, 0.8]), selection_text([None])
    ('selected on validation', 'in the last round, without validation data')
    """
    known = {value is not None for value in validation}
    if known == {True, False}:
        return "selected on validation (clients without validation data: the last round)"
    return "in the last round, without validation data" if known == {False} else "selected on validation"


def headline(views: Mapping[str, str], chosen: Iterable[Mapping[int, Chosen]]) -> str:
    """Describes the accuracies of a table, by the view of each method and the metrics that each method selected."""
    selection = selection_text(one.selected["val"] for rows in chosen for one in rows.values())
    return f"test accuracy, {selection}, {views_text(views)}"


# ---- rows of tables --------------------------------------------------------------------------------------------------

SPLIT_AND_METRIC = {
    "val": ("val", "accuracy"),
    "test": ("test", "accuracy"),  # with domains, this is `acc`
    "test_loss": ("test", "loss"),
    "bwt": ("own domain", "accuracy"),
    "fwt": ("other domains", "accuracy"),
}


def tidy_rows(history: Iterable[Mapping[str, Any]], models: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """One row per round, client, view, split and metric. A metric without a value has no row."""
    for record in history:
        for key, views in record.get("clients", {}).items():
            for view, metrics in views.items():
                about = {"round": record["round"], "client": int(key), "model": models[int(key)], "view": view}
                yield from (about | cell for cell in tidy_cells(metrics))


def tidy_cells(metrics: Metrics) -> Iterator[dict[str, Any]]:
    """Split, metric and value of each metric of a client that has a value."""
    for name, (split, metric) in SPLIT_AND_METRIC.items():
        if (value := metrics.get(name)) is not None:
            yield {"split": split, "metric": metric, "value": value}


def confusion_rows(labels: Sequence[int], predicted: Sequence[int], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row per class: how often each class was predicted for it."""
    for name, row in zip(names, _confusion(labels, predicted, len(names)).tolist(), strict=True):
        yield {"label": name} | dict(zip(names, row, strict=True))


def class_rows(labels: Sequence[int], predicted: Sequence[int], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row per class: precision, recall, F1 and number of rows. None: its denominator is zero."""
    counts = _confusion(labels, predicted, len(names))
    columns = (counts.diagonal().tolist(), counts.sum(0).tolist(), counts.sum(1).tolist())
    for name, correct, chosen, support in zip(names, *columns, strict=True):
        figures = {"precision": _ratio(correct, chosen), "recall": _ratio(correct, support)}
        figures["f1"] = _ratio(2 * correct, chosen + support)
        yield {"class": name, **figures, "support": support}


def _confusion(labels: Sequence[int], predicted: Sequence[int], classes: int) -> np.ndarray:
    """Number of rows by label and predicted class."""
    counts = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(counts, (np.array(labels, dtype=np.int64), np.array(predicted, dtype=np.int64)), 1)
    return counts


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
