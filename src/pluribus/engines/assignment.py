"""Which worker hosts which client: what requests cost, and how they are spread so that no worker is waited for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

# A client stays with the worker that holds it, because moving costs bytes, unless that makes the round so many times
# longer than if all were spread freely, and by more than a few moves take.
CLEARLY_LONGER = 1.1
SECONDS_TO_MOVE = 0.1


class Size(NamedTuple):
    """What is known of a client's work before it is measured: its model, and parameters times samples."""

    model: str
    amount: float


class Costs:
    """Seconds of each kind of request to each client: as last measured, or guessed by clients that were."""

    def __init__(self, size: Callable[[int], Size]) -> None:
        self._size = size
        self._seconds: dict[tuple[Hashable, int], float] = {}
        self._rates: dict[Hashable, dict[str, float]] = {}  # kind -> model -> seconds per amount

    def note(self, kind: Hashable, k: int, seconds: float) -> None:
        """A request of this kind took so long."""
        self._seconds[kind, k] = seconds
        model, amount = self._size(k)
        self._rates.setdefault(kind, {})[model] = seconds / amount

    def of(self, kind: Hashable, clients: Iterable[int]) -> dict[int, float]:
        """Seconds that each client's request will take; amounts instead of seconds while nothing was measured."""
        rates = self._rates.get(kind, {})
        usual = sum(rates.values()) / len(rates) if rates else 1.0
        costs = {}
        for k in clients:
            if (measured := self._seconds.get((kind, k))) is None:
                model, amount = self._size(k)
                measured = amount * rates.get(model, usual)
            costs[k] = measured
        return costs


def assign(costs: Mapping[int, float], owner: Mapping[int, int], workers: int) -> dict[int, int]:
    """A worker for every client: the most costly first, each to whoever is free first, but preferably to its owner.

    >>> assign({0: 3.0, 1: 2.0, 2: 2.0, 3: 1.0}, {}, 2)
    {0: 0, 1: 1, 2: 1, 3: 0}
    >>> assign({0: 3.0, 1: 2.0, 2: 2.0, 3: 1.0}, {0: 1, 1: 0, 2: 0}, 2)
    {0: 1, 1: 0, 2: 0, 3: 1}
    """
    free = _spread(costs, {}, owner, workers)
    limit = limit_of(longest(costs, free))
    kept: dict[int, int] = {}
    loads = [0.0] * workers
    for k in _costly_first(costs):
        if k in owner and loads[owner[k]] + costs[k] <= limit:
            kept[k] = owner[k]
            loads[owner[k]] += costs[k]
    settled = _spread(costs, kept, owner, workers)
    chosen = settled if longest(costs, settled) <= limit else free
    return {k: chosen[k] for k in costs}


def limit_of(best: float) -> float:
    """How long a round may take before clients move."""
    return max(CLEARLY_LONGER * best, best + SECONDS_TO_MOVE)


def longest(costs: Mapping[int, float], plan: Mapping[int, int]) -> float:
    """How long the busiest worker works."""
    loads: dict[int, float] = {}
    for k, worker in plan.items():
        loads[worker] = loads.get(worker, 0.0) + costs[k]
    return max(loads.values(), default=0.0)


def _spread(
    costs: Mapping[int, float], placed: Mapping[int, int], owner: Mapping[int, int], workers: int
) -> dict[int, int]:
    """Add those without a place; of workers that are equally busy the owner is taken."""
    plan, loads = dict(placed), [0.0] * workers
    for k, worker in placed.items():
        loads[worker] += costs[k]
    for k in _costly_first(costs):
        if k not in plan:
            plan[k] = min(range(workers), key=lambda w: (loads[w], w != owner.get(k), w))
            loads[plan[k]] += costs[k]
    return plan


def _costly_first(costs: Mapping[int, float]) -> list[int]:
    return sorted(costs, key=lambda k: (-costs[k], k))
