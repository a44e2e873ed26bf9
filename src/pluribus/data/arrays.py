"""Arrays of any kind as a data set: what a row is, what is predicted, who holds a row and when it was recorded.

Objects of Python and npz files both go through `make_dataset`. Its fields have the names of a Dataset's fields.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pluribus.data.dataset import PARTS, Dataset
from pluribus.data.folders import SPLITS
from pluribus.errors import DataError, unknown
from pluribus.inputs import KINDS, MANY, PADDING, UNKNOWN, Kind
from pluribus.targets import TargetKind

LabelKind = TargetKind | Literal["auto"]
FIELDS = (
    "x", "y", "classes", "kind", "client", "clients", "domain", "domains", "group", "identity", "time", "span", "part",
    "split", "official", "lengths", "vocabulary", "columns", "categories", "name", "notes",
)  # fmt: skip
CHANNELS = (1, 3)
EXACT = 2**24  # float32 holds all whole numbers up to here
LARGEST_ID = 2**31 - 1
HOW_TO_SAY = "Give the kind of x: data=dict(x=..., y=..., kind='tokens') in Python, or an array 'kind' in an npz file."


def make_dataset(
    fields: Mapping[str, Any], name: str = "data", label_kind: LabelKind = "auto", *, in_file: bool = False
) -> Dataset:
    """Make a Dataset of arrays, tensors or lists by the name of their field.

    `in_file`: without a kind, floating-point numbers of three dimensions are signals. In Python they are gray images.
    The kind that a file leaves out is noted.
    """
    for key in fields:
        if key not in FIELDS:
            raise unknown("field of data", key, FIELDS, "docs/add-data.md")
    notes = list(_names(fields, "notes"))
    given = dict(fields)
    if missing := [key for key in ("x", "y") if given.get(key) is None]:
        raise DataError(f"data has no '{missing[0]}': give x, the rows, and y, what is predicted.")
    if is_frame(given["x"]):
        given |= read_frame(given["x"])
    x, y = to_array(given["x"], "x"), to_labels(given["y"], "y")
    if x.ndim < 2 or not y.ndim:
        which, shape = ("x", x.shape) if x.ndim < 2 else ("y", y.shape)
        raise DataError(f"x must have rows of numbers and y a label per row, but the shape of {which} is {shape}.")
    if len(x) != len(y):
        raise DataError(f"x has {len(x)} rows, but y has {len(y)} labels.")
    kind = _choose_kind(given, x, in_file, notes)
    columns: dict[str, Any] = {"kind": kind, "x": make_rows(kind, x, notes)}
    if kind == "tokens":
        columns |= _tokens(given, columns["x"], notes)
    elif given.get("vocabulary") is not None or given.get("lengths") is not None:
        raise DataError(f"only tokens have a vocabulary and lengths, but x holds {MANY[kind]}: leave them out.")
    names = _names(given, "classes") or _frame_names(given["y"])
    columns["y"], columns["classes"] = make_targets(y, names, label_kind, notes)
    columns |= _known(given)
    return Dataset(name=str(given.get("name", name)), notes=tuple(notes), **columns)


# Arrays ---------------------------------------------------------------------------------------------------------------


def to_array(value: Any, name: str) -> np.ndarray:
    """A numpy array of numbers, in the byte order of this machine."""
    try:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        dtype = getattr(value, "dtype", type(value).__name__)
        raise DataError(f"{name} cannot be read as an array of numbers: it is {dtype} ({error}).") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"{name} cannot be read as an array of numbers: it holds {array.dtype}.")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _to_tensor(array: np.ndarray) -> Tensor:
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def to_labels(value: Any, name: str) -> np.ndarray:
    """An array of texts or of numbers: labels, or who holds a row. Anything else is refused with its row."""
    try:
        array = np.asarray(value) if not isinstance(value, Tensor) else to_array(value, name)
    except (TypeError, ValueError):
        return to_array(value, name)
    if array.dtype.kind not in "OUT":
        return to_array(array, name)
    listed = array.dtype.kind == "U" and isinstance(value, list | tuple)  # numpy makes texts of mixed lists
    held = list(value) if listed and array.ndim == 1 else array.ravel().tolist()
    if held and all(isinstance(one, Real) and not isinstance(one, bool) for one in held):
        return to_array(held, name)
    if wrong := [(row, one) for row, one in enumerate(held) if not isinstance(one, str)]:
        raise DataError(f"{name} must hold names or whole numbers, but row {wrong[0][0]} is {wrong[0][1]!r:.40}.")
    return array.astype(str)


def _scalar(fields: Mapping[str, Any], name: str, kind: type[int] | type[float]) -> Any:
    """The one number of a field. None: the field is not given."""
    if fields.get(name) is None:
        return None
    array = np.asarray(fields[name])
    if array.dtype.kind == "m":
        array = array / np.timedelta64(1, "s")
    if array.size != 1 or array.dtype.kind not in ("iu" if kind is int else "iuf"):
        raise DataError(f"{name} must be one {'whole ' if kind is int else ''}number, not {array.dtype} {array.shape}.")
    return kind(array.reshape(()).item())


def _names(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    if fields.get(name) is None:
        return ()
    array = to_labels(fields[name], name).astype(str) if np.size(fields[name]) else np.empty(0, str)
    if array.ndim != 1:
        raise DataError(f"{name} must be a one-dimensional array of names, not of the shape {array.shape}.")
    return tuple(array.tolist())


# Rows -----------------------------------------------------------------------------------------------------------------


def guess_kind(dtype: np.dtype[Any], dimensions: int, ids: bool, in_file: bool) -> Kind | None:
    """The kind of an array of this type. None: it could be several. `ids`: there are lengths or a vocabulary.

    >>> guess_kind(np.dtype("float32"), 3, ids=False, in_file=True), guess_kind(np.dtype("int64"), 2, False, True)
    ('signal', None)
    """
    if dimensions == 2:
        return "tokens" if ids else None if dtype.kind in "iu" else "table"
    if dimensions == 3 and in_file and dtype.kind == "f":
        return "signal"
    return "image" if dimensions in (3, 4) else "tensor"


def _choose_kind(fields: Mapping[str, Any], x: np.ndarray, in_file: bool, notes: list[str]) -> Kind:
    if fields.get("kind") is not None:
        kind = str(np.asarray(fields["kind"]).reshape(-1)[0]) if np.asarray(fields["kind"]).size == 1 else "?"
        found = next((one for one in KINDS if one == kind), None)
        if found is None:
            raise DataError(f"kind must be one of {', '.join(KINDS)}, not {fields['kind']!r:.40}.")
        return found
    ids = fields.get("lengths") is not None or fields.get("vocabulary") is not None
    guess = guess_kind(x.dtype, x.ndim, ids, in_file)
    if guess is None:
        raise DataError(f"x {x.dtype} {x.shape} may hold tokens or a table. {HOW_TO_SAY}")
    if in_file or x.ndim > 4:
        notes.append(f"x {x.dtype} {x.shape} is read as {MANY[guess]}: an entry 'kind' can say otherwise.")
    return guess


def make_rows(kind: Kind, x: np.ndarray, notes: list[str]) -> Tensor:
    """Rows of a kind, as a Dataset stores them. What is converted is noted."""
    if kind == "image":
        return _to_tensor(_pixels(_channels_first(x, notes), notes))
    if kind == "signal":
        return _to_tensor(_signals(x, notes))
    if kind == "tokens":
        return _to_tensor(_ids(x))
    if kind == "table":
        if x.ndim != 2:
            raise DataError(f"x must hold a table (N, columns), but its shape is {x.shape}.")
        return _to_tensor(_floats(x, notes))
    if x.dtype.kind == "f":
        return _to_tensor(_floats(x, notes))
    if x.dtype == np.uint64 and x.size and int(x.max()) > np.iinfo(np.int64).max:
        raise DataError(f"x holds the number {x.max()} in row {_row(x > np.iinfo(np.int64).max)}, too large for int64.")
    return _to_tensor(x.astype(np.int64, copy=False))


def _row(wrong: np.ndarray) -> int:
    """The first row with a wrong number."""
    return int(np.flatnonzero(wrong.reshape(len(wrong), -1).any(1))[0])


def _channels_first(x: np.ndarray, notes: list[str]) -> np.ndarray:
    if x.ndim == 3:
        return x[:, None]
    if x.ndim != 4:
        raise DataError(f"x must hold images (N, H, W), (N, C, H, W) or (N, H, W, C), but its shape is {x.shape}.")
    if x.shape[1] not in CHANNELS and x.shape[3] in CHANNELS:
        notes.append(f"x {x.shape} was read as (N, height, width, channels).")
        return x.transpose(0, 3, 1, 2)
    return x


def _pixels(x: np.ndarray, notes: list[str]) -> np.ndarray:
    """Bytes and float32 stay as they are. Other numbers are converted if that changes no pixel."""
    if x.dtype.kind == "f":
        return _floats(x, notes)
    if x.dtype == np.uint8 or x.size == 0:
        return x.astype(np.uint8, copy=False)
    if x.dtype.kind == "b" or x.min() < 0 or x.max() > 255:
        cure = "" if x.dtype.kind == "b" or x.min() < 0 else f" up to {x.max()}"
        raise DataError(
            f"x must hold bytes (0 to 255) or floating-point numbers, but it holds {x.dtype}{cure}: scale images to "
            f"bytes, such as (x / {_white(x)} * 255).round().astype('uint8'), or name another kind."
        )
    notes.append(f"x was converted from {x.dtype} to bytes.")
    return x.astype(np.uint8)


def _white(x: np.ndarray) -> int:
    return int(np.iinfo(x.dtype).max) if x.dtype.kind == "u" else 1 if x.dtype.kind == "b" else int(x.max())


def _signals(x: np.ndarray, notes: list[str]) -> np.ndarray:
    if x.ndim == 2:
        notes.append(f"x {x.shape} was read as signals of one channel.")
        x = x[:, None]
    if x.ndim != 3:
        raise DataError(f"x must hold signals (N, channels, length), but its shape is {x.shape}.")
    if x.shape[1] > x.shape[2]:
        notes.append(
            f"x {x.shape} was read as signals of {x.shape[1]} channels and {x.shape[2]} samples: if it is (N, length, "
            f"channels), give x.transpose(0, 2, 1)."
        )
    return x if x.dtype == np.float16 else _floats(x, notes)


def _floats(x: np.ndarray, notes: list[str]) -> np.ndarray:
    """Numbers as float32. A number that becomes infinite is refused; numbers that are rounded are noted."""
    if x.dtype == np.float32:
        return x
    with np.errstate(over="ignore"):
        single = x.astype(np.float32)
    if x.dtype.kind == "f" and (lost := np.isfinite(x) & ~np.isfinite(single)).any():
        raise DataError(f"x holds the number {x[lost][0]:g} in row {_row(lost)}, too large for float32.")
    large = x.dtype.kind in "iu" and x.size and (x.max() > EXACT or x.min() < -EXACT)
    notes.append(f"x was converted from {x.dtype} to float32{', which rounds its large numbers' if large else ''}.")
    return single


def _ids(x: np.ndarray) -> np.ndarray:
    if x.ndim != 2 or x.dtype.kind not in "iu":
        raise DataError(f"x must hold tokens, whole numbers (N, length), but it is {x.dtype} {x.shape}.")
    if x.size and (wrong := (x < 0) | (x >= LARGEST_ID)).any():
        raise DataError(f"x holds the token id {x[wrong][0]} in row {_row(wrong)}: ids are 0 to {LARGEST_ID - 1}.")
    return x.astype(np.int32)


def _tokens(fields: Mapping[str, Any], x: Tensor, notes: list[str]) -> dict[str, Any]:
    """Ids with padding after the last token of each row, and the vocabulary."""
    ids, vocabulary = x.numpy().copy(), _scalar(fields, "vocabulary", int)
    if fields.get("lengths") is not None:
        real = np.arange(ids.shape[1]) < _lengths(fields["lengths"], ids)[:, None]
        if (ids[real] == PADDING).any():
            ids += 1
            vocabulary = None if vocabulary is None else vocabulary + 1
            notes.append("all token ids are raised by 1, because the id 0 is padding here and a token in x.")
        ids[~real] = PADDING
    if vocabulary is None:
        vocabulary = max(int(ids.max(initial=0)), UNKNOWN) + 1
        notes.append(
            f"the vocabulary has {vocabulary} ids, by the largest id in x: an entry 'vocabulary' sets another."
        )
    return {"x": torch.from_numpy(ids), "vocabulary": vocabulary}


def _lengths(value: Any, ids: np.ndarray) -> np.ndarray:
    lengths = to_array(value, "lengths")
    if lengths.shape != ids.shape[:1] or lengths.dtype.kind not in "iu":
        raise DataError(f"lengths must be whole numbers, one for each of {len(ids)} rows, not {_form(lengths)}.")
    if (wrong := (lengths < 1) | (lengths > ids.shape[1])).any():
        row = _row(wrong)
        raise DataError(f"lengths is {lengths[row]} in row {row}: it must be 1 to {ids.shape[1]}, the length of x.")
    return lengths


def _form(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape}"


# Targets --------------------------------------------------------------------------------------------------------------


def make_targets(
    y: np.ndarray, names: Sequence[str], label_kind: LabelKind, notes: list[str]
) -> tuple[Tensor, tuple[str, ...]]:
    """Targets as a Dataset stores them, and the names of the classes, of the labels, or of the numbers."""
    kind = _target_kind(y) if label_kind == "auto" else label_kind
    if kind == "classes":
        return _classes(y, names, notes)
    if y.dtype.kind not in "biuf" or y.ndim not in (1, 2):
        raise DataError(f"y must hold {kind}, (N,) or (N, {kind}), but it is {_form(y)}: --label-kind is {kind}.")
    y = y if y.ndim == 2 else y[:, None]
    names = tuple(names) or (("y",) if y.shape[1] == 1 else tuple(map(str, range(y.shape[1]))))
    if kind == "numbers":
        with np.errstate(over="ignore"):
            return torch.from_numpy(np.ascontiguousarray(y, np.float32).copy()), names
    if (wrong := (y != 0) & (y != 1)).any():
        raise DataError(f"y must hold labels, 0 or 1, but row {_row(wrong)} has {y[wrong][0]:g}: see --label-kind.")
    return torch.from_numpy(y.astype(np.uint8)), names


def _target_kind(y: np.ndarray) -> TargetKind:
    """What labels are if the user does not say. Numbers and one-hot labels are refused: most are mistakes."""
    if y.ndim == 2 and y.dtype.kind in "biuf" and y.shape[1] > 1 and y.size and ((y == 0) | (y == 1)).all():
        if not (y.sum(1) == 1).all():
            return "labels"
        raise DataError(
            f"y {y.shape} has one 1 in each row, as one-hot labels have. Use y.argmax(1), or --label-kind labels if a "
            f"row may have several labels."
        )
    if y.ndim != 1:
        cure = "Use y[:, 0]" if y.ndim == 2 and y.shape[1] == 1 else "Use y.argmax(1) for one-hot labels"
        numbers = ", or --label-kind numbers to predict numbers" if y.ndim == 2 else ""
        raise DataError(f"y must hold one label per row, but its shape is {y.shape}. {cure}{numbers}.")
    if y.dtype.kind in "bf":
        predicted = ", or use --label-kind numbers to predict numbers" if y.dtype.kind == "f" else ""
        raise DataError(
            f"y must hold whole numbers, not {y.dtype}: convert the labels, for example with y.astype(int){predicted}."
        )
    return "classes"


def _classes(y: np.ndarray, names: Sequence[str], notes: list[str]) -> tuple[Tensor, tuple[str, ...]]:
    if y.ndim != 1:
        raise DataError(f"y must hold one class per row, but its shape is {y.shape}.")
    if y.dtype.kind == "f":
        if (wrong := ~(np.abs(y) < LARGEST_ID) | (y != np.floor(y))).any():
            raise DataError(f"y must hold classes, whole numbers, but row {_row(wrong)} has {y[wrong][0]:g}.")
        notes.append(f"y was converted from {y.dtype} to whole numbers.")
        y = y.astype(np.int64)
    return _codes(y.astype(np.int64) if y.dtype.kind == "b" else y, names, "y", "classes")


def _codes(values: np.ndarray, names: Sequence[str], field: str, plural: str) -> tuple[Tensor, tuple[str, ...]]:
    """Names or whole numbers as indices, and the name of each index. Without names, the values that occur are names."""
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        raise DataError(f"{field} must hold a name or a whole number per row, not {_form(values)}.")
    if not names:
        found, inverse = np.unique(values, return_inverse=True)
        return torch.from_numpy(inverse.reshape(-1).astype(np.int64)), tuple(map(str, found.tolist()))
    if values.dtype.kind == "U":
        number = {name: at for at, name in enumerate(names)}
        if missing := [(row, one) for row, one in enumerate(values.tolist()) if one not in number]:
            row, one = missing[0]
            raise DataError(f"{field} is '{one}' in row {row}, which is not one of {plural}: {', '.join(names[:10])}.")
        return torch.tensor([number[one] for one in values.tolist()], dtype=torch.int64), tuple(names)
    if (wrong := (values < 0) | (values >= len(names))).any():
        row = _row(wrong)
        raise DataError(
            f"{field} must be in 0..{len(names) - 1}, because {plural} has {len(names)} names, but it is {values[row]} "
            f"in row {row}."
        )
    return torch.from_numpy(values.astype(np.int64)), tuple(names)


# Columns beside the rows ----------------------------------------------------------------------------------------------


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is known about the rows: who holds them, groups, times, a split."""
    found: dict[str, Any] = {}
    for one, many in (("client", "clients"), ("domain", "domains")):
        if fields.get(one) is not None:
            found[one], found[many] = _codes(to_labels(fields[one], one), _names(fields, many), one, many)
        elif fields.get(many) is not None:
            raise DataError(f"{many} names {len(_names(fields, many))} {many}, but there is no '{one}' for each row.")
    for name in ("group", "identity"):
        if fields.get(name) is not None:
            values = to_labels(fields[name], name)
            codes = _codes(values, (), name, name)[0]
            found[name] = codes if values.dtype.kind == "U" else torch.from_numpy(values.astype(np.int64))
    if fields.get("time") is not None:
        found["time"] = _times(fields["time"])
    if (span := _scalar(fields, "span", float)) is not None:
        found["span"] = span
    if (official := _scalar(fields, "official", int)) is not None:
        found["official"] = official
    if (part := fields.get("part", fields.get("split"))) is not None:
        found["part"] = _parts(part)
    if columns := _names(fields, "columns"):
        found["columns"] = columns
    if categories := fields.get("categories"):
        found["categories"] = tuple(tuple(map(str, values)) for values in categories)
    return found


def _times(value: Any) -> Tensor:
    array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind == "M":  # dates: seconds since 1970
        seconds = array.astype("datetime64[ns]").astype(np.int64) / 1e9
        return torch.from_numpy(np.where(np.isnat(array), np.nan, seconds))
    return torch.from_numpy(to_array(value, "time").astype(np.float64))


def _parts(value: Any) -> Tensor:
    """A fixed split by the names of the parts, or by their numbers."""
    values = to_labels(value, "part")
    if values.dtype.kind != "U" or values.ndim != 1:
        return _codes(values, PARTS, "part", "parts")[0]
    known = {one: SPLITS.get(one.lower(), one) for one in np.unique(values).tolist()}
    return _codes(np.array([known[one] for one in values.tolist()]), PARTS, "part", "parts")[0]


# Data frames ----------------------------------------------------------------------------------------------------------


def is_frame(value: Any) -> bool:
    """Whether this is a data frame of pandas, which need not be installed."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame)


def _frame_names(y: Any) -> tuple[str, ...]:
    """The names of the columns of a data frame with targets."""
    return tuple(map(str, y.columns)) if is_frame(y) else ()


def read_frame(frame: Any) -> dict[str, Any]:
    """The table of a data frame: columns of numbers first, then columns of texts, whose values are categories."""
    numbers: list[tuple[str, np.ndarray]] = []
    codes: list[tuple[str, np.ndarray]] = []
    values: list[tuple[str, ...]] = []
    for at, name in enumerate(map(str, frame.columns)):
        column = frame.iloc[:, at]
        kind = column.dtype.kind
        if kind in "biuf":
            held = column.to_numpy(np.float64, na_value=np.nan)
            numbers.append((name, held))
            missing = ~np.isfinite(held)
        elif kind in "OUT":
            found = column.astype("category").cat
            codes.append((name, found.codes.to_numpy()))
            values.append(tuple(map(str, found.categories)))
            missing = codes[-1][1] < 0
        else:
            raise DataError(f"column '{name}' of x holds {column.dtype}: make it numbers or texts, or leave it out.")
        if missing.any():
            raise DataError(f"column '{name}' of x has no value in row {_row(missing)}: fill it, or leave the row out.")
    if not numbers and not codes:
        raise DataError("x is a data frame without columns.")
    names, columns = zip(*numbers, *codes, strict=True)
    return {
        "x": np.stack(columns, 1).astype(np.float32),
        "columns": names,
        "categories": tuple(values),
        "kind": "table",
    }
