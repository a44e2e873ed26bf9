"""Base of engines with several hosts: which host has which client, what requests cost, which clients are unsaved."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from pluribus.assembly import Assembly
from pluribus.engines.assignment import Costs, Size, assign
from pluribus.engines.engine import MOST_PENDING
from pluribus.engines.worker import Adopt, Command, Outcome, Release, TakeChanged, TakeSelected
from pluribus.host import Load, Selected, Tensors, most_selected
from pluribus.request import Answer, Evaluate, Request, Work

Order = tuple[int, Command]  # the number of a host, and its command


class Spread:
    """Base class. Each process has one Host, known here by its number. The processes start at the first request."""

    can_lose = False

    def __init__(self, parts: Assembly, load: Load, number: int) -> None:
        self._parts = parts
        self._load = load
        self._number = number
        self.room: float = most_selected(parts.device)
        self._hosts: list[Any] = []  # empty until the processes start
        self._owner: dict[int, int] = {}  # client -> number of its host
        self._unsaved: set[int] = set()  # clients that worked since the last save
        self._parameters = cache(partial(_parameters, parts))
        self._costs = Costs(self._size)

    def expect(self, clients: Iterable[int]) -> None:
        pass

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        todo = {request.client: request for request in requests}
        if not todo:
            return
        if not self._hosts:
            self._start()
        first = next(iter(todo.values()))
        if not isinstance(first, Evaluate):  # an evaluation does not change a client
            self._unsaved |= todo.keys()
        kind = kind_of(first)
        self._move_clients(assign(self._costs.of(kind, todo), self._owner, self._number))
        for k, outcome in self._answers(todo):
            self._costs.note(kind, k, outcome.seconds)
            yield k, outcome.value

    def take_changed(self) -> dict[int, Tensors]:
        self._unsaved.clear()
        states = {k: state for found in self._broadcast(TakeChanged()) for k, state in found.items()}
        return dict(sorted(states.items()))

    def take_selected(self) -> dict[int, Selected]:
        newest: dict[int, Selected] = {}
        for found in self._broadcast(TakeSelected()):  # a client may have moved: its last host has the newest
            newest |= {k: one for k, one in found.items() if k not in newest or one[0] > newest[k][0]}
        return dict(sorted(newest.items()))

    def pending(self) -> int:
        return len(self._unsaved)  # counted here, because every round asks

    def is_full(self) -> bool:
        return self.pending() > MOST_PENDING

    def _start(self) -> None:
        """Start the processes."""
        raise NotImplementedError

    def _answers(self, todo: dict[int, Request]) -> Iterator[tuple[int, Outcome]]:
        """Take the requests out of `todo`, and yield each client and its outcome, in order. Errors are raised."""
        raise NotImplementedError

    def _command(self, orders: Iterable[Order]) -> list[Any]:
        """Return the result of each command, in order."""
        raise NotImplementedError

    def _send_saved(self, plan: Mapping[int, int]) -> None:
        """Prepare hosts for clients that they do not have yet, and whose state is saved."""

    def _broadcast(self, command: TakeChanged | TakeSelected) -> list[Any]:
        return self._command((number, command) for number in range(len(self._hosts)))

    def _move_clients(self, plan: Mapping[int, int]) -> None:
        """Move clients to their hosts in a plan, with their unsaved state."""
        moving = [k for k, host in plan.items() if self._owner.get(k, host) != host]
        released = self._command((self._owner[k], Release(k)) for k in moving)
        unsaved = {k: state for k, state in zip(moving, released, strict=True) if state is not None}
        new = [k for k, host in plan.items() if self._owner.get(k) != host and k not in unsaved]
        self._command((plan[k], Adopt(k, unsaved.pop(k))) for k in list(unsaved))
        self._send_saved({k: plan[k] for k in new})
        self._owner.update(plan)

    def _size(self, k: int) -> Size:
        card = self._parts.cards[k]
        return Size(card.model, self._parameters(card.model) * max(1, card.samples))


def kind_of(request: Request) -> Hashable:
    """Requests of one kind cost a client about the same: exchanges of a round may differ as much as types."""
    return type(request), request.stage if isinstance(request, Work) else 0


def _parameters(parts: Assembly, model: str) -> int:
    return sum(parameter.numel() for parameter in parts.task.shape_of(model).parameters())
