"""Metrics: their names, which values are better, and how each is computed from a model's scores."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pluribus.errors import ConflictError, FormatError, MismatchError, unknown
from pluribus.internal.devices import double
from pluribus.targets import IN_WORDS, Target, TargetKind

AUTO = "auto"
ACCURACY = "accuracy"
CONFUSION = "confusion"  # a table, not a number
LOSS = "loss"
BINS = 15  # of confidence, for the calibration error
USUAL: dict[TargetKind, str] = {"classes": ACCURACY, "labels": "f1", "numbers": "rmse"}
"""The metric that `auto` stands for. Of many labels a row has few, so a model without any prediction has a high
accuracy, but an F1 of 0."""

Measure = Callable[[Target, Tensor, Tensor], float]


@dataclass(frozen=True)
class Metric:
    """A number that is measured on a set of rows."""

    name: str
    text: str
    """Its name in tables and figures."""
    targets: tuple[TargetKind, ...]
    """What a model must predict."""
    measure: Measure
    """Computes it from a model's scores (n, outputs) and the true values. NaN: these rows cannot tell."""
    smaller: bool = False
    """Whether smaller values are better."""
    range: tuple[float, float] = (0.0, 1.0)

    def best(self, values: Iterable[float | None]) -> float | None:
        """The best of those values that are known."""
        return (min if self.smaller else max)((value for value in values if value is not None), default=None)

    def prefers(self, value: float, other: float) -> bool:
        """Whether a value is better than another."""
        return value < other if self.smaller else value > other

    @property
    def worst(self) -> float:
        """The worst value that there is, as a finite number."""
        return max(-sys.float_info.max, min(sys.float_info.max, self.range[self.smaller]))


def _accuracy(target: Target, scores: Tensor, y: Tensor) -> float:
    return int((target.predict(scores) == y).sum()) / y.numel()


def _balanced_accuracy(target: Target, scores: Tensor, y: Tensor) -> float:
    """The mean recall of the classes that the rows have."""
    hits, _, support = _counts(target, scores, y)
    return float((hits / support)[support > 0].mean())


def _f1(target: Target, scores: Tensor, y: Tensor) -> float:
    """The mean F1 of the classes or labels that are true or predicted for some row."""
    hits, chosen, support = _counts(target, scores, y)
    return float((2 * hits / (chosen + support))[chosen + support > 0].mean())


def _auroc(target: Target, scores: Tensor, y: Tensor) -> float:
    """Each class or label against the rest: the mean of those that some rows have, but not all."""
    from sklearn.metrics import roc_auc_score

    shares = _array(target.posterior(double(scores)))  # float32 would make ties of confident scores
    truth = _array(_columns(target, y, scores.shape[1]))
    known = [n for n in range(shares.shape[1]) if 0 < truth[:, n].sum() < len(truth)]
    found = [float(roc_auc_score(truth[:, n], shares[:, n])) for n in known]
    return sum(found) / len(found) if found else math.nan


def _calibration_error(target: Target, scores: Tensor, y: Tensor) -> float:
    """By bins of confidence, the gap of confidence and accuracy, weighted by rows (Guo et al., 2017)."""
    confidence = _array(target.posterior(double(scores)).amax(1))
    gaps = confidence - _array(target.predict(scores) == y)
    edges = np.linspace(0, 1, BINS + 1)[1:-1]
    return float(np.abs(np.bincount(np.digitize(confidence, edges, right=True), gaps)).sum() / len(gaps))


def _rmse(target: Target, scores: Tensor, y: Tensor) -> float:
    return float(double(scores - y).square().mean(0).sqrt().mean())


def _mae(target: Target, scores: Tensor, y: Tensor) -> float:
    return float(double(scores - y).abs().mean())


def _r2(target: Target, scores: Tensor, y: Tensor) -> float:
    from sklearn.metrics import r2_score

    return float(r2_score(_array(double(y)), _array(double(scores)))) if len(y) > 1 else math.nan


def _columns(target: Target, values: Tensor, outputs: int) -> Tensor:
    """Classes (n,) or labels (n, outputs) as one column of truth values for each class or label."""
    return values[:, None] == torch.arange(outputs, device=values.device) if target.kind == "classes" else values > 0.5


def _counts(target: Target, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each class or label: how many rows have it and are predicted to, are predicted to have it, and have it."""
    truth, predicted = (_columns(target, one, scores.shape[1]) for one in (y, target.predict(scores)))
    hits, chosen, support = (double(one.sum(0)) for one in (truth & predicted, predicted, truth))
    return hits, chosen, support


def _array(values: Tensor) -> np.ndarray[Any, Any]:
    return values.cpu().numpy()


_KNOWN = (
    Metric(ACCURACY, "accuracy", ("classes", "labels"), _accuracy),
    Metric("balanced_accuracy", "balanced accuracy", ("classes",), _balanced_accuracy),
    Metric("f1", "macro F1", ("classes", "labels"), _f1),
    Metric("auroc", "AUROC", ("classes", "labels"), _auroc),
    Metric("ece", "calibration error", ("classes",), _calibration_error, smaller=True),
    Metric("rmse", "RMSE", ("numbers",), _rmse, smaller=True, range=(0.0, math.inf)),
    Metric("mae", "MAE", ("numbers",), _mae, smaller=True, range=(0.0, math.inf)),
    Metric("r2", "R²", ("numbers",), _r2, range=(-math.inf, 1.0)),
)
METRICS = {one.name: one for one in _KNOWN}


def parse_metrics(value: str | Sequence[str]) -> tuple[str, ...]:
    """Names of metrics, from text with commas or from a list. The first one decides.

    >>> parse_metrics("f1, auroc"), parse_metrics("auto")
    (('f1', 'auroc'), ('auto',))
    """
    words = value.split(",") if isinstance(value, str) else value
    names = tuple(dict.fromkeys(word.strip() for word in words))
    if not any(names):
        raise FormatError("--metrics is empty: name at least one metric, or auto.")
    for name in names:
        if name not in (AUTO, CONFUSION, *METRICS):
            raise unknown("metric", name, [AUTO, CONFUSION, *METRICS], "pluribus run --help")
    if names[0] == CONFUSION:
        raise ConflictError("confusion is a table and cannot select rounds: put a metric before it.")
    return names


def choose_metrics(value: str | Sequence[str], target: TargetKind) -> tuple[str, ...]:
    """The metrics for what is predicted, without `confusion`. `auto` becomes the usual one, and others must fit."""
    names = parse_metrics(value)
    fit = [one.name for one in METRICS.values() if target in one.targets]
    fit += [CONFUSION] if target == "classes" else []
    for name in names:
        if name not in (AUTO, *fit):
            raise MismatchError(
                f"metric {name} does not fit data that has {IN_WORDS[target]} to predict: use {', '.join(fit)}."
            )
    chosen = dict.fromkeys(USUAL[target] if name == AUTO else name for name in names)
    return tuple(name for name in chosen if name != CONFUSION)


def asks_for_confusion(value: str | Sequence[str]) -> bool:
    """Whether the setting names the confusion matrix."""
    return CONFUSION in parse_metrics(value)


def measure_all(names: Iterable[str], target: Target, scores: Tensor, y: Tensor) -> dict[str, float | None]:
    """Metrics of a set by name. None: it has no rows, these rows cannot tell, or training diverged.

    JSON lacks NaN, and a resumed run must read the same value that was written.
    """
    return {name: _measure(METRICS[name], target, scores, y) for name in names}


def _measure(metric: Metric, target: Target, scores: Tensor, y: Tensor) -> float | None:
    if not len(y) or (metric.name != ACCURACY and not bool(torch.isfinite(scores).all())):
        return None
    value = metric.measure(target, scores, y)
    return value if math.isfinite(value) else None


# ---- names in records ------------------------------------------------------------------------------------------------


def headline_of(record: Mapping[str, Any]) -> Metric:
    """The metric behind `val` and `test` in a record of a round, or in a result. Accuracy is not written."""
    return METRICS[record.get("metric", ACCURACY)]


def metric_behind(key: str, headline: Metric) -> str:
    """The name of a metric by its key in a record: `test` and `val` are the headline, `test_f1` is another one."""
    return key.partition("_")[2] or headline.name


def is_smaller_better(key: str, headline: Metric) -> bool:
    """Whether smaller values are better of a metric in a record, by its key."""
    name = metric_behind(key, headline)
    return name == LOSS or METRICS[name].smaller


def range_of(key: str, headline: Metric) -> tuple[float, float]:
    """The least and the largest value of a metric in a record, by its key."""
    name = metric_behind(key, headline)
    return (0.0, math.inf) if name == LOSS else METRICS[name].range


def keys_of(names: Sequence[str]) -> list[str]:
    """The keys of a client's metrics in a record, without those of domains. The first name is the headline."""
    return ["val", "test", "test_loss", *(f"{split}_{name}" for name in names[1:] for split in ("val", "test"))]
