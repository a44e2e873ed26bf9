"""FedBN (Li et al., ICLR 2021): clients average all but batch norm, whose weights and statistics are private."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn

from pluribus.client import Client
from pluribus.message import Message, Wire, schema_of
from pluribus.method import Need, register
from pluribus.methods.fedavg import FedAvg
from pluribus.models.layers import batch_norms
from pluribus.ops import average_uploads
from pluribus.server import Server
from pluribus.task import Card, Task


@register("fedbn")
@dataclass(frozen=True)
class FedBN(FedAvg):
    """Average all of a model but its batch norm, which each client keeps."""

    paper = "Li et al., ICLR 2021"
    up = "the model without batch norm"
    down = "the global model without batch norm"
    needs = frozenset({Need.SAME_MODEL, Need.BATCH_NORM})  # without batch norm it would be FedAvg under another name
    unbounded = "it needs batch norm, which mixes the rows of a batch, so that no row can be bounded."
    views = ("before", "after")  # before: the global weights with the client's own batch norm
    defaults = MappingProxyType({"models": "cnn-16-32"})  # the smallest for images with batch norm

    def schema(self, task: Task, card: Card) -> Wire:
        model = task.shape_of(card.model)
        private = batch_norms(model)
        shared = {name: field for name, field in schema_of(model).items() if name not in private}
        return Wire(down=shared, up=shared)

    def setup(self, server: Server) -> None:
        server.state.shared = _shared(server.task.build(server.cards[0].model, "global"))

    def download(self, server: Server, client: int) -> Message:
        return Message(server.state.shared)

    def receive(self, client: Client, down: Message) -> None:
        client.model.load_state_dict(down.part(), strict=False)  # batch norm is not in it, and stays as it is

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message(_shared(client.model))

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.state.shared = average_uploads(server, uploads, weighting=self.weighting)


def _shared(model: nn.Module) -> dict[str, Tensor]:
    private = batch_norms(model)
    return {name: value.detach() for name, value in model.state_dict().items() if name not in private}
