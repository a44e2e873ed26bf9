"""Which worker hosts which client: what requests cost, and how to balance them over the workers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

# Moving a client costs bytes. So a client stays with its worker, unless the round then takes longer than the best
# balance by this factor and by this time.
CLEARLY_LONGER = 1.1
SECONDS_TO_MOVE = 0.1


class Size(NamedTuple):
    """An estimate of a client's work before it is measured: its model, and parameters times samples."""

    model: str
    amount: float


class Costs:
    """Seconds of each kind of request to each client: the last measurement, or an estimate from other clients."""

    def __init__(self, size: Callable[[int], Size]) -> None:
        self._size = size
        self._seconds: dict[tuple[Hashable, int], float] = {}
        self._rates: dict[Hashable, dict[str, float]] = {}  # kind -> model -> seconds per amount

    def note(self, kind: Hashable, k: int, seconds: float) -> None:
        """Store the time that a request of this kind took."""
        self._seconds[kind, k] = seconds
        model, amount = self._size(k)
        self._rates.setdefault(kind, {})[model] = seconds / amount

    def of(self, kind: Hashable, clients: Iterable[int]) -> dict[int, float]:
        """Expected seconds of each client's request. Before the first measurement: amounts instead of seconds."""
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
    """Choose a worker for every client, the most expensive first: its owner, or the first free worker.

    >>> assign({0: 3.0, 1: 2.0, 2: 2.0, 3: 1.0}, {}, 2)
    {0: 0, 1: 1, 2: 1, 3: 0}
    >>> assign({0: 3.0, 1: 2.0, 2: 2.0, 3: 1.0}, {0: 1, 1: 0, 2: 0}, 2)
    {0: 1, 1: 0, 2: 0, 3: 1}
    """
    balanced = _spread_out(costs, {}, owner, workers)
    limit = limit_of(longest(costs, balanced))
    kept: dict[int, int] = {}
    loads = [0.0] * workers
    for k in _costly_first(costs):
        if k in owner and loads[owner[k]] + costs[k] <= limit:
            kept[k] = owner[k]
            loads[owner[k]] += costs[k]
    steady = _spread_out(costs, kept, owner, workers)
    chosen = steady if longest(costs, steady) <= limit else balanced
    return {k: chosen[k] for k in costs}


def limit_of(best: float) -> float:
    """Longest time of a round in which clients stay with their workers."""
    return max(CLEARLY_LONGER * best, best + SECONDS_TO_MOVE)


def longest(costs: Mapping[int, float], plan: Mapping[int, int]) -> float:
    """Time of the busiest worker."""
    loads: dict[int, float] = {}
    for k, worker in plan.items():
        loads[worker] = loads.get(worker, 0.0) + costs[k]
    return max(loads.values(), default=0.0)


def _spread_out(
    costs: Mapping[int, float], placed: Mapping[int, int], owner: Mapping[int, int], workers: int
) -> dict[int, int]:
    """Assign the clients that are not placed yet. Among equally busy workers, the owner comes first."""
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
