"""What `check` returns: one line per promise."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]
WIDTH = 80
MARKS: dict[Status, str] = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}
INDENT = " " * 10


@dataclass(frozen=True)
class Line:
    """One promise, whether it holds, and for a failure what was found, what to change and a case to paste."""

    promise: str
    status: Status
    detail: str = ""
    change: str = ""
    case: str = ""

    def __str__(self) -> str:
        head = f" {MARKS[self.status]:8} {self.promise}"
        if self.status == "skipped":
            return _wrap(f"{head}: {self.detail}", INDENT)
        case = self.case.splitlines()
        notes = [_wrap(INDENT + text, INDENT) for text in (self.detail, self.change) if text]
        return "\n".join([head, *notes, *(INDENT + line for line in case)])


@dataclass(frozen=True, repr=False)
class CheckReport:
    """The result of a check.

    >>> report = CheckReport("method", "fedgh", (Line("runs", "passed"),))
    >>> report.passed, report
    (True, CheckReport(method fedgh: 1 passed))
    """

    kind: str
    target: str
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        """Whether no promise is broken. Skipped promises do not count."""
        return all(line.status != "failed" for line in self.lines)

    def summary(self) -> str:
        """How many promises passed, failed and were skipped."""
        numbers = Counter(line.status for line in self.lines)
        return ", ".join(f"{numbers[status]} {status}" for status in MARKS if numbers[status])

    def to_json(self) -> dict[str, Any]:
        lines = [asdict(line) for line in self.lines]
        return {"kind": self.kind, "target": self.target, "passed": self.passed, "lines": lines}

    def __repr__(self) -> str:
        return f"CheckReport({self.kind} {self.target}: {self.summary()})"

    def __str__(self) -> str:
        texts = [text for _, text in paragraphs(self.lines)]
        return "\n".join([f"{self.kind} {self.target}", *texts, f" {self.summary()}"])


def paragraphs(lines: Iterable[Line]) -> Iterator[tuple[Status, str]]:
    """The text of each line, as soon as it comes. Lines that are skipped for the same reason become one.

    >>> list(paragraphs([Line("a", "passed"), Line("b", "skipped", "no GPU."), Line("c", "skipped", "no GPU.")]))
    [('passed', ' ok       a'), ('skipped', ' skipped  2 promises: no GPU.')]
    """
    held: list[Line] = []
    for line in lines:
        if held and (line.status, line.detail) != ("skipped", held[0].detail):
            yield "skipped", _join(held)
            held = []
        if line.status == "skipped":
            held.append(line)
        else:
            yield line.status, str(line)
    if held:
        yield "skipped", _join(held)


def _join(skipped: Sequence[Line]) -> str:
    if len(skipped) == 1:
        return str(skipped[0])
    return str(replace(skipped[0], promise=f"{len(skipped)} promises"))


def _wrap(text: str, margin: str) -> str:
    """Text of at most 80 columns. Words that are longer, such as paths, are not broken."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
