"""Base of engines with several hosts: which host has which client, what requests cost, which clients are unsaved."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

from pluribus.assembly import Assembly
from pluribus.engines.assignment import Costs, Size, assign
from pluribus.host import Selected, Tensors, most_selected
from pluribus.request import Evaluate, Request, Work

Kind = tuple[type[Request], int]  # with the stage: exchanges of a round may differ in cost as much as types of requests


class Spread:
    """Base class. Each process, on this machine or another, has one Host, known here by its number."""

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts
        self.room: float = most_selected(parts.device)
        self._owner: dict[int, int] = {}  # client -> number of its host
        self._unsaved: set[int] = set()  # clients that worked since the last save
        self._parameters = cache(partial(_parameters, parts))
        self._costs = Costs(self._size)

    def changed(self) -> dict[int, Tensors]:
        self._unsaved.clear()
        states = {k: state for found in self._changed_by_host() for k, state in found.items()}
        return dict(sorted(states.items()))

    def selected(self) -> dict[int, Selected]:
        newest: dict[int, Selected] = {}
        for found in self._selected_by_host():  # a client may have moved: its last host has the newest
            newest |= {k: one for k, one in found.items() if k not in newest or one[0] > newest[k][0]}
        return dict(sorted(newest.items()))

    def pending(self) -> int:
        """Number of clients with unsaved state. Counted here, because every round asks."""
        return len(self._unsaved)

    def _changed_by_host(self) -> list[dict[int, Tensors]]:
        """Return `Host.changed` of every host."""
        raise NotImplementedError

    def _selected_by_host(self) -> list[dict[int, Selected]]:
        """Return `Host.selected` of every host."""
        raise NotImplementedError

    def _plan(self, requests: Mapping[int, Request], hosts: int) -> tuple[Kind, dict[int, int]]:
        """Return the kind of these requests, under which their costs are stored, and a host for every client."""
        first = next(iter(requests.values()))
        if not isinstance(first, Evaluate):  # an evaluation does not change a client
            self._unsaved |= requests.keys()
        kind = type(first), first.stage if isinstance(first, Work) else 0
        return kind, assign(self._costs.of(kind, requests), self._owner, hosts)

    def _find_moving(self, plan: Mapping[int, int]) -> list[int]:
        """Clients that must move from one host to another."""
        return [k for k, host in plan.items() if self._owner.get(k, host) != host]

    def _size(self, k: int) -> Size:
        card = self._parts.cards[k]
        return Size(card.model, self._parameters(card.model) * max(1, card.samples))


def _parameters(parts: Assembly, model: str) -> int:
    return sum(parameter.numel() for parameter in parts.task.shape_of(model).parameters())
