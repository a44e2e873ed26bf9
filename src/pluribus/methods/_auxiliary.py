"""The base of FML, FedKD and FedMRL: clients share a small model and keep private models of any architecture."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import torch

from pluribus.client import Client
from pluribus.errors import MissingSettingError
from pluribus.message import Message, Wire, schema_of
from pluribus.method import Method
from pluribus.models import TwoPartModel
from pluribus.ops import blamed_on
from pluribus.server import Server
from pluribus.task import Card, Cards, Task


@dataclass(frozen=True)
class Auxiliary(Method):
    """Clients share a small model of one architecture and keep private models of any architecture."""

    family = "second model"

    aux_model: str | None = None
    """Architecture of the small model that all clients share. Default: the smallest model of the federation."""

    def complete(self, task: Task, architectures: Iterable[str]) -> Self:
        return self if self.aux_model is not None else replace(self, aux_model=task.smallest(architectures))

    def auxiliary(self, task: Task) -> TwoPartModel:
        """The initial shared model, equal on the server and on all clients."""
        if self.aux_model is None:
            raise MissingSettingError("the method has no shared model yet: name one with --aux-model.")
        return task.build(self.aux_model, "auxiliary")

    def auxiliary_shape(self, task: Task) -> TwoPartModel:
        """The shared model on the meta device: names and shapes without weights."""
        with torch.device("meta"):
            return self.auxiliary(task)

    def schema(self, task: Task, card: Card) -> Wire:
        shared = schema_of(self.auxiliary_shape(task))
        return Wire(down=shared, up=shared)

    def check(self, task: Task, cards: Cards) -> None:
        with blamed_on("--aux-model"):
            self.auxiliary_shape(task)

    def prepare(self, client: Client) -> None:
        client.state.shared = self.auxiliary(client.task)

    def setup(self, server: Server) -> None:
        server.state.shared = self.auxiliary(server.task)

    def download(self, server: Server, client: int) -> Message:
        return Message.of(server.state.shared)

    def receive(self, client: Client, down: Message) -> None:
        client.state.shared.load_state_dict(down.part())

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message.of(client.state.shared)
