"""What processes would save in the rest of a run, judged by the requests that were answered one after the other."""

from __future__ import annotations

from collections.abc import Hashable


class Forecast:
    """Requests of one exchange can run at the same time: they then take as long as the longest of them, or as all of
    them divided by the number of processes."""

    def __init__(self, rounds: int, sampled: int, processes: int) -> None:
        self.seconds = 0.0  # of all requests so far
        self._rounds, self._sampled, self._processes = rounds, sampled, processes
        self._earlier = 0.0  # saved in the round before
        self._finished = 0.0  # saved in finished exchanges of this round
        self._exchange: tuple[int, Hashable] = 0, None  # its round, and the kind of its requests
        self._count, self._sum, self._longest = 0, 0.0, 0.0  # of its requests

    def note(self, t: int, kind: Hashable, seconds: float) -> None:
        """Note a request of round t."""
        self.seconds += seconds
        if self._exchange != (t, kind):
            self._finished += self._saved()
            if self._exchange[0] != t:
                self._earlier, self._finished = self._finished, 0.0
            self._exchange = t, kind
            self._count, self._sum, self._longest = 0, 0.0, 0.0
        self._count += 1
        self._sum += seconds
        self._longest = max(self._longest, seconds)

    def to_save(self) -> float:
        """Seconds that processes would save from now on, if all rounds are like this one or the one before.

        >>> forecast = Forecast(rounds=3, sampled=4, processes=2)
        >>> forecast.note(0, "work", 1.0)
        >>> forecast.to_save()  # nothing runs beside a single request
        0.0
        >>> forecast.note(0, "work", 1.0)
        >>> forecast.to_save()  # 2 seconds in each of 3 rounds, but 1 of them has passed
        5.0
        """
        so_far = self._finished + self._saved()
        whole = self._finished + self._saved() * max(1.0, self._sampled / max(1, self._count))
        return max(whole, self._earlier) * (self._rounds - self._exchange[0]) - so_far

    def _saved(self) -> float:
        return self._sum - max(self._sum / self._processes, self._longest)
