"""What a model predicts for a row: one of several classes, several labels at once, or numbers. And the loss of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

TargetKind = Literal["classes", "labels", "numbers"]
TARGETS: tuple[TargetKind, ...] = get_args(TargetKind)
Reduction = Literal["mean", "sum", "none"]
IN_WORDS = {"classes": "classes", "labels": "several labels at once", "numbers": "numbers"}


@dataclass(frozen=True)
class Target:
    """What is predicted. Its loss is cross-entropy for classes and for labels, and a distance for numbers."""

    kind: TargetKind = "classes"
    distance: Literal["mse", "l1"] = "mse"

    def loss(self, scores: Tensor, y: Tensor, *, weight: Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
        """The loss of scores (n, outputs). With `reduction="none"`, one number per row.

        `weight` has a number per class or label. A mean over rows of weighted classes is weighted too.
        """
        if self.kind == "classes":
            return F.cross_entropy(scores, y, weight=weight, reduction=reduction)
        if self.kind == "labels":
            rows = F.binary_cross_entropy_with_logits(scores, y, pos_weight=weight, reduction="none")
        else:
            rows = (scores - y).square() if self.distance == "mse" else (scores - y).abs()
        return _reduce(rows.mean(1), reduction)

    def divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        """How far a student's scores are from a teacher's, one number per row: KL divergence, or squared distance."""
        if self.kind == "classes":
            target, given = teacher.log_softmax(1), student.log_softmax(1)
            return (target.exp() * (target - given)).sum(1)  # torch's kl_div cannot be stacked
        if self.kind == "labels":
            share = teacher.sigmoid()
            yes = share * (F.logsigmoid(teacher) - F.logsigmoid(student))
            return (yes + (1 - share) * (F.logsigmoid(-teacher) - F.logsigmoid(-student))).mean(1)
        return (teacher - student).square().mean(1)

    def divergence_from(self, posterior: Tensor, scores: Tensor) -> Tensor:
        """How far scores are from a posterior that another client sent, one number per row."""
        if self.kind == "classes":
            return F.kl_div(scores.log_softmax(1), posterior, reduction="none").sum(1)
        if self.kind == "labels":
            sides = torch.stack([posterior, 1 - posterior]), torch.stack([F.logsigmoid(scores), F.logsigmoid(-scores)])
            return F.kl_div(sides[1], sides[0], reduction="none").sum(0).mean(1)
        return (posterior - scores).square().mean(1)

    def confidence(self, posterior: Tensor, y: Tensor) -> Tensor:
        """The share of right predictions. Numbers are never exactly right: all teachers count equally."""
        if self.kind == "numbers":
            return torch.ones((), device=y.device)
        right = posterior.argmax(1) == y if self.kind == "classes" else (posterior > 0.5) == (y > 0.5)
        return right.float().mean()

    def posterior(self, scores: Tensor) -> Tensor:
        """Probabilities of classes or labels. Numbers are their own prediction."""
        if self.kind == "numbers":
            return scores
        return scores.softmax(1) if self.kind == "classes" else scores.sigmoid()

    def predict(self, scores: Tensor) -> Tensor:
        """The predicted class (n,), labels (n, L) as bool, or numbers (n, D)."""
        if self.kind == "classes":
            return scores.argmax(1)
        return scores > 0 if self.kind == "labels" else scores


def _reduce(rows: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return rows
    return rows.mean() if reduction == "mean" else torch.sum(rows)


CLASSES = Target()
