"""The bare loop: the training and forward passes of a round in plain PyTorch, as a reference for speed.

It is what a person would write without a framework: prepared tensors, eager mode, torch's own optimizers. It has no
messages, no shuffling, no records and no checkpoints, and its only loss is that of the task.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pluribus import draws
from pluribus.assembly import Assembly
from pluribus.data.augment import Augment
from pluribus.data.federated import Data
from pluribus.internal.batches import batch_sizes, least_rows
from pluribus.internal.devices import is_apple
from pluribus.internal.steps import sweep_sizes
from pluribus.optim import Rule

ENOUGH = 0.3  # seconds after which no further step is tried
AGAIN = 5  # rounds of a client that are tried at most


class Pace(NamedTuple):
    """Seconds of a training step, and of a row in the forward passes of an evaluation."""

    step: float
    row: float


class BareLoop:
    """Does the work of rounds of an experiment and measures the time.

    To need little memory, it builds one model per architecture and trains it on the data of one client after another.
    """

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts

    def round(self, trained: Iterable[int], evaluated: Iterable[int]) -> float:
        """Train some clients for a round and evaluate some; return the seconds that this took."""
        seconds = 0.0
        trains, tests = self._by_model(trained), self._by_model(evaluated)
        with self._conditions(self._parts.experiment.processes()):
            for name in trains | tests:
                model = self._model(name)
                seconds += sum(self._train(model, k) for k in trains.get(name, ()))
                seconds += sum(self._evaluate(model, k) for k in tests.get(name, ()))
        return seconds

    def pace(self, k: int) -> Pace:
        """Try some steps and forward passes of a client, in the threads of one process."""
        with self._conditions(processes=1):
            model = self._model(self._parts.cards[k].model)
            step = self._median(lambda: self._steps(model, k))
            return Pace(step, self._median(lambda: self._passes(model, k)) * len(self._parts.method.views))

    def steps(self, k: int) -> int:
        """Training steps of a client in a round. Batch norm may need a larger last batch, and so one step less."""
        return self._parts.local.epochs * len(batch_sizes(self._parts.data.samples(k), self._parts.local.batch))

    def rows(self, k: int) -> int:
        """Rows of an evaluation of a client."""
        return sum(map(len, self._examined(k)))

    def _median(self, begin: Callable[[], Iterator[int]]) -> float:
        """Median seconds per row or step. The first part, which chooses kernels, counts only if it is slow itself."""
        times, device = list[float](), self._parts.device
        started = now(device)
        for _ in range(AGAIN):
            parts, last = begin(), now(device)
            for number in parts:
                times.append((now(device) - last) / number)
                last = now(device)
                if last - started >= ENOUGH:
                    return statistics.median(times[1:] or times)
        return statistics.median(times[1:] or times or [0.0])

    def _by_model(self, clients: Iterable[int]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for k in clients:
            found.setdefault(self._parts.cards[k].model, []).append(k)
        return found

    @contextmanager
    def _conditions(self, processes: int) -> Iterator[None]:
        """Set the run's precision, the threads of so many of its workers together, and separate random numbers."""
        device, threads = self._parts.device, torch.get_num_threads()
        torch.set_num_threads(threads * processes)
        try:
            with (
                draws.seeded(self._parts.task.seed, "bare", device=device),
                torch.autocast(device.type, torch.bfloat16, enabled=self._parts.local.bfloat16),
            ):
                yield
        finally:
            torch.set_num_threads(threads)

    def _model(self, name: str) -> nn.Module:
        model = self._parts.task.build(name, "bare").to(self._parts.device)
        if self._parts.local.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def _train(self, model: nn.Module, k: int) -> float:
        steps, device = self._steps(model, k), self._parts.device
        started = now(device)
        for _ in steps:
            pass
        return now(device) - started

    def _steps(self, model: nn.Module, k: int) -> Iterator[int]:
        """Everything before the first step is done at once. The iterator does the steps of a round one by one."""
        local, device = self._parts.local, self._parts.device
        x, y = _whole(self._parts.data.sets(k)["train"])
        least = least_rows(model, self._parts.task.input)
        sizes = batch_sizes(len(y), local.batch, least)
        model.train(len(y) >= least)
        optimizer = make_optimizer(local.rule, model)

        def each() -> Iterator[int]:
            for epoch in range(local.epochs):
                augment = Augment.of(local.augment, epoch, len(y), device)
                seen = x if augment is None else augment(x)
                for bx, by in zip(torch.split(seen, sizes), torch.split(y, sizes), strict=True):
                    optimizer.zero_grad()
                    self._parts.task.target.loss(model(bx), by).backward()  # type: ignore[no-untyped-call]
                    if local.rule.clip_norm is not None:
                        nn.utils.clip_grad_norm_(model.parameters(), local.rule.clip_norm)
                    optimizer.step()
                    yield 1

        return each()

    def _evaluate(self, model: nn.Module, k: int) -> float:
        passes, device = [self._passes(model, k) for _ in self._parts.method.views], self._parts.device
        started = now(device)
        for some in passes:
            for _ in some:
                pass
        return now(device) - started

    def _passes(self, model: nn.Module, k: int) -> Iterator[int]:
        """The iterator does the forward passes of one view one by one, and yields their numbers of rows."""
        sets = [_whole(one)[0] for one in self._examined(k)]
        model.eval()

        def each() -> Iterator[int]:
            for x in sets:
                for bx in torch.split(x, sweep_sizes(len(x))):
                    with torch.no_grad():
                        model(bx)
                    if len(bx):
                        yield len(bx)

        return each()

    def _examined(self, k: int) -> list[Data]:
        exams = self._parts.data.exams_for(k).values() or [self._parts.data.sets(k)]
        return [exam[name] for exam in exams for name in ("val", "test")]


def _whole(data: Data) -> tuple[Tensor, Tensor]:
    return data.take(torch.arange(len(data), device=data.rows.device))


def make_optimizer(rule: Rule, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of torch for a rule."""
    if rule.name == "sgd":
        return torch.optim.SGD(model.parameters(), rule.lr, momentum=rule.momentum, weight_decay=rule.weight_decay)
    if rule.name == "adamw":
        return torch.optim.AdamW(model.parameters(), rule.lr, weight_decay=rule.weight_decay)
    amsgrad = rule.name == "amsgrad"
    return torch.optim.Adam(model.parameters(), rule.lr, weight_decay=rule.weight_decay, amsgrad=amsgrad)


def now(device: torch.device) -> float:
    """Time in seconds, after a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif is_apple(device):
        torch.mps.synchronize()
    return time.perf_counter()
