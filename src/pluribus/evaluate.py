"""Evaluation: what is measured, and how each number is named.

A *view* says which model is evaluated: `after` local training, or `before` it, with the newest download received. A
*metric* says what is measured: `test` and `val` are the headline metric (accuracy, unless the experiment sets another
one) on the client's own sets, and with domains there are also `acc`, `bwt` and `fwt`. Further metrics that the
experiment asks for are `val_NAME` and `test_NAME`. Over clients there are `mean` (each client counts once), `weighted`
(each test sample counts once: the weight of a client is the number of test samples of its metric), `worst` and `best`,
`deviation` (the standard deviation) and `worst_decile` (the mean of the worst tenth). Over rounds there are `last` and
`selected`: the test metric of the round in which the client's validation metric was first at its best. The test data
never select a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pluribus.client import Client
from pluribus.data.federated import Data
from pluribus.errors import DamagedFileError
from pluribus.internal.metrics import METRICS, Metric, headline_of, is_smaller_better, measure_all, metric_behind
from pluribus.internal.steps import Map
from pluribus.internal.views import views_text
from pluribus.method import Method
from pluribus.targets import Target
from pluribus.task import Task

Metrics = dict[str, float | None]
Exams = tuple[int, int]  # test samples of the client's own domain, and of all domains


def rule_of(method: Method, view: str) -> Map:
    """The function that gives scores in a view."""
    if view == "after" and type(method).predict_after is not Method.predict_after:
        return method.predict_after
    return method.predict  # not wrapped: an engine records each function once


class Answers(NamedTuple):
    """A model's scores for some rows, and what it should have predicted for them."""

    scores: Tensor
    y: Tensor

    @classmethod
    def of(cls, rule: Map, client: Client, data: Data) -> Answers:
        labels = data.labels()
        if not len(data):
            return cls(labels.new_zeros((0, client.task.classes), dtype=torch.float32), labels)
        return cls(client.sweep(rule, data), labels)

    @classmethod
    def join(cls, some: Sequence[Answers]) -> Answers:
        """The answers to several sets of rows together."""
        return cls(torch.cat([one.scores for one in some]), torch.cat([one.y for one in some]))

    def measure(self, task: Task) -> Metrics:
        """The task's metrics by name."""
        return measure_all(task.metrics, task.target, self.scores, self.y)

    def mean_loss(self, target: Target) -> float | None:
        """The task's loss without weights, mean over rows. None without rows, and if training diverged."""
        if not len(self.y):
            return None
        total = float(target.loss(self.scores, self.y, reduction="sum"))
        return total / len(self.y) if math.isfinite(total) else None


class Tested(NamedTuple):
    """Test rows of a client, and what was predicted for each of them."""

    data: Data
    predicted: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """True value, predicted value and number in the data set of each row, on the device.

        Values are classes (n,) as int32, labels (n, L) as uint8 or numbers (n, D) as float32.
        """
        y = self.data.labels()
        kind = torch.int32 if y.dim() == 1 else torch.uint8 if self.predicted.dtype == torch.bool else torch.float32
        values = {"label": y.to(kind), "predicted": self.predicted.to(kind)}
        return values | {"row": self.data.rows.to(torch.int32)}


def prediction_bytes(task: Task) -> int:
    """Bytes of the tensors of Tested, per row."""
    values = {"classes": 4, "labels": task.classes, "numbers": 4 * task.classes}[task.target.kind]
    return 2 * values + 4


def measure(rule: Map, client: Client) -> Metrics:
    """All metrics of a client in its current state."""
    return measure_rows(rule, client)[0]


def measure_rows(rule: Map, client: Client) -> tuple[Metrics, Tested]:
    """All metrics of a client in its current state, and its predictions for its test rows.

    With domains, these are the test rows of its own domain.
    """
    if client.exams:
        return _domain_metrics(rule, client)
    task, data = client.task, client.data["test"]
    val, answers = Answers.of(rule, client, client.data["val"]).measure(task), Answers.of(rule, client, data)
    metrics = _named(val, test := answers.measure(task)) | {"test_loss": answers.mean_loss(task.target)}
    return metrics | _others(val, test), Tested(data, task.target.predict(answers.scores))


def _domain_metrics(rule: Map, client: Client) -> tuple[Metrics, Tested]:
    """FedH2L's metrics: BWT on the test set of the own domain, FWT on those of all others, ACC on all."""
    task, exams, own = client.task, list(client.exams.values()), client.task.domain_of[client.card.id]
    answers = [Answers.of(rule, client, exam["test"]) for exam in exams]
    val = Answers.join([Answers.of(rule, client, exam["val"]) for exam in exams]).measure(task)
    test = Answers.join(answers).measure(task)
    sides = {"bwt": answers[own : own + 1], "fwt": answers[:own] + answers[own + 1 :]}
    headline = task.metrics[0]
    metrics = _named(val, test) | {"acc": test[headline]}
    for name, some in sides.items():
        metrics[name] = Answers.join(some).measure(task)[headline] if some else None
    return metrics | _others(val, test), Tested(exams[own]["test"], task.target.predict(answers[own].scores))


def _named(val: Metrics, test: Metrics) -> Metrics:
    """The headline metric, which is the first one, by set."""
    return {"val": next(iter(val.values())), "test": next(iter(test.values()))}


def _others(val: Metrics, test: Metrics) -> Metrics:
    """All metrics but the headline, by set."""
    names = list(test)[1:]
    return {f"{split}_{name}": of[name] for name in names for split, of in (("val", val), ("test", test))}


def exam_sizes(task: Task, client: int) -> Exams | None:
    """Number of test samples of a client's own domain and of all domains. None: no domains, or not disclosed."""
    if not (task.exams and task.share_counts):
        return None
    sizes = list(task.exams.values())
    return sizes[task.domain_of[client]], sum(sizes)


def metrics_over_clients(
    rows: Mapping[int, Metrics],
    samples: Mapping[int, int | None],
    exams: Mapping[int, Exams | None] | None = None,
    headline: Metric = METRICS["accuracy"],
) -> dict[str, Metrics]:
    """Every metric over clients: name -> `mean`, `weighted`, `worst` and so on. The best loss is the smallest.

    `samples` has the sizes of the clients' own test sets; a client that does not disclose it counts once. In a run with
    domains, `exams` has those of the domains.
    `headline` is the metric behind `val` and `test`.
    """
    found: dict[str, Metrics] = {}
    for name in next(iter(rows.values()), {}):
        counts = {k: _sample_count(name, samples[k], (exams or {}).get(k)) for k in rows}
        found[name] = over_clients({k: row[name] for k, row in rows.items()}, counts, is_smaller_better(name, headline))
    return found


def _sample_count(metric: str, samples: int | None, exams: Exams | None) -> int:
    """Number of test samples that a client's metric is measured on. 1 if nobody says."""
    if exams is None:
        return 1 if samples is None else samples
    own, everything = exams
    return {"bwt": own, "fwt": everything - own}.get(metric, everything)


def over_clients(values: Mapping[int, float | None], samples: Mapping[int, int], smaller: bool = False) -> Metrics:
    """One metric over the clients that have it. `smaller`: whether smaller values are better."""
    known = {k: v for k, v in values.items() if v is not None}
    weight = sum(samples[k] for k in known)
    if not known:
        return dict.fromkeys(OVER_CLIENTS)
    worst_first = sorted(known.values(), reverse=smaller)
    tenth = worst_first[: -(-len(known) // 10)]
    return {
        "mean": sum(known.values()) / len(known),
        "weighted": sum(v * samples[k] for k, v in known.items()) / weight if weight else None,
        "worst": worst_first[0],
        "best": worst_first[-1],
        "deviation": float(np.std(worst_first)),
        "worst_decile": sum(tenth) / len(tenth),
    }


OVER_CLIENTS = ("mean", "weighted", "worst", "best", "deviation", "worst_decile")


@dataclass(frozen=True)
class Chosen:
    """A client's metrics in its last evaluated round, and in the round that its validation data selects."""

    last: Metrics
    selected: Metrics
    selected_round: int


class Selection(NamedTuple):
    """The round that a client's validation data selects so far, and its validation metric in that round."""

    round: int
    val: float | None

    @classmethod
    def of(cls, chosen: Chosen) -> Selection:
        return cls(chosen.selected_round, chosen.selected["val"])


def selects(now: Metrics, best: Selection | None, headline: Metric) -> bool:
    """Whether validation data prefers these metrics to those of the best round so far. Ties keep the earliest round."""
    if best is None or best.val is None:  # without validation data, the last round is selected
        return True
    return now["val"] is not None and headline.prefers(now["val"], best.val)


def choose(history: Iterable[Mapping[str, Any]], view: str) -> dict[int, Chosen]:
    """Last and selected metrics of every evaluated client."""
    chosen: dict[int, Chosen] = {}
    for record in history:
        headline = headline_of(record)
        for key, views in record.get("clients", {}).items():
            if view not in views:
                raise DamagedFileError(
                    f"round {record['round']} has no metrics of client {key} in the view '{view:.40}'."
                )
            now, before = views[view], chosen.get(int(key))
            if before is None or selects(now, Selection.of(before), headline):
                chosen[int(key)] = Chosen(now, now, record["round"])
            else:
                chosen[int(key)] = Chosen(now, before.selected, before.selected_round)
    return dict(sorted(chosen.items()))


def headline_in(history: Iterable[Mapping[str, Any]]) -> Metric:
    """The headline metric of a run."""
    return headline_of(next(iter(history), {}))


def summarize(
    history: Sequence[Mapping[str, Any]],
    views: Sequence[str],
    samples: Mapping[int, int | None],
    exams: Mapping[int, Exams | None] | None = None,
) -> dict[str, dict[str, dict[str, Metrics]]]:
    """Metrics over clients: view -> `last` or `selected` -> metric -> `mean`, `weighted`, `worst` and so on."""
    headline = headline_in(history)
    chosen = {view: choose(history, view).items() for view in views}
    return {
        view: {
            "last": metrics_over_clients({k: one.last for k, one in rows}, samples, exams, headline),
            "selected": metrics_over_clients({k: one.selected for k, one in rows}, samples, exams, headline),
        }
        for view, rows in chosen.items()
    }


def selection_text(validation: Iterable[float | None]) -> str:
    """How rounds were selected, in words. `validation` has each client's metric, or None without validation data.

    >>> selection_text([0.9, 0.8]), selection_text([None])
    ('selected on validation', 'in the last round, without validation data')
    """
    known = {value is not None for value in validation}
    if known == {True, False}:
        return "selected on validation (clients without validation data: the last round)"
    return "in the last round, without validation data" if known == {False} else "selected on validation"


def evaluated_clients(histories: Iterable[Sequence[Mapping[str, Any]]]) -> str:
    """Whose metrics some runs have, in words: attackers are not evaluated.

    >>> evaluated_clients([[{"round": 0}]]), evaluated_clients([[{"round": 0, "attackers": [3]}]])
    ('clients', 'honest clients')
    """
    attacked = {"attackers" in record for history in histories for record in history[:1]}
    if attacked == {True, False}:
        return "clients (honest ones in runs under attack)"
    return "honest clients" if attacked == {True} else "clients"


def headline(metric: Metric, views: Mapping[str, str], chosen: Iterable[Mapping[int, Chosen]], whose: str) -> str:
    """Describes the numbers of a table, by the view of each method and the metrics that each method selected."""
    selection = selection_text(one.selected["val"] for rows in chosen for one in rows.values())
    honest = "" if whose == "clients" else f" of {whose}"
    return f"test {metric.text}{honest}, {selection}, {views_text(views)}"


# ---- rows of tables --------------------------------------------------------------------------------------------------

SPLITS = {"val": "val", "test": "test", "bwt": "own domain", "fwt": "other domains"}  # with domains, `test` is `acc`


def tidy_rows(history: Iterable[Mapping[str, Any]], models: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """One row per round, client, view, split and metric. A metric without a value has no row."""
    for record in history:
        headline = headline_of(record)
        for key, views in record.get("clients", {}).items():
            for view, metrics in views.items():
                about = {"round": record["round"], "client": int(key), "model": models[int(key)], "view": view}
                yield from (about | cell for cell in tidy_cells(metrics, headline))


def tidy_cells(metrics: Metrics, headline: Metric) -> Iterator[dict[str, Any]]:
    """Split, metric and value of each metric of a client that has a value."""
    for key, value in metrics.items():
        split = SPLITS.get(key.partition("_")[0])
        if split is not None and value is not None:
            yield {"split": split, "metric": metric_behind(key, headline), "value": value}


def confusion_rows(labels: Tensor, predicted: Tensor, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row per class: how often each class was predicted for it."""
    for name, row in zip(names, confusion(labels, predicted, len(names)).tolist(), strict=True):
        yield {"label": name} | dict(zip(names, row, strict=True))


def class_rows(labels: Tensor, predicted: Tensor, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row per class or label: precision, recall, F1 and number of rows. None: its denominator is zero."""
    if labels.dim() == 1:
        counts = confusion(labels, predicted, len(names))
        columns = counts.diagonal(), counts.sum(0), counts.sum(1)
    else:
        columns = (labels & predicted).sum(0), predicted.sum(0), labels.sum(0)
    for name, correct, chosen, support in zip(names, *(column.tolist() for column in columns), strict=True):
        figures = {"precision": _ratio(correct, chosen), "recall": _ratio(correct, support)}
        figures["f1"] = _ratio(2 * correct, chosen + support)
        yield {"class": name, **figures, "support": support}


def confusion(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Number of rows by label and predicted class."""
    return torch.bincount(labels.long() * classes + predicted.long(), minlength=classes**2).view(classes, classes)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
