"""The bare loop: the training and forward passes of a round in plain PyTorch, as a reference for speed.

It is what a person would write without a framework: prepared tensors, eager mode, torch's own optimizers. It has no
messages, no shuffling, no records and no checkpoints, and its only loss is that of the task.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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
        with self._conditions():
            for name in trains | tests:
                model = self._model(name)
                seconds += sum(self._train(model, k) for k in trains.get(name, ()))
                seconds += sum(self._evaluate(model, k) for k in tests.get(name, ()))
        return seconds

    def _by_model(self, clients: Iterable[int]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for k in clients:
            found.setdefault(self._parts.cards[k].model, []).append(k)
        return found

    @contextmanager
    def _conditions(self) -> Iterator[None]:
        """Set the run's precision, the threads of all its workers together, and separate random numbers."""
        device, threads = self._parts.device, torch.get_num_threads()
        torch.set_num_threads(threads * self._parts.experiment.processes())
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
        local, device = self._parts.local, self._parts.device
        x, y = _whole(self._parts.data.sets(k)["train"])
        least = least_rows(model, self._parts.task.input)
        sizes = batch_sizes(len(y), local.batch, least)
        model.train(len(y) >= least)
        optimizer = make_optimizer(local.rule, model)
        started = now(device)
        for epoch in range(local.epochs):
            augment = Augment.of(local.augment, epoch, len(y), device)
            seen = x if augment is None else augment(x)
            for bx, by in zip(torch.split(seen, sizes), torch.split(y, sizes), strict=True):
                optimizer.zero_grad()
                self._parts.task.target.loss(model(bx), by).backward()  # type: ignore[no-untyped-call]
                if local.rule.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), local.rule.clip_norm)
                optimizer.step()
        return now(device) - started

    def _evaluate(self, model: nn.Module, k: int) -> float:
        device = self._parts.device
        exams = self._parts.data.exams_for(k).values() or [self._parts.data.sets(k)]
        sets = [_whole(exam[name])[0] for exam in exams for name in ("val", "test")]
        model.eval()
        started = now(device)
        with torch.no_grad():
            for _ in self._parts.method.views:
                for x in sets:
                    for bx in torch.split(x, sweep_sizes(len(x))):
                        model(bx)
        return now(device) - started


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
