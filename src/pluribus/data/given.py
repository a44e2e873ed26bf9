"""Data sets that are given as objects in Python: arrays, tensors, a torch Dataset, or a function that returns one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset as TorchDataset

from pluribus.data.arrays import (
    LabelKind,
    is_frame,
    make_dataset,
    make_rows,
    make_targets,
    read_frame,
    to_array,
    to_labels,
)
from pluribus.data.dataset import Dataset
from pluribus.errors import DataError, FormatError, MismatchError
from pluribus.inputs import Input
from pluribus.internal.blame import at
from pluribus.internal.digits import is_whole
from pluribus.internal.lookup import dotted_path, given_name, object_name
from pluribus.targets import IN_WORDS, TargetKind

FORMS = (
    "a name, a path, a pluribus.Dataset, arrays (x, y), a dict with x and y, a torch Dataset, or a function that "
    "returns one of them"
)


def take_data(value: Any, label_kind: LabelKind = "auto") -> str | Dataset | Callable[..., Any]:
    """The value of the setting `data`. Objects become a Dataset; a function is called when the data are needed."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if callable(value) and not isinstance(value, TorchDataset):
        return dotted_path(value) or value
    return as_dataset(value, label_kind)


def name_data(value: Any) -> str:
    """The name of the setting `data` in files and tables."""
    if isinstance(value, str):
        return value
    return given_name(value.name if isinstance(value, Dataset) else object_name(value))


def as_dataset(value: Any, label_kind: LabelKind = "auto") -> Dataset:
    """Make a Dataset of one of the supported objects. A Dataset must predict what `label_kind` says."""
    if isinstance(value, Dataset):
        if label_kind not in ("auto", value.target):
            raise MismatchError(
                f"{value.name} has {IN_WORDS[value.target]} to predict: leave out --label-kind {label_kind}."
            )
        return value
    if isinstance(value, TorchDataset):
        return make_dataset(_read_torch(value), label_kind=label_kind)
    if isinstance(value, Mapping):
        fields = dict(value)
        if isinstance(rows := fields.get("x"), TorchDataset) and "y" not in fields:
            fields = _read_torch(rows) | {key: one for key, one in fields.items() if key != "x"}
        return make_dataset(fields, label_kind=label_kind)
    if isinstance(value, tuple | list) and len(value) == 2:
        return make_dataset({"x": value[0], "y": value[1]}, label_kind=label_kind)
    raise FormatError(f"--data must be {FORMS}, not {value!r:.80}.")


def take_rows(
    x: Any, y: Any, classes: Sequence[str], row: Input | None = None, target: TargetKind = "classes"
) -> tuple[Tensor, Tensor]:
    """Other rows of a data set, as it stores them, and their targets. `row` is what one row is; by default an image.

    Classes are names of its classes, or their numbers.
    """
    notes: list[str] = []
    if is_frame(x):
        frame = read_frame(x)
        if frame["categories"]:
            raise DataError("x has columns of texts: give the number of each value instead, as the data set has it.")
        x = frame["x"]
    rows = make_rows(row.kind if row else "image", to_array(x, "x"), notes)
    if row and row.kind == "tokens" and rows.shape[1] < row.shape[0]:
        rows = F.pad(rows, (0, row.shape[0] - rows.shape[1]))
    if target != "classes":
        targets = make_targets(to_array(y, "y"), classes, target, notes)[0]
    else:
        targets = _take_classes(y, classes)
    if len(rows) != len(targets):
        raise DataError(f"x has {len(rows)} rows, but y has {len(targets)} labels.")
    if target != "classes" and targets.shape[1] != len(classes):
        raise DataError(f"y must have {len(classes)} columns, for {', '.join(classes)}, but has {targets.shape[1]}.")
    return rows, targets


def _take_classes(y: Any, classes: Sequence[str]) -> Tensor:
    """Numbers of classes. Labels that all are names of classes are read as names, even if they are numbers."""
    held, known = make_targets(to_labels(y, "y"), (), "auto", [])
    number = {name: at for at, name in enumerate(classes)}
    found = [known[one] for one in held.tolist()]
    if all(label in number for label in known):
        return torch.tensor([number[label] for label in found], dtype=torch.int64)
    if wrong := [label for label in found if not is_whole(label) or int(label) >= len(classes)]:
        raise DataError(f"y has the label {wrong[0]}, but the classes are {', '.join(classes)}.")
    return torch.tensor([int(label) for label in found], dtype=torch.int64)


def _read_torch(value: TorchDataset[Any]) -> dict[str, Any]:
    """Read all rows of a torch Dataset once: a transform that draws at random gives one draw per row."""
    kind = type(value).__name__
    if not hasattr(value, "__len__"):
        raise DataError(f"{kind} has no length: give a torch Dataset with rows by number, or arrays (x, y).")
    xs, ys = [], []
    for number in range(len(value)):
        with at(f"row {number} of {kind}"):
            row = value[number]
        if not isinstance(row, tuple | list) or len(row) < 2:
            raise DataError(f"row {number} of {kind} must be (x, y), not {_describe(row)}.")
        xs.append(to_array(row[0], f"x of row {number}"))
        ys.append(row[1].numpy() if isinstance(row[1], Tensor) else row[1])
        if xs[-1].shape != xs[0].shape:
            shapes = f"{tuple(xs[-1].shape)}, but row 0 has {tuple(xs[0].shape)}"
            raise DataError(f"row {number} of {kind} has the shape {shapes}. All rows must have one shape.")
    if not xs:
        raise DataError(f"{kind} is empty.")
    classes = getattr(value, "classes", None)
    names = tuple(map(str, classes)) if isinstance(classes, list | tuple) and classes else None
    return {"x": np.stack(xs), "y": ys, "classes": names, "name": kind}


def _describe(value: object) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
