"""Rows of a file for a trained model: in the form of the data that it was trained on, with labels or without."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pluribus.data.columns import refuse_text
from pluribus.data.dataset import Dataset
from pluribus.data.files import read_sheet
from pluribus.data.reading import Reading
from pluribus.data.roles import BY_NAME, LABEL, list_names
from pluribus.data.sheet import Sheet
from pluribus.data.tokens import tokenize
from pluribus.data.values import has_no_values, take_names, take_numbers, take_texts, take_times
from pluribus.data.windows import cut
from pluribus.errors import DataError, MismatchError, UnknownNameError

USE = "the model was trained on"  # a number


class NewRows(NamedTuple):
    """Rows as a data set stores them, the row of the file where each begins, counted from 1, and notes."""

    x: Tensor
    first: list[int]
    notes: tuple[str, ...]


def read_rows(path: Path, reading: Reading, like: Dataset) -> NewRows:
    """Read a file with the input columns of a data set. Columns with another role need not be there."""
    sheet = read_sheet(path)
    if like.kind == "table" and like.columns:
        return _make_rows(sheet, _read_table(sheet, like))
    if like.kind == "tokens":
        return _read_texts(sheet, reading, like)
    if like.kind == "signal" and reading.window is not None:
        return _read_signals(sheet, reading, reading.window, like)
    raise MismatchError(
        f"{like.name} has rows without names of columns, so {path} cannot be read like it: give an array, in Python."
    )


def _make_rows(sheet: Sheet, x: np.ndarray, *notes: str) -> NewRows:
    """One row for each row of the file."""
    return NewRows(torch.from_numpy(x), list(range(1, sheet.rows + 1)), (*sheet.notes, *notes))


def _check_column(sheet: Sheet, name: str) -> None:
    if name not in sheet.columns:
        raise UnknownNameError(
            f"{sheet.path} has no column '{name}', which the model needs. Its columns are {list_names(sheet.columns)}."
        )


def _read_table(sheet: Sheet, like: Dataset) -> np.ndarray:
    numbers = len(like.columns) - len(like.categories)
    columns = []
    for at, name in enumerate(like.columns):
        _check_column(sheet, name)
        if at >= numbers:
            columns.append(_read_category(sheet, name, like.categories[at - numbers]))
        elif has_no_values(sheet.columns[name]) and not bool(like.x[:, at].any()):
            columns.append(np.zeros(sheet.rows))  # as in training, where it had no values either
        else:
            columns.append(take_numbers(sheet, name, USE))
    return np.stack(columns, 1).astype(np.float32)


def _read_category(sheet: Sheet, name: str, values: tuple[str, ...]) -> np.ndarray:
    found, number = take_names(sheet, name), {value: at for at, value in enumerate(values)}
    for at, value in enumerate(found.names):
        if value not in number:
            row = int((found.numbers == at).argmax())
            raise DataError(
                f"{sheet.where(row)} has '{value:.40}' in the column '{name}', a value that the training data did not "
                f"have. They had {list_names(values)}."
            )
    return np.take(np.array([number[value] for value in found.names]), found.numbers)


def _read_texts(sheet: Sheet, reading: Reading, like: Dataset) -> NewRows:
    name = reading.one("text") or "text"
    _check_column(sheet, name)
    texts, length = take_texts(sheet, name, missing=("",)), like.x.shape[1]
    found = tokenize(texts, reading.tokenizer, reading.vocabulary, length, partial(refuse_text, sheet, name))
    if found.vocabulary != like.vocabulary:
        raise MismatchError(
            f"the tokens of {like.name} were made in another way (a vocabulary of {like.vocabulary}): give an array of "
            f"ids, in Python."
        )
    notes = [f"{found.cut} of {len(texts)} texts are cut to their first {length} tokens."] if found.cut else []
    return _make_rows(sheet, found.ids, *notes)


def _read_signals(sheet: Sheet, reading: Reading, window: int, like: Dataset) -> NewRows:
    """Cut recordings into windows as in training, but not where labels change."""
    names = _channels(sheet, reading)
    for name in names:
        _check_column(sheet, name)
    if len(names) != like.x.shape[1] or (like.columns and set(names) != set(like.columns)):
        raise MismatchError(
            f"the model takes signals of {like.x.shape[1]} channels{_list_channels(like)}, but {sheet.path} has "
            f"{len(names)}: {list_names(names)}."
        )
    names = like.columns or names  # in the order of training, whatever that of the file is
    samples = np.stack([take_numbers(sheet, name, USE) for name in names], 1).astype(np.float32)
    recording = np.zeros(sheet.rows, np.int64)
    for role in ("client", "group"):
        if (name := reading.one(role) or role) in sheet.columns and name not in names:
            held = take_names(sheet, name)
            recording = recording * len(held.names) + held.numbers
    clock = reading.one("time") or "time"
    time = take_times(sheet, clock) if clock in sheet.columns and clock not in names else None
    found = cut(recording, [], time, window, reading.stride or window)
    if not len(found.samples):
        raise DataError(f"{sheet.path} has no {window} samples in a row of one recording, which the model takes.")
    x = np.ascontiguousarray(samples[found.samples].transpose(0, 2, 1))
    left = [f"{found.left} of {sheet.rows} samples are in no window: a recording ends before it is full."]
    notes = (*sheet.notes, *(left if found.left else ()))
    return NewRows(torch.from_numpy(x), (found.samples[:, 0] + 1).tolist(), notes)


def _list_channels(like: Dataset) -> str:
    return f" ({list_names(like.columns)})" if like.columns else ""


def _channels(sheet: Sheet, reading: Reading) -> tuple[str, ...]:
    """The input columns: those that the user named, or all without another role."""
    if named := reading.named("inputs"):
        return named
    given = {role for role, columns in reading.columns if columns}
    other = {name for _, columns in reading.columns for name in columns}
    other |= {role for role in (*BY_NAME, LABEL) if role not in given}
    return tuple(name for name in sheet.columns if name not in other)
