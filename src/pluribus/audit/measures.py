"""What attacks are measured by: the area under the ROC curve, its interval, and the signal-to-noise ratio of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pluribus import draws

RESAMPLES = 1000
ENOUGH_CLIENTS = 4  # to resample clients; with fewer, rows are resampled
LEVEL = 0.95


class Interval(NamedTuple):
    """A mean, and the ends of its confidence interval."""

    value: float
    low: float
    high: float


class Scores(NamedTuple):
    """Scores of an attack on the rows of one client: a higher score says that the client has trained on the row.

    Only rows of one class are compared, so that a different mix of classes in the test rows is not taken for a finding.
    """

    members: Tensor  # of training rows
    others: Tensor  # of test rows
    member_class: Tensor
    other_class: Tensor


def pairs(scores: Scores) -> tuple[float, int]:
    """Over all pairs of a training row and a test row of one class: how many the attack orders right (a tie counts
    half), and how many pairs there are."""
    one, other = scores.members.double()[:, None], scores.others.double()[None]
    same = scores.member_class[:, None] == scores.other_class[None]
    right = (one > other).double() + 0.5 * (one == other).double()
    return float((right * same).sum()), int(same.sum())


def auc(scores: Scores) -> float | None:
    """The area under the ROC curve within classes. None: no class has both training and test rows."""
    right, total = pairs(scores)
    return right / total if total else None


def mean_auc(clients: Sequence[Scores], *key: draws.Key) -> Interval | None:
    """The mean over clients, with a bootstrap interval over clients, or over rows if there are few clients."""
    found = [(one, value) for one in clients if (value := auc(one)) is not None]
    if not found:
        return None
    values, rng = np.array([value for _, value in found]), draws.numpy_rng("audit interval", *key)
    if len(values) >= ENOUGH_CLIENTS:
        drawn = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(1)
    else:
        drawn = np.mean([_resample_rows(one, rng) for one, _ in found], axis=0)
    low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(values.mean()), float(low), float(high))


def _resample_rows(scores: Scores, rng: np.random.Generator) -> np.ndarray:
    """The area of one client with rows drawn again, many times. Drawing a row twice is a weight of two."""
    one, other = scores.members.double()[:, None], scores.others.double()[None]
    same = (scores.member_class[:, None] == scores.other_class[None]).double()
    right = ((one > other).double() + 0.5 * (one == other).double()) * same
    sizes = [len(scores.members), len(scores.others)]
    members, others = (
        torch.from_numpy(rng.multinomial(size, np.full(size, 1 / size), RESAMPLES)).double() for size in sizes
    )
    ordered, total = (((members @ part) * others).sum(1) for part in (right, same))
    return (ordered / total.where(total > 0, torch.nan)).numpy()


def psnr(one: Tensor, other: Tensor, span: float) -> float:
    """The peak signal-to-noise ratio in dB, for numbers whose largest and smallest possible value differ by `span`.

    >>> psnr(torch.zeros(4), torch.full((4,), 0.1), span=1.0)
    20.0
    """
    error = float((one.double() - other.double()).square().mean())
    return math.inf if error == 0 else round(10 * math.log10(span**2 / error), 6)


def total_variation(images: Tensor) -> Tensor:
    """The mean difference between neighboring pixels, which is small for natural images."""
    down, right = images[..., 1:, :] - images[..., :-1, :], images[..., :, 1:] - images[..., :, :-1]
    return down.abs().mean() + right.abs().mean()
