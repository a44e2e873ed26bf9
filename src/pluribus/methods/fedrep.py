"""FedRep (Collins et al., ICML 2021): clients share a body and keep private heads, trained in turn."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pluribus.client import Batch, Client
from pluribus.message import Message
from pluribus.method import register
from pluribus.methods.fedavg import FedAvg
from pluribus.models import TwoPartModel
from pluribus.optim import Opt
from pluribus.settings import setting


@register("fedrep")
@dataclass(frozen=True)
class FedRep(FedAvg):
    """Average bodies; each client trains its own head first, then the body."""

    paper = "Collins et al., ICML 2021"
    up = "the body"
    down = "the global body"
    views = ("after", "before")

    head_epochs: int = setting(10, at_least=1, symbol="tau")
    """Epochs on the head in each round, before --epochs on the body."""

    def part(self, model: TwoPartModel) -> nn.Module:
        return model.features

    def optimizers(self, client: Client) -> dict[str, Opt]:
        return {"head": Opt(client.model.head), "model": Opt(nn.ModuleDict({"features": client.model.features}))}

    def local_update(self, client: Client) -> Message:
        client.fit(self.head_loss, opts=("head",), epochs=self.head_epochs)
        client.fit(self.step)  # its optimizer holds only the body
        return Message.of(self.part(client.model))

    def head_loss(self, client: Client, batch: Batch) -> Tensor:
        """The loss of the head on a frozen body, whose batch-norm statistics do not change."""
        with torch.no_grad():
            features = client.call(batch.x, {}, "features")
        return client.task_loss(client.model.head(features), batch.y)
