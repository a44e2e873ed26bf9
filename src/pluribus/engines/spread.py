"""What engines with several hosts share: who hosts which client, what requests cost, which clients are unsaved."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

from pluribus.assembly import Assembly
from pluribus.engines.assignment import Costs, Size, assign
from pluribus.host import Selected, Tensors, most_selected
from pluribus.request import Evaluate, Request, Work

Kind = tuple[type[Request], int]  # the stage too: exchanges of a round may differ as much as types of requests do


class Spread:
    """Base of such engines. A host is a process of this machine or of another, with a host of its own."""

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts
        self.room: float = most_selected(parts.device)
        self._owner: dict[int, int] = {}  # client -> the host that holds it
        self._unsaved: set[int] = set()  # who worked since the last save
        self._parameters = cache(partial(_parameters, parts))
        self._costs = Costs(self._size)

    def changed(self) -> dict[int, Tensors]:
        """State of every client that worked since the last call."""
        self._unsaved.clear()
        states = {k: state for found in self._changed_by_host() for k, state in found.items()}
        return dict(sorted(states.items()))

    def selected(self) -> dict[int, Selected]:
        """What clients were measured with in the rounds that were selected since the last call."""
        newest: dict[int, Selected] = {}
        for found in self._selected_by_host():  # a client may have moved: what its last host has is the newest
            newest |= {k: one for k, one in found.items() if k not in newest or one[0] > newest[k][0]}
        return dict(sorted(newest.items()))

    def pending(self) -> int:
        """How many clients wait to be saved. Known here: every round asks, and no host need be asked."""
        return len(self._unsaved)

    def _changed_by_host(self) -> list[dict[int, Tensors]]:
        """`Host.changed` of every host."""
        raise NotImplementedError

    def _selected_by_host(self) -> list[dict[int, Selected]]:
        """`Host.selected` of every host."""
        raise NotImplementedError

    def _planned(self, requests: Mapping[int, Request], hosts: int) -> tuple[Kind, dict[int, int]]:
        """The kind of these requests, by which their cost is noted, and a host for every client."""
        first = next(iter(requests.values()))
        if not isinstance(first, Evaluate):  # which leaves no trace in a client
            self._unsaved |= requests.keys()
        kind = type(first), first.stage if isinstance(first, Work) else 0
        return kind, assign(self._costs.of(kind, requests), self._owner, hosts)

    def _moving(self, plan: Mapping[int, int]) -> list[int]:
        """Who has a host already, and shall go to another."""
        return [k for k, host in plan.items() if self._owner.get(k, host) != host]

    def _size(self, k: int) -> Size:
        card = self._parts.cards[k]
        return Size(card.model, self._parameters(card.model) * max(1, card.samples))


def _parameters(parts: Assembly, model: str) -> int:
    return sum(parameter.numel() for parameter in parts.task.shape_of(model).parameters())
