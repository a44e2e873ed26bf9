"""Sheet: the columns of a file as they were read, before each of them has a meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pluribus.data.dataset import PARTS
from pluribus.errors import DataError

SPLITS = {part: part for part in PARTS}
SPLITS |= {"training": "train", "valid": "val", "validation": "val", "dev": "val", "testing": "test"}


Column = Sequence[Any] | np.ndarray  # the cells of a column


class Piece(NamedTuple):
    """Rows that come from one file."""

    path: str
    rows: int
    lines: Sequence[int] = ()  # where each row begins, counted from 1. Empty: the file has no lines.


@dataclass(frozen=True)
class Sheet:
    """Named columns of equal length. A cell may be anything; None is a cell without a value."""

    name: str
    """The name of the data set."""
    columns: Mapping[str, Column]
    pieces: tuple[Piece, ...]
    notes: tuple[str, ...] = ()
    part: np.ndarray | None = None
    """The split of each row, an index into `PARTS`, if rows of each split come from a file of their own."""

    @property
    def path(self) -> str:
        return self.pieces[0].path if len(self.pieces) == 1 else self.name

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    def where(self, row: int) -> str:
        """A row as a person finds it: its number among the rows from 1, its line in an editor, and its file."""
        for piece in self.pieces:
            if row < piece.rows:
                break
            row -= piece.rows
        line = f" (line {piece.lines[row]})" if len(piece.lines) else ""
        return f"row {row + 1}{line} of {piece.path}"


def join(name: str, sheets: Mapping[str, Sheet]) -> Sheet:
    """One sheet of several, of which each holds one part of a split."""
    first, *others = sheets.values()
    for other in others:
        if apart := sorted({*first.columns} ^ {*other.columns}):
            has, lacks = (first, other) if apart[0] in first.columns else (other, first)
            raise DataError(f"{has.path} has the column '{apart[0]}', but {lacks.path} does not: give both the same.")
    columns = {key: [cell for one in sheets.values() for cell in one.columns[key]] for key in first.columns}
    part = np.repeat([PARTS.index(split) for split in sheets], [one.rows for one in sheets.values()])
    pieces = tuple(piece for one in sheets.values() for piece in one.pieces)
    notes = tuple(dict.fromkeys(note for one in sheets.values() for note in one.notes))
    return Sheet(name, columns, pieces, notes, part)
