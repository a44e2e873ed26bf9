"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates correct each local step for the drift between clients."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from pluribus.client import Batch, Client, trainable
from pluribus.message import Field, Message, Wire, schema_of
from pluribus.method import Method, Need, register
from pluribus.models import TwoPartModel
from pluribus.ops import average_uploads, flatten, unflatten
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.targets import TARGETS
from pluribus.task import Card, Task


@register("scaffold")
@dataclass(frozen=True)
class Scaffold(Method):
    """FedAvg with local steps corrected by the difference between the mean gradient and the client's own."""

    paper = "Karimireddy et al., ICML 2020"
    family = "one model"
    up = "progress of the model and of the client's control variate"
    down = "the global model and its control variate"
    targets = TARGETS
    needs = frozenset({Need.SAME_MODEL, Need.PLAIN_SGD})
    views = ("before", "after")  # the algorithm returns the global model
    defaults = MappingProxyType({"models": "cnn-16"})

    server_lr: float = setting(1.0, above=0, symbol="eta_g")
    """Factor on the clients' mean progress."""

    def schema(self, task: Task, card: Card) -> Wire:
        """Weights and control variates are sent as vectors, buffers such as batch-norm statistics by name.

        What is uploaded are changes. They have other names than what is downloaded, so they are measured from zero.
        """
        model = task.shape_of(card.model)
        vector = Field((trainable(model),), source="weights")
        buffers = {name: f for name, f in schema_of(model, "model.").items() if name in _buffers(model)}
        return Wire(
            down=schema_of(model, "model.") | {"control": vector}, up={"progress": vector, "changes": vector} | buffers
        )

    def setup(self, server: Server) -> None:
        server.state.model = server.task.build(server.cards[0].model, "global")  # x
        server.state.control = torch.zeros(trainable(server.state.model))  # c

    def download(self, server: Server, client: int) -> Message:
        return Message({**Message.of(server.state.model, "model."), "control": server.state.control})

    def prepare(self, client: Client) -> None:
        client.state.control = torch.zeros(trainable(client.model))  # c_i

    def receive(self, client: Client, down: Message) -> None:
        client.model.load_state_dict(down.part("model."))  # y_i <- x

    def local_update(self, client: Client) -> Message:
        start, c_i = _weights(client), client.state.control.clone()
        steps = client.fit(self.step)  # K
        moved = start - _weights(client)  # x - y_i
        new = c_i - client.got.tensor("control") + moved / (max(steps, 1) * client.now["lr"])  # option II
        client.state.control = new if steps else c_i
        return Message({"progress": -moved, "changes": client.state.control - c_i, **_buffers(client.model)})

    def step(self, client: Client, batch: Batch) -> Tensor:
        loss, y = self.loss(client, batch), client.parameters()
        gradient = flatten(client.grads(loss), y)
        client.apply(unflatten(gradient - client.state.control + client.got.tensor("control"), y))
        return loss

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """x <- x + eta_g mean of progress; c <- c + |S| / N mean of its change. Each client counts once."""
        mean, model = average_uploads(server, uploads, weighting="uniform"), server.state.model
        share = len(uploads) / server.task.clients
        server.state.control = server.state.control + share * mean.pop("changes")
        x = {name: p for name, p in model.named_parameters() if p.requires_grad}
        progress = unflatten(mean.pop("progress"), x)
        moved = {name: p + self.server_lr * progress[name] for name, p in x.items()}
        model.load_state_dict(moved | {name.removeprefix("model."): value for name, value in mean.items()})


def _weights(client: Client) -> Tensor:
    """A copy of the trainable parameters as one vector."""
    weights = {name: p.detach() for name, p in client.parameters().items()}
    return flatten(weights, weights)


def _buffers(model: TwoPartModel) -> dict[str, Tensor]:
    """All tensors of the model except trainable parameters, by their names in a message."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {f"model.{name}": value for name, value in model.state_dict().items() if name not in trained}
