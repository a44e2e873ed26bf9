"""FML (Shen et al., 2020): each client trains a private model and a small shared model, which teach each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.message import Message
from pluribus.method import register
from pluribus.methods._auxiliary import Auxiliary
from pluribus.ops import Weighting, average_uploads
from pluribus.optim import Opt
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.targets import TARGETS


@register("fml")
@dataclass(frozen=True)
class FML(Auxiliary):
    """Mutual distillation between a private model and a small averaged model (the meme model)."""

    paper = "Shen et al., arXiv 2020"
    up = "the meme model"
    down = "the mean meme model"
    targets = TARGETS
    defaults = MappingProxyType({"lr": 0.05})  # on digits, 0.01 takes more than 20 rounds

    label_weight: float = setting(0.5, at_least=0, at_most=1, symbol="alpha")
    """Weight of the labels in the private model's loss; the rest is distillation from the meme model."""
    meme_label_weight: float = setting(0.5, at_least=0, at_most=1, symbol="beta")
    """Weight of the labels in the meme model's loss; the rest is distillation from the private model."""
    weighting: Weighting = "uniform"
    """Weights of clients in the mean: their training samples, or equal."""

    def optimizers(self, client: Client) -> dict[str, Opt]:
        return {"model": Opt(client.model), "meme": Opt(client.state.shared)}

    def step(self, client: Client, batch: Batch) -> Tensor:
        own, meme = client.model(batch.x), client.state.shared(batch.x)
        alpha, beta = self.label_weight, self.meme_label_weight
        divergence = client.task.target.divergence  # KL, for classes
        task_loss = client.task_loss(own, batch.y)
        private_loss = alpha * task_loss + (1 - alpha) * divergence(meme.detach(), own).mean()
        meme_loss = beta * client.task_loss(meme, batch.y) + (1 - beta) * divergence(own.detach(), meme).mean()
        client.descend(private_loss + meme_loss, "model", "meme")  # each loss has gradients for one model only
        return task_loss

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.state.shared.load_state_dict(average_uploads(server, uploads, weighting=self.weighting))
