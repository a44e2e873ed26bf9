"""FedBABU (Oh et al., ICLR 2022): only the body is trained and averaged; the head stays random until fine-tuning."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from pluribus.client import Client
from pluribus.method import register
from pluribus.methods.fedavg import FedAvg
from pluribus.models import TwoPartModel
from pluribus.optim import Opt
from pluribus.settings import setting


@register("fedbabu")
@dataclass(frozen=True)
class FedBABU(FedAvg):
    """Average bodies under a fixed random head; each client fine-tunes before it is tested."""

    paper = "Oh et al., ICLR 2022"
    up = "the body"
    down = "the global body"
    views = ("finetuned", "before")

    finetune_epochs: int = setting(10, at_least=0, symbol="tau")
    """Epochs of fine-tuning before a client is tested."""
    finetune: Literal["model", "head"] = "model"
    """What to fine-tune: the whole model or its head."""

    def part(self, model: TwoPartModel) -> nn.Module:
        return model.features

    def prepare(self, client: Client) -> None:
        """All clients derive the same random head from the common seed, so it is never sent."""
        common = client.task.build(client.card.model, "global")
        client.model.head.load_state_dict(common.head.state_dict())

    def optimizers(self, client: Client) -> dict[str, Opt]:
        body = nn.ModuleDict({"features": client.model.features})
        return {"model": Opt(body), "finetune": Opt(client.model if self.finetune == "model" else client.model.head)}

    def adapt(self, client: Client, view: str) -> None:
        if view == "finetuned":
            client.fit(self.loss, opts=("finetune",), epochs=self.finetune_epochs)
