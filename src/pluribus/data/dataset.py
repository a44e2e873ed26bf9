"""Dataset: labelled images in memory, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pluribus.errors import DataError, DeviceError

PARTS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images in memory, and what is known about where they come from."""

    name: str
    x: Tensor
    """Images as bytes: (N, channels, height, width) uint8."""
    y: Tensor
    """Labels: (N,) int64, numbers into `classes`."""
    classes: tuple[str, ...]
    official: int | None = None
    """Rows below it are the official training set, the rest the official test set; None: no official split."""
    domain: Tensor | None = None
    """(N,) int64, numbers into `domains`: which domain a row belongs to."""
    domains: tuple[str, ...] = ()
    identity: Tensor | None = None
    """(N,) int64: rows of equal identity are copies of one image and must fall into the same part of a split."""
    part: Tensor | None = None
    """(N,) int64, numbers into `PARTS`: a fixed split, in place of shares of each client's rows."""
    notes: tuple[str, ...] = ()
    """What happened while it was read that a person should know: a sentence each."""

    def __post_init__(self) -> None:
        if problem := next(self._problems(), None):
            raise DataError(f"data set {self.name}: {problem}.")

    def shared(self) -> Dataset:
        """The same images and labels in memory that other processes can see too."""
        columns = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        try:
            copies: dict[str, Any] = {name: _shared(value) for name, value in columns.items()}
        except RuntimeError as error:
            size = sum(value.nbytes for value in columns.values())
            raise DeviceError(
                f"worker processes share the data set, but there is no room for its {size >> 20} MiB in shared memory "
                f"({one_line(error)}). Make that larger (/dev/shm), or leave out --workers."
            ) from error
        return dataclasses.replace(self, **copies)

    def _problems(self) -> Iterator[str]:
        """Only the first is looked at, so each check may rely on those before it."""
        if not _is_tensor(self.x, torch.uint8, 4):
            yield f"x must be a tensor, uint8 (N, channels, height, width), not {_described(self.x)}"
        if self.x.numel() == 0:
            yield f"it holds no images, x is {_described(self.x)}"
        if not self.classes:
            yield "it names no classes"
        yield from self._column_problems("y", self.y, len(self.classes))
        if self.official is not None and not 0 < self.official < len(self.x):
            yield f"official must leave rows on both sides, {self.official} of {len(self.x)} does not"
        if (self.domain is None) != (not self.domains):
            yield "domain and domains go together, give both or neither"
        if self.domain is not None:
            yield from self._column_problems("domain", self.domain, len(self.domains))
        if self.identity is not None:
            yield from self._column_problems("identity", self.identity, None)
        if self.part is not None:
            yield from self._column_problems("part", self.part, len(PARTS))
            if self.official is not None or self.identity is not None:
                yield "part is a split, official and identity ask for others: give one of them"

    def _column_problems(self, name: str, column: Tensor, names: int | None) -> Iterator[str]:
        if not _is_tensor(column, torch.int64, 1) or len(column) != len(self.x):
            yield f"{name} must be a tensor, int64 ({len(self.x)},), one number per image, not {_described(column)}"
        low, high = int(column.min()), int(column.max())
        if names is not None and (low < 0 or high >= names):
            yield f"{name} must lie in 0..{names - 1}, but runs from {low} to {high}"


def _shared(value: Tensor) -> Tensor:
    """A copy, because a numpy view of memory that is moved would point nowhere."""
    if value.is_shared():  # type: ignore[no-untyped-call]
        return value
    place: Tensor = torch.empty_like(value).share_memory_()  # type: ignore[no-untyped-call]
    return place.copy_(value)


def _is_tensor(value: object, dtype: torch.dtype, dimensions: int) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype and value.dim() == dimensions


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def resized(dataset: Dataset, size: int) -> Dataset:
    """The same data set with images of size x size."""
    if dataset.x.shape[2:] == (size, size):
        return dataset
    x = F.interpolate(dataset.x, size=(size, size), mode="bilinear", antialias=True)
    return dataclasses.replace(dataset, x=x)


def one_line(reason: Exception) -> str:
    """The last line of what an exception says."""
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    return lines[-1] if lines else type(reason).__name__
