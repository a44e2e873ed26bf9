"""FedAvg (McMahan et al., AISTATS 2017): clients with one architecture average their models."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from torch import nn

from pluribus.client import Client
from pluribus.message import Message, Wire, schema_of
from pluribus.method import Family, Method, Need, register
from pluribus.models import TwoPartModel
from pluribus.ops import Weighting, average_uploads
from pluribus.server import Server
from pluribus.targets import TARGETS
from pluribus.task import Card, Task


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """Average whole models."""

    paper = "McMahan et al., AISTATS 2017"
    family: ClassVar[Family] = "one model"  # of those that build on it, some are of another
    up = "the model"
    down = "the global model"
    targets = TARGETS
    needs = frozenset({Need.SAME_MODEL})
    views: ClassVar[tuple[str, ...]] = ("before", "after")  # FedAvg returns the global model
    defaults = MappingProxyType({"models": "cnn-16"})

    weighting: Weighting = "samples"
    """Weights of clients in the mean: their training samples, or equal."""

    def part(self, model: TwoPartModel) -> nn.Module:
        """The part of the model that is averaged: here all of it. Methods that share less override this."""
        return model

    def schema(self, task: Task, card: Card) -> Wire:
        shared = schema_of(self.part(task.shape_of(card.model)))
        return Wire(down=shared, up=shared)

    def setup(self, server: Server) -> None:
        server.state.shared = self.part(server.task.build(server.cards[0].model, "global"))

    def download(self, server: Server, client: int) -> Message | None:
        return Message.of(server.state.shared)

    def receive(self, client: Client, down: Message) -> None:
        self.part(client.model).load_state_dict(down.part())

    def local_update(self, client: Client) -> Message | None:
        client.fit(self.step)
        return Message.of(self.part(client.model))

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        # Batch-norm statistics are part of the model and are averaged with it.
        server.state.shared.load_state_dict(average_uploads(server, uploads, weighting=self.weighting))
