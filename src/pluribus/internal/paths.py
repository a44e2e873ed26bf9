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
    written = os.fspath(text)
    try:
        path = Path(written).expanduser()
        path.stat()
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise FileAccessError(f"cannot use the path {written:.100}: {error.strerror}. Give another.") from error
    except (RuntimeError, ValueError) as error:  # ~ of a user who does not exist; a NUL
        raise FileAccessError(f"{written!r:.100} cannot be a path ({error}). Give another.") from error
    return path
