"""One GPU: many clients at once, on several streams, with replayed steps.

Each stream has a thread, so that a client that waits for a number does not block the others. A client keeps its thread
and stream while it is in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from pluribus.client import Client
from pluribus.engines.capture import Captured
from pluribus.engines.serial import Serial
from pluribus.engines.stacked import Group, is_stackable, split_groups
from pluribus.engines.staging import Staging
from pluribus.host import Host
from pluribus.request import Answer, Request, Work

MOST_LANES = 20
R = TypeVar("R")


class Lane:
    """A thread and its stream. Work in a lane runs in order."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.load = 0.0
        self.staging: Staging | None = None  # for rows that stay on the host
        self._thread = ThreadPoolExecutor(1, "lane")

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
        self._stacked = defaultdict[str, Group](partial(Group, tell))  # by architecture

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """All clients in memory work at once."""
        wave: dict[int, Request] = {}
        for request in requests:
            k = request.client
            client = self.host.seat(k, beside=wave)
            if client is None:
                yield from self._wave(wave)
                wave = {}
                client = self.host.client(k)
            self._equip(client)
            wave[k] = request
        yield from self._wave(wave)

    def _equip(self, client: Client) -> None:
        """Give a client that is new in memory a lane and a runner."""
        if isinstance(client.runner, Captured) or not self._capture:
            return
        if len(self._lanes) < MOST_LANES:
            self._lanes.append(Lane(client.device))
        lane = min(self._lanes, key=lambda lane: lane.load)
        lane.load += sum(p.numel() for p in client.model.parameters())
        client.runner = Captured(client.device, lane, self._tell)

    def _wave(self, wave: dict[int, Request]) -> Iterator[tuple[int, Answer]]:
        if not self._capture:
            yield from ((k, self.host.answer(request)) for k, request in wave.items())
            return
        torch.cuda.synchronize(self.host.device)  # wait for the copies of this thread
        answers: dict[int, Future[Answer]] = {}
        for members in self._groups(wave):
            clients = {k: self.host.client(k) for k in members}
            first = clients[members[0]]
            assert isinstance(first.runner, Captured)
            lane: Lane = first.runner.lane
            jobs = {k: partial(self.host.answer, wave[k]) for k in members}
            if len(members) > 1:
                answers |= self._stacked[first.card.model].do(clients, jobs, lane)
            else:
                answers |= {k: lane.do(job) for k, job in jobs.items()}
        for k in wave:
            yield k, answers[k].result()

    def _groups(self, wave: dict[int, Request]) -> list[list[int]]:
        """Split clients into groups that train together: small clients of one architecture, if they can be stacked."""
        by_model = defaultdict[str, list[int]](list)
        single: list[list[int]] = []
        for k, request in wave.items():
            client = self.host.client(k)
            if self._stack and isinstance(request, Work) and is_stackable(self.host.method, client):
                by_model[client.card.model].append(k)
            else:
                single.append([k])
        return [group for ks in by_model.values() for group in split_groups(ks)] + single

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        for group in self._stacked.values():
            group.close()
