"""The server: sees cards and messages, never a client."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pluribus import draws
from pluribus.state import State
from pluribus.task import Card, Task


class Server:
    """What a method keeps and does on the server. It may look at numbers; nothing here is captured."""

    def __init__(self, task: Task, cards: Mapping[int, Card]) -> None:
        self.task = task
        self.cards = cards
        self.state = State()
        self.t = -1
        self.now: Mapping[str, float] = {}

    def begin(self, t: int, now: Mapping[str, float]) -> None:
        """Start a round."""
        self.t, self.now = t, now

    def draw(self, *key: draws.Key) -> torch.Generator:
        """The server's randomness, by round and key."""
        return draws.generator(self.task.seed, "server", self.t, *key)
