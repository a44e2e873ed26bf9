"""Methods that tell where their clients run, or fail there. Worker processes import this file, so it imports little."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pluribus.client import Client
from pluribus.message import Field, Message, Wire
from pluribus.method import Method
from pluribus.server import Server
from pluribus.task import Card, Task


@dataclass(frozen=True)
class Look(Method):
    """Clients tell where they are."""

    paper = "toy"

    def schema(self, task: Task, card: Card) -> Wire:
        return Wire(up={"facts": Field((4,), torch.int64)})

    def local_update(self, client: Client) -> Message:
        facts = os.getpid(), torch.get_num_threads(), torch.get_num_interop_threads(), self.shared(client)
        return Message({"facts": torch.tensor(facts)})

    def shared(self, client: Client) -> bool:
        return all(column.is_shared() for column in (client.data["train"].store.x, client.data["train"].store.y))

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.notes["facts"] = {k: upload.tensor("facts").tolist() for k, upload in uploads.items()}


class StrangeError(Exception):
    """Cannot be made from the text it has."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@dataclass(frozen=True)
class Broken(Method):
    """Clients 1 and 2 fail, each in its own way; client 2 at once."""

    paper = "toy"
    how: str = "value"
    """What client 1 raises."""

    def local_update(self, client: Client) -> Message:
        if client.card.id == 1:
            client.fit(self.step)
            raise {"value": ValueError("one is odd"), "strange": StrangeError(1, 2), "exit": SystemExit(3)}[self.how]
        if client.card.id == 2:
            raise KeyError("two")
        return Message({})
