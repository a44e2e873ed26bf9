"""Small data and a difficult model for the experiments of the kit. Their dotted paths are values of settings."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from pluribus.data import Dataset, load

FEW = "pluribus.conformance.digits.few"
TWO_CLASSES = "pluribus.conformance.digits.two_classes"
LONELY = "pluribus.conformance.digits.lonely"
NORMED = "pluribus.conformance.digits.normed"


def few() -> Dataset:
    """160 digits of all classes."""
    return _rows("few", torch.arange(160), 10)


def two_classes() -> Dataset:
    """80 zeros and ones."""
    return _rows("two-classes", (_digits().y < 2).nonzero().flatten()[:80], 2)


def lonely() -> Dataset:
    """Four classes of 60, 30, 8 and 2 images: one class per client leaves the last client one training sample."""
    y = _digits().y.numpy()
    rows = np.concatenate([np.flatnonzero(y == label)[:size] for label, size in enumerate((60, 30, 8, 2))])
    return _rows("lonely", torch.from_numpy(rows), 4)


@cache  # every experiment of a check loads it
def _digits() -> Dataset:
    return load("digits")


def _rows(name: str, rows: Tensor, classes: int) -> Dataset:
    digits = _digits()
    return Dataset(name, digits.x[rows], digits.y[rows], digits.classes[:classes])


def normed(shape: tuple[int, int, int]) -> nn.Module:
    """A backbone that cannot train on a single sample: batch norm has no variance of it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.BatchNorm1d(64), nn.ReLU())
