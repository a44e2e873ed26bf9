"""Dataset: labeled images in memory, checked when it is created."""

from __future__ import annotations

import dataclasses
import hashlib
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
    """Labeled images in memory, with their domains and splits if they have any."""

    name: str
    x: Tensor
    """Images: (N, channels, height, width), bytes (uint8) or numbers (float32). Bytes become numbers in [-1, 1]."""
    y: Tensor
    """Labels: (N,) int64, indices into `classes`."""
    classes: tuple[str, ...]
    official: int | None = None
    """The number of official training rows. The rows after them are the official test set. None: no official split."""
    domain: Tensor | None = None
    """(N,) int64, indices into `domains`: the domain of each row."""
    domains: tuple[str, ...] = ()
    identity: Tensor | None = None
    """(N,) int64: rows with the same identity are copies of one image and must be in the same part of a split."""
    part: Tensor | None = None
    """(N,) int64, indices into `PARTS`: a fixed split, used instead of fractions of each client's rows."""
    notes: tuple[str, ...] = ()
    """What a person should know about how the data set was read, one sentence each."""

    def __post_init__(self) -> None:
        if problem := next(self._problems(), None):
            raise DataError(f"data set {self.name}: {problem}.")

    def __repr__(self) -> str:
        images = " x ".join(map(str, self.x.shape[1:]))
        return f"Dataset({self.name!r}, {len(self.y)} images of {images}, {len(self.classes)} classes)"

    def shared(self) -> Dataset:
        """Copy the data set to memory that other processes can access."""
        columns = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        try:
            copies: dict[str, Any] = {name: _copy_to_shared(value) for name, value in columns.items()}
        except RuntimeError as error:
            size = sum(value.nbytes for value in columns.values())
            raise DeviceError(
                f"worker processes share the data set, but shared memory (/dev/shm) has no room for its {size >> 20} "
                f"MiB ({last_line(error)}). Make /dev/shm larger, or leave out --workers."
            ) from error
        return dataclasses.replace(self, **copies)

    def digest(self) -> str:
        """A hash of all images and labels."""
        found = hashlib.sha256(",".join(self.classes).encode())
        for column in (self.x, self.y):
            found.update(column.contiguous().numpy().data)
        return found.hexdigest()

    def _problems(self) -> Iterator[str]:
        """Only the first problem is reported, so each check may rely on the checks before it."""
        if not (_is_tensor(self.x, torch.uint8, 4) or _is_tensor(self.x, torch.float32, 4)):
            yield f"x must be a tensor, uint8 or float32 (N, channels, height, width), not {_describe(self.x)}"
        if self.x.numel() == 0:
            yield f"it contains no images: x is {_describe(self.x)}"
        if self.x.is_floating_point() and not bool(self.x.isfinite().all()):
            row = int((~self.x.isfinite()).flatten(1).any(1).nonzero()[0])
            yield f"x has a number that is not finite (NaN or infinity) in row {row}"
        if not self.classes:
            yield "it has no classes"
        yield from self._column_problems("y", self.y, len(self.classes))
        if self.official is not None and not 0 < self.official < len(self.x):
            yield f"official must leave rows for training and for test, but it is {self.official} of {len(self.x)} rows"
        if (self.domain is None) != (not self.domains):
            yield "domain and domains belong together: give both or neither"
        if self.domain is not None:
            yield from self._column_problems("domain", self.domain, len(self.domains))
        if self.identity is not None:
            yield from self._column_problems("identity", self.identity, None)
        if self.part is not None:
            yield from self._column_problems("part", self.part, len(PARTS))
            if self.official is not None or self.identity is not None:
                yield "part cannot be combined with official or identity: each of them defines a split"

    def _column_problems(self, name: str, column: Tensor, names: int | None) -> Iterator[str]:
        if not _is_tensor(column, torch.int64, 1) or len(column) != len(self.x):
            yield f"{name} must be a tensor, int64 ({len(self.x)},), one number per image, not {_describe(column)}"
        low, high = int(column.min()), int(column.max())
        if names is not None and (low < 0 or high >= names):
            yield f"{name} must be in 0..{names - 1}, but ranges from {low} to {high}"


def _copy_to_shared(value: Tensor) -> Tensor:
    """Copy a tensor to shared memory. Moving it there would invalidate numpy views of it."""
    if value.is_shared():  # type: ignore[no-untyped-call]
        return value
    copy: Tensor = torch.empty_like(value).share_memory_()  # type: ignore[no-untyped-call]
    return copy.copy_(value)


def _is_tensor(value: object, dtype: torch.dtype, dimensions: int) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype and value.dim() == dimensions


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def resize(dataset: Dataset, size: int) -> Dataset:
    """Resize the images of a data set to size x size."""
    if dataset.x.shape[2:] == (size, size):
        return dataset
    x = F.interpolate(dataset.x, size=(size, size), mode="bilinear", antialias=True)
    return dataclasses.replace(dataset, x=x)


def last_line(reason: Exception) -> str:
    """The last line of an exception's message."""
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    return lines[-1] if lines else type(reason).__name__
