"""HeteroFL (Diao et al., ICLR 2021): clients train the first channels of every layer of one model."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pluribus.client import Batch, Client
from pluribus.message import Message
from pluribus.method import register
from pluribus.methods._submodels import SubModels, layers_of, share_of
from pluribus.ops import onehot


@register("heterofl")
@dataclass(frozen=True)
class HeteroFL(SubModels):
    """Clients train the first channels of one model, as many as they can."""

    paper = "Diao et al., ICLR 2021"

    scaler: bool = True
    """Divide activations by the client's share of the width in training, so that all clients' have one scale."""
    masked: bool = True
    """Zero the logits of classes that a client does not hold, in the training loss."""

    def prepare(self, client: Client) -> None:
        share = share_of(client)
        if self.scaler and share < 1:
            client.state.divisor = torch.ones(())  # by which the weights are divided already
            for layer in _scaled_layers(client):
                layer.register_forward_hook(partial(_divide, share))
        if self.masked:
            client.state.held = onehot(client.data["train"].labels(), client.task.classes).sum(0).clamp(max=1)

    def receive(self, client: Client, down: Message) -> None:
        super().receive(client, down)
        if self.scaler and share_of(client) < 1:
            client.state.divisor.fill_(1.0)
            _divide_weights(client, share_of(client))

    def local_update(self, client: Client) -> Message:
        if not (self.scaler and share_of(client) < 1):
            return super().local_update(client)
        _divide_weights(client, 1.0)
        trained = Message({name: value.clone() for name, value in super().local_update(client).part().items()})
        _divide_weights(client, share_of(client))  # so that the model alone predicts what it was trained to
        return trained

    def why_unbounded(self) -> str:
        return "its masked loss tells which classes a client holds. Leave it out: --no-masked." if self.masked else ""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        logits = client.model(batch.x)
        return client.task_loss(logits * client.state.held if self.masked else logits, batch.y)


def _scaled_layers(client: Client) -> list[nn.Module]:
    return list(layers_of(client.model.features, (nn.Conv1d, nn.Conv2d, nn.Linear)).values())


@torch.no_grad()
def _divide_weights(client: Client, divisor: float) -> None:
    """Divide activations in evaluation, too, without hooks: a layer's output is linear in its weights and biases."""
    for layer in _scaled_layers(client):
        for weight in layer.parameters():
            weight.mul_(client.state.divisor / divisor)
    client.state.divisor.fill_(divisor)


def _divide(share: float, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
    return output / share if layer.training else None
