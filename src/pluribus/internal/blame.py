"""Errors of somebody's own method, model or data function: where in a run they came up, and on which of their lines.

The error keeps its type. It gets a note, which Python prints below a traceback, and which travels with it from other
processes; the command line prints the sentence first.
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
    """What is known of an error: where in the run, its own line, and the frames of code that is neither ours nor of a
    library."""

    where: tuple[str, ...]
    line: str
    frames: str

    def note(self) -> str:
        """Where it came up."""
        return f"{', '.join(self.where)} ({self.line})" if self.line else ", ".join(self.where)


@contextmanager
def at(*where: str) -> Iterator[None]:
    """An error that comes up meanwhile says where in the run, such as `round 3`, `client 2`."""
    try:
        yield
    except PluribusError:  # a sentence that says so itself
        raise
    except Exception as error:
        known = blame_of(error)
        found = Blame(where, *_own(error)) if known is None else known
        found = found._replace(where=(*where, *(word for word in found.where if word not in where)))
        _tell(error, known, found)
        raise


def _tell(error: Exception, known: Blame | None, found: Blame) -> None:
    """One note, which grows as the error rises."""
    notes: list[str] = getattr(error, "__notes__", [])
    if known is not None and known.note() in notes:
        notes[notes.index(known.note())] = found.note()
    else:
        error.add_note(found.note())
    setattr(error, ATTRIBUTE, found)


def blame_of(error: BaseException) -> Blame | None:
    """What is known of an error."""
    return getattr(error, ATTRIBUTE, None)


def sentence_of(error: BaseException) -> str:
    """The error in one line: where, what, and on whose line."""
    said = "".join(traceback.format_exception_only(type(error), error)).splitlines()[0] if str(error) else ""
    said = said or type(error).__name__
    if (known := blame_of(error)) is None:
        return said
    return f"{', '.join(known.where)}: {said}" + (f" ({known.line})" if known.line else "")


def own_line(error: BaseException) -> str:
    """Where in somebody's own code it came up; empty if nowhere."""
    return _own(error)[0]


def _own(error: BaseException) -> tuple[str, str]:
    """The innermost line of code that is neither ours nor of a library, and all such frames."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    if not frames:
        return "", ""
    last = frames[-1]
    line = f"{Path(last.filename).name}, line {last.lineno}, in {last.name}: `{last.line}`"
    return line, "".join(traceback.format_list(frames))


def _is_own(file: str) -> bool:
    return not file.startswith("<frozen") and not any(file.startswith(folder) for folder in _foreign())


@cache
def _foreign() -> tuple[str, ...]:
    """Folders of code that no user wrote: this package, libraries, and Python itself."""
    paths = sysconfig.get_paths()
    libraries = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return (*dict.fromkeys((str(Path(__file__).parents[1]), *libraries)),)
