"""What a method would send in a federation, known before anything runs."""

from __future__ import annotations

from functools import cache

from pluribus.assembly import Assembly
from pluribus.method import Sizes, Traffic

ENOUGH_CLIENTS = 200  # for a mean: ten thousand would say no more


def bytes_per_round(parts: Assembly) -> Traffic:
    """Bytes that a client sends and gets in a round at most, headers aside; the mean over clients."""
    clients = range(min(parts.task.clients, ENOUGH_CLIENTS))
    held = {k: [count > 0 for count in parts.data.counts(k)] for k in clients}
    known = sum(map(any, zip(*held.values(), strict=True)))

    @cache
    def alike(model: str, classes: int, first: int) -> Traffic:
        sizes = Sizes(classes, known, parts.local.batch)
        return parts.method.traffic(parts.task, parts.cards[first], sizes)

    firsts: dict[tuple[str, int], int] = {}
    found = []
    for k in clients:
        kind = parts.cards[k].model, sum(held[k])
        found.append(alike(*kind, firsts.setdefault(kind, k)))
    return Traffic(sum(one.up for one in found) / len(found), sum(one.down for one in found) / len(found))
