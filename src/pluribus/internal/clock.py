"""Measure where the time of a round goes, and how much is left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

SPANS = ("compute", "communication", "server", "evaluation")


def time_left(seconds: float, rounds: int) -> str:
    """The time of the remaining rounds, if each takes these seconds.

    >>> time_left(4.0, 20)
    '0:01:20'
    """
    return str(timedelta(seconds=round(seconds * rounds)))


class Clock:
    """Seconds by kind. Spans may be nested: time counts for the innermost span.

    >>> clock = Clock()
    >>> with clock("evaluation"):
    ...     pass
    >>> sorted(clock.spans())
    ['communication', 'compute', 'evaluation', 'server']
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._spans = dict.fromkeys(SPANS, 0.0)
        self._claimed = 0.0  # seconds of spans that have ended

    def seconds(self) -> float:
        return round(time.perf_counter() - self._started, 6)

    def spans(self) -> dict[str, float]:
        """Seconds by kind. The rest of `seconds` belongs to no kind."""
        return {name: round(value, 6) for name, value in self._spans.items()}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return self.apportion({name: 1.0})

    @contextmanager
    def apportion(self, shares: Mapping[str, float]) -> Iterator[None]:
        """Count the time of this block as several kinds. The shares are read when the block ends."""
        started, claimed = time.perf_counter(), self._claimed
        try:
            yield
        finally:
            passed = time.perf_counter() - started
            own, total = passed - (self._claimed - claimed), sum(shares.values())
            for name, share in shares.items():
                self._spans[name] += own * share / total if total else 0.0
            self._claimed = claimed + passed
