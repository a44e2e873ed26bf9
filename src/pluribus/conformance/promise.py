"""A promise, and how it is held to a case: one line of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, Protocol, Self, TypeVar

from pluribus.conformance.report import Line
from pluribus.errors import ConfigError, PluribusError
from pluribus.internal.blame import blame_of, own_line, sentence_of


class BrokenError(AssertionError):
    """A promise is broken: what was found and, unless the promise says it, what to change."""

    def __init__(self, found: str, change: str = "") -> None:
        super().__init__(found)
        self.change = change


class SkippedError(Exception):
    """A promise cannot be checked here, or does not concern this code. The message is the reason."""


class Subject(Protocol):
    """What promises are held to: one experiment with a method, one way to build a model, or a data set."""

    def but(self, **settings: Any) -> Self:
        """The same with other settings."""

    def call(self) -> str:
        """Python code that does the same, to paste."""


S = TypeVar("S", bound=Subject)


@dataclass(frozen=True)
class Promise(Generic[S]):
    """One promise. `hold` raises if the subject breaks it."""

    name: str
    hold: Callable[[S], None]
    change: str
    """What to change if it is broken, in one sentence."""
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Settings of the subject under which the promise is checked."""
    smaller: tuple[Mapping[str, Any], ...] = ()
    """Settings of smaller cases, the smallest first, to be tried after a failure."""
    compares: bool = False
    """Whether it compares two runs, which says nothing if runs are never equal."""
    errors: tuple[type[Exception], ...] = ()
    """Errors that break this promise even if another one was being checked."""

    def check(self, subject: S) -> Line:
        """Hold the promise to a subject. A failure shows the smallest case that fails in the same way."""
        case = subject.but(**self.settings)
        try:
            self.hold(case)
        except SkippedError as reason:
            return Line(self.name, "skipped", str(reason))
        except Exception as error:
            return self.failure(case, error)
        return Line(self.name, "passed")

    def failure(self, case: S, error: Exception) -> Line:
        """The line of a broken promise."""
        smallest, error = next(self._smaller_failures(case, type(error)), (case, error))
        change = (error.change if isinstance(error, BrokenError) else "") or self.change
        if isinstance(error, ConfigError):  # its sentence says what to change
            change = ""
        return Line(self.name, "failed", describe(error), change, smallest.call())

    def _smaller_failures(self, case: S, kind: type[Exception]) -> Iterator[tuple[S, Exception]]:
        for settings in self.smaller:
            smaller = case.but(**settings)
            try:
                self.hold(smaller)
            except Exception as error:
                if type(error) is kind:
                    yield smaller, error


def describe(error: Exception) -> str:
    """What went wrong, in one line. An error of user code comes with its file and line."""
    cause = error.__cause__ if isinstance(error, BrokenError) else error
    own = "" if cause is None or blame_of(cause) is not None else own_line(cause)  # blame has the line already
    sentence = str(error) if isinstance(error, BrokenError | PluribusError) else sentence_of(error)
    return f"{sentence} ({own})" if own else sentence
