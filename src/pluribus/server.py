"""The server: sees cards and messages, never a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
        self.notes: dict[str, Any] = {}
        """What a method wants to tell about the round (plain values); goes into its record. Emptied every round."""

    def begin(self, t: int, now: Mapping[str, float]) -> None:
        """Start a round."""
        self.t, self.now, self.notes = t, now, {}

    def draw(self, *key: draws.Key) -> torch.Generator:
        """The server's randomness, by round and key."""
        return draws.generator(self.task.seed, "server", self.t, *key)
