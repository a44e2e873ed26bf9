"""The server's steps on a GPU, recorded once and replayed.

A server may take thousands of small steps in a round. The first batch of a kind runs as written, the second is recorded
on fixed buffers, and all later ones are replays, also in later rounds. All row numbers of a fit are on the device from
its start, and a recorded step itself moves on to its next rows, so a replay is one call without any copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pluribus.engines.capture import Tell, capture, name_of_step
from pluribus.engines.observe import observe_server
from pluribus.internal.batches import Batch
from pluribus.internal.steps import Descent, ServerFit
from pluribus.server import Server

MOST_PLACES = 16  # buffers of different shapes that are kept
MOST_RECORDINGS = 32  # steps that are kept for the same buffers: last batches differ in size

Play = Callable[[], object]


class Recorder:
    """Records and replays on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Work on the stream, after everything that the caller has queued. The caller waits until it is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def pool(self) -> Any:
        """Memory that recordings share, until all of them are dropped. A pool cannot be used again after that."""
        return torch.cuda.graph_pool_handle()

    def record(self, step: Play, pool: Any) -> Play:
        """Record a step without executing it. Returns the function that executes it."""
        graph = torch.cuda.CUDAGraph()
        with capture(graph, pool, self.device):
            step()
        return graph.replay

    def drawn(self) -> int:
        """A number that changes when something draws from the generator of the device."""
        return torch.cuda.default_generators[self.device.index or 0].get_offset()


class Kind(NamedTuple):
    """What a recording depends on beside its buffers: the step, the modes of all modules, the size of the batch."""

    name: Any
    modes: tuple[bool, ...]
    n: int


class CapturedServer:
    """The runner of a server on a GPU."""

    def __init__(self, recorder: Recorder, tell: Tell) -> None:
        self.device = recorder.device
        self._recorder = recorder
        self._tell = tell
        self._places: OrderedDict[Any, Place] = OrderedDict()  # the last used one is the last
        self._tried: set[Any] = set()  # steps that have run once, and were observed
        self._refused: set[Any] = set()  # steps that cannot be recorded

    def fit(self, server: Server, fit: ServerFit) -> Tensor:
        """Take all steps of a fit; returns the last loss."""
        with self._recorder.stream():
            place = self._find_place(fit)
            place.fill(fit)
            name, modes = name_of_step(fit.step), tuple(module.training for module in server.state.modules())
            with server.reading(place.given):
                for number, n in enumerate(fit.sizes):
                    fit.set_rates(server, number)  # not recorded: a replay reads the rate from the memory of the GPU
                    self._take_step(server, fit.step, place, Kind(name, modes, n))
            return place.loss.clone()

    def _find_place(self, fit: ServerFit) -> Place:
        """The buffers for tensors of these shapes. Buffers that are too small are replaced by larger ones.

        Nothing that is dropped here is in use: the stream is idle when a fit begins.
        """
        given = tuple((name, value.dtype, value.shape) for name, value in fit.given.items())
        key = fit.x.dtype, fit.x.shape[1:], fit.y.dtype, fit.y.shape[1:], given
        place = self._places.pop(key, None)
        if place is None or not place.holds(fit):
            place = Place(fit, self.device, self._recorder.pool())
        self._places[key] = place
        if len(self._places) > MOST_PLACES:
            self._places.popitem(last=False)
        while len(place.recordings) > MOST_RECORDINGS:
            place.recordings.popitem(last=False)
        return place

    def _take_step(self, server: Server, step: Descent[Server], place: Place, kind: Kind) -> None:
        if kind in place.seen and kind not in place.recordings and kind.name not in self._refused:
            self._record(server, step, place, kind)
        place.seen.add(kind)
        if (play := place.recordings.get(kind)) is not None:
            place.recordings.move_to_end(kind)
            play()
        elif kind.name in self._tried:
            place.step(server, step, kind.n)
        else:
            self._try_out(server, step, place, kind)

    def _try_out(self, server: Server, step: Descent[Server], place: Place, kind: Kind) -> None:
        """Run the first batch of a new step as written, and observe whether it can be recorded."""
        self._tried.add(kind.name)
        before = self._recorder.drawn()
        with observe_server(server) as (watched, watch):
            place.step(watched, step, kind.n)
        if isinstance(kind.name, str):
            self._refuse(step, "a nested function is a new object at every call")
        elif self._recorder.drawn() != before:
            self._refuse(step, "it draws random numbers on the GPU")
        elif watch.reason:
            self._refuse(step, watch.reason)

    def _record(self, server: Server, step: Descent[Server], place: Place, kind: Kind) -> None:
        """Record a step, which executes nothing. A step that cannot be recorded runs as written from now on."""
        try:
            play = self._recorder.record(partial(place.step, server, step, kind.n), place.pool)
        except Exception as error:
            self._refuse(step, (str(error).strip() or type(error).__name__).splitlines()[0])
        else:
            place.recordings[kind] = play

    def _refuse(self, step: Descent[Server], why: str) -> None:
        self._refused.add(name_of_step(step))
        self._tell(f"{getattr(step.loss, '__qualname__', step.loss)} is not captured: {why.rstrip('.')}.")


class Place:
    """Buffers at fixed addresses, and the steps that are recorded on them.

    Rows and visits have room up to a power of two: their number changes with the number of uploads. Only row numbers
    decide what a step reads, so the rest of a buffer does not matter.
    """

    def __init__(self, fit: ServerFit, device: torch.device, pool: Any) -> None:
        self.pool = pool
        self.given = {name: torch.empty_like(value, device=device) for name, value in fit.given.items()}
        self.loss = torch.zeros((), device=device)
        self.recordings: OrderedDict[Kind, Play] = OrderedDict()  # the last used one is the last
        self.seen: set[Kind] = set()  # steps that have run as written
        self._x, self._y, self._order = (_room_for(value, device) for value in (fit.x, fit.y, fit.order))
        self._next = torch.zeros((), dtype=torch.int64, device=device)  # where in the order the next batch begins

    def holds(self, fit: ServerFit) -> bool:
        """Whether there is room for all rows and visits."""
        return len(fit.x) <= len(self._x) and len(fit.order) <= len(self._order)

    def fill(self, fit: ServerFit) -> None:
        """Copy what a fit reads into the buffers."""
        for buffer, value in ((self._x, fit.x), (self._y, fit.y), (self._order, fit.order)):
            buffer[: len(value)].copy_(value)
        for name, value in fit.given.items():
            self.given[name].copy_(value)
        self._next.zero_()

    def step(self, server: Server, step: Descent[Server], n: int) -> None:
        """Take a step on the next n rows of the order, and move on."""
        rows = self._order[self._next + torch.arange(n, device=self._order.device)]
        self.loss.copy_(step(server, Batch(self._x[rows], self._y[rows], rows, n)).detach())
        self._next += n


def _room_for(value: Tensor, device: torch.device) -> Tensor:
    """A buffer like the tensor, with at least as many rows: a power of two."""
    return torch.zeros(1 << (len(value) - 1).bit_length(), *value.shape[1:], dtype=value.dtype, device=device)
