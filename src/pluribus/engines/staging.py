"""Rows of a host's store for recorded steps: parts of a fit are copied to a fixed place while the GPU computes.

A recorded step reads rows at fixed addresses. So a lane has one place on the GPU, with two halves: a thread fills one
of them while steps read the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from pluribus.data.federated import Store
from pluribus.data.host_store import HostStore
from pluribus.engines.visit import Visit

HALF_BYTES = 8 * 2**20


class Staging(Store):
    """Two halves on the GPU with rows of a store on the host."""

    def __init__(self, store: HostStore, least: int) -> None:
        """Make room for at least so many rows in each half."""
        self.host = store
        self.capacity = max(least, HALF_BYTES // max(1, store.x[0].nbytes))
        columns = store.x, store.y
        shapes = [((2 * self.capacity, *column.shape[1:]), column.dtype) for column in columns]
        x, y = (torch.empty(shape, dtype=dtype, device=store.device) for shape, dtype in shapes)
        super().__init__(x, y, store.device)
        self._layout = store._layout
        self._pinned = [torch.empty(shape, dtype=dtype, pin_memory=True) for shape, dtype in shapes]
        self._numbers = torch.arange(2 * self.capacity, device=store.device)
        # Torch has 32 streams of each priority. A lane's stream, which records steps, must not be this one, too, so no
        # lane has this priority.
        self._copies = torch.cuda.Stream(store.device, priority=-3)  # type: ignore[no-untyped-call]
        self._copied, self._read = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "staging")

    def visit(self, visits: Sequence[Visit]) -> Iterator[Visit]:
        """These visits, with the places of their rows on the GPU. The rows of the next ones are copied meanwhile."""
        parts = list(self._parts(visits))
        waiting = self._fill(0, parts[0]) if parts else None
        for number, part in enumerate(parts):
            half = number % 2
            assert waiting is not None
            waiting.result()
            torch.cuda.current_stream(self.host.device).wait_event(self._copied[half])
            waiting = self._fill(1 - half, parts[number + 1]) if number + 1 < len(parts) else None
            start = half * self.capacity
            for visit in part:
                end = start + len(visit.rows)
                yield visit._replace(rows=self._numbers[start:end])
                start = end
            self._read[half].record(torch.cuda.current_stream(self.host.device))

    def _parts(self, visits: Iterable[Visit]) -> Iterator[list[Visit]]:
        """Consecutive visits whose rows fit into one half."""
        part: list[Visit] = []
        rows = 0
        for visit in visits:
            if part and rows + len(visit.rows) > self.capacity:
                yield part
                part, rows = [], 0
            part.append(visit)
            rows += len(visit.rows)
        if part:
            yield part

    def _fill(self, half: int, part: Sequence[Visit]) -> Future[None]:
        return self._thread.submit(self._copy, half, torch.cat([visit.rows for visit in part]))

    def _copy(self, half: int, rows: torch.Tensor) -> None:
        self._copied[half].synchronize()  # the last copy from this half of the pinned memory
        place = slice(half * self.capacity, half * self.capacity + len(rows))
        columns = (self.host.x, self.host.y), self._pinned, (self.x, self.y)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._read[half])  # steps that read this half
            for column, pinned, own in zip(*columns, strict=True):
                torch.index_select(column, 0, rows, out=pinned[place])
                own[place].copy_(pinned[place], non_blocking=True)
            self._copied[half].record(self._copies)

    def close(self) -> None:
        self._thread.shutdown()
