"""The server: it sees cards and messages, never a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pluribus import draws
from pluribus.draws import Made
from pluribus.internal.state import State
from pluribus.optim import Opt, Optimizer, Rule
from pluribus.task import Cards, Task


class Server:
    """What a method keeps and does on the server. Nothing here is captured, so code may read values of tensors."""

    def __init__(self, task: Task, cards: Cards) -> None:
        self.task = task
        self.cards = cards
        self.state = State()
        self._optimizers: dict[str, Optimizer] = {}
        self.t = -1
        self.now: Mapping[str, float] = {}
        self.notes: dict[str, Any] = {}
        """Plain values that the method reports about the round. They go into its record and are cleared every round."""

    def begin(self, t: int, now: Mapping[str, float]) -> None:
        self.t, self.now, self.notes = t, now, {}

    def draw(self, *key: draws.Key) -> torch.Generator:
        """A generator of the server's random numbers, keyed by round and `key`."""
        return draws.generator(self.task.seed, "server", self.t, *key)

    def make(self, key: draws.Key, build: Callable[[], Made]) -> Made:
        """Return `build()`, initialized with the numbers of `draw(key)` instead of torch's global ones."""
        with draws.seeded(self.task.seed, "server", self.t, key):
            return build()

    def optimize(self, name: str, of: nn.Module, rule: Rule) -> None:
        """Give a module of the state an optimizer, in `setup`. Its slots are part of the state and are saved."""
        optimizer = Optimizer(Opt(of, rule, life="run"), rule)
        setattr(self.state, f"{name}_optimiser", optimizer.slots())
        self._optimizers[name] = optimizer

    def descend(self, loss: Tensor, name: str) -> None:
        """Take one step of an optimizer down the gradient of a loss."""
        optimizer = self._optimizers[name]
        optimizer.apply(torch.autograd.grad(loss, list(optimizer.parameters.values()), allow_unused=True))
