"""FCCL (Huang et al., CVPR 2022): clients correlate their logits on public data with the mean of all logits. Then they
train on their own data, close to what they learned from others and to what they knew at the start."""

import copy
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from pluribus.client import Batch, Client
from pluribus.message import Message
from pluribus.method import Exchange, register
from pluribus.methods._public import MeanLogits, alignment
from pluribus.models import TwoPartModel
from pluribus.ops import kl
from pluribus.optim import Opt
from pluribus.settings import setting

EPS = 1e-5  # added to a variance: a class may have the same logit in a whole batch


class Teacher(nn.Module):
    """A copy of a client's model that does not learn and stays in eval mode."""

    def __init__(self, model: TwoPartModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode."""
        return super().train(False)

    def copy(self, model: TwoPartModel) -> None:
        self.model.load_state_dict(model.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


@register("fccl")
@dataclass(frozen=True)
class FCCL(MeanLogits):
    """Clients correlate their logits with the mean on public data, and do not forget it in private training."""

    paper = "Huang et al., CVPR 2022"
    enrols = True
    exchanges = (Exchange(None, "show", "agree"), Exchange("consensus", "collaborate_and_train", None))

    public_epochs: int = setting(1, at_least=0)
    """Epochs of training on the correlation with the mean logits."""
    public_batch: int = setting(64, at_least=2, symbol="B")
    """Public samples in a batch, over which logits are correlated."""
    public_lr: float = setting(0.001, above=0)
    """Learning rate on public data: gradients of correlations are large while logits are small."""
    redundancy: float = setting(0.0051, at_least=0, symbol="lambda_Col")
    """Weight of the correlation between different classes."""
    inter: float = setting(1.0, at_least=0, symbol="L_Inter")
    """Weight of the divergence from the client's model after the last step on public data."""
    intra: float = setting(1.0, at_least=0, symbol="L_Intra")
    """Weight of the divergence from the client's pre-trained model."""
    pretrain_private: int = setting(20, at_least=0)
    """Epochs on the client's own data before it first takes part."""

    def prepare(self, client: Client) -> None:
        super().prepare(client)
        client.state.pretrained = Teacher(client.model)
        client.state.taught = Teacher(client.model)

    def optimizers(self, client: Client) -> dict[str, Opt]:
        """One for labels and one for correlations, because their gradients differ in size."""
        return {"model": Opt(client.model), "public": Opt(client.model, replace(client.local.rule, lr=self.public_lr))}

    def enrol(self, client: Client) -> Message:
        client.fit(super().step, epochs=self.pretrain_private)
        client.state.pretrained.copy(client.model)
        return Message({})

    def collaborate_and_train(self, client: Client) -> Message:
        shown, size = alignment(client, self.align), self.public_batch
        # the mean logits are of images without augmentation
        client.fit(self.correlate, shown, opts=("public",), epochs=self.public_epochs, batch=size, augment=False)
        client.state.taught.copy(client.model)
        client.fit(self.step)
        return Message({})

    def correlate(self, client: Client, batch: Batch) -> Tensor:
        """L_Col: the correlation of own and mean logits, 1 within a class and -1 between classes."""
        m = correlation(client.model(batch.x), client.got.tensor("logits")[batch.i])
        same = torch.eye(len(m), device=m.device)
        return (same * (1 - m).square() + self.redundancy * (1 - same) * (1 + m).square()).sum()

    def step(self, client: Client, batch: Batch) -> Tensor:
        """CE + L_Inter + L_Intra."""
        logits = client.model(batch.x)
        task_loss = client.task_loss(logits, batch.y)
        inter = kl(client.state.taught(batch.x), logits).mean()
        intra = kl(client.state.pretrained(batch.x), logits).mean()
        client.descend(task_loss + self.inter * inter + self.intra * intra)
        return task_loss


def correlation(one: Tensor, other: Tensor) -> Tensor:
    """M_uv: the correlation of column u of one matrix with column v of another, over their rows."""
    return standardized(one).T @ standardized(other) / len(one)


def standardized(logits: Tensor) -> Tensor:
    """Logits with mean 0 and variance 1 in each column."""
    centered = logits - logits.mean(0)
    return centered / (centered.square().mean(0) + EPS).sqrt()
