"""FedAPEN (Qin et al., KDD 2023): a private and a shared model teach each other, and predict together. Each client
learns the weight of its private model on rows that it holds out of training."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
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


@register("fedapen")
@dataclass(frozen=True)
class FedAPEN(Auxiliary):
    """Mutual distillation between a private and a shared model, which predict as an ensemble of learned weight."""

    paper = "Qin et al., KDD 2023"
    up = "the shared model"
    down = "the mean shared model"
    targets = TARGETS
    views = ("after", "before")
    unbounded = "the weight of its ensemble is learned on private rows, and nothing bounds one of them."
    defaults = MappingProxyType({"lr": 0.05})  # on digits, 0.01 takes more than 20 rounds

    held_out: float = setting(0.05, at_least=0, below=1)
    """Share of a client's training rows that it learns lambda on, and nothing else. 0: lambda stays."""
    adapt_steps: int = setting(10, at_least=0)
    """Gradient steps of lambda before each round. 0: lambda stays."""
    adapt_lr: float = setting(0.001, at_least=0)
    """Learning rate of lambda."""
    start: float = setting(0.5, at_least=0, at_most=1, symbol="lambda_0")
    """Weight of the private model in the prediction before the first round."""
    ensemble_weight: float = setting(1.0, at_least=0)
    """Weight of the ensemble's loss in training."""
    weighting: Weighting = "uniform"
    """Weights of clients in the mean: their training samples, or equal."""

    def prepare(self, client: Client) -> None:
        super().prepare(client)
        client.state.weight = torch.tensor(self.start)  # lambda
        train = client.data["train"]
        size, order = self.held(len(train)), torch.randperm(len(train), generator=client.draw("held out"))
        client.data["held out"], client.data["rest"] = train[order[:size]], train[order[size:].sort().values]

    def held(self, rows: int) -> int:
        """Number of rows to hold out. One remains for training, and at least one is held out of two or more."""
        return min(max(round(self.held_out * rows), 1), rows - 1) if self.held_out and rows else 0

    def optimizers(self, client: Client) -> dict[str, Opt]:
        return {"model": Opt(client.model), "shared": Opt(client.state.shared)}

    def local_update(self, client: Client) -> Message:
        self.adapt_weight(client)
        client.fit(self.step, on="rest")
        return Message.of(client.state.shared)

    def adapt_weight(self, client: Client) -> None:
        """Learning for adaptability: lambda descends the ensemble's loss on the held-out rows, and stays in [0, 1]."""
        held = client.data["held out"]
        if not len(held):
            return
        own, shared, y = client.sweep(super().predict, held), client.sweep(self.shared_scores, held), held.labels()
        weight = client.state.weight.detach().clone()
        for _ in range(self.adapt_steps):
            weight.requires_grad_()
            loss = client.task_loss(blend(weight, own, shared), y)
            (slope,) = torch.autograd.grad(loss, weight)
            weight = (weight.detach() - self.adapt_lr * slope).clamp(0, 1)
        client.state.weight = weight

    def step(self, client: Client, batch: Batch) -> Tensor:
        own, shared = client.model(batch.x), client.state.shared(batch.x)
        divergence = client.task.target.divergence  # KL, for classes
        taught = divergence(shared.detach(), own).mean() + divergence(own.detach(), shared).mean()
        labels = client.task_loss(own, batch.y) + client.task_loss(shared, batch.y)
        # each model's gradient of the ensemble's loss takes the other model as it is
        together = client.task_loss(blend(client.state.weight, own, shared), batch.y)
        client.descend(labels + taught + self.ensemble_weight * together, "model", "shared")
        return together

    def shared_scores(self, client: Client, x: Tensor) -> Tensor:
        return client.state.shared(x)  # type: ignore[no-any-return]

    def predict(self, client: Client, x: Tensor) -> Tensor:
        return blend(client.state.weight, client.model(x), client.state.shared(x))

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.state.shared.load_state_dict(average_uploads(server, uploads, weighting=self.weighting))


def blend(weight: Tensor, own: Tensor, shared: Tensor) -> Tensor:
    """The ensemble's scores: lambda z_p + (1 - lambda) z_s."""
    return weight * own + (1 - weight) * shared
