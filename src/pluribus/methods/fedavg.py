"""FedAvg (McMahan et al., AISTATS 2017): clients with one architecture average their models."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pluribus.client import Client
from pluribus.message import Message, Wire, schema_of
from pluribus.method import Method, Need, register
from pluribus.ops import weighted_mean
from pluribus.server import Server
from pluribus.task import Card, Task


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """The mean of whole models, weighted by training samples."""

    paper = "McMahan et al., AISTATS 2017"
    up = "the model"
    down = "the global model"
    needs = frozenset({Need.SAME_MODEL})
    views = ("before", "after")  # the global model is what FedAvg returns
    defaults = MappingProxyType({"models": "cnn-16"})

    def schema(self, task: Task, card: Card) -> Wire:
        model = schema_of(task.shape_of(card.model))
        return Wire(down=model, up=model)

    def setup(self, server: Server) -> None:
        server.state.model = server.task.build(server.cards[0].model, "global")

    def download(self, server: Server, client: int) -> Message:
        return Message.of(server.state.model)

    def receive(self, client: Client, down: Message) -> None:
        client.model.load_state_dict(down.part())

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message.of(client.model)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        samples = {k: server.cards[k].samples for k in uploads}
        # Batch-norm statistics are part of the model and are averaged with it.
        server.state.model.load_state_dict(weighted_mean({k: m.part() for k, m in uploads.items()}, samples))
