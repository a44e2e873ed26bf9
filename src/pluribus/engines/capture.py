"""Steps that are recorded once and replayed. With small batches, a GPU waits for Python unless a step is one call.

A step is a pure tensor program. The first batch of a size runs as written, the second is recorded as a CUDA graph on
fixed buffers, and all later ones are replays. What ran as written for one client of an architecture is recorded at once
for the others. A recording belongs to a slot in memory, not to a client: the client in the slot brings its weights, its
state and its rows.

One thread of the process runs steps as written and records them, on the streams of all slots. cuDNN plans each
convolution once per thread, and planning takes time: so each is planned once, not once per client.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import is_dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from pluribus import draws
from pluribus.client import Client
from pluribus.data.augment import Augment
from pluribus.data.federated import Data, Store
from pluribus.data.host_store import HostStore
from pluribus.data.scaling import Scale
from pluribus.engines.observe import Observed, observe_step
from pluribus.engines.staging import Staging
from pluribus.engines.visit import Visit
from pluribus.internal.batches import Batch, gather
from pluribus.internal.snapshot import copy_all
from pluribus.internal.steps import Descent, Eager, Fit, Map, RowFinish, RowStep, Step, sweep_sizes
from pluribus.message import Inbox

Tell = Callable[[str], None]
R = TypeVar("R")

COUNTER = "num_batches_tracked"
RECORDING = "recording"
_recording = ThreadPoolExecutor(1, RECORDING, torch.set_num_threads, (1,))
_exclusive = threading.RLock()  # one thread records at a time: that one, or the one of a stack or a server
_ready = threading.local()


def _alone(work: Callable[[], R]) -> R:
    """Do work in the recording thread, on the stream and in the gradient mode of this one."""
    if threading.current_thread().name.startswith(RECORDING):
        return work()
    stream, learning = torch.cuda.current_stream(), torch.is_grad_enabled()

    def on_stream() -> R:
        with torch.cuda.stream(stream), torch.set_grad_enabled(learning):
            return work()

    return _recording.submit(on_stream).result()


class Known:
    """What all slots of an engine know about the steps of architectures."""

    def __init__(self) -> None:
        self.reasons: dict[Any, str | None] = {}  # why steps that were observed cannot be recorded; None: they can
        self.tried: set[Any] = set()  # sizes of them that ran as written, and can be recorded


class Captured:
    """The runner of one slot in the memory of a GPU."""

    def __init__(self, device: torch.device, lane: Any, tell: Tell, known: Known) -> None:
        self.lane = lane  # where it records and replays
        self._known = known
        self._device = device
        self._tell = tell
        self._eager = Eager()
        self._pool = torch.cuda.graph_pool_handle()
        self._total = torch.zeros((), device=device)
        self._recordings: dict[Any, list[Recording]] = {}
        self._seen: set[Any] = set()
        self._refused: set[Any] = set()  # steps that cannot be recorded
        self._random: set[Any] = set()  # steps that draw from the device's generator

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        """Run all steps of a fit. Returns the mean loss over its samples; None: no step returned a loss."""
        if name_of_step(fit.step) in self._random:
            return _alone(partial(self._eager.fit, client, fit))
        visits = _visits(fit, self._device)
        self._total.zero_()
        done, samples = (
            (0, 0) if name_of_step(fit.step) in self._seen else _alone(partial(self._try_out, client, fit, visits))
        )
        filled: set[int] = set()
        source = self._source(fit.data.store, max(fit.sizes))
        for number, visit in enumerate(_stage(source, visits[done:]), done):
            recording = self._find_step(client, fit, len(visit.rows), source)
            if recording is None:
                samples += _alone(partial(self._step_as_written, client, fit, visit))
            else:
                if id(recording) not in filled:
                    recording.fill(client, fit.data.scale)
                    filled.add(id(recording))
                recording.play(visit)
                samples += recording.result
            self._finish(client, fit, number)
        return self._total / samples if samples else None

    def _finish(self, client: Client, fit: Fit, number: int) -> None:
        """Run the second part of a step, if this was the last chunk of its batch."""
        finish = fit.finish
        if finish is None or not finish.ends[number]:
            return
        finish.prepare()
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)

        def step(*_: Any) -> None:
            with client.autocast():
                finish.step(client, Batch(nothing, nothing, nothing, 0))

        recording = self._find_recording((name_of_step(finish.step), client.model.training), client, 0, step, None)
        if recording is None:
            _alone(step)
        else:
            recording.play(Visit(nothing))

    def _try_out(self, client: Client, fit: Fit, visits: Sequence[Visit]) -> tuple[int, int]:
        """Run the first batch of a new step as written, and observe it. If it draws random numbers, run all batches.

        If another client of the architecture has done so without objection, run none. Returns the number of batches
        done, and of their samples with a loss.
        """
        name = name_of_step(fit.step)
        self._seen.add(name)
        key = self._key_of_step(client, fit, len(visits[0].rows), self._source(fit.data.store, max(fit.sizes)))
        self._seen.add(key)
        if (client.card.model, key) in self._known.tried:
            return 0, 0
        generator = torch.cuda.default_generators[self._device.index or 0]
        with draws.seeded(*fit.key, device=self._device):
            before = generator.get_offset()
            with self._observe(client, name) as watch:
                samples = self._step_as_written(client, fit, visits[0])
            drew = generator.get_offset() != before
            self._finish(client, fit, 0)
            if not drew:
                self._judge(client, key, watch)
                return 1, samples
            self._random.add(name)
            self._refuse(name, "it draws random numbers on the GPU")
            for number, visit in enumerate(visits[1:], 1):
                samples += self._step_as_written(client, fit, visit)
                self._finish(client, fit, number)
            return len(visits), samples

    def _observe(self, client: Client, name: Any) -> AbstractContextManager[Observed]:
        """Observe a step. Its operations are the same for all clients of an architecture."""
        return observe_step(client, operations=(client.card.model, name) not in self._known.reasons)

    def _judge(self, client: Client, key: Any, watch: Observed) -> None:
        """Decide by what was observed whether a step is recorded, here and for other clients of the architecture."""
        name, model = key[0], client.card.model
        if reason := self._known.reasons.setdefault((model, name), watch.reason) or watch.reason:
            self._refuse(name, reason)
        else:
            self._known.tried.add((model, key))

    def _step_as_written(self, client: Client, fit: Fit, visit: Visit) -> int:
        assert visit.positions is not None
        (batch,) = gather(fit.data, visit.positions, [len(visit.positions)], visit.augment)
        with client.autocast():
            return self._step(client, fit.step, batch)

    def _step(self, client: Client, step: Step, batch: Batch) -> int:
        """Run one step. Returns the number of samples in its loss."""
        if (loss := step(client, batch)) is None:
            return 0
        self._total.add_(loss.detach() * batch.n)
        return batch.n

    def _source(self, store: Store, least: int) -> Store:
        """Where recorded steps read rows: the store, or a place for rows that are copied from the host."""
        if not isinstance(store, HostStore):
            return store
        if self.lane.staging is None or self.lane.staging.capacity < least:
            self.lane.staging = Staging(store, least)
        staging: Staging = self.lane.staging
        return staging

    def _key_of_step(self, client: Client, fit: Fit, n: int, source: Store) -> Any:
        """Steps with equal keys have the same operations on tensors of the same shapes."""
        inbox = () if client.inbox is None else tuple((k, tuple(v.shape)) for k, v in client.inbox.got.items())
        names = None if fit.augment is None else fit.augment.names
        return name_of_step(fit.step), n, client.model.training, inbox, names, fit.data.scale is None, _size(source)

    def _find_step(self, client: Client, fit: Fit, n: int, source: Store) -> Recording | None:
        names = None if fit.augment is None else fit.augment.names  # None: the step sees unchanged images

        def step(rows: Tensor, positions: Tensor, keys: Tensor, scale: Scale | None) -> int:
            augment = None if names is None else Augment(names, keys)
            return self._step(client, fit.step, Batch(*source.take(rows, augment, scale), positions, n))

        return self._find_recording(self._key_of_step(client, fit, n, source), client, n, step, fit.data.scale)

    def sweep(self, client: Client, rows: Map, data: Data) -> Tensor:
        """Compute `rows` of every sample of a set, in order. The client is in eval mode."""
        parts: list[Tensor] = []
        sizes = sweep_sizes(len(data))
        source = self._source(data.store, max(sizes))

        def forward(at: Tensor, _: Any, __: Any, scale: Scale | None) -> Tensor:
            return rows(client, source.take(at, scale=scale)[0]).float()

        with torch.no_grad():
            for visit in _stage(source, [Visit(part) for part in torch.split(data.rows, sizes)]):
                n = len(visit.rows)
                key = name_of_step(rows), n, "sweep", data.scale is None, _size(source)
                recording = self._find_recording(key, client, n, forward, data.scale)
                if recording is None:
                    written = partial(forward, visit.rows, None, None, data.scale)
                    parts.append(_alone(partial(self._sweep_as_written, client, key, written)))
                else:
                    recording.fill(client, data.scale)
                    recording.play(visit)
                    parts.append(recording.result.clone())
        return torch.cat(parts)

    def _sweep_as_written(self, client: Client, key: Any, forward: Callable[[], Tensor]) -> Tensor:
        name = key[0]
        with client.autocast():
            if name in self._seen:
                return forward()
            self._seen.add(name)
            with self._observe(client, name) as watch:
                result = forward()
        self._judge(client, key, watch)
        return result

    def _find_recording(
        self, key: Any, client: Client, n: int, record: Callable[..., Any], scale: Scale | None
    ) -> Recording | None:
        """Return the recording for this client. Record it, unless nobody ran it yet. None: run as written."""
        if key[0] in self._refused:
            return None
        for recording in self._recordings.get(key, []):
            if recording.fits(client):
                return recording
        if key not in self._seen and (client.card.model, key) not in self._known.tried:
            self._seen.add(key)
            return None
        if isinstance(key[0], str):
            self._refuse(key[0], "a nested function is a new object at every call")
            return None
        try:
            recording = _alone(partial(Recording, client, n, record, self._pool, scale))
        except Exception as error:
            self._refuse(key[0], str(error).strip().splitlines()[0])
            return None
        self._recordings.setdefault(key, []).append(recording)
        return recording

    def _refuse(self, name: Any, why: str) -> None:
        self._refused.add(name)
        self._tell(f"{_display_name(name)} is not captured: {why.rstrip('.')}.")


def _size(source: Store) -> int:
    """Part of the key of a recording: a larger place for staged rows is another place."""
    return source.capacity if isinstance(source, Staging) else 0


def _stage(source: Store, visits: Sequence[Visit]) -> Iterable[Visit]:
    """Visits whose rows are where recorded steps read them."""
    return source.visit(visits) if isinstance(source, Staging) else visits


def _visits(fit: Fit, device: torch.device) -> list[Visit]:
    order = fit.order[: sum(fit.sizes)]
    positions, own = order.to(device, non_blocking=True), fit.data.rows
    visited = own[positions] if fit.data.store.resident else own[order]  # row numbers are beside the rows
    rows, batches = (torch.split(part, fit.sizes) for part in (visited, positions))
    changes = [None] * len(rows) if fit.augment is None else fit.augment.split(fit.sizes)
    return [Visit(*visit) for visit in zip(rows, batches, changes, strict=True)]


class Recording:
    """A CUDA graph, and the buffers that it reads."""

    def __init__(
        self, client: Client, n: int, record: Callable[..., Any], pool: Any, scale: Scale | None = None
    ) -> None:
        device = client.device
        self._scale = None if scale is None else scale.clone()
        self._rows, self._positions, self._keys = (torch.zeros(n, dtype=torch.int64, device=device) for _ in range(3))
        self._inbox = None if client.inbox is None else {k: v.clone() for k, v in client.inbox.got.items()}
        sets = _Sets(client.data)
        self._graph = torch.cuda.CUDAGraph()
        with (
            _use_buffers(client, sets, self._inbox),
            capture(self._graph, pool, device),
            client.autocast(),
            _count_batches(client),
        ):
            self.result = record(self._rows, self._positions, self._keys, self._scale)
        self._sets = {name: sets[name] for name in sets.read}

    def fits(self, client: Client) -> bool:
        """Whether the sets that the step itself reads have the recorded sizes."""
        return all(len(client.data[name]) == len(data) for name, data in self._sets.items())

    def fill(self, client: Client, scale: Scale | None) -> None:
        """Copy the client's rows, scale and inbox into the buffers. Weights and state are already in place."""
        _copy_scale(self._scale, scale)
        for name, data in self._sets.items():
            data.rows.copy_(client.data[name].rows)
            _copy_scale(data.scale, client.data[name].scale)
        if self._inbox is not None and client.inbox is not None:
            copy_all(self._inbox, client.inbox.got)

    def play(self, visit: Visit) -> None:
        """Replay the step on this batch."""
        self._rows.copy_(visit.rows)
        if visit.positions is not None:
            self._positions.copy_(visit.positions)
        if visit.augment is not None:
            self._keys.copy_(visit.augment.keys)
        self._graph.replay()


class _Sets(dict[str, Data]):
    """Copies of a client's sets that note which of them are read."""

    def __init__(self, sets: dict[str, Data]) -> None:
        scales = {name: None if data.scale is None else data.scale.clone() for name, data in sets.items()}
        super().__init__({name: Data(data.store, data.rows.clone(), scales[name]) for name, data in sets.items()})
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Data:
        if not super().__getitem__(name).store.resident:
            raise RuntimeError("it takes rows itself, and the rows are on the host")
        self.read.add(name)
        return super().__getitem__(name)


def _copy_scale(buffer: Scale | None, scale: Scale | None) -> None:
    if buffer is not None and scale is not None:
        buffer.mean.copy_(scale.mean)
        buffer.factor.copy_(scale.factor)


@contextmanager
def _use_buffers(client: Client, sets: _Sets, inbox: dict[str, Tensor] | None) -> Iterator[None]:
    """Give the client the buffers of the recording instead of its own sets and inbox."""
    before = client.data, client.inbox
    client.data = sets
    if inbox is not None and client.inbox is not None:
        client.inbox = Inbox(client.inbox.ids, inbox)
    try:
        yield
    finally:
        client.data, client.inbox = before


@contextmanager
def _count_batches(client: Client) -> Iterator[None]:
    """Advance the counters of all batch normalizations in one call, not in one each: they are a twelfth of the calls of
    a ResNet's step. Meanwhile each layer has a counter on the CPU, which shows how often it advances in a step."""
    layers = [part for module in (client.model, client.state) for part in module.modules() if _counts_batches(part)]
    counters = [layer._buffers for layer in layers]
    real = [buffers[COUNTER] for buffers in counters]
    for buffers in counters:
        buffers[COUNTER] = torch.zeros((), dtype=torch.int64)
    try:
        yield
    finally:
        times = [0 if (count := buffers[COUNTER]) is None else int(count) for buffers in counters]
        for buffers, counter in zip(counters, real, strict=True):
            buffers[COUNTER] = counter
    for number in {*times} - {0}:
        advanced = [one for one, n in zip(real, times, strict=True) if n == number and one is not None]
        torch._foreach_add_(advanced, number)


def _counts_batches(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and layer.training and layer.momentum is not None and layer.track_running_stats


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Record the current stream, while other threads run. Garbage collection is off: it might free GPU memory."""
    with _exclusive:
        _create_handles(device)
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
                # after a failed recording the generator still waits for its end
                generator = torch.cuda.default_generators[device.index or 0]
                generator.graphsafe_set_state(generator.clone_state())
                raise
            graph.capture_end()
        finally:
            if collecting:
                gc.enable()


def _create_handles(device: torch.device) -> None:
    """Create this thread's library handles. They cannot be created while a stream is recorded."""
    if not getattr(_ready, "done", False):
        one = torch.ones(1, 1, 1, 1, device=device)
        F.conv2d(one, one)
        one[0, 0] @ one[0, 0]
        _ready.done = True


def name_of_step(function: Any) -> Any:
    """Key of a step, loss or map: equal at every call, whatever object it is bound to. A string: a nested function.

    An object that is called, of a frozen dataclass, is its own key.
    """
    if isinstance(function, Descent):
        loss = name_of_step(function.loss)
        return loss if isinstance(loss, str) else Descent(loss, function.opts)
    if isinstance(function, RowStep | RowFinish):
        step = name_of_step(function.step)
        return step if isinstance(step, str) else type(function)(step, function.opts)
    if is_dataclass(function):
        return function
    plain = getattr(function, "__func__", function)
    return plain.__qualname__ if "<" in getattr(plain, "__qualname__", "<") else plain


def _display_name(name: Any) -> str:
    if isinstance(name, Descent):
        return _display_name(name.loss)
    if isinstance(name, RowStep | RowFinish):
        return _display_name(name.step)
    if is_dataclass(name):
        return type(name).__qualname__
    return name if isinstance(name, str) else name.__qualname__
