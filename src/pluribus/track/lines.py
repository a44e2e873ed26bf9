"""Plain lines about a run, by `logging`, where no terminal can show a bar: in log files, pipes and jobs of a cluster.

The logger is "pluribus", the level INFO. The command line prints these lines; in Python you configure logging.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console

from pluribus.federation import Federation, Observer
from pluribus.internal.clock import time_left
from pluribus.internal.ledger import Ledger
from pluribus.internal.metrics import headline_of
from pluribus.result import Result
from pluribus.terminal import Notes, Progress, format_bytes

LOGGER = logging.getLogger("pluribus")
SECONDS = 10.0  # between two lines

Seconds = Callable[[], float]  # a clock


def show_progress() -> Progress | Lines:
    """A bar where standard error is a terminal or a notebook, otherwise lines."""
    console = Console(stderr=True)
    return Progress(console) if console.is_terminal or console.is_jupyter else Lines(console)


class Pace:
    """Says when a line is due: the first at once, the others if ten seconds have passed since the last."""

    def __init__(self, clock: Seconds = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None

    def is_due(self, certainly: bool = False) -> bool:
        now = self._clock()
        if certainly or self._last is None or now - self._last >= SECONDS:
            self._last = now
            return True
        return False


class Lines(Observer):
    """Logs the first round, the last round, and one round every ten seconds."""

    def __init__(self, console: Console | None = None, clock: Seconds = time.monotonic) -> None:
        self._notes = Notes(console or Console(stderr=True))
        self._clock = clock

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None: ...

    def start(self, federation: Federation) -> None:
        self._federation, self._pace, self._begin = federation, Pace(self._clock), self._clock()
        self._before = len(federation.history)  # rounds that an earlier process has done
        self._score = ""
        self._waiting: str | None = None  # the line of the last round, if it was not due
        self._notes.forget()  # the run may restart
        self._notes.show(federation.warnings)

    def round(self, record: Mapping[str, Any], ledger: Ledger) -> None:
        line = self._line(record, ledger)
        due = self._pace.is_due(certainly=record["round"] + 1 == self._federation.parts.task.rounds)
        self._waiting = None if due else line
        if due:
            LOGGER.info(line)
        self._notes.show(self._federation.warnings)

    def finish(self, result: Result) -> None:
        if self._waiting is not None:  # the run has ended before its last round
            LOGGER.info(self._waiting)
        self._notes.show(self._federation.warnings)

    def _line(self, record: Mapping[str, Any], ledger: Ledger) -> str:
        done, rounds = record["round"] + 1, self._federation.parts.task.rounds
        mean = record["mean"].get(self._federation.method.views[0], {}).get("test", {}).get("mean")
        if mean is not None:
            self._score = f"test {headline_of(record).text} {mean:.3f}"
        facts = ", ".join(self._facts(record, ledger, done, rounds))
        return f"{self._federation.parts.experiment.method} {done} of {rounds} rounds: {facts}"

    def _facts(self, record: Mapping[str, Any], ledger: Ledger, done: int, rounds: int) -> Iterator[str]:
        if self._score:
            yield self._score
        if record["loss"] is not None:
            yield f"loss {record['loss']:.3f}"
        yield from (f"{way} {format_bytes(ledger.total[way])}" for way in ("up", "down"))
        each = (self._clock() - self._begin) / (done - self._before)
        yield f"{each:.2f} s per round"
        if done < rounds:
            yield f"{time_left(each, rounds - done)} left"
