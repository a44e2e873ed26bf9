"""Steps recorded once and replayed: at batch size 10 a GPU waits for Python, unless a whole step is one call.

A step is a pure tensor program, so the first batch of a size runs as written, the second is recorded as a CUDA graph on
fixed buffers, and all later ones are replays. A recording belongs to a place in memory, not to a client: whoever takes
the place brings its weights, its state and its rows.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus import draws
from pluribus.batches import Batch, gathered
from pluribus.client import Client
from pluribus.data.federated import Data
from pluribus.engines.observe import observed
from pluribus.message import Inbox
from pluribus.snapshot import copy_all
from pluribus.steps import Eager, Fit, Map, Step, sweep_sizes

Tell = Callable[[str], None]

# One recording at a time; and whatever draws from the device's one generator does so alone.
_alone = threading.RLock()
_ready = threading.local()


class Captured:
    """The runner of one place in a GPU's memory."""

    def __init__(self, device: torch.device, lane: Any, tell: Tell) -> None:
        self.lane = lane  # where its recordings are made and played
        self._device = device
        self._tell = tell
        self._eager = Eager()
        self._pool = torch.cuda.graph_pool_handle()
        self._total = torch.zeros((), device=device)
        self._recordings: dict[Any, list[Recording]] = {}
        self._seen: set[Any] = set()
        self._uncaught: set[Any] = set()  # steps that cannot be recorded
        self._random: set[Any] = set()  # steps that draw from the device's generator

    # ---- training --------------------------------------------------------------------------------------------------

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        """All steps of a fit; the mean loss over its samples, None if no step gave one."""
        if _name(fit.step) in self._random:
            with _alone:
                return self._eager.fit(client, fit)
        positions = fit.order[: sum(fit.sizes)].to(self._device, non_blocking=True)
        rows, batches = (torch.split(part, fit.sizes) for part in (fit.data.rows[positions], positions))
        self._total.zero_()
        done, samples = self._try_out(client, fit, batches)
        filled: set[int] = set()
        for at in range(done, len(batches)):
            recording = self._recording(client, fit, len(batches[at]))
            if recording is None:
                samples += self._as_written(client, fit, batches[at])
                continue
            if id(recording) not in filled:
                recording.fill(client)
                filled.add(id(recording))
            recording.play(rows[at], batches[at])
            samples += recording.gives
        return self._total / samples if samples else None

    def _try_out(self, client: Client, fit: Fit, batches: Sequence[Tensor]) -> tuple[int, int]:
        """The very first batch of a step, under observation; all of them, if it draws random numbers of its own.

        Returns the batches done, and their samples with a loss.
        """
        name = _name(fit.step)
        if name in self._seen:
            return 0, 0
        self._seen.add(name)
        self._recording(client, fit, len(batches[0]))  # noted as seen
        generator = torch.cuda.default_generators[self._device.index or 0]
        with _alone, draws.seeded(*fit.key, device=self._device):
            before = generator.get_offset()
            with observed(client) as watch:
                samples = self._as_written(client, fit, batches[0])
            if generator.get_offset() == before:
                if watch.reason:
                    self._not_captured(name, watch.reason)
                return 1, samples
            self._random.add(name)
            self._not_captured(name, "it draws random numbers on the GPU")
            return len(batches), samples + sum(self._as_written(client, fit, batch) for batch in batches[1:])

    def _as_written(self, client: Client, fit: Fit, positions: Tensor) -> int:
        (batch,) = gathered(fit.data, positions, [len(positions)])
        with client.autocast():
            return self._step(client, fit.step, batch)

    def _step(self, client: Client, step: Step, batch: Batch) -> int:
        """One step; the number of samples that its loss speaks for."""
        loss = step(client, batch)
        if loss is None:
            return 0
        self._total.add_(loss.detach() * batch.n)
        return batch.n

    def _recording(self, client: Client, fit: Fit, n: int) -> Recording | None:
        inbox = () if client.inbox is None else tuple((k, tuple(v.shape)) for k, v in client.inbox.got.items())

        def step(rows: Tensor, positions: Tensor) -> int:
            return self._step(client, fit.step, Batch(*fit.data.store.take(rows), positions, n))

        return self._found((_name(fit.step), n, client.model.training, inbox), client, n, step)

    # ---- sweeps ----------------------------------------------------------------------------------------------------

    def sweep(self, client: Client, rows: Map, data: Data) -> Tensor:
        """`rows` of every sample of a set, in order; the client is in eval mode."""
        parts: list[Tensor] = []
        started = 0
        with torch.no_grad():
            for n in sweep_sizes(len(data)):
                wanted = data.rows[started : started + n]
                started += n

                def forward(at: Tensor, _: Tensor) -> Tensor:
                    return rows(client, data.store.take(at)[0]).float()

                recording = self._found((_name(rows), n, "sweep"), client, n, forward)
                if recording is None:
                    parts.append(self._swept(client, _name(rows), partial(forward, wanted, wanted)))
                else:
                    recording.fill(client)
                    recording.play(wanted, None)
                    parts.append(recording.gives.clone())
        return torch.cat(parts)

    def _swept(self, client: Client, name: Any, forward: Callable[[], Tensor]) -> Tensor:
        with client.autocast():
            if name in self._seen:
                return forward()
            self._seen.add(name)
            with observed(client) as watch:
                found = forward()
        if watch.reason:
            self._not_captured(name, watch.reason)
        return found

    # ---- recordings ------------------------------------------------------------------------------------------------

    def _found(self, key: Any, client: Client, n: int, record: Callable[..., Any]) -> Recording | None:
        """The recording for this client, made now if it is time to; None: run it as written."""
        if key[0] in self._uncaught:
            return None
        for recording in self._recordings.get(key, []):
            if recording.fits(client):
                return recording
        if key not in self._seen:
            self._seen.add(key)
            return None
        if isinstance(key[0], str):
            self._not_captured(key[0], "a nested function is another one every time")
            return None
        try:
            made = Recording(client, n, record, self._pool)
        except Exception as error:
            self._not_captured(key[0], str(error).strip().splitlines()[0])
            return None
        self._recordings.setdefault(key, []).append(made)
        return made

    def _not_captured(self, name: Any, why: str) -> None:
        self._uncaught.add(name)
        self._tell(f"{_text(name)} is not captured: {why.rstrip('.')}.")


class Recording:
    """A CUDA graph, and the buffers that it reads."""

    def __init__(self, client: Client, n: int, record: Callable[..., Any], pool: Any) -> None:
        device = client.device
        self._rows = torch.zeros(n, dtype=torch.int64, device=device)
        self._positions = torch.zeros(n, dtype=torch.int64, device=device)
        self._inbox = None if client.inbox is None else {k: v.clone() for k, v in client.inbox.got.items()}
        sets = _Sets(client.data)
        self._graph = torch.cuda.CUDAGraph()
        with _posing(client, sets, self._inbox), capturing(self._graph, pool, device), client.autocast():
            self.gives = record(self._rows, self._positions)
        self._sets = {name: sets[name].rows for name in sets.read}

    def fits(self, client: Client) -> bool:
        """Whether the sets that the step reads by itself are as large as those it was recorded with."""
        return all(len(client.data[name]) == len(rows) for name, rows in self._sets.items())

    def fill(self, client: Client) -> None:
        """Take over what is the client's own, beyond weights and state."""
        for name, rows in self._sets.items():
            rows.copy_(client.data[name].rows)
        if self._inbox is not None and client.inbox is not None:
            copy_all(self._inbox, client.inbox.got)

    def play(self, rows: Tensor, positions: Tensor | None) -> None:
        """One step on these rows of the store."""
        self._rows.copy_(rows)
        if positions is not None:
            self._positions.copy_(positions)
        self._graph.replay()


class _Sets(dict[str, Data]):
    """A client's sets with row numbers of their own, noting which are read."""

    def __init__(self, sets: dict[str, Data]) -> None:
        super().__init__({name: Data(data.store, data.rows.clone()) for name, data in sets.items()})
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Data:
        self.read.add(name)
        return super().__getitem__(name)


@contextmanager
def _posing(client: Client, sets: _Sets, inbox: dict[str, Tensor] | None) -> Iterator[None]:
    """The client with the recording's buffers in place of what is its own."""
    before = client.data, client.inbox
    client.data = sets
    if inbox is not None and client.inbox is not None:
        client.inbox = Inbox(client.inbox.ids, inbox)
    try:
        yield
    finally:
        client.data, client.inbox = before


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Record the current stream. Other threads go on; nothing may be collected meanwhile that frees GPU memory."""
    with _alone:
        _touch(device)
        torch.cuda.current_stream(device).synchronize()
        collecting = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                # a recording that failed leaves the generator waiting for its end
                generator = torch.cuda.default_generators[device.index or 0]
                generator.graphsafe_set_state(generator.clone_state())
                raise
            graph.capture_end()
        finally:
            if collecting:
                gc.enable()


def _touch(device: torch.device) -> None:
    """Make this thread's library handles now: they cannot be made while a stream is recorded."""
    if not getattr(_ready, "done", False):
        one = torch.ones(1, 1, 1, 1, device=device)
        F.conv2d(one, one)
        one[0, 0] @ one[0, 0]
        _ready.done = True


def _name(function: Any) -> Any:
    """What a step or map is known by: the same at every call, whatever object it is bound to."""
    plain = getattr(function, "__func__", function)
    return plain.__qualname__ if "<" in getattr(plain, "__qualname__", "<") else plain


def _text(name: Any) -> str:
    return name if isinstance(name, str) else name.__qualname__
