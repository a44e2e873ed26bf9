"""What a method would send in a federation, known before anything runs."""

from __future__ import annotations

from pluribus.assembly import Assembly
from pluribus.method import Sizes, Traffic

ENOUGH_CLIENTS = 200  # for a mean: ten thousand would say no more


def bytes_per_round(parts: Assembly) -> Traffic:
    """Bytes that a client sends and gets in a round at most, headers aside; the mean over clients."""
    clients = range(min(parts.task.clients, ENOUGH_CLIENTS))
    held = {k: [count > 0 for count in parts.data.counts(k)] for k in clients}
    known = sum(map(any, zip(*held.values(), strict=True)))

    alike: dict[tuple[str, int], Traffic] = {}
    for k in clients:
        kind = parts.cards[k].model, sum(held[k])
        if kind not in alike:
            sizes = Sizes(kind[1], known, parts.local.batch)
            alike[kind] = parts.method.traffic(parts.task, parts.cards[k], sizes)
    found = [alike[parts.cards[k].model, sum(held[k])] for k in clients]
    return Traffic(sum(one.up for one in found) / len(found), sum(one.down for one in found) / len(found))
