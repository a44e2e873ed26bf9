"""FedDF (Lin et al., NeurIPS 2020): the server averages models per architecture, and distills all of them into each."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pluribus.client import Batch
from pluribus.errors import PartitionError
from pluribus.message import Message
from pluribus.method import Need, ServerModel, register
from pluribus.methods.fedavg import FedAvg
from pluribus.ops import average_uploads, kl
from pluribus.optim import Rule
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Cards, Task

TEACHING_BATCH = 256  # rows per forward pass of a teacher
FEWEST = 2  # public rows: batch norm has no variance of one


@register("feddf")
@dataclass(frozen=True)
class FedDF(FedAvg):
    """Average models per architecture, then distill the ensemble of all models into each average."""

    paper = "Lin et al., NeurIPS 2020"
    family = "ensembles"
    down = "the distilled model of the client's architecture"
    targets = ("classes",)
    needs = frozenset({Need.PUBLIC_DATA, Need.PUBLIC_AT_SERVER})
    views = ("before", "after", "group")
    defaults = MappingProxyType({"models": "cnn-16,mlp-64", "public_fraction": 0.1})

    server_steps: int = setting(200, at_least=0, symbol="N")
    """Steps of distillation per architecture and round. 0: FedAvg within each architecture."""
    server_lr: float = setting(1e-3, above=0, symbol="eta")
    """Learning rate of the distillation (Adam). It falls to 0 along a cosine in every round."""
    server_batch: int = setting(128, at_least=FEWEST, symbol="B")
    """Public rows in a batch of the distillation."""

    def check(self, task: Task, cards: Cards) -> None:
        if sum(task.public.values()) < FEWEST:
            raise PartitionError(
                f"feddf needs at least {FEWEST} public rows: use a larger --public-fraction, or --public-data."
            )

    def setup(self, server: Server) -> None:
        models = server.cards.architectures()
        server.state.models = nn.ModuleDict({_key(model): server.task.build(model, "global") for model in models})
        for key, model in server.state.models.items():
            server.optimize(key, model, Rule("adam", lr=self.server_lr), life="round")

    def download(self, server: Server, client: int) -> Message:
        return Message.of(server.state.models[_key(server.cards[client].model)])

    def server_model(self, server: Server, view: str, client: int) -> ServerModel:
        model = server.cards[client].model
        return ServerModel(model, server.state.models[_key(model)].state_dict())

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        groups: dict[str, dict[int, Message]] = {}
        for k, upload in uploads.items():
            groups.setdefault(_key(server.cards[k].model), {})[k] = upload
        for key, group in groups.items():
            mean = average_uploads(server, group, weighting=self.weighting)
            server.state.models[key].load_state_dict(mean)
        if self.server_steps:
            self._distill(server, groups)

    def _distill(self, server: Server, groups: Mapping[str, Mapping[int, Message]]) -> None:
        """Distill the ensemble into every model, also into those of architectures that nobody sent."""
        x = server.public.take(self.draw_rows(server))
        targets = ensemble(server, groups, x)
        losses = [self._fit(server, key, x, targets) for key in server.state.models]
        server.notes["distillation_loss"] = float(torch.stack(losses).mean())

    def _fit(self, server: Server, key: str, x: Tensor, targets: Tensor) -> Tensor:
        server.state.models[key].train()
        return server.fit(
            Distillation(key),
            x,
            targets,
            opts=(key,),
            batch=self.server_batch,
            steps=self.server_steps,
            anneal=True,
            shuffle="order",
        )

    def draw_rows(self, server: Server) -> Tensor:
        """Positions of this round's public rows: all of them, if there are no more than the steps visit."""
        most = self.server_steps * self.server_batch
        return torch.randperm(len(server.public), generator=server.draw("public"))[:most]


@dataclass(frozen=True)
class Distillation:
    """The loss of one architecture's model. The labels of a batch are the mean logits of the ensemble."""

    student: str

    def __call__(self, server: Server, batch: Batch) -> Tensor:
        return kl(batch.y, server.state.models[self.student](batch.x)).mean()


@torch.no_grad()
def ensemble(server: Server, groups: Mapping[str, Mapping[int, Message]], x: Tensor) -> Tensor:
    """The mean logits of all received models, in eval mode."""
    sums, teachers = torch.zeros(len(x), server.task.classes, device=server.device), 0
    for key, group in groups.items():
        model = server.state.models[key].eval()
        for upload in group.values():
            weights = {name: value.to(server.device) for name, value in upload.part().items()}
            sums += torch.cat([functional_call(model, weights, (rows,)) for rows in torch.split(x, TEACHING_BATCH)])
            teachers += 1
    return sums / teachers


def _key(model: str) -> str:
    """The name of an architecture's model in the server's state, where torch allows no dots."""
    return model.replace(".", "/")
