"""The cells of one column as numbers, as names with numbers, as times or as texts. A cell that is none is named.

Cells are parsed a column at a time: a loop over single cells would take minutes for a large file.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np

from pluribus.data.roles import columns_flag
from pluribus.data.sheet import Column, Sheet
from pluribus.errors import DataError

BOOLEANS = {"true": 1.0, "false": 0.0}
MOST_NUMBERS = 20  # different numbers in a column with words, from which on it is a damaged column of numbers
UTC = datetime.UTC


class Names(NamedTuple):
    """The different values of a column in order, and the number of each cell's value."""

    names: tuple[str, ...]
    numbers: np.ndarray  # int64
    notes: tuple[str, ...] = ()


# Numbers --------------------------------------------------------------------------------------------------------------


def parse_numbers(cells: Column) -> np.ndarray | None:
    """The cells as float64, if each is a number or each is true or false. A cell without a value is NaN, if written so.

    >>> parse_numbers(["1", "2.5"]), parse_numbers(["true", "False"]), parse_numbers(["1", "one"])
    (array([1. , 2.5]), array([1., 0.]), None)
    """
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "biuf":
        return cells.astype(np.float64)
    try:
        found = np.fromiter(map(float, cells), np.float64, len(cells))
    except (ValueError, TypeError, OverflowError):
        return _parse_booleans(cells)
    return None if _has_underscore(cells) else found


def _parse_booleans(cells: Column) -> np.ndarray | None:
    if str(cells[0]).strip().lower() not in BOOLEANS:
        return None
    words = [str(cell).strip().lower() for cell in cells]
    if not BOOLEANS.keys() >= {*words}:
        return None
    return np.fromiter(map(BOOLEANS.__getitem__, words), np.float64, len(words))


def _has_underscore(cells: Column) -> bool:
    """Python reads 1_2 as 12, but in a file it is a word."""
    try:
        return "_" in "".join(cells)
    except TypeError:  # cells of JSON
        return any("_" in cell for cell in cells if isinstance(cell, str))


def take_numbers(sheet: Sheet, name: str, use: str) -> np.ndarray:
    """The finite numbers (float64) of a column that must hold numbers. `use` says in a sentence what they are."""
    numbers = parse_numbers(sheet.columns[name])
    if numbers is None:
        for row, cell in enumerate(sheet.columns[name]):
            _refuse_missing(sheet, name, row, [_to_text(sheet, name, row, cell)])
            if parse_numbers([cell]) is None:
                raise DataError(f"{sheet.where(row)} has {cell!r:.40} in the column '{name}', but {use} a number.")
        raise DataError(f"the column '{name}' of {sheet.path} mixes numbers with true and false: use one of them.")
    return check_finite(sheet, name, numbers)


def check_finite(sheet: Sheet, name: str, numbers: np.ndarray) -> np.ndarray:
    """Refuse cells without a value, and numbers that are too large for a model (float32)."""
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(numbers.astype(np.float32))
    if bad.any():
        row = int(bad.argmax())
        if np.isnan(numbers[row]):
            raise _missing(sheet, name, row)
        raise DataError(
            f"{sheet.where(row)} has {numbers[row]} in the column '{name}', which is not a finite number: correct it."
        )
    return numbers


# Names ----------------------------------------------------------------------------------------------------------------


def take_texts(sheet: Sheet, name: str, missing: Collection[str] = ("", "nan")) -> list[str]:
    """The cells as texts without spaces around them. `missing` are the texts that stand for a cell without a value."""
    cells = sheet.columns[name]
    try:
        texts = [*map(str.strip, cells)]
    except TypeError:  # not all cells are text, as in JSON
        texts = [_to_text(sheet, name, row, cell) for row, cell in enumerate(cells)]
    _refuse_missing(sheet, name, 0, texts, missing)
    try:
        "\n".join(texts).encode()
    except UnicodeEncodeError:
        row = next(row for row, text in enumerate(texts) if text != text.encode(errors="replace").decode())
        raise DataError(f"{sheet.where(row)} has text in the column '{name}' that is not valid Unicode.") from None
    return texts


def take_names(sheet: Sheet, name: str) -> Names:
    """The different values of a column, sorted, and their numbers. Numbers are sorted by size."""
    return number_names(take_texts(sheet, name), name)


def number_names(texts: Sequence[str], column: str) -> Names:
    """Sort and number texts. Two spellings that differ only in their code points are one name."""
    spellings = {text: normalize("NFC", text) for text in {*texts}}
    names = {*spellings.values()}
    if all(name.endswith(".0") for name in names) and parse_numbers([*names]) is not None:
        spellings = {text: name.removesuffix(".0") for text, name in spellings.items()}  # 1.0 is how pandas writes 1
        names = {*spellings.values()}
    ordered = _sort(names)
    number = {name: at for at, name in enumerate(ordered)}
    number_of = {text: number[name] for text, name in spellings.items()}
    numbers = np.fromiter(map(number_of.__getitem__, texts), np.int64, len(texts))
    notes = []
    if merged := [name for name, spelled in Counter(spellings.values()).items() if spelled > 1]:
        notes.append(
            f"spellings of '{merged[0]}' in the column '{column}' that differ only in their code points are one name."
        )
    if twins := _find_twins(ordered):
        notes.append(
            f"'{twins[0]}' and '{twins[1]}' in the column '{column}' differ only in upper and lower case, and are two "
            "names."
        )
    return Names(tuple(ordered), numbers, tuple(notes))


def _sort(names: Collection[str]) -> list[str]:
    values = parse_numbers([*names])
    if values is None or np.isnan(values).any():
        return sorted(names)
    return [name for _, name in sorted(zip(values.tolist(), names, strict=True))]


def _find_twins(names: Sequence[str]) -> tuple[str, str] | None:
    first: dict[str, str] = {}
    for name in names:
        if (other := first.setdefault(name.lower(), name)) != name:
            return other, name
    return None


def take_column(sheet: Sheet, name: str) -> np.ndarray | Names:
    """A column of a table: numbers if every cell is one, otherwise a category."""
    if (numbers := parse_numbers(sheet.columns[name])) is not None:
        return check_finite(sheet, name, numbers)
    texts = take_texts(sheet, name)
    found = number_names(texts, name)
    counted = [one for one in found.names if parse_numbers([one]) is not None]
    if not counted:
        return found
    words = [one for one in found.names if parse_numbers([one]) is None]
    if not words:
        raise DataError(f"the column '{name}' of {sheet.path} mixes numbers with true and false: use one of them.")
    word = words[0]
    row = int((found.numbers == found.names.index(word)).argmax())
    if len(counted) > MOST_NUMBERS:
        raise DataError(
            f"the column '{name}' holds numbers, but {sheet.where(row)} has '{word:.40}': correct it, or leave the "
            f"column out with {columns_flag('ignore', name)}."
        )
    note = f"the column '{name}' mixes numbers and words, such as '{word:.40}' in {sheet.where(row)}: it is a category."
    return found._replace(notes=(*found.notes, note))


# Times ----------------------------------------------------------------------------------------------------------------


def take_times(sheet: Sheet, name: str) -> np.ndarray:
    """Times as float64: numbers as they are, dates as seconds. A date without a time zone is in UTC."""
    cells = sheet.columns[name]
    if (numbers := parse_numbers(cells)) is not None:
        return check_finite(sheet, name, numbers)
    found = np.empty(sheet.rows)
    for row, cell in enumerate(cells):
        try:
            found[row] = _seconds(cell)
        except (AttributeError, ValueError, TypeError, OverflowError) as error:
            _refuse_missing(sheet, name, row, [_to_text(sheet, name, row, cell)])
            raise DataError(
                f"{sheet.where(row)} has {cell!r:.40} in the column '{name}', which is no time: write a number, or a "
                "date such as 2024-05-31 or 2024-05-31T12:00:00."
            ) from error
    return found


def _seconds(cell: Any) -> float:
    time = cell if isinstance(cell, datetime.date) else datetime.datetime.fromisoformat(cell.strip())
    if not isinstance(time, datetime.datetime):
        time = datetime.datetime(time.year, time.month, time.day)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


# Cells without a value ------------------------------------------------------------------------------------------------


def _to_text(sheet: Sheet, name: str, row: int, cell: Any) -> str:
    """A cell that need not be text, as text."""
    if isinstance(cell, str):
        return cell.strip()
    if cell is None:
        return ""
    if isinstance(cell, datetime.date):
        return cell.isoformat()
    if isinstance(cell, list | tuple | dict | bytes | np.ndarray):
        kind = "an object" if isinstance(cell, dict) else "bytes" if isinstance(cell, bytes) else "a list"
        raise DataError(
            f"{sheet.where(row)} has {kind} in the column '{name}', where text or a number is needed: leave the column "
            f"out with {columns_flag('ignore', name)}."
        )
    return str(cell)


def has_no_values(cells: Column) -> bool:
    """Whether no cell of a column has a value."""
    return _is_empty(cells[0]) and all(map(_is_empty, cells))


def _is_empty(cell: Any) -> bool:
    return cell is None or cell != cell or (isinstance(cell, str) and cell.strip().lower() in ("", "nan"))


def _refuse_missing(
    sheet: Sheet, name: str, first: int, texts: Sequence[str], missing: Collection[str] = ("", "nan")
) -> None:
    if empty := [text for text in {*texts} if text.lower() in missing]:
        raise _missing(sheet, name, first + min(texts.index(text) for text in empty))


def _missing(sheet: Sheet, name: str, row: int) -> DataError:
    return DataError(
        f"{sheet.where(row)} has no value in the column '{name}': fill it in, delete the row, or leave the column out "
        f"with {columns_flag('ignore', name)}."
    )
