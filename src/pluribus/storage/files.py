"""Atomic files: they are written under a temporary name, synced and renamed."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from pluribus.errors import DamagedFileError, FileAccessError
from pluribus.internal.paths import check_path
from pluribus.internal.system import sync

if TYPE_CHECKING:
    from torch import Tensor


def check_writable(path: Path) -> None:
    """Refuse a file whose folder does not exist, or that is a folder itself, before anything runs."""
    check_path(path)
    if not path.name or path.is_dir():
        raise FileAccessError(f"cannot write {path}: it is a folder. Give the name of a file.")
    if not path.parent.is_dir():
        raise FileAccessError(f"cannot write {path}: {path.parent} is not a folder.")


def write_text(path: Path, text: str) -> None:
    """Write a small text file."""
    _write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def to_json(value: Any, indent: int | None = None) -> str:
    """A value as JSON. JSON lacks NaN and infinity: they become null."""
    return json.dumps(_replace_non_finite(value), indent=indent)


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    write_text(path, to_json(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileAccessError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged: {error}.") from error


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write named tensors as safetensors."""
    import safetensors.torch  # here alone: keys, which are files too, need no torch

    _write_atomically(path, lambda temporary: safetensors.torch.save_file(tensors, temporary, metadata))


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append values as lines of JSON."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(to_json(value) + "\n" for value in values)
    except OSError as error:
        raise _write_error(path, error) from error


def read_lines(path: Path) -> list[Any]:
    """The JSON lines of a file; an incomplete last line, left by a crash, is skipped."""
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FileAccessError(f"cannot read {path}: {error.strerror}.") from error
    values = []
    for line in text.splitlines():
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return values


def _write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # if writing fails, deleting may fail, too
            temporary.unlink()
        raise _write_error(path, error) from error


def _write_error(path: Path, error: Exception) -> FileAccessError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return FileAccessError(f"cannot write {path}: {reason}.")
