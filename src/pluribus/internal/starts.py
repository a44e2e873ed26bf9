"""The initial models of clients, made ahead by threads.

Most of the time of a constructor goes into random numbers. The first client of an architecture is built by the
constructor, and the recipe of it draws the others, with the same bits, while clients train.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pluribus.internal.snapshot import ALIGNMENT, Snapshot
from pluribus.models import TwoPartModel, comes_with_library
from pluribus.models.layers import recurrent
from pluribus.models.recipe import Recipe, record_build
from pluribus.task import Task

MOST_THREADS = 12  # to draw weights
BUILDING_THREADS = 2  # to run constructors: more of them would only wait for each other, and the first client for all
MOST_BYTES = 4 * 2**30  # of weights that wait for their clients


class _Pattern(NamedTuple):
    """An architecture without numbers, and how its weights are drawn."""

    empty: TwoPartModel
    recipe: Recipe
    drawn: dict[int, Snapshot]  # by seed: of the client that it was found with

    def make(self, weights: Mapping[str, Tensor]) -> TwoPartModel:
        """A model with these weights."""
        shared = {id(value): value for value in (*self.empty.parameters(), *self.empty.buffers())}  # not to be copied
        made = copy.deepcopy(self.empty, shared)
        made.load_state_dict(weights, assign=True)
        return made


# By architecture and task. The first run of a process fills it, and the next ones need not.
_patterns: dict[Hashable, Future[_Pattern | None]] = {}  # None: only the constructor can build it


class Starts:
    """Makes the initial model of every client. The same client always gets the same bits."""

    def __init__(self, task: Task, same_init: bool) -> None:
        self._task, self._same = task, same_init
        self._ahead: dict[int, Future[Snapshot | None]] = {}
        self._threads: list[ThreadPoolExecutor] = []

    def expect(self, clients: Mapping[int, str]) -> None:
        """Draw the weights of these clients ahead, as far as memory allows. Others that were drawn are dropped."""
        for k in [k for k in self._ahead if k not in clients]:
            self._ahead.pop(k).cancel()
        sizes = {model: self._task.nbytes(model) for model in {*clients.values()}}
        taken = 0
        for k, model in clients.items():
            taken += sizes[model]
            if taken > MOST_BYTES:
                return
            if (found := _patterns.get(self._key(model))) is None or found.cancelled():
                _patterns[self._key(model)] = self._pools()[0].submit(self._find_pattern, model, k)
            if k not in self._ahead:
                self._ahead[k] = self._pools()[1].submit(self._draw, model, k)

    def weights(self, model: str, k: int) -> Snapshot | None:
        """The weights of a client's initial model. None: only its constructor can draw them."""
        if (ahead := self._ahead.pop(k, None)) is not None:
            return ahead.result()
        return self._draw(model, k) if self._key(model) in _patterns else None

    def model(self, model: str, k: int, device: torch.device) -> TwoPartModel:
        """A client's initial model on a device."""
        if (weights := self.weights(model, k)) is None:
            return self._task.start(model, None if self._same else k).to(device)
        pattern = _patterns[self._key(model)].result()
        assert pattern is not None
        if recurrent(pattern.empty):
            return pattern.make(weights.views()).to(device)  # which arranges the weights of recurrent layers
        return pattern.make(weights.to(device).views())  # one copy, not one per tensor

    def _draw(self, model: str, k: int) -> Snapshot | None:
        if (pattern := _patterns[self._key(model)].result()) is None:
            return None
        seed = self._seed(model, k)
        return pattern.drawn.pop(seed, None) or _keep(pattern.recipe.draw(seed))

    def _find_pattern(self, model: str, k: int) -> _Pattern | None:
        """Build the model of a client, and note how its weights are drawn."""
        if not comes_with_library(model):
            return None
        seed = self._seed(model, k)
        found = record_build(lambda: self._task.construct(model), seed)
        if found is None or not _has_state_alone(found[0]):
            return None
        built, recipe = found
        assert isinstance(built, TwoPartModel)
        return _Pattern(_without_numbers(built), recipe, {seed: _keep(built.state_dict())})

    def _key(self, model: str) -> Hashable:
        task = self._task
        return model, task.input, task.classes, task.width, task.projector, task.has_weights(model)

    def _seed(self, model: str, k: int) -> int:
        return self._task.seed_of(*self._task.start_key(model, None if self._same else k))

    def _pools(self) -> list[ThreadPoolExecutor]:
        """Threads that build models, and threads that draw weights."""
        if not self._threads:
            cores = max(1, (os.cpu_count() or 1) - 2)
            for most in (BUILDING_THREADS, MOST_THREADS):
                self._threads.append(ThreadPoolExecutor(min(most, cores), "draws", torch.set_num_threads, (1,)))
        return self._threads

    def close(self) -> None:
        for threads in self._threads:
            threads.shutdown(cancel_futures=True)


def _keep(weights: Mapping[str, Tensor]) -> Snapshot:
    """Copy weights to memory from which a GPU copies fast, if there is one."""
    return Snapshot(weights, ALIGNMENT, pinned=torch.cuda.is_available())


def _has_state_alone(model: nn.Module) -> bool:
    """Whether `state_dict` has all tensors of a model."""
    every = [*model.named_parameters(), *model.named_buffers()]
    return {name for name, _ in every} <= model.state_dict().keys()


def _without_numbers(model: TwoPartModel) -> TwoPartModel:
    """A copy on the meta device."""
    empty: dict[int, Tensor] = {id(value): value.to("meta") for value in model.buffers()}
    for value in model.parameters():
        empty[id(value)] = nn.Parameter(value.detach().to("meta"), value.requires_grad)
    return copy.deepcopy(model, empty)
