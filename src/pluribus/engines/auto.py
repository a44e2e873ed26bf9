"""Clients run in this process until worker processes would clearly save time, and then there, with the same bits.

Worker processes take seconds to start, so clients go on here in the meantime. They move when they are next needed, in
the middle of a round too. Whatever keeps processes from starting leaves all clients here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import chain
from typing import Any

from pluribus.assembly import Assembly
from pluribus.data.dataset import copy_to_shared
from pluribus.engines.forecast import Forecast
from pluribus.engines.spread import kind_of
from pluribus.engines.worker import Adopt, Start, TakeChanged, TakeSelected, Worker, carry_out, pack
from pluribus.engines.workers import Workers, start_workers
from pluribus.host import Host, Load, Tensors, make_host
from pluribus.internal.arithmetic import Arithmetic
from pluribus.processes import process_context
from pluribus.request import Answer, Enrol, Evaluate, Request

LEAST_SECONDS = 1.0  # work that is measured before anything is decided: the first requests take longer than later ones
LEAST_SAVED = 6.0  # seconds that processes must save: twice as many as their start takes, or more
PATIENCE = 0.0  # seconds that a client waits for processes that start


class Auto(Workers):
    """The engine of `--workers auto` on a CPU."""

    def __init__(self, parts: Assembly, load: Load, number: int) -> None:
        super().__init__(parts, load, number)
        self.host = make_host(parts, load)
        self._here: set[int] = set()  # clients of this process
        self._seconds: dict[tuple[Hashable, int], float] = {}  # by kind of request and client
        self._forecast = Forecast(parts.task.rounds, parts.experiment.sampled(), number)
        self._undecided = True
        self._starting: Future[list[Worker]] | None = None

    @property
    def workers(self) -> int:
        """Number of worker processes. 0: clients run in this process."""
        return len(self._hosts)

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        requests = iter(requests)
        for request in requests:
            if self._hosts or self._processes_are_ready():
                yield from super().each(chain([request], requests))
                return
            yield request.client, self._answer(request)
            if self._undecided and self._pays():
                self._undecided = False
                self._start_in_background()

    def take_changed(self) -> dict[int, Tensors]:
        states = super().take_changed()
        if self._hosts:  # everything is saved, so nothing has to stay here
            for k in self._here:
                self.host.release(k)
            self._here.clear()
        return states

    def close(self) -> None:
        if self._starting is not None:
            wait([self._starting])
            self._processes_are_ready()
        super().close()

    def _answer(self, request: Request) -> Answer:
        self._here.add(request.client)
        if not isinstance(request, Evaluate):
            self._unsaved.add(request.client)
        started = time.perf_counter()
        answer = self.host.answer(request)
        seconds = time.perf_counter() - started
        self._seconds[kind_of(request), request.client] = seconds
        if not isinstance(request, Enrol):
            self._forecast.note(request.t, kind_of(request), seconds)
        return answer

    def _pays(self) -> bool:
        """Whether processes would clearly save time."""
        return self._forecast.seconds >= LEAST_SECONDS and self._forecast.to_save() > LEAST_SAVED

    def _start_in_background(self) -> None:
        """Start processes. They do not import the user's script: it may lack a guard, and would run again."""
        parts, experiment = self._parts, self._parts.experiment
        data = [*parts.dataset.tensors().values(), parts.data.store.x, parts.data.store.y]
        thread = ThreadPoolExecutor(1, "start of workers")
        try:
            # packed here and not in the thread, because clients that work change it
            packed = pack(partial(_make_host, self._host_factory(), experiment.own_builders()), data)
            how = Start(process_context(), *packed, Arithmetic.here())
            self._starting = thread.submit(_start_workers, self._number, how, self._load)
        except Exception:  # an object that is packed may raise anything
            return
        finally:
            thread.shutdown(wait=False)

    def _processes_are_ready(self) -> bool:
        """Whether processes have started by now. If they cannot start, clients stay here."""
        if self._starting is None or not wait([self._starting], PATIENCE).done:
            return False
        started, self._starting = self._starting, None
        if started.exception() is not None:
            return False
        self._hosts = started.result()
        for (kind, k), seconds in self._seconds.items():
            self._costs.note(kind, k, seconds)
        return True

    def _move_clients(self, plan: Mapping[int, int]) -> None:
        for k in self._here.intersection(plan):  # one at a time, because a state may be large
            self._here.remove(k)
            if (state := self.host.release(k)) is not None:
                self._command([(plan[k], Adopt(k, state))])
        super()._move_clients(plan)

    def _broadcast(self, command: TakeChanged | TakeSelected) -> list[Any]:
        return [*super()._broadcast(command), carry_out(self.host, command)]


def _make_host(make: Callable[..., Host], own: Mapping[str, Any], load: Load) -> Host:
    """Make the host of a worker. `own` has builders of the user's: with them come the modules that register models."""
    host = make(load=load)
    for model in own:
        host.task.shape_of(model)  # fails here and not later, if this process does not know it
    return host


def _start_workers(number: int, how: Start, load: Load) -> list[Worker]:
    how = how._replace(shared=[copy_to_shared(value) for value in how.shared])
    return start_workers(number, how, load, script=False)
