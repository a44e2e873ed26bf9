"""Errors in user code (a method, model or data function): where in the run and on which line they were raised.

The error keeps its type. It gets a note, which Python prints below the traceback, also if the error comes from another
process. The command line prints the sentence first.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pluribus.errors import PluribusError

ATTRIBUTE = "_pluribus_blame"


class Blame(NamedTuple):
    """Facts about an error: where in the run it was raised, and the line and the frames of user code."""

    where: tuple[str, ...]
    line: str
    frames: str

    def note(self) -> str:
        return f"{', '.join(self.where)} ({self.line})" if self.line else ", ".join(self.where)


@contextmanager
def at(*where: str) -> Iterator[None]:
    """Add to every error raised in this block where in the run that was, such as `round 3`, `client 2`."""
    try:
        yield
    except PluribusError:  # its sentence says where
        raise
    except Exception as error:
        known = blame_of(error)
        found = Blame(where, *_find_user_code(error)) if known is None else known
        found = found._replace(where=(*where, *(word for word in found.where if word not in where)))
        notes: list[str] = getattr(error, "__notes__", [])
        if known is not None and known.note() in notes:  # one note, which grows as the error propagates
            notes[notes.index(known.note())] = found.note()
        else:
            error.add_note(found.note())
        setattr(error, ATTRIBUTE, found)
        raise


def blame_of(error: BaseException) -> Blame | None:
    """The facts about an error; None if it was not raised inside `at`."""
    return getattr(error, ATTRIBUTE, None)


def sentence_of(error: BaseException) -> str:
    """The error in one line: where in the run, the error itself, and the line of user code."""
    text = "".join(traceback.format_exception_only(type(error), error)).splitlines()[0] if str(error) else ""
    text = text or type(error).__name__
    if (known := blame_of(error)) is None:
        return text
    return f"{', '.join(known.where)}: {text}" + (f" ({known.line})" if known.line else "")


def first_line(error: Exception) -> str:
    """The first line of an error's message, without its full stop; the type of the error if it has no message."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")


def own_line(error: BaseException) -> str:
    """The line of user code that raised the error; empty if there is none."""
    return _find_user_code(error)[0]


def _find_user_code(error: BaseException) -> tuple[str, str]:
    """The innermost line of user code, and all frames of user code."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if not frame.filename.startswith(_library_folders())]
    if not frames:
        return "", ""
    last = frames[-1]
    line = f"{Path(last.filename).name}, line {last.lineno}, in {last.name}: `{last.line}`"
    return line, "".join(traceback.format_list(frames))


@cache
def _library_folders() -> tuple[str, ...]:
    """Beginnings of files without user code: those of this package, of libraries, and of Python itself."""
    paths = sysconfig.get_paths()
    libraries = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return ("<frozen", str(Path(__file__).parents[1]), *libraries)
