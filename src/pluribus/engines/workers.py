"""Clients run in worker processes on the CPU cores of this machine, with the same bits as the serial engine.

Images are in shared memory, once for all workers. A client stays with one worker, and moves only if that makes a round
clearly shorter. Results do not depend on which worker is used or which ends first: answers keep the order of requests.
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
    LoadSaved,
    Open,
    Outcome,
    Release,
    Saved,
    TakeChanged,
    TakeSelected,
    Worker,
    pack,
)
from pluribus.errors import ConflictError
from pluribus.host import Host, Limits, Selected, Tensors
from pluribus.processes import process_context, without_interrupts
from pluribus.request import Answer, Request

AHEAD = 2  # commands queued at a worker: with one it would wait for the parent, with more they would take memory

Load = Callable[[int], Tensors | None]
Order = tuple[int, Command]  # the number of a worker, and its command


class Workers(Spread):
    """The engine of `--workers`. Its processes start at the first request."""

    def __init__(self, parts: Assembly, load: Load, number: int) -> None:
        super().__init__(parts)
        self._load = load
        self._number = number
        self._workers: list[Worker] = []

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        todo = {request.client: request for request in requests}
        if not todo:
            return
        self._start()
        clients, (kind, plan) = list(todo), self._plan(todo, self._number)
        self._move_clients(plan)
        dispatch = self._dispatch((self._owner[k], todo.pop(k)) for k in clients)
        for index, k in enumerate(clients):
            outcome = dispatch.outcome(index)
            self._costs.note(kind, k, outcome.seconds)
            yield k, outcome.value

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close_pipe()
        for worker in workers:
            worker.end()

    # ---- processes -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._workers:
            return
        if multiprocessing.current_process().daemon:
            raise ConflictError("a process of a pool cannot start worker processes: leave out --workers.")
        host, shared = pack(self._host_factory())
        context = process_context()
        with without_interrupts():
            for number in range(self._number):
                self._workers.append(Worker(context, number, shared))
        self._broadcast(Open(host))

    def _host_factory(self) -> Callable[..., Host]:
        """A function that makes the host of a worker. Only the worker can give it `load`."""
        parts, limits = self._parts, Limits.of(self._parts.device, self._number)
        where = parts.data, parts.local, parts.device
        same_init = parts.experiment.same_init
        return partial(Host, parts.method, parts.task, parts.cards, *where, same_init=same_init, limits=limits)

    def _changed_by_host(self) -> list[dict[int, Tensors]]:
        return self._broadcast(TakeChanged())

    def _selected_by_host(self) -> list[dict[int, Selected]]:
        return self._broadcast(TakeSelected())

    def _broadcast(self, command: Command) -> list[Any]:
        dispatch = self._dispatch((number, command) for number in range(len(self._workers)))
        return [dispatch.outcome(number).value for number in range(len(self._workers))]

    def _dispatch(self, orders: Iterable[Order]) -> _Dispatch:
        return _Dispatch(self._workers, list(orders), self._load)

    # ---- which worker has which client -----------------------------------------------------------------------------

    def _move_clients(self, plan: Mapping[int, int]) -> None:
        """Move clients to their workers in a plan."""
        moving = self._find_moving(plan)
        released = self._dispatch((self._owner[k], Release(k)) for k in moving)
        states = {k: released.outcome(index).value for index, k in enumerate(moving)}
        unsaved = [k for k in moving if states[k] is not None]
        adopted = self._dispatch((plan[k], Adopt(k, states.pop(k))) for k in unsaved)
        for index in range(len(unsaved)):
            adopted.outcome(index)
        self._owner.update(plan)


class _Dispatch:
    """Commands for the workers. Each worker gets a few at a time."""

    def __init__(self, workers: Sequence[Worker], orders: list[Order], load: Load) -> None:
        self._workers = workers
        self._load = load
        self._waiting: list[deque[tuple[int, Command]]] = [deque() for _ in workers]
        self._running: list[deque[int]] = [deque() for _ in workers]
        self._outcomes: dict[int, Outcome] = {}
        for index, (number, command) in enumerate(orders):
            self._waiting[number].append((index, command))
        for number in range(len(workers)):
            for _ in range(AHEAD):
                self._send_next(number)

    def outcome(self, index: int) -> Outcome:
        """Wait for the outcome of a command, by its index. An error in the worker is raised here."""
        self._receive(seconds=0)  # messages that have arrived, so that no worker runs out of commands
        while index not in self._outcomes:
            self._receive(seconds=None)
        outcome = self._outcomes.pop(index)
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def _receive(self, seconds: float | None) -> None:
        numbers = {worker.connection: number for number, worker in enumerate(self._workers)}
        for connection in wait(list(numbers), seconds):
            number = numbers[connection]  # type: ignore[index]
            message = self._workers[number].receive()
            if isinstance(message, LoadSaved):
                self._workers[number].send(Saved(self._load(message.client)))
            else:
                self._outcomes[self._running[number].popleft()] = message
                self._send_next(number)

    def _send_next(self, number: int) -> None:
        if self._waiting[number]:
            index, command = self._waiting[number].popleft()
            self._workers[number].send(command)
            self._running[number].append(index)
