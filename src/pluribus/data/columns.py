"""A file with columns as a data set: tables, texts and signals, with their labels and who holds them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pluribus.data.dataset import PARTS, Dataset
from pluribus.data.files import peek_names, read_sheet
from pluribus.data.reading import DEFAULT, Reading
from pluribus.data.roles import Roles, check_settings, columns_flag, find_roles, kind_of_rows
from pluribus.data.sheet import SPLITS, Sheet
from pluribus.data.tokens import tokenize
from pluribus.data.values import (
    Names,
    check_finite,
    has_no_values,
    number_names,
    parse_numbers,
    take_column,
    take_names,
    take_numbers,
    take_texts,
    take_times,
)
from pluribus.data.windows import cut
from pluribus.errors import ConflictError, DataError
from pluribus.inputs import Kind

MOST_VALUES = 1000  # of a category
FEW_CLASSES = 20  # that a label column may have, even if every row has another one
BETWEEN_LABELS = "|"


def read_columns(path: Path, reading: Reading = DEFAULT) -> Dataset:
    """Read a file with columns, or a folder with such files named after splits."""
    return make_dataset(read_sheet(path), reading)


def kind_of_file(path: Path, reading: Reading) -> Kind:
    """What a row of a file becomes, by the names of its columns."""
    return kind_of_rows(peek_names(path), reading)


def make_dataset(sheet: Sheet, reading: Reading) -> Dataset:
    """Turn columns into rows of a kind: tokens if a column is a text, signals if there is a window, else a table."""
    check_settings(kind_of_rows([*sheet.columns], reading), reading)
    roles = find_roles([*sheet.columns], sheet.path, reading)
    kind: Kind = "tokens" if roles.text else "table" if reading.window is None else "signal"
    rows = describe_rows(sheet, roles, reading)
    notes = [*sheet.notes, *roles.notes, *rows.notes]
    make = {"tokens": _make_tokens, "table": _make_table, "signal": _make_signals}[kind]
    return make(sheet, roles, reading, rows, notes)


# What all kinds have --------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """What is known about each row of a sheet, except for its inputs."""

    y: np.ndarray
    """Classes (N,) as int64, labels (N, L) as uint8, or numbers (N, D) as float32."""
    classes: tuple[str, ...]
    client: Names | None
    group: Names | None
    time: np.ndarray | None
    part: np.ndarray | None
    notes: tuple[str, ...]

    def fields(self, rows: np.ndarray | slice = slice(None)) -> dict[str, Any]:
        """The fields of a data set for these rows."""
        given = {"client": self.client and self.client.numbers, "group": self.group and self.group.numbers}
        tensors = {**given, "time": self.time, "part": self.part}
        found: dict[str, Any] = {key: None if one is None else _tensor(one[rows]) for key, one in tensors.items()}
        clients = () if self.client is None else self.client.names
        return found | {"y": _tensor(self.y[rows]), "classes": self.classes, "clients": clients}


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def describe_rows(sheet: Sheet, roles: Roles, reading: Reading) -> Rows:
    """Parse the columns that say what each row is: its label, who holds it, and so on."""
    y, classes, notes = _take_labels(sheet, roles, reading)
    client, group = (None if name is None else take_names(sheet, name) for name in (roles.client, roles.group))
    time = None if roles.time is None else take_times(sheet, roles.time)
    part, more = _take_split(sheet, roles)
    merged = [note for names in (client, group) if names for note in names.notes]
    return Rows(y, classes, client, group, time, part, (*notes, *merged, *more))


def _take_split(sheet: Sheet, roles: Roles) -> tuple[np.ndarray | None, list[str]]:
    part, source = sheet.part, "the names of the files define"
    if roles.split is not None:
        if part is not None:
            raise ConflictError(
                f"the files of {sheet.name} are a split, and the column '{roles.split}' is another one: leave it out "
                f"with {columns_flag('ignore', roles.split)}."
            )
        part, source = _parse_split(sheet, roles.split), f"the column '{roles.split}' defines"
    if part is None:
        return None, []
    counts = {name: int((part == at).sum()) for at, name in enumerate(PARTS)}
    sizes = [f"{name} ({count} rows)" for name, count in counts.items() if count]
    if len(sizes) == 1:
        return None, [f"all rows are in one split, {sizes[0]}: each client's rows are split by shares."]
    return part, [f"{source} the split, not --val-fraction and --test-fraction: {', '.join(sizes)}."]


def _parse_split(sheet: Sheet, name: str) -> np.ndarray:
    found = take_names(sheet, name)
    for at, word in enumerate(found.names):
        if word.lower() not in SPLITS:
            row = int((found.numbers == at).argmax())
            raise DataError(
                f"{sheet.where(row)} has '{word:.40}' in the column '{name}', which is no split: write train, val or "
                "test."
            )
    number = np.array([PARTS.index(SPLITS[word.lower()]) for word in found.names])
    return np.take(number, found.numbers)


# Labels ---------------------------------------------------------------------------------------------------------------

Labels = tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]  # y, names, notes


def _take_labels(sheet: Sheet, roles: Roles, reading: Reading) -> Labels:
    if reading.label_kind == "numbers":
        columns = [take_numbers(sheet, name, "a label of --label-kind numbers is") for name in roles.label]
        return np.stack(columns, 1).astype(np.float32), roles.label, ()
    if reading.label_kind == "labels":
        return _take_several(sheet, roles.label)
    if len(roles.label) > 1:
        raise ConflictError(
            f"--columns names {len(roles.label)} label columns: that needs --label-kind numbers or --label-kind labels."
        )
    return _take_classes(sheet, roles.label[0])


def _take_classes(sheet: Sheet, name: str) -> Labels:
    if (numbers := parse_numbers(sheet.columns[name])) is not None:
        fraction = check_finite(sheet, name, numbers) % 1 != 0
        if fraction.any():
            row = int(fraction.argmax())
            raise DataError(
                f"{sheet.where(row)} has {numbers[row]:g} in the label column '{name}', which is no class: to predict "
                "numbers, use --label-kind numbers."
            )
    found = take_names(sheet, name)
    if len(found.names) > max(FEW_CLASSES, sheet.rows / 2):
        raise DataError(
            f"the label column '{name}' of {sheet.path} has {len(found.names)} different values in {sheet.rows} rows, "
            "too many for classes: to predict numbers, use --label-kind numbers."
        )
    return found.numbers, found.names, found.notes


def _take_several(sheet: Sheet, names: tuple[str, ...]) -> Labels:
    """Labels of which a row has any number: one column with lists of names, or columns of 0 and 1."""
    if len(names) == 1:
        return _take_lists(sheet, names[0])
    columns = [take_numbers(sheet, name, "each of several label columns holds 0 or 1, so it is") for name in names]
    for name, column in zip(names, columns, strict=True):
        if (wrong := (column != 0) & (column != 1)).any():
            row = int(wrong.argmax())
            raise DataError(
                f"{sheet.where(row)} has {column[row]:g} in the column '{name}', but each of several label columns "
                "must hold 0 or 1."
            )
    return np.stack(columns, 1).astype(np.uint8), names, ()


def _take_lists(sheet: Sheet, name: str) -> Labels:
    cells = sheet.columns[name]
    if any(isinstance(cell, list) for cell in cells):
        lists = [cell if isinstance(cell, list) else [] if cell is None else [cell] for cell in cells]
        wrong = (row for row, those in enumerate(lists) if not all(isinstance(one, str | int | float) for one in those))
        if (row := next(wrong, None)) is not None:
            raise DataError(f"{sheet.where(row)} has {cells[row]!r:.40} in the column '{name}': labels must be names.")
        lists = [[str(one).strip() for one in those] for those in lists]
    else:
        texts = take_texts(sheet, name, missing=())
        lists = [[one for word in text.split(BETWEEN_LABELS) if (one := word.strip())] for text in texts]
    if not any(lists):
        raise DataError(f"the label column '{name}' of {sheet.path} names no label in any row.")
    found = number_names([one for those in lists for one in those], name)
    y = np.zeros((len(lists), len(found.names)), np.uint8)
    y[np.repeat(np.arange(len(lists)), [*map(len, lists)]), found.numbers] = 1
    return y, found.names, found.notes


# Tables ---------------------------------------------------------------------------------------------------------------


def _make_table(sheet: Sheet, roles: Roles, _: Reading, rows: Rows, notes: list[str]) -> Dataset:
    numbers: dict[str, np.ndarray] = {}
    categories: dict[str, Names] = {}
    constant: list[str] = []
    for name in roles.inputs:
        if has_no_values(sheet.columns[name]):
            numbers[name] = np.zeros(sheet.rows)
            notes.append(f"the column '{name}' has no values: it is 0 in every row.")
            continue
        column = take_column(sheet, name)
        if isinstance(column, Names):
            categories[name] = _check_category(sheet, name, column)
            notes += column.notes
        else:
            numbers[name] = column
        codes = column.numbers if isinstance(column, Names) else column
        if sheet.rows > 1 and bool((codes == codes[0]).all()):
            constant.append(name)
    if constant:
        notes.append(f"the same value is in every row of: {', '.join(constant)}.")
    if categories:
        listed = ", ".join(f"{name} ({len(column.names)} values)" for name, column in categories.items())
        notes.append(f"{len(categories)} of {len(roles.inputs)} inputs are categories: {listed}.")
    values = [column.astype(np.float32) for column in (*numbers.values(), *(c.numbers for c in categories.values()))]
    return Dataset(
        name=sheet.name,
        x=torch.from_numpy(np.stack(values, 1)),
        kind="table",
        columns=(*numbers, *categories),
        categories=tuple(column.names for column in categories.values()),
        notes=tuple(notes),
        **rows.fields(),
    )


def _check_category(sheet: Sheet, name: str, column: Names) -> Names:
    if len(column.names) > MOST_VALUES:
        raise DataError(
            f"the column '{name}' of {sheet.path} holds words, {len(column.names)} different ones, but a category has "
            f"at most {MOST_VALUES} values: leave it out with {columns_flag('ignore', name)}."
        )
    return column


# Texts ----------------------------------------------------------------------------------------------------------------


def _make_tokens(sheet: Sheet, roles: Roles, reading: Reading, rows: Rows, notes: list[str]) -> Dataset:
    name = str(roles.text)
    texts = take_texts(sheet, name, missing=("",))
    refuse = partial(refuse_text, sheet, name)
    found = tokenize(texts, reading.tokenizer, reading.vocabulary, reading.length, refuse)
    length = found.ids.shape[1]
    if found.cut:
        notes.append(f"{found.cut} of {len(texts)} texts are cut to their first {length} tokens (--length).")
    x = torch.from_numpy(found.ids)
    fields = rows.fields()
    return Dataset(sheet.name, x, kind="tokens", vocabulary=found.vocabulary, notes=tuple(notes), **fields)


def refuse_text(sheet: Sheet, name: str, row: int) -> Exception:
    """The error for a text without a token."""
    return DataError(f"{sheet.where(row)} has a text in the column '{name}' without a single token: delete the row.")


# Signals --------------------------------------------------------------------------------------------------------------


def _make_signals(sheet: Sheet, roles: Roles, reading: Reading, rows: Rows, notes: list[str]) -> Dataset:
    assert reading.window is not None
    window, stride = reading.window, reading.stride or reading.window
    channels = [take_numbers(sheet, name, "a sample of a signal is") for name in roles.inputs]
    samples = np.stack(channels, 1).astype(np.float32)
    recording = _number_recordings(sheet, rows)
    measured = rows.y.dtype == np.float32  # numbers may change with every sample, so they do not end a window
    labels = [] if measured else [*np.atleast_2d(rows.y.T)]
    found = cut(recording, labels if rows.part is None else [*labels, rows.part], rows.time, window, stride)
    if not len(found.samples):
        raise DataError(
            f"{sheet.path} has no {window} samples in a row of one recording and one label: use a smaller --window."
        )
    first, last = found.samples[:, 0], found.samples[:, -1]
    time = found.start.astype(np.float64) if rows.time is None else rows.time[first]
    lasts = window - 1.0 if rows.time is None else float((rows.time[last] - rows.time[first]).max())
    fields = rows.fields(first) | {"time": torch.from_numpy(time)}
    if measured:
        fields["y"] = torch.from_numpy(rows.y[found.samples].mean(1, dtype=np.float64).astype(np.float32))
    if rows.group is not None:
        fields["group"] = torch.from_numpy(recording[first])
    if found.left:
        ends = "a recording, label or split ends before a window is full"
        gaps = "" if stride <= window else ", or they are between two windows"
        notes.append(f"{found.left} of {sheet.rows} samples are in no window: {ends}{gaps}.")
    if stride < window:
        fields["span"] = lasts * window / (window - 1)
        if rows.group is None:
            notes.append("windows overlap: with --split-by time, no sample is in two parts of a split.")
    x = torch.from_numpy(np.ascontiguousarray(samples[found.samples].transpose(0, 2, 1)))
    return Dataset(sheet.name, x, kind="signal", notes=tuple(notes), columns=roles.inputs, **fields)


def _number_recordings(sheet: Sheet, rows: Rows) -> np.ndarray:
    """The recording of each sample: what one client recorded in one group."""
    number = np.zeros(sheet.rows, np.int64)
    for names in (rows.client, rows.group):
        if names is not None:
            number = number * len(names.names) + names.numbers
    return number
