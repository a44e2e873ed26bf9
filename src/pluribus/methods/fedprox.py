"""FedProx (Li et al., MLSys 2020): FedAvg with a penalty on the distance from the global model."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pluribus.client import Batch, Client
from pluribus.message import Wire, schema_of
from pluribus.method import register
from pluribus.methods.fedavg import FedAvg
from pluribus.settings import setting
from pluribus.task import Card, Task


@register("fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """Average whole models, trained with a penalty on the distance from the global model."""

    paper = "Li et al., MLSys 2020"

    mu: float = setting(0.01, at_least=0, symbol="mu")
    """Weight of the squared distance to the global model. 0 is FedAvg."""

    def schema(self, task: Task, card: Card) -> Wire:
        shared = self.part(task.shape_of(card.model))
        return Wire(down=schema_of(shared, kept=True), up=schema_of(shared))

    def loss(self, client: Client, batch: Batch) -> Tensor:
        anchor = {name: client.got.tensor(name) for name in client.got}  # w^t, the downloaded global model
        return super().loss(client, batch) + self.mu / 2 * drift(self.part(client.model), anchor)  # h_k(w; w^t)


def drift(model: nn.Module, anchor: Mapping[str, Tensor]) -> Tensor:
    """Squared distance between a model's parameters and those of the same names."""
    return torch.stack([(p - anchor[name]).square().sum() for name, p in model.named_parameters()]).sum()
