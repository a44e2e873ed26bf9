"""One model of the server, of which each client trains the part that its capacity allows."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from pluribus.client import Client
from pluribus.errors import MismatchError
from pluribus.message import Message, Wire, schema_of
from pluribus.method import Method, Need, ServerModel
from pluribus.models.width import Part
from pluribus.ops import Weighting, client_weights, gather_statistics
from pluribus.server import Server
from pluribus.task import Card, Cards, Task


@dataclass(frozen=True)
class SubModels(Method):
    """Average every weight over the clients whose part of the model holds it."""

    family = "sub-models"
    up = "the client's part of the model"
    down = "the client's part of the global model"
    needs = frozenset({Need.SAME_ARCHITECTURE})
    views = ("before", "after", "global")
    defenses = ("clip",)  # messages of different sizes cannot be compared number by number
    defaults = MappingProxyType({"models": "cnn-16-32", "capacity": "1,0.5,0.25"})

    weighting: Weighting = "uniform"
    """Weights of clients in the mean: equal, as in the paper, or their training samples."""

    def schema(self, task: Task, card: Card) -> Wire:
        part = schema_of(task.shape_of(card.model))
        return Wire(down=part, up=part)

    def check(self, task: Task, cards: Cards) -> None:
        whole = task.shape_of(cards[0].architecture)
        for card in cards.firsts():
            if card.capacity is not None and card.head == tuple(tuple(p.shape) for p in whole.head.parameters()):
                raise MismatchError(
                    f"client {card.id} has {card.model}, but its head is as wide as that of the whole model: leave out "
                    f"--width, so that features are cut, too."
                )

    def setup(self, server: Server) -> None:
        server.state.shared = server.task.build(server.cards[0].architecture, "global")

    def first(self, t: int) -> int:
        """The first channel that the parts of round t hold."""
        return 0

    def part(self, server: Server, client: int) -> Part:
        """The part of the global model that a client holds in this round."""
        return server.task.part_of(server.cards[client].model, self.first(server.t))

    def download(self, server: Server, client: int) -> Message:
        return Message(self.part(server, client).take(server.state.shared.state_dict()))

    def receive(self, client: Client, down: Message) -> None:
        client.model.load_state_dict(down.part())

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message.of(client.model)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        parts = {k: self.part(server, k) for k in uploads}
        sent = {k: upload.part() for k, upload in uploads.items()}
        weights = client_weights(server, uploads, self.weighting)
        whole = server.state.shared.state_dict()
        server.state.shared.load_state_dict(mean_of_holders(whole, sent, parts, weights))

    def adapt(self, client: Client, view: str) -> None:
        """Nobody trained the whole model, so nobody knows the statistics of its batch norm: gather them."""
        if view == "global":
            gather_statistics(client)

    def server_model(self, server: Server, view: str, client: int) -> ServerModel:
        return ServerModel(server.cards[client].architecture, server.state.shared.state_dict())


def mean_of_holders(
    whole: Mapping[str, Tensor],
    sent: Mapping[int, Mapping[str, Tensor]],
    parts: Mapping[int, Part],
    weights: Mapping[int, float],
) -> dict[str, Tensor]:
    """Each number of a model as the mean over the clients that hold it. What nobody holds stays as it is."""
    found: dict[str, Tensor] = {}
    for name, value in whole.items():
        at = {k: part.at(name) for k, part in parts.items()}
        if not value.is_floating_point():  # counters, of which a mean may not be an integer
            found[name] = torch.stack([part[name] for part in sent.values()]).amax(0)
            continue
        total = torch.zeros(value.shape, dtype=torch.float64)
        for k, where in at.items():
            total[where] += weights[k]
        mean = torch.zeros_like(value)
        for k, where in at.items():
            mean[where] += sent[k][name] * (weights[k] / total[where]).to(value.dtype)
        found[name] = torch.where(total > 0, mean, value)
    return found


def share_of(client: Client) -> float:
    """The share of the width that a client has."""
    return 1.0 if client.card.capacity is None else client.card.capacity.value


def layers_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    """The layers of some kinds, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
