"""The npz files of data sets: the cache format of images, and arrays of any kind.

The cache format has `x_train, y_train, x_test, y_test, classes`. Any other file has `x` and `y`, and what else is known
about the rows, under the names of a Dataset's fields. Nothing is unpickled.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from pluribus.data.arrays import FIELDS, LabelKind, guess_kind, make_dataset
from pluribus.data.dataset import Dataset, last_line
from pluribus.errors import DamagedDataError, DataError, MissingDataError, UnknownNameError
from pluribus.inputs import KINDS, Kind

Arrays = dict[str, np.ndarray]

NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test", "classes")
NOT_IN_FILES = ("name", "categories")
ELSEWHERE = ("owner",)  # read by real sites, and by nobody else
MOST_COMPRESSED = 1100  # bytes of an array for each byte of a zip file: deflate compresses by 1032 at most


def read_npz(file: Path, name: str | None = None, label_kind: LabelKind = "auto") -> Dataset:
    """Read a data set from a file with arrays of any kind, or in the cache format of images."""
    names = _array_names(file)
    if "x" in names and "x_train" not in names:
        return _read_any(file, name, label_kind, names)
    arrays = read_arrays(file, NPZ_KEYS)
    if missing := [key for key in NPZ_KEYS if key not in arrays]:
        raise DamagedDataError(
            f"{file} lacks {', '.join(missing)}: it must hold {', '.join(NPZ_KEYS)}, or x and y with data of any kind."
        )
    return _read_cached(file, name, arrays)


def _read_any(file: Path, name: str | None, label_kind: LabelKind, names: list[str]) -> Dataset:
    known = [key for key in FIELDS if key not in NOT_IN_FILES]
    arrays: dict[str, Any] = dict(read_arrays(file, known))
    other = [key for key in names if key not in (*known, *ELSEWHERE)]
    if other:
        unread = f"{len(other)} arrays of {file.name} were not read: {', '.join(other[:5])}."
        arrays["notes"] = [*np.atleast_1d(arrays.get("notes", ())).tolist(), unread]
    try:
        return make_dataset(arrays, name or file.stem, label_kind, in_file=True)
    except (DataError, UnknownNameError) as refusal:
        raise type(refusal)(f"{file} cannot be used: {refusal.sentence}") from refusal


def read_kind(file: Path) -> Kind:
    """The kind of the rows in a file, by the head of its array x. `image` if that cannot be told: reading says why."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if "kind.npy" in names:
                return next(kind for kind in KINDS if kind == _read_array(archive, "kind.npy").item())
            ids = "lengths.npy" in names or "vocabulary.npy" in names
            with archive.open("x.npy") as x:
                shape, dtype = _read_header(x)
        return guess_kind(dtype, len(shape), ids, in_file=True) or "image"
    except Exception:  # a damaged archive raises almost any error
        return "image"


def _array_names(file: Path) -> list[str]:
    _check_archive(file)
    try:
        with zipfile.ZipFile(file) as archive:
            return [one.removesuffix(".npy") for one in archive.namelist() if one.endswith(".npy")]
    except Exception as reason:
        raise _unreadable(file, reason) from reason


def _read_cached(file: Path, name: str | None, arrays: Arrays) -> Dataset:
    """Images N x H x W or N x H x W x 3, with an official test set."""
    if problem := next(_npz_problems(arrays), None):
        raise DamagedDataError(f"{file} cannot be used: {problem}. Write it again or delete it.")
    train, test = arrays["x_train"], arrays["x_test"]
    try:
        return Dataset(
            name=name or file.stem,
            x=_channels_first(train, test),
            y=torch.from_numpy(np.concatenate([arrays["y_train"], arrays["y_test"]]).astype(np.int64)),
            classes=tuple(str(label) for label in arrays["classes"]),
            official=len(train) if len(train) and len(test) else None,
        )
    except DataError as refusal:
        raise type(refusal)(f"{file} cannot be used: {refusal.sentence}") from refusal


def write_npz(file: Path, arrays: Arrays) -> None:
    """Write a cache file atomically: a reader never sees part of it, even if this process is killed."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as handle:
            # not compressed: photos would shrink by a tenth and take ten times as long to read
            np.savez(handle, **arrays)  # type: ignore[arg-type]
            handle.flush()
            os.fsync(handle.fileno())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def read_arrays(file: Path, keys: Iterable[str]) -> Arrays:
    """Read those of the arrays `keys` that a file contains."""
    _check_archive(file)
    try:
        with zipfile.ZipFile(file) as archive:
            held = {*archive.namelist()}
            return {key: _read_array(archive, f"{key}.npy") for key in keys if f"{key}.npy" in held}
    # a damaged archive raises almost any error: BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, ...
    except Exception as reason:
        raise _unreadable(file, reason) from reason


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read one array. Refuse a header that claims more numbers than the file has, before memory is taken for them."""
    with archive.open(name) as member:
        shape, dtype = _read_header(member)
        info, size = archive.getinfo(name), math.prod(shape) * max(1, dtype.itemsize)
        most = MOST_COMPRESSED * os.fstat(archive.fp.fileno()).st_size  # type: ignore[union-attr]
        if dtype.hasobject:
            raise ValueError(f"Object arrays such as {name} are never unpickled")
        if min(shape, default=0) < 0 or info.file_size > most or size != info.file_size - member.tell():
            raise ValueError(f"the array {name} does not hold what its header says, {dtype} {shape}")
        member.seek(0)
        return np.lib.format.read_array(member, allow_pickle=False)


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and the type of an array."""
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member)
    return shape, dtype


def _check_archive(file: Path) -> None:
    if not file.is_file():
        raise MissingDataError(f"file {file} does not exist.")
    if not zipfile.is_zipfile(file):
        raise DamagedDataError(f"{file} is not a complete npz file: write it again or delete it.")


def _unreadable(file: Path, reason: Exception) -> DamagedDataError:
    return DamagedDataError(f"{file} cannot be read ({last_line(reason)}): write it again or delete it.")


def _npz_problems(arrays: Arrays) -> Iterator[str]:
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.dtype != np.uint8 or not (x.ndim == 3 or (x.ndim == 4 and x.shape[3] == 3)):
            yield f"x_{part} must be uint8 N x H x W or N x H x W x 3, not {x.dtype} {x.shape}"
        if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
            yield f"y_{part} must be a one-dimensional array of integers, not {y.dtype} {y.shape}"
        if len(x) != len(y):
            yield f"x_{part} has {len(x)} images but y_{part} has {len(y)} labels"
    if arrays["x_train"].shape[1:] != arrays["x_test"].shape[1:]:
        yield f"images of x_train {arrays['x_train'].shape[1:]} and x_test {arrays['x_test'].shape[1:]} differ in shape"
    if arrays["classes"].ndim != 1:
        yield f"classes must be a one-dimensional array of names, not {arrays['classes'].shape}"


def _channels_first(train: np.ndarray, test: np.ndarray) -> Tensor:
    height, width, channels = (*train.shape[1:], 1)[:3]
    x = torch.empty((len(train) + len(test), channels, height, width), dtype=torch.uint8)
    for rows, images in ((x[: len(train)], train), (x[len(train) :], test)):
        rows.copy_(torch.from_numpy(images).reshape(len(images), height, width, channels).permute(0, 3, 1, 2))
    return x
