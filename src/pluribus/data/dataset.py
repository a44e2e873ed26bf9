"""Dataset: labeled rows of one kind in memory, checked when it is created."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pluribus.errors import DataError, DeviceError, MismatchError
from pluribus.inputs import KINDS, MANY, PADDING, UNKNOWN, Input, Kind
from pluribus.targets import TargetKind

PARTS = ("train", "val", "test")
UNLABELED = -1  # the class of a public row without a label

# The types and the number of dimensions that each kind of data may have, and how it is written.
FORMS: dict[Kind, tuple[tuple[torch.dtype, ...], int | None, str]] = {
    "image": ((torch.uint8, torch.float32), 4, "uint8 or float32 (N, channels, height, width)"),
    "signal": ((torch.float16, torch.float32), 3, "float16 or float32 (N, channels, length)"),
    "tokens": ((torch.int32,), 2, "int32 (N, length)"),
    "table": ((torch.float32,), 2, "float32 (N, columns)"),
    "tensor": ((torch.float32, torch.int64), None, "float32 or int64 (N, ...)"),
}


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labeled rows in memory, with what is known about them: who holds them, when they were recorded, their split."""

    name: str
    x: Tensor
    """Rows, by their kind: images (N, channels, height, width) as bytes (uint8) or numbers (float32), signals (N,
    channels, length) as float16 or float32, tokens (N, length) as int32, tables (N, columns) as float32, or any tensor
    (N, ...) as float32 or int64. The bytes of images become numbers in [-1, 1]."""
    y: Tensor
    """Classes (N,) as int64, indices into `classes`; or labels (N, len(classes)) as uint8, 1 where a row has the label;
    or numbers to predict (N, len(classes)) as float32."""
    classes: tuple[str, ...]
    """Names of the classes, of the labels, or of the numbers to predict."""
    official: int | None = None
    """The number of official training rows. The rows after them are the official test set. None: no official split."""
    domain: Tensor | None = None
    """(N,) int64, indices into `domains`: the domain of each row."""
    domains: tuple[str, ...] = ()
    identity: Tensor | None = None
    """(N,) int64: rows with the same identity are copies of one image and must be in the same part of a split, whoever
    holds them."""
    part: Tensor | None = None
    """(N,) int64, indices into `PARTS`: a fixed split, used instead of fractions of each client's rows."""
    notes: tuple[str, ...] = ()
    """What a person should know about how the data set was read, one sentence each."""
    kind: Kind = "image"
    """What a row is."""
    client: Tensor | None = None
    """(N,) int64, indices into `clients`: who holds each row, for the partition `natural`."""
    clients: tuple[str, ...] = ()
    group: Tensor | None = None
    """(N,) int64: rows of one group, such as one recording or one patient, are in the same part of a client's split."""
    time: Tensor | None = None
    """(N,) float64: when each row was recorded, for a split by time."""
    span: float = 0.0
    """How long a row lasts, in units of `time`. Rows of one group overlap if their times are closer than that."""
    vocabulary: int = 0
    """Of tokens: all ids are below it. The id 0 is padding after the last token, the id 1 an unknown token."""
    columns: tuple[str, ...] = ()
    """Names of the columns of a table, or of the channels of signals. Empty: they have none."""
    categories: tuple[tuple[str, ...], ...] = ()
    """Values of the last columns of a table. In x, each value is its number. The columns before them hold numbers."""

    def __post_init__(self) -> None:
        if problem := next(self._problems(), None):
            raise DataError(f"data set {self.name}: {problem}.")

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {len(self.y)} rows: {self.input}, {len(self.classes)} {self.target})"

    @property
    def input(self) -> Input:
        """What one row is to a model."""
        counts = tuple(len(values) for values in self.categories)
        whole = self.kind == "tensor" and self.x.dtype == torch.int64
        return Input(self.kind, tuple(self.x.shape[1:]), self.vocabulary, counts, whole)

    @property
    def target(self) -> TargetKind:
        """What is predicted."""
        if self.y.dtype == torch.int64:
            return "classes"
        return "labels" if self.y.dtype == torch.uint8 else "numbers"

    @property
    def strata(self) -> Tensor:
        """(N,) int64: what partitions and splits keep in proportion. The classes, or 0 if there are none."""
        return self.y if self.target == "classes" else torch.zeros(len(self.y), dtype=torch.int64)

    @property
    def rows(self) -> str:
        """The plural of what a row is, in words."""
        return MANY[self.kind] if self.kind in ("image", "signal") else "rows"

    def tensors(self) -> dict[str, Tensor]:
        """Rows, targets and everything else that each row has, by the name of the field."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def shared(self) -> Dataset:
        """Copy the data set to memory that other processes can access."""
        try:
            copies: dict[str, Any] = {name: copy_to_shared(value) for name, value in self.tensors().items()}
        except RuntimeError as error:
            size = sum(value.nbytes for value in self.tensors().values())
            raise DeviceError(
                f"worker processes share the data set, but shared memory (/dev/shm) has no room for its {size >> 20} "
                f"MiB ({last_line(error)}). Make /dev/shm larger, or leave out --workers."
            ) from error
        return dataclasses.replace(self, **copies)

    def digest(self) -> str:
        """A hash of all rows and labels."""
        found = hashlib.sha256(",".join(self.classes).encode())
        held = (column for column in (self.client, self.group, self.time, self.part) if column is not None)
        for column in (self.x, self.y, *held):
            found.update(column.contiguous().numpy().data)
        return found.hexdigest()

    def _problems(self) -> Iterator[str]:
        """Only the first problem is reported, so each check may rely on the checks before it."""
        if self.kind not in KINDS:
            yield f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}"
        dtypes, dimensions, form = FORMS[self.kind]
        if not isinstance(self.x, Tensor) or self.x.dtype not in dtypes or self.x.dim() != (dimensions or self.x.dim()):
            yield f"x must be a tensor, {form}, not {_describe(self.x)}"
        if self.x.dim() < 2 or self.x.numel() == 0:
            yield f"it contains no {self.rows}: x is {_describe(self.x)}"
        if self.x.is_floating_point() and not bool(self.x.isfinite().all()):
            row = int((~self.x.isfinite()).flatten(1).any(1).nonzero()[0])
            yield f"x has a number that is not finite (NaN or infinity) in row {row}"
        yield from self._token_problems()
        yield from self._table_problems()
        if not self.classes:
            yield "it has no classes"
        yield from self._target_problems()
        if self.official is not None and not 0 < self.official < len(self.x):
            yield f"official must leave rows for training and for test, but it is {self.official} of {len(self.x)} rows"
        for name, names in (("domain", "domains"), ("client", "clients")):
            column, known = getattr(self, name), getattr(self, names)
            if (column is None) != (not known):
                yield f"{name} and {names} belong together: give both or neither"
            if column is not None:
                yield from self._column_problems(name, column, len(known))
        for name in ("identity", "group"):
            if (column := getattr(self, name)) is not None:
                yield from self._column_problems(name, column, None)
        if self.time is not None and (not _is_tensor(self.time, torch.float64, 1) or len(self.time) != len(self.x)):
            yield f"time must be a tensor, float64 ({len(self.x)},), not {_describe(self.time)}"
        if self.time is not None and not bool(self.time.isfinite().all()):
            yield f"time is not finite in row {int((~self.time.isfinite()).nonzero()[0])}"
        if self.part is not None:
            yield from self._column_problems("part", self.part, len(PARTS))
            if self.official is not None or self.identity is not None:
                yield "part cannot be combined with official or identity: each of them defines a split"

    def _token_problems(self) -> Iterator[str]:
        if (self.kind == "tokens") != (self.vocabulary > UNKNOWN):
            yield f"tokens need a vocabulary above {UNKNOWN}, and other kinds none, not {self.vocabulary}"
        if self.kind != "tokens":
            return
        low, high = int(self.x.min()), int(self.x.max())
        if low < 0 or high >= self.vocabulary:
            row = int(((self.x < 0) | (self.x >= self.vocabulary)).any(1).nonzero()[0])
            yield f"token ids must be in 0..{self.vocabulary - 1}, but range from {low} to {high} (row {row})"
        present = self.x != PADDING
        if not bool(present.any(1).all()):
            yield f"row {int((~present.any(1)).nonzero()[0])} has no token (a length of 0)"
        if bool((late := present[:, 1:] & ~present[:, :-1]).any()):
            row = int(late.any(1).nonzero()[0])
            yield f"row {row} has padding (id 0) before its last token: 'lengths' can say where tokens end"

    def _table_problems(self) -> Iterator[str]:
        if (self.kind != "table" and self.categories) or (self.kind not in ("table", "signal") and self.columns):
            yield "only tables and signals have names of columns, and only tables have categories"
        if self.columns and len(self.columns) != self.x.shape[1]:
            yield f"it has {len(self.columns)} names of columns for {self.x.shape[1]} columns"
        first = self.x.shape[1] - len(self.categories)
        for number, values in enumerate(self.categories, first):
            codes = self.x[:, number]
            if not values or bool(((codes < 0) | (codes >= len(values)) | (codes != codes.floor())).any()):
                yield f"column {number} is a category, so it must hold whole numbers in 0..{len(values) - 1}"

    def _target_problems(self) -> Iterator[str]:
        if isinstance(self.y, Tensor) and self.y.dtype in (torch.uint8, torch.float32):
            wanted = (len(self.x), len(self.classes))
            if self.y.shape != wanted:
                yield f"y must have the shape {wanted}, a column for each of classes, not {_describe(self.y)}"
            if self.y.dtype == torch.uint8 and int(self.y.max()) > 1:
                yield f"labels in y must be 0 or 1, not {int(self.y.max())}"
            if self.y.is_floating_point() and not bool(self.y.isfinite().all()):
                yield f"y has a number that is not finite in row {int((~self.y.isfinite()).any(1).nonzero()[0])}"
            return
        yield from self._column_problems("y", self.y, len(self.classes))

    def _column_problems(self, name: str, column: Tensor, names: int | None) -> Iterator[str]:
        if not _is_tensor(column, torch.int64, 1) or len(column) != len(self.x):
            yield f"{name} must be a tensor, int64 ({len(self.x)},), one number per row, not {_describe(column)}"
        low, high = int(column.min()), int(column.max())
        if names is not None and (low < 0 or high >= names):
            row = int(((column < 0) | (column >= names)).nonzero()[0])
            yield f"{name} must be in 0..{names - 1}, but ranges from {low} to {high} (row {row})"


def copy_to_shared(value: Tensor) -> Tensor:
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
    if dataset.kind != "image":
        raise MismatchError(
            f"--image-size resizes images, but {dataset.name} holds {MANY[dataset.kind]}: leave it out."
        )
    if dataset.x.shape[2:] == (size, size):
        return dataset
    x = F.interpolate(dataset.x, size=(size, size), mode="bilinear", antialias=True)
    return dataclasses.replace(dataset, x=x)


def last_line(reason: Exception) -> str:
    """The last line of an exception's message."""
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    return lines[-1] if lines else type(reason).__name__
