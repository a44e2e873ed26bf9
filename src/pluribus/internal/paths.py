"""Paths that users write, in files and on the command line."""

from __future__ import annotations

import os
from errno import ELOOP, ENOENT, ENOTDIR
from pathlib import Path

from pluribus.errors import FileAccessError

NOT_THERE = (ENOENT, ENOTDIR, ELOOP)


def to_path(text: str | os.PathLike[str]) -> Path:
    """The path of a text, in which ~ is the home folder. It need not exist, but the system must be able to say so.

    Refuse text that can be no path: one that is too long, or in a folder that this user may not search.
    """
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # ~ of a user who does not exist
        raise FileAccessError(f"{os.fspath(text)!r:.100} cannot be a path ({error}). Give another.") from error
    return check_path(path)


def check_path(text: str | os.PathLike[str]) -> Path:
    """The path of a text as it is written, in which ~ is a name like any other. Refuse text that can be no path."""
    path = Path(text)
    try:
        path.stat()
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise FileAccessError(f"cannot use the path {path!s:.100}: {error.strerror}. Give another.") from error
    except ValueError as error:  # a NUL
        raise FileAccessError(f"{str(path)!r:.100} cannot be a path ({error}). Give another.") from error
    return path
