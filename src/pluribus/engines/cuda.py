"""One GPU: many clients at once, on several streams, with replayed steps.

Each stream has a thread, so that a client that waits for a number does not block the others. A client keeps its thread
and stream while it is in memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from pluribus.client import Client
from pluribus.engines.capture import Captured, Known
from pluribus.engines.serial import Serial
from pluribus.engines.stacked import Group, is_stackable, split_groups
from pluribus.engines.staging import Staging
from pluribus.host import Host
from pluribus.request import Answer, Request, Work

MOST_LANES = 20
AHEAD = 64  # requests that are read at once
LARGE = (15_000_000, 35_000_000)  # weights from which a client's operations come before those of smaller ones
R = TypeVar("R")


class Lane:
    """A thread and its stream. Work in a lane runs in order."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self.priority = priority
        self.load = 0.0
        self.staging: Staging | None = None  # for rows that stay on the host
        # One thread of the CPU for each operation: as many lanes as cores, with as many threads each, would only wait.
        self._thread = ThreadPoolExecutor(1, "lane", torch.set_num_threads, (1,))

    def do(self, work: Callable[[], R]) -> Future[R]:
        """Queue work. The future is done when the GPU has finished."""
        return self._thread.submit(self._on_stream, work)

    def _on_stream(self, work: Callable[[], R]) -> R:
        with torch.cuda.stream(self.stream):
            result = work()
            self.stream.synchronize()
            return result

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        if self.staging is not None:
            self.staging.close()


class Cuda(Serial):
    """The engine of a GPU."""

    def __init__(self, host: Host, tell: Callable[[str], None], capture: bool = True, stack: bool = True) -> None:
        super().__init__(host)
        self._tell = tell
        self._capture = capture
        self._stack = stack and capture
        self._lanes: list[Lane] = []
        self._known = Known()
        self._lane_of: WeakKeyDictionary[Client, Lane] = WeakKeyDictionary()
        self._stacked = defaultdict[str, Group](partial(Group, tell))  # by architecture

    def expect(self, clients: Iterable[int]) -> None:
        self.host.expect(clients)

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """All clients in memory work at once. A client that has answered makes room for the next one."""
        running: dict[int, Future[Answer]] = {}
        together: dict[int, Request] = {}  # small clients that wait for others to train with
        order = deque[int]()
        answers: dict[int, Answer] = {}
        for request in _read_ahead(requests):
            k = request.client
            order.append(k)
            while (client := self.host.seat(k, beside=running.keys() | together.keys())) is None:
                running |= self._start_groups(together)
                wait(running.values(), return_when=FIRST_COMPLETED)
                _collect(running, answers)
            self._equip(client)
            if self._is_stackable(request, client):
                together[k] = request
            else:
                running[k] = self._start(request, client)
            _collect(running, answers)
            yield from _in_order(order, answers)
        running |= self._start_groups(together)
        while order:
            wait([running[order[0]]])
            _collect(running, answers)
            yield from _in_order(order, answers)

    def _equip(self, client: Client) -> None:
        """Give a client that is new in memory a lane, and a runner that records steps."""
        if client in self._lane_of:
            return
        weights = sum(p.numel() for p in client.model.parameters())
        lane = self._find_lane(client.device, weights)
        lane.load += weights
        self._lane_of[client] = lane
        if self._capture:
            client.runner = Captured(client.device, lane, self._tell, self._known)

    def _find_lane(self, device: torch.device, weights: int) -> Lane:
        """A new lane, or the one with the least load, of the priority of such clients if there is one.

        The largest clients decide how long a round takes, so the GPU starts their operations first.
        """
        priority = -sum(weights >= limit for limit in LARGE)
        if len(self._lanes) < (MOST_LANES if self._capture else 1):
            self._lanes.append(Lane(device, priority))
            return self._lanes[-1]
        return min(self._lanes, key=lambda lane: (lane.priority != priority, lane.load))

    def _is_stackable(self, request: Request, client: Client) -> bool:
        return self._stack and isinstance(request, Work) and is_stackable(self.host.method, client)

    def _start(self, request: Request, client: Client) -> Future[Answer]:
        self._finish_copies()
        return self._lane_of[client].do(partial(self.host.answer, request))

    def _start_groups(self, together: dict[int, Request]) -> dict[int, Future[Answer]]:
        """Start small clients, and empty the list of them. Those of one architecture train together."""
        if not together:
            return {}
        self._finish_copies()
        by_model = defaultdict[str, list[int]](list)
        for k in together:
            by_model[self.host.client(k).card.model].append(k)
        answers: dict[int, Future[Answer]] = {}
        for members in (group for ks in by_model.values() for group in split_groups(ks)):
            clients = {k: self.host.client(k) for k in members}
            jobs = {k: partial(self.host.answer, together[k]) for k in members}
            first = clients[members[0]]
            if len(members) > 1:
                answers |= self._stacked[first.card.model].do(clients, jobs, self._lane_of[first])
            else:
                answers |= {k: self._lane_of[clients[k]].do(job) for k, job in jobs.items()}
        together.clear()
        return answers

    def _finish_copies(self) -> None:
        """Wait for the copies of this thread, which a client's stream would not wait for."""
        torch.cuda.current_stream(self.host.device).synchronize()

    def close(self) -> None:
        super().close()
        for lane in self._lanes:
            lane.close()
        for group in self._stacked.values():
            group.close()
        # cuBLAS keeps a workspace for every pair of a thread and a stream, and the next run brings new threads
        torch._C._cuda_clearCublasWorkspaces()


def _read_ahead(requests: Iterable[Request]) -> Iterator[Request]:
    """Requests, of which many are read at once: a server makes their messages, and on a busy GPU waits for each."""
    source = iter(requests)
    while some := list(islice(source, AHEAD)):
        yield from some


def _collect(running: dict[int, Future[Answer]], answers: dict[int, Answer]) -> None:
    """Move the answers of clients that have finished. An error of a client is raised here."""
    for k in [k for k, future in running.items() if future.done()]:
        answers[k] = running.pop(k).result()


def _in_order(order: deque[int], answers: dict[int, Answer]) -> Iterator[tuple[int, Answer]]:
    """Yield and remove the answers that are next."""
    while order and order[0] in answers:
        k = order.popleft()
        yield k, answers.pop(k)
