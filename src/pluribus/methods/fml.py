"""FML (Shen et al., 2020): every client trains a private model and a small shared one, and the two teach each other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus.client import Batch, Client
from pluribus.errors import MissingSettingError
from pluribus.message import Message, Wire, schema_of
from pluribus.method import Method, register
from pluribus.models import TwoPartModel
from pluribus.ops import Weighting, averaged, blamed_on, kl
from pluribus.optim import Opt
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Cards, Task


@dataclass(frozen=True)
class Auxiliary(Method):
    """Methods in which a small model of one architecture travels beside private models of any."""

    aux_model: str | None = None
    """Architecture of the small model that all clients share. Default: the smallest model of the federation."""

    def settled(self, task: Task, architectures: Iterable[str]) -> Self:
        return self if self.aux_model is not None else replace(self, aux_model=task.smallest(architectures))

    def auxiliary(self, task: Task) -> TwoPartModel:
        """The shared model as it begins, alike for all parties."""
        if self.aux_model is None:
            raise MissingSettingError("no shared model is chosen yet: name one with --aux-model.")
        return task.build(self.aux_model, "auxiliary")

    def auxiliary_shape(self, task: Task) -> TwoPartModel:
        """The shared model on the meta device: all names and shapes, no weights."""
        with torch.device("meta"):
            return self.auxiliary(task)

    def schema(self, task: Task, card: Card) -> Wire:
        shared = schema_of(self.auxiliary_shape(task))
        return Wire(down=shared, up=shared)

    def check(self, task: Task, cards: Cards) -> None:
        with blamed_on("--aux-model"):
            self.auxiliary_shape(task)

    def prepare(self, client: Client) -> None:
        client.state.shared = self.auxiliary(client.task)

    def setup(self, server: Server) -> None:
        server.state.shared = self.auxiliary(server.task)

    def download(self, server: Server, client: int) -> Message:
        return Message.of(server.state.shared)

    def receive(self, client: Client, down: Message) -> None:
        client.state.shared.load_state_dict(down.part())

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message.of(client.state.shared)


@register("fml")
@dataclass(frozen=True)
class FML(Auxiliary):
    """Mutual distillation between a private model and a small one (the meme model) that is averaged."""

    paper = "Shen et al., arXiv 2020"
    up = "the meme model"
    down = "the mean meme model"
    defaults = MappingProxyType({"lr": 0.05})  # on digits, 0.01 takes more than 20 rounds

    label_weight: float = setting(0.5, at_least=0, at_most=1, symbol="alpha")
    """Share of the labels in the private model's loss; the rest is what the meme model teaches."""
    meme_label_weight: float = setting(0.5, at_least=0, at_most=1, symbol="beta")
    """Share of the labels in the meme model's loss; the rest is what the private model teaches."""
    weighting: Weighting = "uniform"
    """Whether a client counts by its training samples, or each client once."""

    def optimisers(self, client: Client) -> dict[str, Opt]:
        return {"model": Opt(client.model), "meme": Opt(client.state.shared)}

    def step(self, client: Client, batch: Batch) -> Tensor:
        own, meme = client.model(batch.x), client.state.shared(batch.x)
        alpha, beta = self.label_weight, self.meme_label_weight
        task_loss = F.cross_entropy(own, batch.y)
        private_loss = alpha * task_loss + (1 - alpha) * kl(meme.detach(), own).mean()
        meme_loss = beta * F.cross_entropy(meme, batch.y) + (1 - beta) * kl(own.detach(), meme).mean()
        client.descend(private_loss + meme_loss, "model", "meme")  # each loss reaches one model alone
        return task_loss

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.state.shared.load_state_dict(averaged(server, uploads, weighting=self.weighting))
