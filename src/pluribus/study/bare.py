"""The bare loop: a round's training and forward passes in plain PyTorch, for comparison.

What a person would write without a framework: whole sets as finished tensors, eager, torch's own optimisers. No
messages, no shuffling, no records, no checkpoints, and nothing that a method does besides a step of cross-entropy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus import draws
from pluribus.assembly import Assembly
from pluribus.data.augment import Augment
from pluribus.data.federated import Data
from pluribus.internal.batches import batch_sizes, least_rows
from pluribus.internal.steps import sweep_sizes
from pluribus.optim import Rule


class BareLoop:
    """Works through rounds of an experiment and says how long it took.

    One model of an architecture at a time, in turn on the data of all its clients, so that hardly any memory is taken
    beside the federation's.
    """

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts

    def round(self, trained: Iterable[int], evaluated: Iterable[int]) -> float:
        """Seconds of training some clients for a round, and of forward passes over the sets that some are tested on."""
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
        """The run's arithmetic, as many threads as all its workers have together, and nobody's random numbers."""
        device, threads = self._parts.device, torch.get_num_threads()
        torch.set_num_threads(threads * self._parts.experiment.workers)
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
        least = least_rows(model, self._parts.task.shape)
        sizes = batch_sizes(len(y), local.batch, least)
        model.train(len(y) >= least)
        optimiser = optimiser_of(local.rule, model)
        started = now(device)
        for epoch in range(local.epochs):
            augment = Augment.of(local.augment, epoch, len(y), device)
            seen = x if augment is None else augment(x)
            for bx, by in zip(torch.split(seen, sizes), torch.split(y, sizes), strict=True):
                optimiser.zero_grad()
                F.cross_entropy(model(bx), by).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        return now(device) - started

    def _evaluate(self, model: nn.Module, k: int) -> float:
        device = self._parts.device
        exams = self._parts.data.exams.values() or [self._parts.data.sets(k)]
        images = [_whole(exam[name])[0] for exam in exams for name in ("val", "test")]
        model.eval()
        started = now(device)
        with torch.no_grad():
            for _ in self._parts.method.views:
                for x in images:
                    for bx in torch.split(x, sweep_sizes(len(x))):
                        model(bx)
        return now(device) - started


def _whole(data: Data) -> tuple[Tensor, Tensor]:
    return data.take(torch.arange(len(data), device=data.rows.device))


def optimiser_of(rule: Rule, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of a rule as torch makes it by itself."""
    if rule.name == "sgd":
        return torch.optim.SGD(model.parameters(), rule.lr, momentum=rule.momentum, weight_decay=rule.weight_decay)
    if rule.name == "adamw":
        return torch.optim.AdamW(model.parameters(), rule.lr, weight_decay=rule.weight_decay)
    amsgrad = rule.name == "amsgrad"
    return torch.optim.Adam(model.parameters(), rule.lr, weight_decay=rule.weight_decay, amsgrad=amsgrad)


def now(device: torch.device) -> float:
    """The time in seconds, once a GPU has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
