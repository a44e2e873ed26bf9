"""Normalization: a mean and a deviation per channel or column, measured on training rows or given by the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pluribus.data.dataset import Dataset
from pluribus.errors import FormatError, MismatchError
from pluribus.inputs import Kind

MODES = ("auto", "none", "client", "dataset")
# How each kind is normalized by default. Images have a range of their own, [-1, 1].
AUTO: Mapping[Kind, str] = {"image": "none", "signal": "client", "tokens": "none", "table": "client", "tensor": "none"}
BYTE = 255  # users give the mean and the deviation of images for pixels in [0, 1]


class Scale(NamedTuple):
    """What is subtracted from a row, and what the difference is multiplied with: tensors that fit a row.

    In a stack of clients, they have one more dimension in front, with one entry per row.
    """

    mean: Tensor
    factor: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x.sub(self.mean).mul_(self.factor)

    def to(self, device: torch.device) -> Scale:
        return Scale(self.mean.to(device), self.factor.to(device))

    def clone(self) -> Scale:
        return Scale(self.mean.clone(), self.factor.clone())


class Normalize(NamedTuple):
    """The setting `normalize`: a mode, or the user's own means and deviations per channel or column."""

    mode: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def by_client(self) -> bool:
        return self.mode == "client"

    def given(self, dataset: Dataset) -> Scale:
        """The scale of the user's own numbers."""
        channels = dataset.x.shape[1]
        for name, values in (("mean", self.mean), ("deviation", self.std)):
            if len(values) not in (1, channels):
                raise MismatchError(
                    f"--normalize has {len(values)} numbers for the {name}: give 1, or {channels} for the channels of "
                    f"{dataset.name}."
                )
        unit = BYTE if dataset.x.dtype == torch.uint8 else 1
        mean, std = (np.broadcast_to(np.array(values) * unit, channels) for values in (self.mean, self.std))
        return _scale(mean, std, dataset)


AS_IT_IS = Normalize("none")


def parse_normalize(text: str) -> Normalize:
    """Parse the setting: a mode, or `mean/deviation` with a number for all channels or for each of them.

    >>> parse_normalize("0.5,0.4,0.3/0.2").std
    (0.2,)
    """
    if text in MODES:
        return Normalize(text)
    try:
        mean, std = (tuple(float(word) for word in part.split(",")) for part in text.split("/"))
    except ValueError:
        raise FormatError(
            f"--normalize must be one of {', '.join(MODES)}, or MEAN/DEVIATION such as 0.49,0.48,0.45/0.25, not "
            f"{text!r}."
        ) from None
    if not all(np.isfinite([*mean, *std])) or min(std) <= 0:
        raise FormatError(f"--normalize needs finite means and deviations above 0, not {text!r}.")
    return Normalize("given", mean, std)


def choose_normalize(normalize: Normalize, dataset: Dataset) -> Normalize:
    """The mode that `auto` means for a data set. Modes that a kind cannot have are refused."""
    if normalize.mode == "auto":
        return Normalize(AUTO[dataset.kind])
    if normalize.mode != "none" and (dataset.kind == "tokens" or not _measurable(dataset)):
        raise MismatchError(f"{dataset.name} holds whole numbers, which cannot be normalized: leave out --normalize.")
    return normalize


def _measurable(dataset: Dataset) -> bool:
    return dataset.x.is_floating_point() or dataset.x.dtype == torch.uint8


def measure(dataset: Dataset, rows: np.ndarray) -> Scale:
    """Mean and deviation per channel or column over some rows. Of the categories of a table, none are measured."""
    return measure_rows(dataset.x[torch.from_numpy(rows)], dataset)


def measure_rows(rows: Tensor, dataset: Dataset) -> Scale:
    """The same over given rows, of the form of a data set."""
    x = rows.cpu().numpy().astype(np.float64)  # on the CPU and in double: equal on every device
    axes = (0, *range(2, x.ndim))
    return _scale(x.mean(axes), x.std(axes), dataset)


def _scale(mean: np.ndarray, std: np.ndarray, dataset: Dataset) -> Scale:
    mean, factor = np.array(mean), 1 / np.where(std > 0, std, 1.0)  # a constant channel becomes zero
    if dataset.categories:
        mean[-len(dataset.categories) :], factor[-len(dataset.categories) :] = 0.0, 1.0
    shape = (-1, *[1] * (dataset.x.dim() - 2))
    return Scale(*(torch.from_numpy(part).to(torch.float32).view(shape) for part in (mean, factor)))


def scale_facts(scale: Scale, dataset: Dataset) -> dict[str, Any]:
    """Mean and deviation per channel, as plain numbers. Of bytes, for pixels in [0, 1] as in papers."""
    unit = BYTE if dataset.x.dtype == torch.uint8 else 1
    mean, std = scale.mean.flatten().double() / unit, 1 / scale.factor.flatten().double() / unit
    return {name: [float(f"{value:.7g}") for value in part.tolist()] for name, part in (("mean", mean), ("std", std))}
