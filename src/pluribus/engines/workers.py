"""Clients spread over worker processes on this machine's CPU cores, with the same bits as one after the other.

Images lie in shared memory, once for all. A client lives with one worker, and moves only where that makes a round
clearly shorter. Nothing depends on who works where or who is done first: answers are given in the order of requests.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from pluribus.assembly import Assembly
from pluribus.engines.spread import Spread
from pluribus.engines.worker import (
    Adopt,
    Command,
    Open,
    Outcome,
    Release,
    Saved,
    TakeChanged,
    TakeSelected,
    Wanted,
    Worker,
    packed,
)
from pluribus.errors import ConflictError
from pluribus.host import Host, Limits, Selected, Tensors
from pluribus.processes import process_context, without_interrupts
from pluribus.request import Answer, Request

AHEAD = 2  # commands that a worker has at hand: with one it would wait for the parent, with more they would take memory

Load = Callable[[int], Tensors | None]
Order = tuple[int, Command]  # the number of a worker, and what it shall do


class Workers(Spread):
    """The engine behind `--workers`. Its processes start with the first request."""

    def __init__(self, parts: Assembly, load: Load, number: int) -> None:
        super().__init__(parts)
        self._load = load
        self._number = number
        self._workers: list[Worker] = []

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """Each client with its answer, in the order of requests."""
        todo = {request.client: request for request in requests}
        if not todo:
            return
        self._start()
        clients, (kind, plan) = list(todo), self._planned(todo, self._number)
        self._settle(plan)
        turn = self._turn((self._owner[k], todo.pop(k)) for k in clients)
        for place, k in enumerate(clients):
            outcome = turn.outcome(place)
            self._costs.note(kind, k, outcome.seconds)
            yield k, outcome.value

    def close(self) -> None:
        """End the processes."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.hang_up()
        for worker in workers:
            worker.end()

    # ---- processes -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._workers:
            return
        if multiprocessing.current_process().daemon:
            raise ConflictError("a process of a pool cannot have worker processes of its own: leave out --workers.")
        host, shared = packed(self._host())
        context = process_context()
        with without_interrupts():
            for number in range(self._number):
                self._workers.append(Worker(context, number, shared))
        self._everywhere(Open(host))

    def _host(self) -> Callable[..., Host]:
        """Makes a worker's host, but for what only the worker has."""
        parts, limits = self._parts, Limits.of(self._parts.device, self._number)
        where = parts.data, parts.local, parts.device
        same_init = parts.experiment.same_init
        return partial(Host, parts.method, parts.task, parts.cards, *where, same_init=same_init, limits=limits)

    def _changed_by_host(self) -> list[dict[int, Tensors]]:
        return self._everywhere(TakeChanged())

    def _selected_by_host(self) -> list[dict[int, Selected]]:
        return self._everywhere(TakeSelected())

    def _everywhere(self, command: Command) -> list[Any]:
        turn = self._turn((number, command) for number in range(len(self._workers)))
        return [turn.outcome(number).value for number in range(len(self._workers))]

    def _turn(self, orders: Iterable[Order]) -> _Turn:
        return _Turn(self._workers, list(orders), self._load)

    # ---- who works where -------------------------------------------------------------------------------------------

    def _settle(self, plan: Mapping[int, int]) -> None:
        """Bring clients to the workers of a plan."""
        moving = self._moving(plan)
        released = self._turn((self._owner[k], Release(k)) for k in moving)
        states = {k: released.outcome(place).value for place, k in enumerate(moving)}
        unsaved = [k for k in moving if states[k] is not None]
        adopted = self._turn((plan[k], Adopt(k, states.pop(k))) for k in unsaved)
        for place in range(len(unsaved)):
            adopted.outcome(place)
        self._owner.update(plan)


class _Turn:
    """Commands on their way through the workers, a few at a time with each."""

    def __init__(self, workers: Sequence[Worker], orders: list[Order], load: Load) -> None:
        self._workers = workers
        self._load = load
        self._waiting: list[deque[tuple[int, Command]]] = [deque() for _ in workers]
        self._at_work: list[deque[int]] = [deque() for _ in workers]
        self._outcomes: dict[int, Outcome] = {}
        for place, (number, command) in enumerate(orders):
            self._waiting[number].append((place, command))
        for number in range(len(workers)):
            for _ in range(AHEAD):
                self._feed(number)

    def outcome(self, place: int) -> Outcome:
        """What came of the command at this place; what went wrong in a worker is raised here."""
        self._hear(seconds=0)  # what is already there, so that nobody runs out of work
        while place not in self._outcomes:
            self._hear(seconds=None)
        outcome = self._outcomes.pop(place)
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def _hear(self, seconds: float | None) -> None:
        numbers = {worker.connection: number for number, worker in enumerate(self._workers)}
        for connection in wait(list(numbers), seconds):
            number = numbers[connection]  # type: ignore[index]
            said = self._workers[number].receive()
            if isinstance(said, Wanted):
                self._workers[number].send(Saved(self._load(said.client)))
            else:
                self._outcomes[self._at_work[number].popleft()] = said
                self._feed(number)

    def _feed(self, number: int) -> None:
        if self._waiting[number]:
            place, command = self._waiting[number].popleft()
            self._workers[number].send(command)
            self._at_work[number].append(place)
