"""The round that each client's validation data selects, and the models of these rounds until they are saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pluribus.engines.engine import Engine
from pluribus.evaluate import Metrics, Selection, choose, prediction_bytes, selects
from pluribus.internal.metrics import METRICS
from pluribus.storage.store import StateStore
from pluribus.task import Cards, DataFacts, Task


class Selections:
    """The selected round of every client of a run.

    The process that evaluates a client keeps a copy of its model and predictions if this round is better than the best
    one so far. The copies wait in memory until the next commit, or until they take too much memory.
    """

    def __init__(self, task: Task, cards: Cards, data: DataFacts, engine: Engine, checkpoint: StateStore) -> None:
        self._headline = METRICS[task.metrics[0]]
        self._row_bytes = prediction_bytes(task)
        self._cards = cards
        self._data = data
        self._engine = engine
        self._checkpoint = checkpoint
        self._best: dict[int, Selection] = {}
        self._waiting: dict[int, int] = {}  # client -> bytes of its copy

    def restore(self, history: Iterable[Mapping[str, Any]], view: str) -> None:
        self._best = {k: Selection.of(one) for k, one in choose(history, view).items()}

    def best(self, k: int) -> Selection | None:
        """The best round of a client so far; None if it was never evaluated."""
        return self._best.get(k)

    def note(self, t: int, k: int, measured: Metrics) -> None:
        """Record the metrics of a client. The process that evaluated it applies the same rule."""
        if selects(measured, self._best.get(k), self._headline):
            self._best[k] = Selection(t, measured["val"])
            self._waiting[k] = self._nbytes(k)

    def _nbytes(self, k: int) -> int:
        """Size of the copy of a client's model and predictions."""
        return self._cards.nbytes(k) + self._row_bytes * (self._data.test_samples(k) or 0)

    def groups(self, clients: Iterable[int]) -> Iterator[list[int]]:
        """Clients to evaluate together, so that their copies fit into memory. Copies are saved between groups."""
        group: list[int] = []
        size = sum(self._waiting.values())
        for k in clients:
            size += 0 if k in self._waiting else self._nbytes(k)
            if group and size > self._engine.room:
                yield group
                self.keep()
                group, size = [], self._nbytes(k)
            group.append(k)
        if group:
            yield group

    def keep(self) -> None:
        """Save the waiting copies. Older files stay until the next commit."""
        self._waiting.clear()
        for k, (t, measured) in self._engine.take_selected().items():
            self._checkpoint.keep(k, t, measured)

    def drop_superseded(self) -> None:
        """Delete the files that no commit needs any more."""
        self._checkpoint.drop_superseded({k: self._best[k].round for k in self._checkpoint.doubled if k in self._best})
