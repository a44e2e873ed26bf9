"""The initial models of clients, drawn ahead by threads.

Most of the time of a constructor goes into random numbers. If more clients of an architecture are expected, the first
one is built by its constructor, and the recipe of it draws the others, with the same bits, while clients train.
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pluribus.internal.snapshot import Snapshot
from pluribus.models import TwoPartModel
from pluribus.models.recipe import Recipe, record_build
from pluribus.task import Task

MOST_THREADS = 12
MOST_BYTES = 4 * 2**30  # of weights that wait for their clients


class _Pattern(NamedTuple):
    """An architecture without numbers, and how its weights are drawn."""

    empty: TwoPartModel
    recipe: Recipe
    repeats: Future[bool]
    """Whether the recipe leaves the bits of the constructor."""


class Starts:
    """Builds the initial model of every client. The same client always gets the same bits."""

    def __init__(self, task: Task, same_init: bool) -> None:
        self._task, self._same = task, same_init
        self._patterns: dict[str, _Pattern] = {}
        self._expected: defaultdict[str, list[int]] = defaultdict(list)  # by architecture
        self._drawn: dict[int, Future[Snapshot | None]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def expect(self, clients: Mapping[int, str]) -> None:
        """Draw the models of these clients ahead, as far as memory allows. Others that were drawn are dropped."""
        for k in [k for k in self._drawn if k not in clients]:
            self._drawn.pop(k).cancel()
        self._expected.clear()
        for k, model in clients.items():
            self._expected[model].append(k)
        for model in self._expected:
            self._draw_ahead(model)

    def weights(self, model: str, k: int) -> Snapshot | None:
        """The weights of a client's initial model. None: only the constructor can draw them."""
        if (drawn := self._drawn.pop(k, None)) is not None:
            return drawn.result()
        return _draw(self._patterns[model], self._seed(model, k)) if model in self._patterns else None

    def model(self, model: str, k: int) -> TwoPartModel:
        """A client's initial model."""
        self._expected[model] = [other for other in self._expected[model] if other != k]
        if (weights := self.weights(model, k)) is not None:
            made = copy.deepcopy(self._patterns[model].empty)
            made.load_state_dict(weights.views(), assign=True)
            return made
        if model in self._patterns or not self._expected[model]:
            return self._build(model, k)
        built, recipe = record_build(lambda: self._build(model, k))
        assert isinstance(built, TwoPartModel)
        if recipe is not None and _has_state_alone(built):
            repeats = self._pool().submit(_repeats, recipe, self._seed(model, k), built.state_dict())
            self._patterns[model] = _Pattern(_without_numbers(built), recipe, repeats)
            self._draw_ahead(model)
        return built

    def _build(self, model: str, k: int) -> TwoPartModel:
        return self._task.start(model, None if self._same else k)

    def _seed(self, model: str, k: int) -> int:
        return self._task.seed_of(*self._task.start_key(model, None if self._same else k))

    def _draw_ahead(self, model: str) -> None:
        """Let threads draw the expected clients of an architecture that has a recipe."""
        if model not in self._patterns:
            return
        pattern = self._patterns[model]
        size = sum(value.nbytes for value in pattern.empty.state_dict().values())
        for k in self._expected[model]:
            if k not in self._drawn and (len(self._drawn) + 1) * size <= MOST_BYTES:
                self._drawn[k] = self._pool().submit(_draw, pattern, self._seed(model, k))

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            number = min(MOST_THREADS, max(1, (os.cpu_count() or 1) - 2))
            self._threads = ThreadPoolExecutor(number, "draws", torch.set_num_threads, (1,))
        return self._threads

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)


def _draw(pattern: _Pattern, seed: int) -> Snapshot | None:
    """Draw weights into memory from which a GPU copies fast, if there is one."""
    if not pattern.repeats.result():
        return None
    return Snapshot(pattern.recipe.draw(seed), pinned=torch.cuda.is_available())


def _repeats(recipe: Recipe, seed: int, built: Mapping[str, Tensor]) -> bool:
    drawn = recipe.draw(seed)
    return drawn.keys() == built.keys() and all(torch.equal(value, built[name]) for name, value in drawn.items())


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
