"""Files with columns: CSV, TSV, JSONL and Parquet. Each becomes a `Sheet`, and each defect a sentence with its line."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pluribus.data.dataset import PARTS, last_line
from pluribus.data.images import path_text
from pluribus.data.sheet import SPLITS, Column, Piece, Sheet, join
from pluribus.errors import DamagedDataError, DataError, MissingDataError, PackageError

Cells = tuple[dict[str, Column], Sequence[int], list[str]]  # columns, the line of each row, notes
FORMS = "CSV, TSV, JSONL or Parquet"


def is_sheet(path: Path) -> bool:
    """Whether a path is a file with columns by its name, or a folder with such files named after splits."""
    return path.suffix.lower() in READERS or bool(_files_by_split(path))


def read_sheet(path: Path) -> Sheet:
    """Read a file, or a folder with files `train`, `val` and `test` of one form."""
    by_split = _files_by_split(path)
    if not by_split:
        return _read_file(path)
    name = path.resolve().name
    sheets = {split: _read_file(by_split[split]) for split in PARTS if split in by_split}
    return join(name, sheets) if len(sheets) > 1 else next(iter(sheets.values()))


def peek_names(path: Path) -> tuple[str, ...]:
    """The names of the columns, from the beginning of a file. Empty if they cannot be read."""
    by_split = _files_by_split(path)
    file = next(iter(by_split.values()), path)
    try:
        return tuple(name.strip() for name in PEEKS[file.suffix.lower()](file))
    except (OSError, ValueError, RecursionError, NotImplementedError, csv.Error, DataError, PackageError, KeyError):
        return ()  # reading the file says what is wrong with it


def _files_by_split(folder: Path) -> dict[str, Path]:
    """The files of a folder by split. Empty if the folder has subfolders, which is a folder of images."""
    if not folder.is_dir():
        return {}
    try:
        inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DamagedDataError(f"cannot read the folder {path_text(folder)}: {error.strerror}.") from error
    if any(path.is_dir() for path in inside):
        return {}
    files = [path for path in inside if path.suffix.lower() in READERS and path.stem.lower() in SPLITS]
    found: dict[str, Path] = {}
    for file in files:
        split = SPLITS[file.stem.lower()]
        if split in found:
            raise DataError(f"{folder} has {found[split].name} and {file.name}, which are one split: keep one of them.")
        found[split] = file
    return found


def _read_file(path: Path) -> Sheet:
    if not path.is_file():
        raise MissingDataError(f"file {path_text(path)} does not exist: give a file with columns ({FORMS}).")
    columns, lines, notes = READERS[path.suffix.lower()](path)
    rows = len(next(iter(columns.values()), ()))
    if not rows:
        raise DataError(f"{path_text(path)} has no rows: it needs at least one below the names of its columns.")
    return Sheet(path.stem, columns, (Piece(path_text(path), rows, lines),), tuple(notes))


def _read_text(path: Path) -> str:
    """The text of a file without a byte order mark, with the ends of its lines as they are."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedDataError(f"cannot read {path_text(path)}: {error.strerror}.") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DamagedDataError(
            f"{path_text(path)} is not UTF-8: line {line} has the byte 0x{content[error.start]:02x}. Save it as UTF-8."
        ) from error


# CSV and TSV ----------------------------------------------------------------------------------------------------------


@contextmanager
def _long_cells() -> Iterator[None]:
    """Let a cell be longer than 128 KiB: a text may be."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _reader(lines: Any, path: Path) -> Any:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    return csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)


def _read_delimited(path: Path) -> Cells:
    reader = _reader(io.StringIO(_read_text(path), newline=""), path)
    rows: list[list[str]] = []
    lines: list[int] = []
    names: list[str] | None = None
    blank, line = 0, 1
    try:
        with _long_cells():
            for row in reader:
                if not row:
                    blank += 1
                elif names is None:
                    names = _check_names([name.strip() for name in row], path)
                elif len(row) != len(names):
                    raise DataError(
                        f"row {len(rows) + 1} (line {line}) of {path_text(path)} has {len(row)} cells, but there are "
                        f"{len(names)} columns: correct it, or put quotes around cells with a comma."
                    )
                else:
                    rows.append(row)
                    lines.append(line)
                line = reader.line_num + 1
    except csv.Error as error:
        raise DamagedDataError(f"line {reader.line_num} of {path_text(path)} cannot be read: {error}.") from error
    if names is None:
        raise DataError(f"{path_text(path)} is empty: its first line must name the columns.")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())
    notes = [f"{blank} empty {'line was' if blank == 1 else 'lines were'} not read."] if blank else []
    return {**columns}, lines, notes


def _peek_delimited(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        return next((row for row in _reader(lines, path) if row), [])


def _check_names(names: Sequence[str], path: Path) -> list[str]:
    """The names of columns, each of which must be one."""
    for at, name in enumerate(names):
        if not name:
            raise DataError(
                f"column {at + 1} of {path_text(path)} has no name: name it in the first line. Pandas writes no index "
                "with index=False."
            )
        if name in names[:at]:
            raise DataError(f"{path_text(path)} has two columns with the name '{name}': rename one.")
    return [*names]


# JSONL ----------------------------------------------------------------------------------------------------------------


def _read_jsonl(path: Path) -> Cells:
    """Objects, one on each line. A key that an object lacks is a cell without a value."""
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip():
            rows.append(_parse_object(line, f"line {number} of {path_text(path)}"))
            lines.append(number)
    if not rows:
        raise DataError(f"{path_text(path)} is empty: it needs one JSON object on each line.")
    names = list(dict.fromkeys(key for row in rows for key in row))
    _check_names(names, path)
    return {name: [row.get(name) for row in rows] for name in names}, lines, []


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedDataError(f"{where} is not JSON: {last_line(error)}.") from error
    if not isinstance(found, dict):
        raise DamagedDataError(f'{where} must be a JSON object, such as {{"label": 1}}, not {line.strip()[:40]}.')
    return found


def _peek_jsonl(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig") as lines:
        return list(_parse_object(next(filter(str.strip, lines), ""), ""))


# Parquet --------------------------------------------------------------------------------------------------------------


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as missing:
        raise PackageError("Parquet needs a package that is missing: pip install 'pluribus[parquet]'.") from missing
    return pyarrow.parquet


def _read_parquet(path: Path) -> Cells:
    parquet = _parquet()
    try:
        table = parquet.ParquetFile(path).read()
    except (LookupError, NotImplementedError, OSError, TypeError, ValueError) as error:  # kinds of Arrow's errors
        raise DamagedDataError(f"cannot read {path_text(path)}: {last_line(error)}.") from error
    _check_names(table.column_names, path)
    return {name: arrow_cells(table[name]) for name in table.column_names}, (), []


def _peek_parquet(path: Path) -> list[str]:
    return list(_parquet().ParquetFile(path).schema_arrow.names)


def arrow_cells(column: Any) -> Column:
    """The cells of a column of Arrow: an array if they are numbers and none is missing, otherwise a list."""
    import pyarrow.types as types

    plain = types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)
    return column.to_numpy() if plain and not column.null_count else column.to_pylist()  # type: ignore[no-any-return]


READERS: dict[str, Callable[[Path], Cells]] = {
    ".csv": _read_delimited,
    ".tsv": _read_delimited,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
PEEKS: dict[str, Callable[[Path], list[str]]] = {
    ".csv": _peek_delimited,
    ".tsv": _peek_delimited,
    ".jsonl": _peek_jsonl,
    ".parquet": _peek_parquet,
}
