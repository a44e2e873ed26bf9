"""HeteroFL (Diao et al., ICLR 2021): clients train the first channels of every layer of one model."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from pluribus.client import Batch, Client
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
            for layer in layers_of(client.model.features, (nn.Conv1d, nn.Conv2d, nn.Linear)).values():
                layer.register_forward_hook(partial(_divide, share))
        if self.masked:
            client.state.held = onehot(client.data["train"].labels(), client.task.classes).amax(0)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        logits = client.model(batch.x)
        return client.task_loss(logits * client.state.held if self.masked else logits, batch.y)


def _divide(share: float, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
    return output / share if layer.training else None
