"""Data sets that are given as objects in Python: arrays, tensors, a torch Dataset, or a function that returns one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from pluribus.data.dataset import Dataset
from pluribus.errors import DataError, FormatError
from pluribus.internal.blame import at
from pluribus.internal.lookup import dotted_path, given_name, object_name

CHANNELS = (1, 3)
FORMS = "a name, a path, a pluribus.Dataset, arrays (x, y), a torch Dataset, or a function that returns one of them"


def take_data(value: Any) -> str | Dataset | Callable[..., Any]:
    """The value of the setting `data`. Objects become a Dataset; a function is called when the data are needed."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if callable(value) and not isinstance(value, TorchDataset):
        return dotted_path(value) or value
    return as_dataset(value)


def name_data(value: Any) -> str:
    """The name of the setting `data` in files and tables."""
    if isinstance(value, str):
        return value
    return given_name(value.name if isinstance(value, Dataset) else object_name(value))


def as_dataset(value: Any) -> Dataset:
    """Make a Dataset of one of the supported objects."""
    if isinstance(value, Dataset):
        return value
    if isinstance(value, TorchDataset):
        return _from_torch(value)
    if isinstance(value, tuple | list) and len(value) == 2:
        return from_arrays(*value)
    raise FormatError(f"--data must be {FORMS}, not {value!r:.80}.")


def from_arrays(x: Any, y: Any, classes: tuple[str, ...] | None = None, name: str = "data") -> Dataset:
    """Make a Dataset of arrays or tensors: images (N, H, W), (N, C, H, W) or (N, H, W, C), and whole numbers (N,).

    Bytes are pixels, and become numbers in [-1, 1]. Floating-point numbers stay as they are. Without names of
    `classes`, each number in `y` is a class.
    """
    notes: list[str] = []
    images, numbers = _images(_to_tensor(x, "x"), notes), _labels(_to_tensor(y, "y"))
    if len(images) != len(numbers):
        raise DataError(f"x has {len(images)} rows, but y has {len(numbers)} labels.")
    if classes is None:
        found, inverse = np.unique(numbers.numpy(), return_inverse=True)
        classes, numbers = tuple(map(str, found.tolist())), torch.from_numpy(inverse)
    return Dataset(name, images, numbers, classes, notes=tuple(notes))


def take_rows(x: Any, y: Any, classes: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Images and class numbers of other rows of a data set. Labels are names of its classes, or their numbers."""
    images, labels = _images(_to_tensor(x, "x"), []), _labels(_to_tensor(y, "y"))
    if len(images) != len(labels):
        raise DataError(f"x has {len(images)} rows, but y has {len(labels)} labels.")
    number = {name: at for at, name in enumerate(classes)}
    found = labels.tolist()
    if all(str(label) in number for label in set(found)):
        return images, torch.tensor([number[str(label)] for label in found], dtype=torch.int64)
    if wrong := [label for label in found if not 0 <= label < len(classes)]:
        raise DataError(f"y has the label {wrong[0]}, but the classes are {', '.join(classes)}.")
    return images, labels


def _to_tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        array = np.asarray(value)
        return torch.from_numpy(np.ascontiguousarray(array))
    except (TypeError, ValueError) as error:
        dtype = getattr(value, "dtype", type(value).__name__)
        raise DataError(f"{name} cannot be read as an array of numbers: it is {dtype} ({error}).") from error


def _images(x: Tensor, notes: list[str]) -> Tensor:
    shape = tuple(x.shape)
    if x.dim() == 3:
        x = x.unsqueeze(1)
    elif x.dim() == 4 and shape[1] not in CHANNELS and shape[3] in CHANNELS:
        x = x.permute(0, 3, 1, 2)
        notes.append(f"x {shape} was read as (N, height, width, channels).")
    elif x.dim() != 4:
        raise DataError(f"x must hold images (N, H, W), (N, C, H, W) or (N, H, W, C), but its shape is {shape}.")
    return _numbers(x, notes).contiguous()


def _numbers(x: Tensor, notes: list[str]) -> Tensor:
    """Bytes and float32 stay as they are. Other numbers are converted if that changes no pixel."""
    dtype = str(x.dtype).removeprefix("torch.")
    if x.is_floating_point():
        if x.dtype != torch.float32:
            notes.append(f"x was converted from {dtype} to float32.")
        return x.to(torch.float32)
    if x.dtype == torch.uint8 or x.numel() == 0:
        return x
    if x.is_complex() or x.dtype == torch.bool or not 0 <= int(x.min()) <= int(x.max()) <= 255:
        raise DataError(f"x must hold bytes (0 to 255) or floating-point numbers, but it holds {dtype}.")
    notes.append(f"x was converted from {dtype} to bytes.")
    return x.to(torch.uint8)


def _labels(y: Tensor) -> Tensor:
    if y.dim() != 1:
        cure = " Use y.argmax(1) for one-hot labels." if y.dim() == 2 else ""
        raise DataError(f"y must hold one label per row, but its shape is {tuple(y.shape)}.{cure}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        dtype = str(y.dtype).removeprefix("torch.")
        raise DataError(f"y must hold whole numbers, not {dtype}: convert the labels, for example with y.astype(int).")
    return y.to(torch.int64)


def _from_torch(value: TorchDataset[Any]) -> Dataset:
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
        xs.append(_to_tensor(row[0], f"x of row {number}"))
        ys.append(row[1].numpy() if isinstance(row[1], Tensor) else row[1])
        if xs[-1].shape != xs[0].shape:
            shapes = f"{tuple(xs[-1].shape)}, but row 0 has {tuple(xs[0].shape)}"
            raise DataError(f"row {number} of {kind} has the shape {shapes}. All rows must have one shape.")
    if not xs:
        raise DataError(f"{kind} is empty.")
    classes = getattr(value, "classes", None)
    names = tuple(map(str, classes)) if isinstance(classes, list | tuple) and classes else None
    return from_arrays(torch.stack(xs), np.asarray(ys), names, kind)


def _describe(value: object) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
