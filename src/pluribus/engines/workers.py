"""Clients run in worker processes on the CPU cores of this machine, with the same bits as the serial engine.

Images are in shared memory, once for all workers. A client stays with one worker, and moves only if that makes a round
clearly shorter. Results do not depend on which worker is used or which ends first: answers keep the order of requests.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from pluribus.engines.spread import Order, Spread
from pluribus.engines.worker import Command, LoadSaved, Open, Outcome, Saved, Start, Worker, pack
from pluribus.errors import ConflictError
from pluribus.host import Host, Limits, Load, host_factory
from pluribus.internal.arithmetic import Arithmetic
from pluribus.processes import process_context, starting
from pluribus.request import Request

AHEAD = 2  # commands queued at a worker: with one it would wait for the parent, with more they would take memory


class Workers(Spread):
    """The engine of `--workers`."""

    _hosts: list[Worker]

    def close(self) -> None:
        workers, self._hosts = self._hosts, []
        _end(workers)

    def _start(self) -> None:
        if multiprocessing.current_process().daemon:
            raise ConflictError("a process of a pool cannot start worker processes: leave out --workers.")
        how = Start(process_context(), *pack(self._host_factory()), Arithmetic.here())
        self._hosts = start_workers(self._number, how, self._load)

    def _host_factory(self) -> Callable[..., Host]:
        """A function that makes the host of a worker. Only the worker can give it `load`."""
        return host_factory(self._parts, Limits.of(self._parts.device, self._number))

    def _answers(self, todo: dict[int, Request]) -> Iterator[tuple[int, Outcome]]:
        clients = list(todo)
        orders = ((self._owner[k], todo.pop(k)) for k in clients)
        return zip(clients, _Dispatch(self._hosts, orders, self._load), strict=True)

    def _command(self, orders: Iterable[Order]) -> list[Any]:
        return [outcome.value for outcome in _Dispatch(self._hosts, orders, self._load)]


def start_workers(number: int, how: Start, load: Load, script: bool = True) -> list[Worker]:
    """Start worker processes that have made their hosts. `script`: whether they import the user's script before."""
    workers: list[Worker] = []
    try:
        with starting(script):
            for index in range(number):
                workers.append(Worker(index, how))
        for _ in _Dispatch(workers, ((index, Open(how.host)) for index in range(number)), load):
            pass
    except BaseException:
        _end(workers)
        raise
    return workers


def _end(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.connection.close()  # tells the worker to end
    for worker in workers:
        worker.end()


class _Dispatch:
    """Commands for the workers. Each worker gets a few at a time."""

    def __init__(self, workers: Sequence[Worker], orders: Iterable[Order], load: Load) -> None:
        self._workers = workers
        self._load = load
        self._waiting: list[deque[tuple[int, Command]]] = [deque() for _ in workers]
        self._running: list[deque[int]] = [deque() for _ in workers]
        self._outcomes: dict[int, Outcome] = {}
        self._commands = 0
        for number, command in orders:
            self._waiting[number].append((self._commands, command))
            self._commands += 1
        for number in range(len(workers)):
            for _ in range(AHEAD):
                self._send_next(number)

    def __iter__(self) -> Iterator[Outcome]:
        """Wait for the outcomes, in the order of commands. An error in a worker is raised here."""
        for index in range(self._commands):
            self._receive(seconds=0)  # messages that have arrived, so that no worker runs out of commands
            while index not in self._outcomes:
                self._receive(seconds=None)
            outcome = self._outcomes.pop(index)
            if outcome.error is not None:
                raise outcome.error
            yield outcome

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
